"""How a train stage is put together from model, data and loop, and what it leaves."""

import math
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..config.train import TrainConfig
from ..convert.importers.peft import resolve_adapter
from ..cpu import on_cpu
from ..evaluation.perplexity import measure_perplexity
from ..generation.engine import Generator
from ..models.loader import set_compute_dtype
from ..models.lora import io as adapter_files
from ..models.lora import lora_model
from ..models.lora.io import init_adapter
from ..quantization.packing import dequantize
from ..quantization.qat.fake_quant import FakeQuant, QALoRAWeights
from ..run.fs import atomic_folder
from ..training.optimizers import OptimizerConfig
from ..training.schedules import learning_rate_at
from ..training.step import TrainStep
from ..training.trainer import Trainer, TrainerConfig
from .batches import chunked_loss, document_caches, training_batches, validation_batches
from .context import ModelArtifact, StageContext, write_model
from .evaluate import SAMPLE_TOKENS
from .qat_setup import prepare, require_time
from .teacher import TeacherSetup


class TrainRun:
    """One train stage: everything is built at once, so that faults come first."""

    def __init__(self, config: TrainConfig, context: StageContext):
        self.config = config
        self.context = context
        self.start = context.require_visible(context.initial_model)
        loaded = context.load(self.start, compute="stored")
        known = {"origin": context.unquantized_weights, "seed": context.seed}
        self.rounded = prepare(config, loaded, context.logger, **known)
        self.loaded, self.selection = self.rounded.loaded, self.rounded.selection
        self.base = dict(tree_flatten(self.loaded.model.parameters()))
        self.adapted_keys = self._attach()
        self.teaching = self._teaching()
        self.trainer = self._trainer()
        self.step = self.trainer.step

    def run(self) -> None:
        """Train to the end; see `Trainer.train`."""
        self._require_one_model()
        if self.config.fsdp:
            self._release()
        loss = self.trainer.train()
        # That against a teacher is another one than that of the rows' own tokens.
        self.valid_loss = (
            self._loss_of(self.step.materialize()) if self.teaching else loss
        )
        self.parameters = self.step.parameters
        if self.step.sharding:
            types = {path: value.dtype for path, value in self.base.items()}
            self.parameters = self.step.gather_parameters(types)

    def write(self) -> ModelArtifact:
        """Write the trained checkpoint, its unquantized twin, and the adapter."""
        folder, parameters = self.context.folder, self.parameters
        loaded, fake_quant = self.loaded, self.step.fake_quant
        dense = lora_model.fuse(loaded.model, self.base, parameters, loaded.dtype)
        stored = fake_quant.export_tensors(parameters) if fake_quant else {}
        reference = model = self._write_dense(dict(dense), stored)
        if fake_quant:
            model = folder / "model"
            write_model(model, loaded, dense, self.selection, stored)
        adapters = self._write_adapters() if self.config.adapter else None
        return ModelArtifact(model, reference, adapters, self._facts(model))

    def _write_dense(
        self, weights: dict[str, mx.array], stored: dict[str, mx.array]
    ) -> Path:
        """Write the unquantized twin; that of codes is their origin, if known."""
        current, loaded = self.context.current, self.loaded
        if self.rounded.packed and current.is_quantized:
            return current.reference
        for path in self.rounded.packed or {}:
            # Where in their cells the weights are says nothing of what was lost.
            own = {k: stored[f"{path}.{k}"] for k in ("weight", "scales", "biases")}
            spec = self.selection.specs[path]
            weights[f"{path}.weight"] = dequantize(own, spec, loaded.dtype)
        target = self.context.folder / "dense"
        write_model(target, loaded, weights)
        return target

    def _release(self) -> None:
        """Let go of all whole weights."""
        cut = self.step.sharding.shard
        self.base = {path: cut(path, value) for path, value in self.base.items()}
        mx.eval(self.base)
        self.step.free()
        own = self.step.parameters.items()
        kept = sum(value.size for _, value in own)
        whole = sum(math.prod(self.step.sharding.full_shape(k, v)) for k, v in own)
        self.context.logger.info(
            f"every process keeps {kept / whole:.0%} of the trained weights"
        )

    def _require_one_model(self) -> None:
        ranks = self.context.ranks
        if ranks.size == 1:
            return
        # What is not trained comes from every machine's own copy.
        sums = [v.reshape(-1).view(mx.uint8).sum().item() for v in self.base.values()]
        ranks.require_same(
            sums, "begins with another model", hint="give all machines the same model"
        )

    def _attach(self) -> list[str]:
        rounding = self.config.qat
        if rounding and rounding.quantizer == "scales_only":
            self.loaded.model.freeze()
        if not (adapter := self.config.adapter):
            return []
        merged = rounding is not None
        seed = self.context.seed
        keys = lora_model.attach(self.loaded.model, adapter, seed=seed, merged=merged)
        if adapter.init_from:
            folder = self.context.find(adapter.init_from) or Path(adapter.init_from)
            init_adapter(
                lora_model.adapted_layers(self.loaded.model), resolve_adapter(folder)
            )
        return keys

    def _teaching(self) -> TeacherSetup | None:
        if not (teacher := self.config.teacher):
            return None
        moves = self.config.qat is not None
        return TeacherSetup(teacher, self.context, self.loaded, moves=moves)

    def _trainer(self) -> Trainer:
        config, context, loaded = self.config, self.context, self.loaded
        fake_quant = self._fake_quant() if self.selection.specs else None
        compute_dtype = training_dtype(config.compute_dtype, loaded.dtype)
        if compute_dtype == mx.float32:
            # Lossless, and the loss is verified in the dtype of the training.
            set_compute_dtype(loaded.model, compute_dtype)
        chunked = chunked_loss(config, context, loaded)
        caches = None
        if config.packing:
            caches = document_caches(loaded, context, self.teaching)
        settings = {"packing": caches is not None}
        if self.teaching:
            settings["answered"] = self.teaching.answered
        batches = training_batches(config, context, loaded, **settings)
        valid = validation_batches(config, context, loaded)
        eval_batches = list(valid.in_order(config.eval_batches))
        num_batches = config.batches(batches.per_epoch)
        steps = math.ceil(num_batches / config.gradient_accumulation_steps)
        require_time(config.qat, steps)
        context.logger.info(
            f"{len(batches.examples):,} examples, {batches.per_epoch:,} batches an "
            f"epoch; {steps:,} steps are {num_batches / batches.per_epoch:.1f} epochs"
        )
        teacher_loss = None
        if self.teaching:
            teacher_loss, batches = self.teaching.prepare(batches, num_batches)
            eval_batches = self.teaching.held_out(valid.examples, eval_batches)
        step = TrainStep(
            loaded.model,
            self._optimizer(fake_quant),
            compute_dtype=compute_dtype,
            fake_quant=fake_quant,
            chunked_loss=chunked,
            document_caches=caches,
            teacher_loss=teacher_loss,
            gradient_checkpointing=config.gradient_checkpointing,
            ranks=context.ranks,
            fsdp=config.fsdp,
        )
        set_compute_dtype(loaded.model, compute_dtype)
        return Trainer(
            step,
            batches,
            TrainerConfig(
                steps=steps,
                seed=context.seed,
                checkpoint_dir=context.folder / "checkpoints",
                logging_steps=config.logging_steps,
                eval_steps=config.eval_steps,
                save_steps=config.save_steps,
                gradient_accumulation_steps=config.gradient_accumulation_steps,
                num_batches=num_batches,
                save_total_limit=config.save_total_limit,
                load_best_at_end=config.load_best_at_end,
                early_stopping_patience=config.early_stopping_patience,
            ),
            learning_rate=lambda number: learning_rate_at(
                number,
                steps,
                peak=config.learning_rate,
                schedule=config.lr_schedule,
                warmup_ratio=config.warmup_ratio,
                min_lr_ratio=config.min_lr_ratio,
                decay_ratio=config.decay_ratio,
            ),
            eval_batches=eval_batches,
            logger=context.logger,
            on_evaluate=self._sample,
        )

    def _optimizer(
        self, fake_quant: FakeQuant | QALoRAWeights | None
    ) -> OptimizerConfig:
        config, lr_multipliers = self.config, {}
        if config.adapter:
            trained = dict(tree_flatten(self.loaded.model.trainable_parameters()))
            lr_multipliers |= lora_model.lr_multipliers(trained, config.adapter)
        if fake_quant:
            lr_multipliers |= fake_quant.lr_multipliers()
        return OptimizerConfig(
            name=config.optimizer,
            beta1=config.beta1,
            beta2=config.beta2,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            max_grad_norm=config.max_grad_norm,
            lr_multipliers=lr_multipliers,
        )

    def _fake_quant(self) -> FakeQuant | QALoRAWeights:
        model, rounded = self.loaded.model, self.rounded
        if self.config.keeps_codes:
            return QALoRAWeights(model, rounded.packed)
        specs, dtype = self.selection.specs, self.loaded.dtype
        return FakeQuant(model, specs, dtype, rounded.rounding, rounded.packed)

    def _sample(self, done: int) -> None:
        if not self.config.sample_prompts:
            return
        ranks, model = self.context.ranks, self.step.materialize()
        with ranks.collective_errors():
            if ranks.is_first:
                generator = Generator(model, self.loaded.tokenizer)
                for prompt in self.config.sample_prompts:
                    answer = generator.chat(prompt, max_tokens=SAMPLE_TOKENS).text
                    row = {"step": done, "prompt": prompt, "answer": answer}
                    self.context.logger.sample(row)
        self.step.free()

    def _write_adapters(self) -> Path:
        adapter = self.config.adapter
        target = self.context.output / "adapters"
        layers = lora_model.adapted_layers(self.loaded.model)
        if unreadable := adapter_files.layers_mlx_lm_cannot_load(layers):
            self.context.logger.warning(
                f"mlx-lm cannot load the dora adapters of {len(unreadable)} layers, as "
                f"{unreadable[0]}: it gets their quantized width wrong; the fused "
                "model is right"
            )
        with atomic_folder(target) as partial:
            adapter_files.save_adapter(
                partial,
                self.parameters,
                layers=layers,
                adapter=adapter,
                keys=self.adapted_keys,
                num_layers=adapter.num_layers or len(self.loaded.model.layers),
                base=self.context.display_name(self.start),
            )
        return target

    def _facts(self, model: Path) -> dict:
        return {
            "steps": self.trainer.progress.step,
            "best_step": self.trainer.progress.best_step,
            "selected_step": self.trainer.selected_step,
            "trained_tokens": self.trainer.progress.trained_tokens,
            "trained_parameters": sum(v.size for v in self.parameters.values()),
            "seconds": self.trainer.progress.seconds,
            "kept": self.selection.skipped,
            "validation_loss": self.valid_loss,
            "improvement": self._gain(model),
        }

    def _gain(self, model: Path) -> dict:
        """How much the validation loss fell, in training and in the files it left."""
        base, exported = (
            self._loss_of(self.context.load(folder).model)
            for folder in (self.start, model)
        )
        self.context.logger.info(
            f"validation loss {base:.4f} before, {self.valid_loss:.4f} in training, "
            f"{exported:.4f} reloaded from disk"
        )
        return {
            "in_training": base - self.valid_loss,
            "exported": base - exported,
        }

    def _loss_of(self, model: nn.Module) -> float:
        return measure_perplexity(model, self.trainer.eval_batches).loss


def training_dtype(name: str, stored: mx.Dtype) -> mx.Dtype:
    """The type to compute in.

    "auto" is bfloat16 for a bfloat16 checkpoint on a GPU, else float32: float16 would
    lose small gradients, and bfloat16 the digits that a float16 checkpoint is served
    with.
    """
    if name != "auto":
        return getattr(mx, name)
    return mx.bfloat16 if stored == mx.bfloat16 and not on_cpu() else mx.float32

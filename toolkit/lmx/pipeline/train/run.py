"""One training of a train stage: its parts, and the checkpoints it writes."""

import gc
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain, count, islice
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ...config.budget import budget_seconds
from ...config.train import TrainConfig
from ...convert.importers.peft import resolve_adapter
from ...data.batching import Batch
from ...evaluation.perplexity import measure_perplexity
from ...files.atomic import atomic_folder, copy_folder
from ...generation.generator import Generator
from ...models.dtypes import set_compute_dtype
from ...models.lora import io as adapter_files
from ...models.lora import lora_model
from ...models.lora.io import init_adapter
from ...models.quantized_layers import TENSORS
from ...quantization.packing import dequantize
from ...quantization.qat.fake_quant import FakeQuant
from ...training.document_mask import DocumentCaches
from ...training.losses import LossModel
from ...training.optimizers import OptimizerConfig
from ...training.schedules import learning_rate_at
from ...training.step import TrainStep
from ...training.trainer import Trainer, TrainerConfig
from ..budget import TIMED_STEPS, UNTIMED_STEPS, seconds_per_step, steps_within
from ..context import ModelArtifact, StageContext, write_model
from ..estimate import BatchShape, ModelShape, training_dtype
from ..work import correct_rates
from .batches import document_caches, loss_model, training_batches, validation_batches
from .estimate import training_cost
from .objective import Objective, PolicyObjective
from .preference import PreferenceObjective
from .qat import QATModel, prepare, require_steps
from .teacher import DistillationObjective

# Share of changed codes below which a training has practically no effect.
MIN_CHANGED_CODES = 1e-5
# Share of the gain in validation loss that fusing may lose, and what is never a loss.
MAX_LOST_GAIN, MIN_LOST = 0.05, 1e-3
# Batches whose mean size is that of a training.
SIZED_BATCHES = 16
# Tokens of an answer to a sample prompt.
SAMPLE_TOKENS = 48


def choose_objective(
    config: TrainConfig, context: StageContext, model: QATModel
) -> Objective:
    """The loss of a train stage, and the batches that it needs."""
    if config.teacher:
        return DistillationObjective(config, context, model)
    if config.rollouts:
        return PolicyObjective(config, context, model)
    if config.loss:
        return PreferenceObjective(config, context, model)
    return Objective(config, context, model)


def first_batches(
    batches: Callable[[int], Batch], indices: Callable[[int], range]
) -> list[Batch]:
    """Some batches of a training, whose steps may have different numbers of them."""
    numbers = chain.from_iterable(map(indices, count()))
    return [*map(batches, islice(numbers, SIZED_BATCHES))]


class TrainRun:
    """One training: the model, the batches and the trainer, and what it writes.

    Everything is built at once, so that errors come before the training.
    """

    def __init__(self, config: TrainConfig, context: StageContext):
        self.config = config
        self.context = context
        self.initial = context.require_visible(context.initial_model)
        loaded = context.load(self.initial, compute="stored")
        self.model = prepare(
            config,
            loaded,
            context.logger,
            seed=context.seed,
            quantized_here=bool(context.current and context.current.is_quantized),
        )
        self.loaded, self.selection = self.model.loaded, self.model.selection
        self.base_weights = dict(tree_flatten(self.loaded.model.parameters()))
        self.adapted_keys = self._attach_adapter()
        self.objective = choose_objective(config, context, self.model)
        self.trainer = self._make_trainer()
        self.step = self.trainer.step

    @classmethod
    def within_budget(cls, config: TrainConfig, context: StageContext) -> "TrainRun":
        """The training of as many steps as fit into the recipe's time, if it has one.

        Some steps of another training are timed for it.
        """
        seconds = budget_seconds(config.budget)
        if seconds is None:
            return cls(config, context)

        def of_steps(steps: int) -> TrainConfig:
            return config.model_copy(update={"budget": None, "steps": steps})

        def measure() -> float:
            context.logger.info(
                f"a training of a few steps, to know how many fit into {config.budget}"
            )
            steps = UNTIMED_STEPS + TIMED_STEPS
            trainer = cls(of_steps(steps), context).trainer

            def batches(step: int) -> list[Batch]:
                return [trainer.batches(index) for index in trainer.indices(step)]

            with context.logger.activity(f"timing {TIMED_STEPS} steps"):
                return seconds_per_step(trainer.step, [batches])

        steps = steps_within(seconds, measure, context.artifacts)
        # A training and its trainer refer to each other, and have weights and moments.
        gc.collect()
        context.logger.info(f"{steps:,} steps fit into {config.budget}")
        return cls(of_steps(steps), context)

    def run(self) -> None:
        """Train to the end; see `Trainer.train`."""
        if self.config.fsdp:
            self._free_full_weights()
        try:
            self.eval_loss = self.context.train(self.trainer)
        finally:
            self.objective.close()
        if self.config.teacher or self.config.loss or self.context.extensions.loss:
            # The trainer's loss is another one.
            trained = self.step.materialize()
            self.eval_loss = self._cross_entropy(trained, "the trained model")
        self.parameters = self.step.parameters
        if self.step.sharding:
            self.parameters = self.step.gather_parameters()

    def finish(self) -> ModelArtifact:
        """Write on rank 0 what was trained, and measure it; all ranks call this."""
        context, ranks = self.context, self.context.ranks
        with context.logger.activity("writing the trained model"):
            artifact = self._write() if ranks.is_first else context.current
        trained = Path(ranks.broadcast_object(str(artifact and artifact.model)))
        if ranks.is_first:
            improvement = self._improvement(context.require_visible(trained))
            facts = artifact.facts | {"improvement": improvement}
            artifact = replace(artifact, facts=facts)
        return artifact

    def correct_rates(self) -> None:
        """Correct the speed that dry runs assume, if this training was faster."""
        config, progress = self.config, self.trainer.progress
        # Others have more work than that of the steps, or wait for other processes.
        losses = config.teacher, config.loss, self.context.extensions.loss
        if any(losses) or self.context.ranks.size > 1 or not progress.seconds:
            return
        if "model_file" in self.loaded.config:  # Its shape is known to its own code.
            return
        batches = first_batches(self.trainer.batches, self.trainer.indices)
        sizes = [batch.tokens.size for batch in batches]
        longest = max(batch.tokens.shape[1] for batch in batches)
        shape = ModelShape.of_folder(self.initial, self.loaded.config)
        dtype = training_dtype(config.compute_dtype, self.loaded.dtype)
        batch = BatchShape(longest, max(sizes), sum(sizes) / len(sizes))
        cost = training_cost(shape, config, batch, dtype.size)
        # Of one training: the seconds of a baseline are not among these.
        work = cost.work * (progress.step / config.num_trainings)
        if factor := correct_rates(dtype, work, progress.seconds):
            self.context.logger.info(
                f"the training was {factor:.1f} times as fast as the measured speed of "
                "this machine, which was measured again for the next dry run"
            )

    def _write(self) -> ModelArtifact:
        """Write the trained checkpoint, its full-precision reference, the adapter."""
        loaded, fake_quant = self.loaded, self.fake_quant
        parameters = self.parameters
        # Lazy, and of the whole model.
        weights = lora_model.fuse(
            loaded.model, self.base_weights, parameters, loaded.dtype
        )
        packed = fake_quant.export_tensors(parameters) if fake_quant else {}
        codes = self._count_changed_codes(packed)
        # A weight that no other file needs is freed once it is written.
        unquantized = dict(weights) if fake_quant else weights
        reference = model = self._write_reference(unquantized, packed)
        if fake_quant:
            model = self.context.folder / "model"
            write_model(model, loaded, weights, self.selection, packed)
        adapters = self._write_adapter() if self.config.adapter else None
        # Whether the reference has the values of codes, not of weights before them.
        is_dequantized = bool(self.model.packed)
        if is_dequantized and (current := self.context.current).is_quantized:
            is_dequantized = current.facts.get("reference_is_dequantized", False)
        progress = self.trainer.progress
        facts = {
            "steps": progress.step,
            "best_step": progress.best_step,
            "selected_step": self.trainer.selected_step,
            "trained_tokens": progress.trained_tokens,
            "qat": self.config.qat is not None,
            "trained_parameters": sum(value.size for value in parameters.values()),
            "seconds": progress.seconds,
            "kept": self.selection.skipped,
            "reference_is_dequantized": is_dequantized,
            "validation_loss": self.eval_loss,
        }
        return ModelArtifact(model, reference, adapters, facts | codes)

    def _count_changed_codes(self, packed: dict[str, mx.array]) -> dict[str, int]:
        """Facts of a training whose codes can change; a warning if almost none did."""
        qat, before = self.model.qat, self.model.packed
        fake_quant, logger = self.fake_quant, self.context.logger
        if not (qat and before) or fake_quant.codes:
            return {}
        changed, total = fake_quant.count_changed_codes(before, packed)
        text = f"{changed:,} of {total:,} codes ({changed / total:.2g})"
        if changed < MIN_CHANGED_CODES * total:
            logger.warning(
                f"training has changed only {text}: its updates are too small for the "
                "grid; raise learning_rate, or train for more steps"
            )
        else:
            logger.info(f"training has changed {text}")
        return {"changed_codes": changed, "codes": total}

    def _warn_of_rounding(self, before: float, fused: float) -> None:
        """Warn if fusing loses what the adapter learned: small updates of large weights
        are rounded away in 16 bits."""
        gain, lost = before - self.eval_loss, fused - self.eval_loss
        if lost < MIN_LOST or lost < MAX_LOST_GAIN * gain:
            return
        context, dtype = self.context, self.loaded.dtype
        name, base = str(dtype).removeprefix("mlx.core."), context.source.path
        text = f"fusing rounds to {name}: the validation loss is {fused:.4f}, and "
        text += f"{self.eval_loss:.4f} with the adapter beside the model"
        if base and self.initial == context.base:
            wide = f"{Path(base).name}-float32"
            text += f". Train from a wider copy: lmx convert {base} {wide} --dtype "
            text += f"float32, then model={wide}; or use the adapter: lmx generate "
            text += f"{base} --adapter-path {context.output / 'adapters'}"
        context.logger.warning(text)

    def _write_reference(
        self, weights: dict[str, mx.array], packed: dict[str, mx.array]
    ) -> Path:
        """Write the unquantized weights, or return the known reference of codes.

        If training continues from codes of unknown origin, the latent weights' places
        inside their cells are no reference: the new codes are dequantized.
        """
        current, loaded = self.context.current, self.loaded
        if self.model.packed and current.is_quantized:
            return current.reference
        for path in self.model.packed or {}:
            names = {k: f"{path}.{k}" for k in TENSORS}
            tensors = {k: packed[name] for k, name in names.items() if name in packed}
            spec = self.selection.specs[path]
            weights[f"{path}.weight"] = dequantize(tensors, spec, loaded.dtype)
        target = self.context.folder / "dense"
        write_model(target, loaded, weights)
        return target

    def _free_full_weights(self) -> None:
        """Keep only this rank's shards of the weights."""
        sharding = self.step.sharding
        self.base_weights = {
            path: sharding.shard(path, value)
            for path, value in self.base_weights.items()
        }
        mx.eval(self.base_weights)
        self.step.free()
        shards = self.step.parameters.items()
        local = sum(value.size for _, value in shards)
        full = sum(math.prod(sharding.full_shape(k, v)) for k, v in shards)
        self.context.logger.info(
            f"every process keeps {local / full:.0%} of the trained weights"
        )

    def _attach_adapter(self) -> list[str]:
        qat, model = self.config.qat, self.loaded.model
        if not (adapter := self.config.adapter):
            return []
        keys = lora_model.attach(
            model, adapter, seed=self.context.seed, merged=qat is not None
        )
        if adapter.init_from:
            folder = self.context.find(adapter.init_from) or Path(adapter.init_from)
            init_adapter(model, resolve_adapter(folder))
        return keys

    def _make_trainer(self) -> Trainer:
        config, context, loaded = self.config, self.context, self.loaded
        objective = self.objective
        compute_dtype = training_dtype(config.compute_dtype, loaded.dtype)
        if compute_dtype == mx.float32:
            # Lossless, and the chunked loss is verified in the dtype of the training.
            set_compute_dtype(loaded.model, compute_dtype)
        # The loss model gives gradients to the weights that are trainable by now.
        self.fake_quant = self._make_fake_quant()
        model = loss_model(config, context, loaded)
        caches = None
        if config.packing:
            caches = document_caches(loaded, context, objective.enable_packing)
        examples = training_batches(
            config,
            context,
            loaded,
            objective.replace_completions,
            packing=caches is not None,
            encode=objective.encode,
        )
        encode = objective.encode_valid(examples)
        valid = validation_batches(config, context, loaded, encode=encode)
        tokens, per_epoch = 0.0, examples.steps_per_epoch
        if config.budget:
            first = first_batches(examples, examples.indices)
            sizes = [batch.tokens.size for batch in first]
            tokens = sum(sizes) / len(sizes) * examples.per_epoch / per_epoch
        steps = config.num_steps(per_epoch, tokens)
        require_steps(config.qat, steps)
        context.logger.info(
            f"{examples.num_examples:,} examples, {examples.per_epoch:,} batches per "
            f"epoch; {steps:,} steps are {steps / per_epoch:.1f} epochs"
        )
        eval_batches = list(valid.in_order(config.eval_batches))
        self.cross_entropy_batches = eval_batches
        if encode:
            chosen = validation_batches(config, context, loaded)
            self.cross_entropy_batches = list(chosen.in_order(config.eval_batches))
        batches = objective.training(examples, steps, compute_dtype)
        targets = objective.validation(valid, eval_batches, compute_dtype)
        step = self._make_step(compute_dtype, model, caches)
        set_compute_dtype(loaded.model, compute_dtype)
        source, evaluate = objective.with_rollouts(step, batches, valid)
        return Trainer(
            step,
            source,
            TrainerConfig(
                steps=steps,
                seed=context.seed,
                checkpoint_dir=context.folder / "checkpoints",
                logging_steps=config.logging_steps,
                eval_steps=config.eval_steps,
                save_steps=config.save_steps,
                save_total_limit=config.save_total_limit,
                load_best_at_end=config.load_best_at_end,
                early_stopping_patience=config.early_stopping_patience,
            ),
            indices=source.indices,
            learning_rate=partial(
                learning_rate_at,
                steps=steps,
                peak=config.learning_rate,
                schedule=config.lr_schedule,
                warmup_ratio=config.warmup_ratio,
                min_lr_ratio=config.min_lr_ratio,
                decay_ratio=config.decay_ratio,
            ),
            eval_batches=targets,
            logger=context.logger,
            evaluate=evaluate,
            on_evaluate=self._sample,
            on_event=context.extensions.callbacks.call,
        )

    def _make_fake_quant(self) -> FakeQuant | None:
        loaded, model = self.loaded, self.model
        if not self.selection.specs:
            return None
        fake_quant = FakeQuant(
            loaded.model, self.selection.specs, loaded.dtype, model.qat, model.packed
        )
        # Without the dense weights, which would stay in memory.
        self.base_weights |= fake_quant.codes
        return fake_quant

    def _make_step(
        self,
        compute_dtype: mx.Dtype,
        loss_model: LossModel,
        caches: DocumentCaches | None,
    ) -> TrainStep:
        config, network = self.config, self.loaded.model
        lr_multipliers = {}
        if config.adapter:
            trained = dict(tree_flatten(network.trainable_parameters()))
            lr_multipliers |= lora_model.lr_multipliers(trained, config.adapter)
        if self.fake_quant:
            lr_multipliers |= self.fake_quant.lr_multipliers()
        return TrainStep(
            network,
            OptimizerConfig(
                config.optimizer,
                config.beta1,
                config.beta2,
                weight_decay=config.weight_decay,
                max_grad_norm=config.max_grad_norm,
                lr_multipliers=lr_multipliers,
            ),
            stored_dtypes={k: v.dtype for k, v in self.base_weights.items()},
            compute_dtype=compute_dtype,
            weight_transform=self.fake_quant,
            gradient_checkpointing=config.gradient_checkpointing,
            ranks=self.context.ranks,
            fsdp=config.fsdp,
            loss_model=loss_model,
            document_caches=caches,
            loss=self.objective.loss,
        )

    def _sample(self, done: int) -> None:
        """Answer the sample prompts, into samples.jsonl."""
        if not self.config.sample_prompts:
            return
        ranks, model = self.context.ranks, self.step.materialize()
        if ranks.is_first:
            generator = Generator(model, self.loaded.tokenizer, keep_dequantized=False)
            for prompt in self.config.sample_prompts:
                answer = generator.chat(prompt, max_tokens=SAMPLE_TOKENS).text
                row = {"step": done, "prompt": prompt, "answer": answer}
                self.context.logger.sample(row)
        self.step.free()

    def _write_adapter(self) -> Path:
        adapter = self.config.adapter
        target = self.context.folder / "adapters"
        layers = lora_model.adapted_layers(self.loaded.model)
        if unreadable := adapter_files.layers_mlx_lm_cannot_load(layers):
            self.context.logger.warning(
                f"mlx-lm cannot load the dora adapters of {len(unreadable)} layers, "
                f"such as {unreadable[0]}, because it computes their quantized width "
                "wrongly; the fused model is correct"
            )
        with atomic_folder(target) as partial:
            adapter_files.save_adapter(
                partial,
                self.parameters,
                layers=layers,
                adapter=adapter,
                keys=self.adapted_keys,
                num_layers=adapter.num_layers or len(self.loaded.model.layers),
                base=self.context.base_name(self.initial),
            )
        # A later train stage replaces this copy, but not the stage's own one.
        with atomic_folder(self.context.output / "adapters") as partial:
            copy_folder(target, partial)
        return target

    def _improvement(self, model: Path) -> dict:
        """Decrease of the validation loss: in training, and of the reloaded files."""
        folders = {"the model before": self.initial, "the new model": model}
        base, exported = (
            self._cross_entropy(self.context.load(folder, sharded=True).model, name)
            for name, folder in folders.items()
        )
        if self.config.adapter and not self.fake_quant:
            self._warn_of_rounding(base, exported)
        self.context.logger.info(
            f"validation loss {base:.4f} before, {self.eval_loss:.4f} in training, "
            f"{exported:.4f} reloaded from disk"
        )
        return {
            "in_training": base - self.eval_loss,
            "exported": base - exported,
        }

    def _cross_entropy(self, model: nn.Module, name: str) -> float:
        batches, logger = self.cross_entropy_batches, self.context.logger
        with logger.progress(len(batches), f"validation loss of {name}") as bar:
            return measure_perplexity(model, bar.track(batches)).loss

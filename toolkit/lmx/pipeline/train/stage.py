"""The train stage: full fine-tuning or adapters, with or without fake quantization."""

import gc
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import mlx.core as mx

from ...config.budget import budget_seconds
from ...config.data import DataConfig
from ...config.messages import Problem
from ...config.preference import KEYS as PREFERENCE_LOSSES
from ...config.qat import CONTINUES_FROM_ALL_CODES, CONTINUES_FROM_CODES, QATConfig
from ...config.quant_spec import FLOAT_MODES
from ...config.train import TrainConfig
from ...data.record_formats import FORMATS
from ...errors import UserError
from ...interfaces import Communicator
from ...launcher import process_count
from ...training.rewards import check_reward
from ..context import ModelArtifact, StageContext, create_from_scratch
from ..estimate import (
    ADAMW_BYTES,
    BatchShape,
    Estimate,
    ModelShape,
    Workload,
    training_dtype,
)
from ..stage import (
    ModelState,
    RawStage,
    Stage,
    needs_training_data,
    quantization_values,
)
from ..work import Work
from .estimate import measuring_work, training_cost

# The dataset format that a preference loss needs.
LOSS_FORMATS = dict.fromkeys(PREFERENCE_LOSSES, "preference") | {
    "kto": "unpaired_preference"
}


class TrainStage(Stage):
    """Train the current model; leaves a checkpoint, quantized with `qat:`."""

    kind = "train"
    runs_on_all_ranks = True
    changes_model = True
    needs_trained_model = False
    calls = "loss"
    other_models = (("teacher", "model"),)
    config: TrainConfig

    def datasets(self, data: DataConfig) -> list[str]:
        return [*data.train, *data.valid]

    @property
    def named_files(self) -> list[tuple[str, str]]:
        config = self.config
        names = getattr(config.loss, "rewards", [])
        files = (name.rpartition(":")[0] for name in names)
        named = [("loss.rewards", file) for file in files if file.endswith(".py")]
        if config.adapter and config.adapter.init_from:
            named.append(("adapter.init_from", config.adapter.init_from))
        return named

    def outputs(self, output: Path) -> list[Path]:
        return [output / "adapters"] if self.config.adapter else []

    @classmethod
    def check(cls, raw: RawStage, state: ModelState) -> Iterator[Problem]:
        yield from super().check(raw, state)
        yield from needs_training_data(raw)
        has_adapter, has_qat = (
            raw.value(key) is not None for key in ("adapter", "qat")
        )
        if raw.value("loss") is not None and raw.data.get("loss_on") == "all":
            hint = "leave data.loss_on out: it compares completions"
            message = "this loss needs loss_on: completions"
            yield Problem((*raw.path, "loss"), message, hint, "key")
        yield from _check_formats(raw)
        yield from _check_rewards(raw)
        if state.is_untrained and has_adapter:
            path, message = (*raw.path, "adapter"), "an adapter needs a trained model"
            hint = "leave adapter out: a model from scratch is trained in full"
            yield Problem(path, message, hint, "key")
        if state.quantization is None:
            if state.config and raw.value("qat", "quantizer") == "fixed_codes":
                message = "the model is not quantized here, so it has no codes to fix"
                hint = "add a quantize stage before, or use quantizer: lsq"
                path = (*raw.path, "qat", "quantizer")
                yield Problem(path, message, hint, "key")
            return
        is_activation_quantized = (state.config | state.quantization).get(
            "quantize_activations"
        )
        if is_activation_quantized and not raw.value("qat", "quantize_activations"):
            message = "the model quantizes its activations here; it cannot be trained"
            hint = "train with quantize_activations in `qat`"
            yield Problem(raw.path, message, hint, "key")
        elif has_qat:
            yield from _check_qat_of_codes(raw, state.quantization)
        elif not has_adapter:
            message = "a quantized model cannot be trained in full"
            hint = "add `adapter:` or `qat:`; or train first"
            yield Problem(raw.path, message, hint, "key")

    @classmethod
    def next_state(cls, raw: RawStage, state: ModelState) -> ModelState:
        has_adapter, qat = raw.value("adapter") is not None, raw.value("qat")
        quantization = state.quantization
        if qat is not None and quantization is None:
            quantization = quantization_values(qat)
        elif qat is None and has_adapter:
            # The adapter is fused into dequantized weights.
            quantization = None
        state = super().next_state(raw, state)
        return replace(state, quantization=quantization, has_adapter=has_adapter)

    @property
    def quantization(self) -> QATConfig | None:
        return self.config.qat

    def estimate(self, workload: Workload, current: ModelShape) -> Estimate:
        from ..budget import TIMED_STEPS, UNTIMED_STEPS

        config, shape = self.config, workload.shape
        dtype = training_dtype(config.compute_dtype, shape.dtype)
        batch = self._batch(workload)
        needs = training_cost(current, config, batch, dtype.size, process_count())
        steps, epochs = self._steps(workload, batch, needs.work, dtype)
        work = None
        if steps is not None:
            tokens = config.eval_batches * batch.mean_tokens
            if workload.valid_tokens is not None:
                tokens = min(tokens, workload.valid_tokens)
            is_timed = budget_seconds(config.budget) is not None
            timed = is_timed * (UNTIMED_STEPS + TIMED_STEPS)
            work = needs.work * (steps + timed)
            work += measuring_work(current, config, steps, tokens)
        model = current
        if current.is_quantized:
            # The dequantized weights of the reference, or with a fused adapter, usually
            # of 16 bits.
            dense = 2 * needs.parameters
            model = replace(current, bytes=dense, float_values=None, specs={})
        # A new checkpoint is written before an old one is removed.
        checkpoints = 1 + config.save_total_limit + config.load_best_at_end
        disk = max(model.bytes, shape.bytes)
        disk += checkpoints * ADAMW_BYTES * needs.trained
        disk *= config.num_trainings
        if config.qat:
            model = current
            if not current.is_quantized:
                model = shape.quantized(shape.selection(config.qat).specs)
            disk += model.bytes
        return replace(
            needs,
            model=model,
            disk=disk,
            work=work,
            dtype=dtype,
            steps=steps,
            epochs=epochs,
            remedies=tuple(self._remedies(workload.max_seq_length)),
        )

    def check_ranks(self, ranks: Communicator) -> None:
        if self.config.fsdp:
            from ...training import fsdp

            fsdp.require_fsdp_support(ranks)

    def run(self, context: StageContext) -> ModelArtifact:
        # Imported here, so that a recipe is checked without the libraries of a run.
        from .fp_baseline import FullPrecisionBaseline
        from .run import TrainRun

        config, ranks = self.config, context.ranks
        if ranks.is_first:
            # A quantizer may turn NaN into a code, and the loss would not tell.
            context.check_base()
            create_from_scratch(context)
        ranks.wait_for_all()
        baseline = None
        if config.compare_full_precision:
            baseline = FullPrecisionBaseline(config, context)
        training = TrainRun.within_budget(config, context)
        training.run()
        training.correct_rates()
        artifact = training.finish()
        if baseline is None:
            return artifact
        selection, eval_batches = training.selection, training.cross_entropy_batches
        steps = training.trainer.config.steps
        # The baseline needs the memory of this training's weights and moments.
        del training
        gc.collect()
        baseline.train(steps)
        return baseline.compare(artifact, selection, eval_batches)

    def _batch(self, workload: Workload) -> BatchShape:
        config, window = self.config, workload.max_seq_length
        if config.packing:
            tokens = config.sequences_per_batch(window) * window
            return BatchShape(window, tokens, tokens)
        longest = max(workload.lengths)
        tokens = workload.largest_batch(config.batch_size, config.batch_tokens)
        if config.batch_tokens:
            return BatchShape(longest, tokens, tokens)
        mean = config.batch_size * workload.mean_length
        sequences = config.sequences_per_example
        together = sequences // config.micro_batches
        return BatchShape(longest, together * tokens, sequences * mean)

    def _steps(
        self, workload: Workload, batch: BatchShape, work: Work, dtype: mx.Dtype
    ) -> tuple[int | None, float | None]:
        """Steps, and epochs; None = unknown before the data is read.

        Args:
            work: of a step of all trainings.
        """
        config = self.config
        # The time and the tokens of a budget do not depend on the data.
        if not (workload.examples or config.budget):
            return config.steps, config.epochs
        examples = batch.mean_tokens / workload.mean_length
        examples /= config.sequences_per_example
        examples *= config.gradient_accumulation_steps
        per_epoch = math.ceil(workload.examples / examples)
        tokens = batch.mean_tokens * config.gradient_accumulation_steps
        steps = config.num_steps(per_epoch, tokens)
        if steps is None:
            seconds = work.seconds(dtype) / config.num_trainings
            steps = max(1, round(budget_seconds(config.budget) / seconds))
        return steps, steps / per_epoch if per_epoch else None

    def _remedies(self, window: int) -> Iterator[str]:
        config, address = self.config, self.address
        if not config.gradient_checkpointing:
            yield f"{address}.gradient_checkpointing=true"
        if config.loss_chunk_tokens is None:
            yield f"{address}.loss_chunk_tokens=auto"
        accumulation = 2 * config.gradient_accumulation_steps
        twice = f"{address}.gradient_accumulation_steps={accumulation}"
        if (config.batch_tokens or 0) > window:
            half = max(window, config.batch_tokens // 2)
            yield f"{address}.batch_tokens={half} {twice}"
        elif (config.batch_size or 1) > 1:
            yield f"{address}.batch_size={config.batch_size // 2} {twice}"
        yield f"data.max_seq_length={max(8, window // 2)}"
        if config.adapter is None:
            yield f"{address}.adapter={{rank: 16}}"


def _check_formats(raw: RawStage) -> Iterator[Problem]:
    """The problem of a loss whose examples are in no dataset."""
    loss = raw.value("loss")
    name = loss.get("type", "dpo") if isinstance(loss, dict) else loss
    if not isinstance(name, str) or name not in LOSS_FORMATS:
        return
    needed = LOSS_FORMATS[name]
    keys = [*FORMATS[needed].keys, *FORMATS[needed].optional]
    for split, formats in raw.formats.items():
        if formats and not {needed, None} & {*formats}:
            kinds = ", ".join(dict.fromkeys(formats))
            message = f"the loss {name} needs {needed} examples; these are {kinds}"
            yield Problem(("data", split), message, f"an example has {', '.join(keys)}")


def _check_rewards(raw: RawStage) -> Iterator[Problem]:
    rewards = raw.value("loss", "rewards")
    for index, name in enumerate(rewards if isinstance(rewards, list) else []):
        try:
            if isinstance(name, str):
                check_reward(name, raw.find)
        except UserError as error:
            path = (*raw.path, "loss", "rewards", index)
            yield Problem(path, error.message, error.hint)


def _check_qat_of_codes(raw: RawStage, before: dict) -> Iterator[Problem]:
    """Why a qat block cannot continue from a quantized model's codes."""
    path = (*raw.path, "qat")
    quantizer = raw.value("qat", "quantizer")
    # See `QATConfig.for_quantized_model`.
    modes = (None, "affine", *FLOAT_MODES)
    keeps = raw.value("adapter") is not None or raw.value("qat", "mode") in modes
    if quantizer not in CONTINUES_FROM_CODES and not (quantizer is None and keeps):
        message = (
            f"the model is quantized here, and {quantizer or 'minmax'} would quantize "
            "it again"
        )
        names = ", ".join(CONTINUES_FROM_ALL_CODES)
        hint = f"the quantizers {names} continue from the codes"
        yield Problem(path, message, hint, "key")
    key = "fake_quant_after_n_steps"
    if raw.value("qat", key):
        message = "the model is quantized here, and training begins with its codes"
        yield Problem((*path, key), message, f"leave {key} out", "key")
    # Without absent bits and group_size, which are the model's.
    after = quantization_values(raw.value("qat"), QATConfig)
    names = [key for key in before if key in after and before[key] != after[key]]
    if names:
        old, new = (
            ", ".join(f"{key}: {values[key]}" for key in names)
            for values in (before, after)
        )
        message = f"the model is quantized here with {old}; this block has {new}"
        hint = "use the same values: training continues from the codes"
        yield Problem(path, message, hint, "key")

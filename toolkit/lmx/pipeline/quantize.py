"""The quantize stage: a PTQ method, then scale tuning, each kept if it is better."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property

import mlx.core as mx
from mlx.utils import tree_flatten

from ..config.messages import Problem
from ..config.quantize import CalibrationConfig, PTQConfig, ScaleTuningConfig
from ..data.calibration import (
    CalibrationBatch,
    concatenated_sequences,
    per_example_sequences,
)
from ..data.record_formats import DataRecord
from ..data.splits import Splits
from ..errors import UserError
from ..models.checkpoint import weights_digest
from ..models.loader import LoadedModel
from ..quantization.mixed_precision.search import search_plan
from ..quantization.packing import pack
from ..quantization.ptq.base import PTQContext
from ..quantization.ptq.candidates import CandidateModel, CandidateSelector
from ..quantization.ptq.methods import METHODS
from ..quantization.ptq.scale_tuning import ScaleTuner
from ..quantization.target_layers import QuantizationPlan, select_layers
from ..run.fs import remove_folder
from ..training.teacher_cache import PartTargets, cache_part_targets
from .context import ModelArtifact, StageContext, write_model
from .estimate import StageResources, Workload
from .stage import ModelState, RawStage, Stage, quantization_values

# Folders of intermediate results, which the finished checkpoint replaces.
INTERMEDIATE = ("scratch", "candidate", "eval-targets", "train-targets", "tuning")
DEFAULT_DATASET = "builtin:stdlib"
# Tokens per forward pass: without training, and where a step accumulates gradients.
TOKENS_AT_ONCE, TRAINED_TOKENS_AT_ONCE = 2048, 1024


class QuantizeStage(Stage):
    """Quantize the current model after training; leaves a quantized checkpoint."""

    kind = "quantize"
    changes_model = True
    config: PTQConfig

    @classmethod
    def check(cls, raw: RawStage, state: ModelState) -> Iterator[Problem]:
        yield from super().check(raw, state)
        if state.quantization is not None:
            hint = "quantizing twice adds error; keep one quantization"
            yield Problem(raw.path, "the model is already quantized here", hint, "key")

    @classmethod
    def next_state(cls, raw: RawStage, state: ModelState) -> ModelState:
        state = super().next_state(raw, state)
        return replace(state, quantization=quantization_values(raw.block))

    @property
    def quantization(self) -> PTQConfig:
        return self.config

    def resources(self, workload: Workload, model_bytes: int) -> StageResources:
        shape = workload.shape
        size = shape.quantized_bytes(shape.selection(self.config).specs)
        if target := self.config.mixed_precision:
            size = target.max_bytes(shape.parameters)
        return StageResources(size, disk=size)

    def run(self, context: StageContext) -> ModelArtifact:
        """Quantize the current model, which becomes the full-precision reference."""
        config, reference = self.config, context.current.model
        loaded = context.load(reference, compute="stored", lazy=True)
        selection = select_layers(loaded.model, config)
        for path, reason in sorted(selection.skipped.items()):
            context.logger.info(f"left unquantized: {path}: {reason}")
        compares = config.rollback_if_worse and config.method != "rtn"
        uses_eval_tokens = bool(config.scale_tuning) or compares
        calibration = CalibrationData(
            config.calibration, context, loaded.tokenizer, holds_out=uses_eval_tokens
        )
        task = PTQContext(
            loaded.model,
            selection.specs,
            loaded.dtype,
            calibration.train_sequences,
            context.folder / "scratch",
            context.logger,
            loaded.reread,
        )
        facts = context.current.facts
        facts = facts | {"method": config.method, "kept": selection.skipped}
        if config.mixed_precision:
            selection, result = search_plan(
                config,
                selection,
                replace(task, folder=context.folder),
                context.load(reference).model,
                reference,
            )
            task = replace(task, specs=selection.specs)
            facts["mixed_precision"] = result
        tensors = METHODS[config.method](config, task).quantize()
        if uses_eval_tokens:
            refinement = PostQuantRefinement(
                config, context, calibration, loaded, selection
            )
            tensors, measured = refinement.run(tensors)
            facts |= measured
        # Lazy weights, referenced nowhere else, so that each is freed once written.
        weights = dict(tree_flatten(loaded.reread().parameters()))
        target = context.folder / "model"
        write_model(target, loaded, weights, selection, tensors)
        for name in INTERMEDIATE:
            remove_folder(context.folder / name)
        return ModelArtifact(target, reference, context.current.adapters, facts)


class CalibrationData:
    """Sequences of tokens for calibration and evaluation; no example is used in both.

    Args:
        holds_out: whether evaluation sequences are needed. If not, every example may
            be used for calibration.
    """

    def __init__(
        self,
        calibration: CalibrationConfig,
        context: StageContext,
        tokenizer,
        *,
        holds_out: bool,
    ):
        self.calibration = calibration
        self.context = context
        self.tokenizer = tokenizer
        self.holds_out = holds_out
        source = calibration.dataset
        if source is None and not context.data.train:
            source = DEFAULT_DATASET
        self._rows = context.rows if source is None else _splits(source, context)
        self._name = source or ", ".join(context.data.train)

    def train_sequences(self, tokens: int) -> CalibrationBatch:
        """Sequences of this many tokens, or all that the dataset has.

        Raises:
            UserError: the dataset does not fill one sequence.
        """
        skipped = self._num_eval_sequences if self.holds_out else 0
        sequences = self._sequences(
            self._train_rows(), tokens + skipped * self.calibration.max_seq_length
        )
        sequences = sequences[skipped:]
        self.context.logger.info(
            f"calibrating on {sequences.size:,} tokens of {self._name}"
        )
        return sequences

    @cached_property
    def eval_sequences(self) -> CalibrationBatch:
        """Sequences of the validation examples, or of the dataset without them.

        Raises:
            UserError: there are too few tokens for one sequence.
        """
        count, tokens = self._num_eval_sequences, self.calibration.num_eval_tokens
        if count == 0:
            sequences = self._sequences(self._eval_rows, tokens)
        else:
            sequences = self._sequences(self._train_rows(), tokens)[:count]
        self.context.logger.info(f"evaluating on {sequences.size:,} held-out tokens")
        return sequences

    @cached_property
    def _eval_rows(self) -> list[DataRecord]:
        data = self.context.data
        return self.context.rows.valid if data.valid or data.train else []

    @cached_property
    def _num_eval_sequences(self) -> int:
        """Sequences of the dataset to hold out; 0 if there are validation examples."""
        try:
            self._sequences(self._eval_rows, self.calibration.max_seq_length)
        except UserError:
            tokens = self.calibration.num_eval_tokens
            sequences = self._sequences(self._train_rows(), 4 * tokens)
            if len(sequences) < 2:
                raise
            count = tokens * len(sequences) // sequences.size
            return max(1, min(count, len(sequences) // 4))
        return 0

    def _train_rows(self) -> Iterator[DataRecord]:
        """The dataset's examples that are not validation examples."""
        held_out = {row.as_text() for row in self._eval_rows} if self.holds_out else ()
        return (row for row in self._rows.train if row.as_text() not in held_out)

    def _sequences(self, rows: Iterable[DataRecord], tokens: int) -> CalibrationBatch:
        length, seed = self.calibration.max_seq_length, self.context.seed
        if self.calibration.loss_on == "completions":
            return per_example_sequences(
                rows,
                self.tokenizer,
                tokens=tokens,
                length=length,
                seed=seed,
                loss_on=self.context.data.loss_on,
            )
        return concatenated_sequences(
            rows, self.tokenizer, tokens=tokens, length=length, seed=seed
        )


def _splits(source: str, context: StageContext) -> Splits:
    rows = context.rows
    # Examples that a training dataset holds out are not held out of this dataset.
    data = rows.data.model_copy(update={"train": [source], "valid": [source]})
    return Splits(
        data, find=rows.find, seed=rows.seed, info=rows.info, warning=rows.warning
    )


class PostQuantRefinement:
    """Compares candidates with the full-precision model on held-out tokens.

    Args:
        loaded: the full-precision model; its weights may have been freed.
    """

    def __init__(
        self,
        config: PTQConfig,
        context: StageContext,
        calibration: CalibrationData,
        loaded: LoadedModel,
        selection: QuantizationPlan,
    ):
        self.config = config
        self.context = context
        self.calibration = calibration
        self.loaded = loaded
        # Lazy, so that a large model needs little memory.
        self.weights = dict(tree_flatten(loaded.reread().parameters()))
        self.selection = selection
        self.tuning = config.scale_tuning or ScaleTuningConfig()

    def run(self, tensors: dict[str, mx.array]) -> tuple[dict[str, mx.array], dict]:
        """The best candidate: RTN, the method's tensors, or these after scale tuning.

        Returns:
            its tensors, and facts for the report.
        """
        eval_targets, train_targets = self._targets()
        candidate = self.context.folder / "candidate"
        weights = dict(self.weights)
        write_model(candidate, self.loaded, weights, self.selection, dict(tensors))
        model = CandidateModel(self.context.load(candidate).model, self.loaded.dtype)
        selector = CandidateSelector(model, eval_targets, self.context.logger.info)
        if self.config.rollback_if_worse and self.config.method != "rtn":
            selector.add("rtn", self._rtn(tensors))
        selector.add(self.config.method, tensors)
        if self.config.scale_tuning:
            tuner = ScaleTuner(
                self.config.scale_tuning,
                model,
                train_targets,
                eval_targets,
                folder=self.context.folder / "tuning",
                seed=self.context.seed,
                logger=self.context.logger,
            )
            selector.add("scale_tuning", selector.tensors | tuner.run())
        return selector.tensors, {
            "eval_kl": selector.divergences,
            "selected_candidate": selector.best_name,
        }

    def _targets(self) -> tuple[PartTargets, PartTargets | None]:
        """The full-precision model's predictions for evaluation and for training."""
        reference = self.context.load(self.loaded.path)
        digest = weights_digest(reference.path)

        def targets(
            name: str, sequences: CalibrationBatch, at_once: int, temperature: float
        ) -> PartTargets:
            parts = sequences.parts(at_once)
            return cache_part_targets(
                self.context.folder / name,
                [mx.array(part.tokens) for part in parts],
                reference.model,
                counted=[mx.array(part.counted) for part in parts],
                digest=digest,
                top_k=self.tuning.top_k,
                temperature=temperature,
                info=self.context.logger.info,
            )

        eval_targets = targets(
            "eval-targets", self.calibration.eval_sequences, TOKENS_AT_ONCE, 1.0
        )
        if not self.config.scale_tuning:
            return eval_targets, None
        size, tuning = self.tuning.batch_tokens, self.tuning
        limit = self.config.calibration.num_tokens or tuning.steps * size
        sequences = self.calibration.train_sequences(min(limit, tuning.steps * size))
        at_once = min(size, TRAINED_TOKENS_AT_ONCE)
        return eval_targets, targets(
            "train-targets", sequences, at_once, tuning.temperature
        )

    def _rtn(self, tensors: dict[str, mx.array]) -> dict[str, mx.array]:
        """RTN tensors in place of all tensors that the method changed."""
        rtn = {k: self.weights[k] for k in tensors if k in self.weights}
        for path, spec in self.selection.specs.items():
            packed = pack(self.weights[f"{path}.weight"], spec, self.loaded.dtype)
            rtn |= {f"{path}.{name}": value for name, value in packed.items()}
        return rtn

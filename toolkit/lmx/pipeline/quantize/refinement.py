"""Calibration data of a quantize stage, and the steps after its method.

Scales are tuned, and held-out tokens choose between the candidates.
"""

import json
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

from ...config.quantize import (
    TUNING_TOP_K,
    CalibrationConfig,
    KVCacheConfig,
    PTQConfig,
    ScaleTuningConfig,
)
from ...cpu import keep_dequantized
from ...data.calibration import (
    CalibrationBatch,
    TooFewTokens,
    concatenated_sequences,
    per_example_sequences,
)
from ...data.record_formats import DataRecord
from ...data.splits import Splits
from ...files.atomic import write_atomic
from ...files.json_files import read_json
from ...models.checkpoint import weights_digest
from ...models.loader import KV_BITS, LoadedModel
from ...quantization.mixed_precision import kv_bits
from ...quantization.packing import pack
from ...quantization.target_layers import QuantizationPlan
from ...training.teacher_cache import PartTargets, cache_part_targets
from ..context import StageContext, write_model
from .candidates import CandidateModel, CandidateSelector
from .scale_tuning import ScaleTuner

DEFAULT_DATASET = "builtin:stdlib"
# Tokens per forward pass: without training, and where a step accumulates gradients.
TOKENS_AT_ONCE, TRAINED_TOKENS_AT_ONCE = 512, 1024


class CalibrationData:
    """Sequences of tokens for calibration and evaluation; no token is used in both.

    Without validation examples, one example may continue from the last evaluation
    sequence into the first one for calibration.

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
        sources = calibration.dataset
        if not sources and not context.data.train:
            sources = [DEFAULT_DATASET]
        self._rows = _splits(sources, context) if sources else context.rows
        self._too_short: dict[str, TooFewTokens] = {}

    def train_sequences(self, tokens: int) -> CalibrationBatch:
        """Sequences of this many tokens, or all that there are.

        Raises:
            TooFewTokens: no dataset fills one sequence.
        """
        batches = self._by_dataset(tokens, self._held_out)
        parts = ", ".join(f"{b.size:,} tokens of {name}" for name, b in batches.items())
        self.context.logger.info(f"calibrating on {parts}")
        for name, error in self._too_short.items():
            self.context.logger.warning(f"not calibrating on {name}: {error.message}")
        return CalibrationBatch.in_turn([*batches.values()])

    @cached_property
    def eval_sequences(self) -> CalibrationBatch:
        """Sequences of the validation examples, or of the datasets without them.

        Raises:
            TooFewTokens: there are not enough for one sequence.
        """
        if self._held_out:
            sequences = CalibrationBatch.in_turn([*self._held_out.values()])
        else:
            tokens = self.calibration.num_eval_tokens
            sequences = self._sequences(self._eval_rows, tokens)
        self.context.logger.info(f"evaluating on {sequences.size:,} held-out tokens")
        return sequences

    @cached_property
    def _eval_rows(self) -> list[DataRecord]:
        data = self.context.data
        return self.context.rows.valid if data.valid or data.train else []

    @cached_property
    def _held_out(self) -> dict[str, CalibrationBatch]:
        """The first sequences of each dataset, for evaluation; none if there are
        validation examples, or no evaluation."""
        if not self.holds_out:
            return {}
        try:
            self._sequences(self._eval_rows, self.calibration.max_seq_length)
            return {}
        except TooFewTokens:
            tokens = self.calibration.num_eval_tokens
            batches = self._by_dataset(4 * tokens, {})
            share = -(-tokens // len(batches))
            held_out = {
                name: batch[: max(1, len(batch) // 4)].first(share)
                for name, batch in batches.items()
                if len(batch) > 1
            }
            if not held_out:
                raise
            return held_out

    def _by_dataset(
        self, tokens: int, held_out: dict[str, CalibrationBatch]
    ) -> dict[str, CalibrationBatch]:
        """Sequences of each dataset, without validation examples.

        Every dataset has the same share of the tokens, however long its examples are.

        Args:
            held_out: the first sequences of datasets, which are left out.

        Raises:
            TooFewTokens: no dataset fills one sequence.
        """
        texts = {row.as_text() for row in self._eval_rows} if self.holds_out else ()
        train, batches = self._rows.train, {}
        # A dataset that is named twice has the same sequences twice.
        names = dict.fromkeys(train.sources)
        share = -(-tokens // len(names))
        for name in names:
            rows = (r for r in train.records(name) if r.as_text() not in texts)
            skipped = len(held_out.get(name, ()))
            wanted = share + skipped * self.calibration.max_seq_length
            try:
                batches[name] = self._sequences(rows, wanted)[skipped:].first(share)
            except TooFewTokens as error:
                self._too_short.setdefault(name, error)
        if not batches:
            raise next(iter(self._too_short.values()))
        return batches

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


def quantize_kv_cache(
    config: KVCacheConfig,
    model: Path,
    calibration: CalibrationData,
    context: StageContext,
) -> dict:
    """Choose the bits of the KV cache by layer, and write them to config.json.

    Args:
        model: the folder of the finished quantized model.

    Returns:
        Facts for the report; see `choose_kv_bits`.

    Raises:
        UserError: the cache of this model cannot be quantized, or no choice fits.
    """
    ranks = context.ranks
    served = context.load(model)
    keep_dequantized(served.model)
    sequences = calibration.train_sequences(kv_bits.CALIBRATION_TOKENS)
    held_out = calibration.eval_sequences
    bits, facts = kv_bits.choose_kv_bits(
        served.model,
        served.dtype,
        config,
        sequences,
        held_out,
        context.logger,
        ranks,
    )
    if ranks.is_first:
        file = model / "config.json"
        values = read_json(file) | {KV_BITS: bits}
        text = json.dumps(values, indent=4, sort_keys=True)
        write_atomic(file, text + "\n")
    return facts


def _splits(sources: list[str], context: StageContext) -> Splits:
    rows = context.rows
    # Examples that a training dataset holds out are not held out of these datasets.
    data = rows.data.model_copy(update={"train": sources, "valid": sources})
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
        candidate, ranks = self.context.folder / "candidate", self.context.ranks
        if ranks.is_first:
            write_model(
                candidate,
                self.loaded,
                dict(self.weights),
                self.selection,
                dict(tensors),
                keeps_mtp=False,
            )
        ranks.wait_for_all()
        served = self.context.load(candidate)
        model = CandidateModel(served.model, self.loaded.dtype, ranks)
        selector = CandidateSelector(model, eval_targets, self.context.logger)
        if self.config.compares_with_rtn:
            selector.add("rtn", self._rtn(tensors))
        is_rtn = self.config.method == "rtn" and self.config.compares_with_rtn
        selector.add("smoothquant" if is_rtn else self.config.method, tensors)
        modes = {spec.mode for spec in self.selection.specs.values()}
        if self.config.scale_tuning and "affine" not in modes:
            self.context.logger.warning(
                "scale_tuning trains nothing: no layer has mode affine"
            )
        elif self.config.scale_tuning:
            tuner = ScaleTuner(
                self.config.scale_tuning,
                model,
                train_targets,
                eval_targets,
                store=self.context.artifacts,
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
        ranks = self.context.ranks
        reference = self.context.load(self.loaded.path)
        # Of rank 0's folders.
        digest = weights_digest(reference.path) if ranks.is_first else ""
        digest = ranks.broadcast_object(digest)

        def targets(
            name: str, sequences: CalibrationBatch, at_once: int, temperature: float
        ) -> PartTargets:
            parts = sequences.parts(at_once)
            return cache_part_targets(
                self.context.artifacts,
                name,
                [mx.array(part.tokens) for part in parts],
                reference.model,
                counted=[mx.array(part.counted) for part in parts],
                digest=digest,
                top_k=TUNING_TOP_K,
                temperature=temperature,
                logger=self.context.logger,
            )

        held_out = self.calibration.eval_sequences
        eval_targets = targets("eval-targets", held_out, TOKENS_AT_ONCE, 1.0)
        if not self.config.scale_tuning:
            return eval_targets, None
        size, tuning = self.tuning.batch_tokens, self.tuning
        limit = self.config.calibration.num_tokens or tuning.steps * size
        wanted = min(limit, tuning.steps * size)
        sequences = self.calibration.train_sequences(wanted)
        at_once = min(size, TRAINED_TOKENS_AT_ONCE)
        return eval_targets, targets("train-targets", sequences, at_once, 1.0)

    def _rtn(self, tensors: dict[str, mx.array]) -> dict[str, mx.array]:
        """RTN tensors in place of all tensors that the method changed."""
        rtn = {k: self.weights[k] for k in tensors if k in self.weights}
        for path, spec in self.selection.specs.items():
            packed = pack(self.weights[f"{path}.weight"], spec, self.loaded.dtype)
            rtn |= {f"{path}.{name}": value for name, value in packed.items()}
        return rtn

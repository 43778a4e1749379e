"""Calibration data of a quantize stage."""

from collections.abc import Iterable
from functools import cached_property

from ...config.quantize import CalibrationConfig
from ...data.calibration import (
    CalibrationBatch,
    TooFewTokens,
    concatenated_sequences,
    per_example_sequences,
)
from ...data.record_formats import DataRecord
from ...data.splits import Splits
from ..context import StageContext

DEFAULT_DATASET = "builtin:stdlib"


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


def _splits(sources: list[str], context: StageContext) -> Splits:
    rows = context.rows
    # Examples that a training dataset holds out are not held out of these datasets.
    data = rows.data.model_copy(update={"train": sources, "valid": sources})
    return Splits(
        data, find=rows.find, seed=rows.seed, info=rows.info, warning=rows.warning
    )

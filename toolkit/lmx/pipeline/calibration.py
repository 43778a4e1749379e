"""The tokens a quantize stage watches the model on, and those it judges by."""

from collections.abc import Iterable, Iterator
from functools import cached_property

from ..config.quantize import CalibrationConfig
from ..data.calibration import (
    CalibrationBatch,
    concatenated_sequences,
    per_example_sequences,
)
from ..data.record_formats import DataRecord
from ..data.splits import Splits
from ..errors import UserError
from .context import StageContext

WITHOUT_ROWS = "builtin:stdlib"


class CalibrationData:
    """Windows of tokens; no row is both watched and judged by.

    Args:
        judging: whether rows are judged by; if not, all may be watched.
    """

    def __init__(
        self,
        calibration: CalibrationConfig,
        context: StageContext,
        tokenizer,
        *,
        judging: bool,
    ):
        self.calibration = calibration
        self.context = context
        self.tokenizer = tokenizer
        self.judging = judging
        source = calibration.dataset
        if source is None and not context.data.train:
            source = WITHOUT_ROWS
        self._rows = context.rows if source is None else _splits(source, context)
        self._name = source or ", ".join(context.data.train)

    def watched(self, tokens: int) -> CalibrationBatch:
        """As many tokens as asked for, if the source has them.

        Raises:
            UserError: it does not fill one window.
        """
        aside = self._aside if self.judging else 0
        found = self._windows(
            self._others(), tokens + aside * self.calibration.max_seq_length
        )
        found = found[aside:]
        self.context.logger.info(
            f"calibrating on {found.size:,} tokens of {self._name}"
        )
        return found

    @cached_property
    def held_out(self) -> CalibrationBatch:
        """Of the validation rows, or else of the source.

        Raises:
            UserError: there is too little for a window.
        """
        if self._aside == 0:
            found = self._windows(self._validation, self.calibration.num_eval_tokens)
        else:
            found = self._windows(self._others(), self.calibration.num_eval_tokens)
            found = found[: self._aside]
        self.context.logger.info(f"judging by {found.size:,} tokens held out")
        return found

    @cached_property
    def _validation(self) -> list[DataRecord]:
        data = self.context.data
        return self.context.rows.valid if data.valid or data.train else []

    @cached_property
    def _aside(self) -> int:
        """Windows of the source that are held out, for want of validation rows."""
        try:
            self._windows(self._validation, self.calibration.max_seq_length)
        except UserError:
            wanted = self.calibration.num_eval_tokens
            found = self._windows(self._others(), 4 * wanted)
            if len(found) < 2:
                raise
            enough = wanted * len(found) // found.size
            return max(1, min(enough, len(found) // 4))
        return 0

    def _others(self) -> Iterator[DataRecord]:
        """The source's rows that are not validation rows too."""
        held = {row.as_text() for row in self._validation} if self.judging else set()
        return (row for row in self._rows.train if row.as_text() not in held)

    def _windows(self, rows: Iterable[DataRecord], tokens: int) -> CalibrationBatch:
        settings = {
            "length": self.calibration.max_seq_length,
            "seed": self.context.seed,
        }
        if self.calibration.loss_on == "completions":
            settings["loss_on"] = self.context.data.loss_on
            return per_example_sequences(
                rows, self.tokenizer, tokens=tokens, **settings
            )
        return concatenated_sequences(rows, self.tokenizer, tokens=tokens, **settings)


def _splits(source: str, context: StageContext) -> Splits:
    rows = context.rows
    # What is held out of a training source by itself is not held out of this one.
    data = rows.data.model_copy(update={"train": [source], "valid": [source]})
    return Splits(
        data, find=rows.find, seed=rows.seed, info=rows.info, warning=rows.warning
    )

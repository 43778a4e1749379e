"""The work of an evaluation by kind, for its time left."""

from collections.abc import Collection, Mapping, Sequence

from ...config.evaluate import EvaluateConfig
from ...data.batching import Batch
from ...evaluation.memory_bandwidth import decoding_seconds
from ...generation.generator import Generator
from ...run.work_rate import KindOfWork
from .questions import DecodingSteps, Questions, batch_rows, distinct_tokens

BASE = "base"
# Measured steps of decoding, after one that compiles kernels.
MEASURED_STEPS = 3


class PlannedWork:
    """What all models of an evaluation take.

    A step of decoding takes about as long as reading all weights, many times as long as
    a token of a prompt. It is measured before the first one; then all rates are those
    of the run.

    Args:
        generator: of the first model.
        load_seconds: the time that loading the first model took.
        names: of all models.
        uncounted: metrics that take long and count no tokens; they are unknown until
            one was measured.
        ranks: processes that answer the questions, each its share.

    Attributes:
        kinds: `tokens` of forward passes and of prompts, `steps` of decoding, loaded
            `models`, and each of `uncounted`.
    """

    def __init__(
        self,
        config: EvaluateConfig,
        questions: Questions,
        batches: Sequence[Batch],
        generator: Generator,
        load_seconds: float,
        names: Collection[str],
        uncounted: Collection[str],
        ranks: int,
    ):
        prompts = questions.fitting(generator)
        share = [*prompts][::ranks]
        rows = batch_rows(generator, len(share))
        limit, thought = config.max_tokens, config.thinking_budget or 0
        # With the token that ends an answer.
        lengths = [len(generator.tokenizer.encode(q.expected or "")) + 1 for q in share]
        self._steps: dict[str, int] = {}
        for name in names:
            steps = DecodingSteps(rows)
            for length in lengths:
                # A model that was not trained on such answers seldom ends as they do,
                # and of some questions no answer is expected.
                known = name != BASE and length > 1
                tokens = min(limit, length) if known else limit
                steps.add_tokens(thought + tokens, is_last=True)
            self._steps[name] = steps.count
        count = len(names)
        self._pass = sum(batch.tokens.size for batch in batches)
        # A model with a reference has a pass of both.
        asked = distinct_tokens(list(prompts.values()))
        tokens = (2 * count - 1) * self._pass + count * asked
        step = decoding_seconds(generator.model, rows, MEASURED_STEPS) if rows else None
        self.kinds: Mapping[str, KindOfWork] = {
            "tokens": KindOfWork(tokens),
            "steps": KindOfWork(sum(self._steps.values()), step),
            "models": KindOfWork(count - 1, load_seconds),
        } | {name: KindOfWork(count) for name in uncounted}

    def add_passes(self, count: int) -> None:
        """More passes over all batches, which a model turns out to need."""
        self.kinds["tokens"].total += count * self._pass

    def end_model(self, name: str) -> None:
        """A model is measured: its answers had their own lengths."""
        del self._steps[name]
        steps = self.kinds["steps"]
        steps.total = steps.done + sum(self._steps.values())

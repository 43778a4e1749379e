"""The time left of an evaluation, with a clock that its models move."""

import re
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from lmx.config.evaluate import EvaluateConfig
from lmx.data.record_formats import DataRecord
from lmx.evaluation.perplexity import perplexity_of
from lmx.generation.kv_cache.batch import is_batchable
from lmx.interfaces import SINGLE_PROCESS
from lmx.pipeline.evaluate import evaluator, metrics
from lmx.pipeline.evaluate.evaluator import Evaluator
from lmx.pipeline.evaluate.questions import DecodingSteps
from lmx.run.logger import RunLogger
from lmx.run.parallel_dims import ParallelDims
from lmx.run.work_rate import KindOfWork, WorkRate
from test_evaluate_samples import END, SIZE, Letters

# Seconds of a token of a long pass, of a decoding step, and of loading a model.
TOKEN, STEP, LOAD = 0.05, 1.0, 5.0
LIMIT = 48
BATCHES = [SimpleNamespace(tokens=np.zeros((4, 32)))] * 6


class Clock:
    """Seconds that pass, in which the heartbeat writes its lines to `lines`."""

    def __init__(self, monkeypatch):
        self.now, self.logger = 1000.0, None
        self.lines: list[tuple[float, str]] = []
        for name in ("monotonic", "perf_counter"):
            monkeypatch.setattr(f"time.{name}", lambda: self.now)

    def watch(self, logger) -> None:
        self.logger = logger
        logger.info = self.write

    def write(self, text: str) -> None:
        self.logger._last_line = self.now
        self.lines.append((self.now, text))

    def wait(self, seconds: float) -> None:
        while seconds > 0:
            self.now += min(seconds, 0.25)
            seconds -= 0.25
            self.logger.break_silence()


class SlowModel:
    """Answers with the next letters up to a last one, and takes its time."""

    def __init__(self, clock, last, speed):
        self.clock, self.last, self.speed = clock, last, speed
        self.args = SimpleNamespace(max_position_embeddings=None)

    def __call__(self, tokens, cache=None):
        self.clock.wait(STEP if tokens.shape[1] == 1 else TOKEN * tokens.size)
        follows = mx.where(tokens < self.last, tokens + 1, END)
        return follows[..., None] == mx.arange(SIZE)

    def make_cache(self):
        return []


class EqualWeights(WorkRate):
    """Negative control: a step of decoding counts as much as a token of a prompt."""

    def __init__(self, kinds):
        super().__init__(kinds)
        self.one = WorkRate({"": KindOfWork(sum(w.total for w in kinds.values()))})

    def count(self, amounts):
        self.one.count({"": sum(amounts.values())})

    def seconds_left(self):
        return self.one.seconds_left()


def evaluate(monkeypatch, clock, questions, last_letters):
    """Evaluate models whose answers end with these letters, on this many questions."""

    def predictions(*arguments):
        *models, batches, _ = arguments
        for batch in batches:
            for model in models:
                model.clock.wait(TOKEN * batch.tokens.size / model.speed)
        perplexity = perplexity_of([[np.ones(2), np.ones(2)]])
        if len(models) == 1:
            return perplexity
        return SimpleNamespace(perplexity=perplexity, figures={})

    def load(last):
        clock.wait(LOAD)
        model = SlowModel(clock, last, 1.0)
        with monkeypatch.context() as patch:
            # A check of few tokens takes no time in models of use.
            patch.setattr(clock, "wait", lambda seconds: None)
            assert is_batchable(model)
        return SimpleNamespace(
            model=model, tokenizer=Letters(), path="model", kv_bits=None
        )

    monkeypatch.setattr(metrics, "measure_perplexity", predictions)
    monkeypatch.setattr(metrics, "measure_divergence", predictions)
    steps = (metrics._predictions, metrics._exact_match)
    monkeypatch.setattr(evaluator, "METRICS", steps)
    monkeypatch.setattr(Evaluator, "_batches", lambda *_: BATCHES)
    answer = "B" * (last_letters[-1] - 2)
    records = [
        DataRecord("x", prompt="A" * 10, completion=answer, skill="one")
        for _ in range(questions)
    ]
    logger = RunLogger(None, quiet=True)
    clock.watch(logger)
    context = SimpleNamespace(
        rows=SimpleNamespace(valid=records),
        logger=logger,
        ranks=SINGLE_PROCESS,
        parallel=ParallelDims(),
        extensions=SimpleNamespace(metrics={}),
    )
    config = EvaluateConfig(max_tokens=LIMIT)
    names = ("base", "fine-tuned", "quantized")
    models = {
        name: lambda last=last: load(last)
        for name, last in zip(names, last_letters, strict=False)
    }
    Evaluator(config, context).measure(models)


def worst_error(clock) -> float:
    """Of the time left in all lines from the second one on, as a factor."""
    lines = [(now, text) for now, text in clock.lines if "%" in text]
    assert len(lines) >= 6
    errors = []
    for now, text in lines[1:]:
        true, match = clock.now - now, re.search(r"about (\d+) (s|min) left", text)
        said = int(match[1]) * {"s": 1, "min": 60}[match[2]] if match else 0
        if max(said, true) > 3:  # the last steps and rounding
            errors.append(max(said / true, true / max(said, 0.1)))
    return max(errors)


CASES = {
    "same": (4, (60, 60)),
    "longer than the base was trained for": (8, (60, 20)),
    "three models": (4, (60, 60, 60)),
    "more answers than fit in a batch": (70, (60, 40)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_time_left_is_right_from_the_second_line_on(monkeypatch, case):
    clock = Clock(monkeypatch)
    evaluate(monkeypatch, clock, *case)
    assert worst_error(clock) < 1.5


def test_equal_weights_are_wrong(monkeypatch):
    monkeypatch.setattr("lmx.run.progress.WorkRate", EqualWeights)
    clock = Clock(monkeypatch)
    evaluate(monkeypatch, clock, *CASES["same"])
    assert worst_error(clock) > 2


@pytest.mark.parametrize(
    ("rows", "lengths", "count"),
    [(4, [3, 9, 5], 9), (2, [9, 3, 5, 2], 10), (1, [3, 9, 5], 17)],
)
def test_steps_of_answers_that_start_where_others_end(rows, lengths, count):
    steps = DecodingSteps(rows)
    for length in lengths:
        for token in range(length):
            steps.add_tokens(1, is_last=token == length - 1)
    assert steps.count == count

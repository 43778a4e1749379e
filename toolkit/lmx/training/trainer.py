"""The one training loop: full, LoRA and quantization-aware training alike."""

import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from ..data.batching import Batch, BucketBatchSampler
from ..errors import FAILED, Interrupted, UserError
from ..run.distributed import ProcessGroup
from ..run.fs import write_atomic
from ..run.logger import RunLogger
from ..run.signals import ended_when_stuck, stop_requested
from . import checkpoint
from .checkpoint import TrainingProgress
from .checkpoint_policy import CheckpointPolicy
from .step import TrainStep

# Seconds that a step and a checkpoint may take after SIGTERM, of several processes.
PATIENCE = 300


@dataclass(frozen=True)
class TrainerIntervals:
    """How often things happen, in steps, and where checkpoints go."""

    report: int
    evaluate: int
    checkpoint: int
    folder: Path


class Trainer:
    """Runs a `Step` over batches, with validation, checkpoints and a way to stop.

    Args:
        accumulate: batches per step.
        total: batches in all, if the last step has fewer.
        rate: the learning rate of a step, counted from 0.
        valid: validation batches, used again and again.
        keep: which weights are left and when to stop; None = the last, at the end.
        on_evaluate: called with the step after every validation, for samples, in all
            processes.
    """

    def __init__(
        self,
        step: TrainStep,
        batches: BucketBatchSampler,
        *,
        steps: int,
        rate: Callable[[int], float],
        valid: Sequence[Batch],
        cadence: TrainerIntervals,
        logger: RunLogger,
        seed: int,
        accumulate: int = 1,
        total: int | None = None,
        keep: CheckpointPolicy | None = None,
        on_evaluate: Callable[[int], None] = lambda step: None,
    ):
        self.step = step
        self.batches = batches
        self.steps = steps
        self.accumulate = accumulate
        self.total = steps * accumulate if total is None else total
        self.rate = rate
        self.valid = valid
        self.cadence = cadence
        self.logger = logger
        self.seed = seed
        self.keep = keep or CheckpointPolicy()
        self.on_evaluate = on_evaluate
        self.progress = TrainingProgress()
        # Of the last step that is done, whether one of several processes would stop.
        self._told = False
        # The steps that the weights have seen which `run` leaves.
        self.left = 0
        self._pending: tuple | None = None
        self._clock = 0.0

    def run(self) -> float:
        """Train to the end, from the newest checkpoint if there is one.

        Returns:
            The validation loss of the weights left, per trained token.

        Raises:
            Interrupted: stopped by a signal, after saving.
            UserError: the loss is not a number, or the rows have changed since.
        """
        self._resume()
        with (
            stop_requested() as stopping,
            self.logger.progress(self.steps, "training") as bar,
            self.ranks.connection_errors(),
            ended_when_stuck(PATIENCE) if self.ranks.size > 1 else nullcontext(),
        ):
            self._clock = time.perf_counter()
            for number in range(self.progress.step, self.steps):
                if self.keep.is_over(self.progress):
                    self._stop_early()
                    break
                self._launch(number, bar, stopping())
                if self._is_pause(number + 1) or self._is_told(stopping):
                    self._settle(bar)
                    self._pause(number + 1, self._is_told(stopping))
        return self._leave()

    @property
    def ranks(self) -> ProcessGroup:
        """The processes that train together."""
        return self.step.ranks

    def _is_told(self, stopping: Callable[[], bool]) -> bool:
        # Several must stop after the same step, so they go by what they sent there.
        return stopping() if self.ranks.size == 1 else self._told

    def _resume(self) -> None:
        folder = self.cadence.folder
        self.progress = checkpoint.restore(folder, self.step, self.logger.warning)
        examples = self.batches.digest
        self.ranks.require_same(
            examples,
            "reads other rows",
            hint="give all machines the same data and the same tokenizer",
        )
        if self.progress.step:
            if self.progress.examples != examples:
                raise UserError(
                    "the training rows are not those this run began with",
                    place=str(folder),
                    hint="restore the data, or start over with --restart",
                )
            self.logger.info(f"resuming after step {self.progress.step}")
            self.logger.truncate(self.progress.step)
        else:
            # A checkpoint of step 0 may know of a validation that comes again.
            self.progress = TrainingProgress(examples=examples)
            # Even of a run that died before its first checkpoint there may be rows.
            self.logger.truncate(-1)
            self._evaluate()
            if self.keep.wants(self.progress):
                self._save()

    def _launch(self, number: int, bar, stop: bool) -> None:
        """Start a step; while it runs, read the numbers of the one before it."""
        window, rate = self._window(number), self.rate(number)
        # Processes draw alike only in what they draw alone.
        source = [self.seed, number, *([self.ranks.rank] * (not self.ranks.is_first))]
        draw = np.random.SeedSequence(source).generate_state(1)[0]
        self.step.reach(number)
        outputs = self.step(window, rate, int(draw), stop)
        mx.async_eval(outputs, self.step.parameters, self.step.optimizer.state)
        self._settle(bar)
        self._pending = (number, window, rate, outputs)

    def _window(self, number: int) -> list[Batch]:
        first = number * self.accumulate
        last = min(first + self.accumulate, self.total)
        return [self.batches(index) for index in range(first, last)]

    def _settle(self, bar) -> None:
        """Wait for the pending step, count it, logger it when it is time."""
        if self._pending is None:
            return
        number, window, rate, outputs = self._pending
        self._pending = None
        loss, tokens, norm, *told = (output.item() for output in outputs)
        self._told = any(told)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            with self.ranks.collective_errors():
                if self.ranks.is_first:
                    self._stop_at_nan(number, window)
        now = time.perf_counter()
        progress = self.progress
        progress.step = number + 1
        progress.loss_since += loss
        progress.tokens_since += int(tokens)
        progress.seconds_since += now - self._clock
        self._clock = now
        if progress.step % self.cadence.report == 0 or progress.step == self.steps:
            self._report(rate, norm, bar)

    def _report(self, rate: float, norm: float, bar) -> None:
        progress = self.progress
        numbers = {
            "loss": progress.loss_since / progress.tokens_since,
            "learning_rate": rate,
            "gradient_norm": norm,
            "tokens_per_second": progress.tokens_since / progress.seconds_since,
            "peak_memory_gb": mx.get_peak_memory() / 1e9,
        }
        self._count()
        bar.update(progress.step, **numbers)
        totals = {
            "trained_tokens": progress.trained_tokens,
            "seconds": progress.seconds,
        }
        self.logger.metrics({"kind": "train", "step": progress.step} | numbers | totals)

    def _count(self) -> None:
        progress = self.progress
        progress.trained_tokens += progress.tokens_since
        progress.seconds += progress.seconds_since
        progress.loss_since, progress.tokens_since, progress.seconds_since = 0.0, 0, 0.0

    def _is_pause(self, done: int) -> bool:
        every = (self.cadence.evaluate, self.cadence.checkpoint, self.steps)
        return any(done % steps == 0 for steps in every)

    def _pause(self, done: int, stopping: bool) -> None:
        """Validate, save or stop after `done` steps.

        In this order, so that what is saved has its validation behind it and a resumed
        run owes none.
        """
        if done % self.cadence.evaluate == 0 or done == self.steps:
            self._evaluate()
        is_time = done % self.cadence.checkpoint == 0
        if stopping or is_time or self.keep.wants(self.progress):
            saved = self._save()
        if stopping:
            told = f"stopped after step {done}; saved {saved}"
            raise Interrupted(told if self.ranks.is_first else "")
        self._clock = time.perf_counter()

    def _evaluate(self) -> None:
        done = self.progress.step
        loss, tokens = self.step.evaluate(self.valid)
        loss /= tokens
        self.progress.judge(loss)
        with self.ranks.collective_errors():
            self.logger.metrics({"kind": "valid", "step": done, "loss": loss})
            self.logger.info(f"step {done}: validation loss {loss:#.4g}")
        self.on_evaluate(done)

    def _save(self) -> Path | None:
        """Where the checkpoint is, if this process is the one that writes it."""
        return self.keep.save(self.cadence.folder, self.step, self.progress)

    def _stop_early(self) -> None:
        progress = self.progress
        self._count()
        self.logger.info(
            f"stopping at step {progress.step} of {self.steps}: no validation since "
            f"step {progress.best_step} had a lower loss"
        )

    def _leave(self) -> float:
        progress, folder = self.progress, self.cadence.folder
        self.left = self.keep.leave(folder, self.step, progress, self.logger)
        is_last = self.left == progress.step
        return progress.valid_loss if is_last else progress.best_loss

    def _stop_at_nan(self, number: int, window: list[Batch]) -> None:
        path = self.cadence.folder.parent / "not-a-number.json"
        where = [place for batch in window for place in batch.where]
        tokens = [row for batch in window for row in batch.tokens.tolist()]
        rows = {"step": number + 1, "rows": where, "tokens": tokens}
        write_atomic(path, json.dumps(rows) + "\n")
        raise UserError(
            f"the loss or its gradient is not a number at step {number + 1}",
            place=", ".join(where[:4]),
            hint=f"lower learning_rate; the batch is in {path}; "
            "the last checkpoint is kept and the same command goes on from it",
            code=FAILED,
        )

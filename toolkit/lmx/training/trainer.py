"""The training loop of all train stages: full, LoRA and quantization-aware training."""

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import mlx.core as mx
import numpy as np

from ..cpu.memory import limited_cache
from ..data.batching import Batch, BucketBatchSampler
from ..errors import FAILED, Interrupted, UserError
from ..files.atomic import write_atomic
from ..interfaces import Logger
from . import checkpoint
from .checkpoint import TrainingProgress
from .step import EvalOutput, StepOutput, TrainStep, metric_means

# A validation loss that is so many times the best one gets a warning.
SUSPICIOUS_RISE = 2


@dataclass(frozen=True)
class TrainerConfig:
    """How long to train, how often to log, evaluate and save, and what to keep.

    Attributes:
        steps: optimizer steps.
        seed: of the random numbers of all steps.
        checkpoint_dir: where checkpoints go.
        logging_steps, eval_steps, save_steps: intervals in steps.
        save_total_limit: newest checkpoints kept.
        load_best_at_end: keep the weights of the best evaluation, which may be that
            before the first step, instead of the last ones.
        early_stopping_patience: consecutive evaluations without a better one that end
            the training; None = train all steps.
    """

    steps: int
    seed: int
    checkpoint_dir: Path
    logging_steps: int
    eval_steps: int
    save_steps: int
    save_total_limit: int = 2
    load_best_at_end: bool = False
    early_stopping_patience: int | None = None


@dataclass(frozen=True)
class _RunningStep:
    """A step that was launched and whose loss was not read yet."""

    number: int
    batches: list[Batch]
    learning_rate: float
    output: StepOutput


class Trainer:
    """Runs a `TrainStep` over batches: evaluates, saves, resumes, and stops on signals.

    Args:
        batches: the batch of an index, from 0; a function of seed and index.
        indices: of the batches of a step, counted from 0.
        learning_rate: of a step, counted from 0.
        eval_batches: validation batches, used in every evaluation.
        evaluate: makes the validation loss; None = that of `step` on `eval_batches`.
        on_evaluate: called on all ranks with the step after every validation loss;
            returns the score of the weights, the same on all ranks, of which the
            highest is the best; None = the lowest loss is.
        score_name: what that score is, for messages.
        on_event: called after every step and evaluation, with its kind and values.

    Attributes:
        progress: steps, tokens and losses so far.
        selected_step: the step of the weights that `train` left.
    """

    def __init__(
        self,
        step: TrainStep,
        batches: BucketBatchSampler,
        config: TrainerConfig,
        *,
        learning_rate: Callable[[int], float],
        eval_batches: Sequence[Batch],
        logger: Logger,
        indices: Callable[[int], Sequence[int]] = lambda step: (step,),
        evaluate: Callable[[], EvalOutput] | None = None,
        on_evaluate: Callable[[int], float | None] = lambda step: None,
        score_name: str = "validation loss",
        on_event: Callable[..., None] = lambda event, **values: None,
    ):
        self.step = step
        self.ranks = step.ranks
        self.batches = batches
        self.indices = indices
        self.config = config
        self.learning_rate = learning_rate
        self.logger = logger
        self.eval_batches = eval_batches
        self.evaluate = evaluate
        self.on_evaluate = on_evaluate
        self.score_name = score_name
        self.on_event = on_event
        self.progress = TrainingProgress()
        self.selected_step = 0
        self._running: _RunningStep | None = None
        self._has_finished_step = False
        # Whether any rank was asked to stop before the last finished step.
        self._any_rank_stops = False
        self._last_time = 0.0
        # Tokens and seconds since the last step that was not overlapped by the next.
        # The time of a single step is not known: MLX may wait for most of the next one
        # when that is launched.
        self._rate_tokens, self._rate_seconds = 0, 0.0

    @limited_cache()
    def train(self, stopping: Callable[[], bool] = lambda: False) -> float:
        """Train to the end, from the newest checkpoint if there is one.

        Args:
            stopping: whether to stop after the running step, with a checkpoint.

        Returns:
            The validation loss of the selected weights, per trained token.

        Raises:
            Interrupted: `stopping` stopped the training, after a checkpoint was saved.
            UserError: the loss is NaN or infinite, or the examples have changed.
        """
        config = self.config
        self._stopping = stopping
        self._resume()
        # After these numbers of steps there is something to evaluate or to save.
        intervals = config.eval_steps, config.save_steps, config.steps
        with self.logger.progress(config.steps, "training") as bar:
            bar.skip(self.progress.step)
            bar.advance(0, "first step")
            self._last_time = time.perf_counter()
            for step in range(self.progress.step, config.steps):
                patience = config.early_stopping_patience
                if patience is not None and self.progress.evals_since_best >= patience:
                    self._count_tokens()
                    self.logger.info(
                        f"stopping at step {step} of {config.steps}: the "
                        f"{self.score_name} has not improved since step "
                        f"{self.progress.best_step}"
                    )
                    break
                self._train_step(step, bar, stop=self._stopping())
                is_due = any((step + 1) % interval == 0 for interval in intervals)
                if is_due or self._should_stop():
                    self._finish_step(bar)
                    self._evaluate_and_save()
        return self._select_weights()

    def _train_step(self, step: int, bar, *, stop: bool) -> None:
        """Launch a step; while it runs, finish the step before it."""
        batches = [self.batches(index) for index in self.indices(step)]
        learning_rate = self.learning_rate(step)
        # Every rank but the first adds its number, so that ranks draw differently for
        # their examples. Those that hold a model together draw alike.
        entropy, ranks = [self.config.seed, step], self.step.ranks
        if not ranks.is_first:
            entropy.append(ranks.rank)
        seed = int(np.random.SeedSequence(entropy).generate_state(1)[0])
        self.step.on_step(step)
        output = self.step(batches, learning_rate, seed, stop)
        mx.async_eval(output, self.step.parameters, self.step.optimizer.state)
        self._finish_step(bar)
        self._running = _RunningStep(step, batches, learning_rate, output)

    def _finish_step(self, bar) -> None:
        """Wait for the running step, count it, and log it when it is time."""
        if self._running is None:
            return
        running, self._running = self._running, None
        output = running.output
        loss_sum, norm = output.loss_sum.item(), output.grad_norm.item()
        tokens, stop_requests = output.num_tokens.item(), output.stop_requests.item()
        self._any_rank_stops = stop_requests > 0
        is_finite = math.isfinite(loss_sum) and math.isfinite(norm)
        if not is_finite and self.ranks.is_first:
            self._raise_not_finite(running)
        now = time.perf_counter()
        progress = self.progress
        # The first step says nothing about the time left: it compiles kernels.
        count = bar.advance if self._has_finished_step else bar.skip
        count(1)
        bar.advance(0, "")
        self._has_finished_step = True
        progress.step = running.number + 1
        progress.loss_since += loss_sum
        loss_count = output.loss_count.item()
        progress.loss_count_since += loss_count
        progress.tokens_since += int(tokens)
        metrics = output.metrics.reshape(-1).tolist()
        pairs = zip_longest(progress.metrics_since, metrics, fillvalue=0.0)
        progress.metrics_since = [total + value for total, value in pairs]
        progress.seconds_since += now - self._last_time
        self._rate_tokens += int(tokens)
        self._rate_seconds += now - self._last_time
        self._last_time = now
        is_last = progress.step == self.config.steps
        if progress.step % self.config.logging_steps == 0 or is_last:
            self._log(running.learning_rate, norm, bar)
        self.on_event(
            "step",
            stage=self.logger.stage,
            step=progress.step,
            steps=self.config.steps,
            loss=loss_sum / max(1, loss_count),
            learning_rate=running.learning_rate,
            gradient_norm=norm,
            trained_tokens=int(tokens),
        )

    def _evaluate_and_save(self) -> None:
        """Evaluate, save and stop as the finished step requires.

        Evaluation comes before saving, so that a resumed run does not repeat it.
        """
        config, done = self.config, self.progress.step
        if done % config.eval_steps == 0 or done == config.steps:
            self._evaluate()
        stop = self._should_stop()
        if stop or done % config.save_steps == 0 or self._is_new_best():
            path = self._save()
        if stop:
            message = f"stopped after step {done}; saved {path}"
            raise Interrupted(message if self.ranks.is_first else "")
        self._last_time = time.perf_counter()
        self._rate_tokens, self._rate_seconds = 0, 0.0

    def _should_stop(self) -> bool:
        # All ranks must stop after the same step: they go by the sum of their requests.
        return self._stopping() if self.ranks.size == 1 else self._any_rank_stops

    def _is_new_best(self) -> bool:
        is_best = self.progress.best_step == self.progress.step
        return self.config.load_best_at_end and is_best

    def _resume(self) -> None:
        folder = self.config.checkpoint_dir
        self.progress = checkpoint.restore(folder, self.step, self.logger.warning)
        digest = self.batches.digest
        self.ranks.require_same(
            digest,
            "reads other examples",
            hint="give all machines the same data and the same tokenizer",
        )
        if self.progress.step:
            if self.progress.examples != digest:
                raise UserError(
                    "the training examples or rewards have changed since this run "
                    "started",
                    place=str(folder),
                    hint="restore the data, or start over with --restart",
                )
            self.logger.info(f"resuming after step {self.progress.step}")
            self.logger.truncate(self.progress.step)
        else:
            # A checkpoint of step 0 holds an evaluation, which is repeated here.
            self.progress = TrainingProgress(examples=digest)
            # A run that died before its first checkpoint may have left metrics.
            self.logger.truncate(-1)
            self._evaluate()
            if self._is_new_best():
                self._save()

    def _evaluate(self) -> None:
        progress, step = self.progress, self.progress.step
        if self.evaluate:
            output = self.evaluate()
        else:
            name = f"validation at step {step}"
            with self.logger.progress(len(self.eval_batches), name) as bar:
                output = self.step.evaluate(bar.track(self.eval_batches))
        loss = output.loss_sum / output.loss_count
        tokens = progress.trained_tokens + progress.tokens_since
        record = {"kind": "valid", "step": step, "loss": loss}
        self.logger.metrics(record | output.metrics | {"trained_tokens": tokens})
        others = "".join(f", {k} {v:.4g}" for k, v in output.metrics.items())
        self.logger.info(f"step {step}: validation loss {loss:#.4g}{others}")
        if loss > SUSPICIOUS_RISE * progress.best_loss > 0:
            self.logger.warning(
                f"the validation loss is {loss / progress.best_loss:.1f} times that of "
                f"step {progress.best_step}: learning_rate is too high, or the model "
                "overfits"
            )
        progress.add_evaluation(loss, self.on_evaluate(step))
        self.on_event(
            "evaluate",
            stage=self.logger.stage,
            step=step,
            steps=self.config.steps,
            validation_loss=loss,
        )

    def _save(self) -> Path | None:
        """The path of the new checkpoint on the rank that writes it."""
        config, best = self.config, self.progress.best_step
        with self.logger.activity("saving a checkpoint"):
            return checkpoint.save(
                config.checkpoint_dir,
                self.step,
                self.progress,
                save_total_limit=config.save_total_limit,
                best_step=best if config.load_best_at_end else None,
            )

    def _log(self, learning_rate: float, norm: float, bar) -> None:
        progress = self.progress
        metrics = {
            "loss": progress.loss_since / progress.loss_count_since,
            "learning_rate": learning_rate,
            "trained_tokens_per_second": self._rate_tokens / self._rate_seconds,
            "peak_memory_gb": mx.get_peak_memory() / 1e9,
            "gradient_norm": norm,
        }
        loss_metrics = metric_means(self.step.loss.metric_names, progress.metrics_since)
        self._count_tokens()
        main = self.step.loss.main_metric
        shown = {k: v for k, v in loss_metrics.items() if k == main}
        bar.update(progress.step, **metrics | shown)
        totals = {
            "trained_tokens": progress.trained_tokens,
            "seconds": progress.seconds,
        }
        record = {"kind": "train", "step": progress.step}
        self.logger.metrics(record | metrics | loss_metrics | totals)

    def _count_tokens(self) -> None:
        progress = self.progress
        progress.trained_tokens += progress.tokens_since
        progress.seconds += progress.seconds_since
        progress.loss_since, progress.tokens_since, progress.seconds_since = 0.0, 0, 0.0
        progress.loss_count_since, progress.metrics_since = 0, []

    def _select_weights(self) -> float:
        """Leave the best or the last weights in the step; returns their loss."""
        progress = self.progress
        last, best = progress.step, progress.best_step
        self.selected_step = last
        if not self.config.load_best_at_end or best == last:
            return progress.valid_loss
        if not checkpoint.load_weights(self.config.checkpoint_dir, self.step, best):
            self.logger.warning(
                f"the best checkpoint, of step {best}, is damaged or missing: "
                f"keeping the weights of step {last}"
            )
            return progress.valid_loss
        self.logger.info(
            f"keeping step {best} of {last}: {self.score_name} "
            f"{_compared(progress.best_score, progress.best_loss)} against "
            f"{_compared(progress.score, progress.valid_loss)} after the last step"
        )
        self.selected_step = best
        return progress.best_loss

    def _raise_not_finite(self, running: _RunningStep) -> None:
        path = self.config.checkpoint_dir.parent / "nan_batch.json"
        where = [place for batch in running.batches for place in batch.where]
        tokens = [t for batch in running.batches for t in batch.tokens.tolist()]
        record = {"step": running.number + 1, "examples": where, "tokens": tokens}
        write_atomic(path, json.dumps(record) + "\n")
        raise UserError(
            f"the loss or its gradient is NaN or infinite at step {running.number + 1}",
            place=", ".join(where[:4]),
            hint="lower learning_rate, with which the stage starts anew; the batch is "
            f"in {path}",
            code=FAILED,
        )


def _compared(score: float | None, loss: float) -> str:
    """What evaluations are compared by."""
    return f"{loss if score is None else score:#.4g}"

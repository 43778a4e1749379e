"""What is kept of a training, and when it ends because it gets no better."""

from dataclasses import dataclass
from pathlib import Path

from ..run.logger import RunLogger
from . import checkpoint
from .checkpoint import TrainingProgress
from .step import TrainStep


@dataclass(frozen=True)
class CheckpointPolicy:
    """Which checkpoints are kept, which weights are left, how long to wait for better.

    Attributes:
        newest: checkpoints kept to go on from.
        best: leave the weights of the lowest validation loss, not the last ones. Those
            of step 0 count: a training that only harms leaves what it began with.
        patience: validations in a row without a lower loss that end the training; None
            = all steps are made.
    """

    newest: int = 2
    best: bool = False
    patience: int | None = None

    def wants(self, progress: TrainingProgress) -> bool:
        """Whether the state as it is now is the best one, to be saved."""
        return self.best and progress.best_step == progress.step

    def is_over(self, progress: TrainingProgress) -> bool:
        """Whether enough validations have passed in vain."""
        waited = progress.validations_since
        return self.patience is not None and waited >= self.patience

    def save(
        self, folder: Path, step: TrainStep, progress: TrainingProgress
    ) -> Path | None:
        """Write a checkpoint and drop what is not kept; see `checkpoint.save`."""
        spared = progress.best_step if self.best else None
        return checkpoint.save(
            folder, step, progress, newest=self.newest, spared=spared
        )

    def leave(
        self,
        folder: Path,
        step: TrainStep,
        progress: TrainingProgress,
        logger: RunLogger,
    ) -> int:
        """Put the weights to be left into `step`; the number of steps they have seen.

        All processes call this.
        A best checkpoint that is damaged is told of, and the last weights are left.
        """
        last, best = progress.step, progress.best_step
        if not self.best or best == last:
            return last
        if not checkpoint.recall(folder, step, best):
            logger.warning(
                f"the checkpoint of step {best}, the best one, is damaged or gone: "
                f"keeping the weights of step {last}"
            )
            return last
        logger.info(
            f"keeping step {best} of {last}: validation loss "
            f"{progress.best_loss:#.4g}, the last had {progress.valid_loss:#.4g}"
        )
        return best

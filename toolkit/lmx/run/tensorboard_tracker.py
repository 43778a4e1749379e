"""TensorBoard: event files in the run directory, for `tensorboard --logdir`.

tensorboardX writes them, without TensorFlow and torch. Every stage is one run of
TensorBoard, because its steps begin at 0.
"""

from pathlib import Path

from ..config.trackers import TrackerConfig
from .tables import recipe_values

PACKAGE = "tensorboardX"
EXTRA = "tensorboard"


def start(
    config: TrackerConfig, *, folder: Path, name: str, recipe: dict
) -> "TensorBoardTracker":
    """Open the event files of a run, which show the recipe as text."""
    tracker = TensorBoardTracker(folder / "tensorboard")
    lines = [f"    {key}: {value}" for key, value in recipe_values(recipe).items()]
    tracker.writer("", 0).add_text("recipe", "\n".join([f"{name}\n", *lines]), 0)
    return tracker


class TensorBoardTracker:
    """Open event files, one for each stage and one for the run."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._writers: dict = {}

    def writer(self, stage: str, step: int):
        """The open writer of a stage; "" = of the run.

        Args:
            step: the first step that a new writer will get. TensorBoard then drops the
                later steps of earlier files, which a resumed run repeats.
        """
        from tensorboardX import SummaryWriter

        if stage not in self._writers:
            # A stage of a baseline is called "1-train, fp_baseline".
            path = self._folder / stage.replace(", ", "-")
            # The names of files begin with the second in which they were opened.
            number = len(list(path.glob("events.*")))
            self._writers[stage] = SummaryWriter(
                str(path), purge_step=step, filename_suffix=f".{number}"
            )
        return self._writers[stage]

    def log(self, stage: str, step: int, values: dict[str, float]) -> None:
        """Write the values of a step to the disk."""
        writer = self.writer(stage, step)
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    def finish(self, summary: dict, code: int) -> None:
        """Write the final metrics and close the files."""
        for name, value in summary.items():
            self.writer("", 0).add_scalar(name, value, 0)
        for writer in self._writers.values():
            writer.close()

"""Trackio: on disk, for `trackio show`, or in a Space of the Hugging Face Hub."""

import os
from pathlib import Path

from ..config.trackers import TrackerConfig
from ..files.atomic import stored_id

PACKAGE = "trackio"
EXTRA = "trackio"


def start(
    config: TrackerConfig, *, folder: Path, name: str, recipe: dict
) -> "TrackioTracker":
    """Start or resume a trackio run, whose config is the recipe."""
    # The recipe alone decides whether data leaves this machine.
    for variable in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        os.environ.pop(variable, None)
    import trackio
    import trackio.deploy
    import trackio.run
    import trackio.utils

    # Trackio has no option that keeps its lines from the terminal.
    for module in (trackio, trackio.deploy, trackio.run, trackio.utils):
        module.print = lambda *_, **__: None
    # Trackio finds a run by its name alone.
    identifier = stored_id(folder / "trackio" / "run-id")
    run = trackio.init(
        project=config.project,
        name=f"{config.name or name}-{identifier}",
        space_id=config.space_id,
        private=True if config.space_id else None,
        config=recipe,
        resume="allow",
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )
    return TrackioTracker(run)


class TrackioTracker:
    """An open trackio run."""

    def __init__(self, run):
        self._run = run

    def log(self, stage: str, step: int, values: dict[str, float]) -> None:
        """Log the values of a step."""
        named = {f"{stage}/{name}": value for name, value in values.items()}
        self._run.log(named, step=step)

    def finish(self, summary: dict, code: int) -> None:
        """Log the final metrics and end the run."""
        if summary:
            self._run.log(summary)
        self._run.finish()

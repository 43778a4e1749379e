"""Weights & Biases: online, or as files in the run directory for `wandb sync`."""

import os
from pathlib import Path

from ..config.trackers import TrackerConfig
from ..files.atomic import stored_id

PACKAGE = "wandb"
EXTRA = ""
# Seconds to reach the server, and to send the remaining data at the end.
TIMEOUT = 30
# Settings that keep facts about the machine and its user out of the run.
PRIVATE = (
    *("silent", "disable_code", "disable_git", "disable_job_creation"),
    *("x_disable_machine_info", "x_disable_meta", "x_disable_stats"),
)


def start(
    config: TrackerConfig, *, folder: Path, name: str, recipe: dict
) -> "WandbTracker":
    """Start or resume a wandb run, whose config is the recipe."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    if config.mode == "online":
        wandb.setup(wandb.Settings(silent=True))
        # Without this check, wandb asks for a key on the terminal.
        if not wandb.login(prompt=False, verify=False):
            raise RuntimeError("there is no API key: see `wandb login`")
    run = wandb.init(
        project=config.project,
        name=config.name or name,
        id=stored_id(folder / "wandb" / "run-id"),
        resume="allow",
        mode=config.mode,
        dir=str(folder),
        config=recipe,
        settings=wandb.Settings(
            **dict.fromkeys(PRIVATE, True),
            console="off",
            x_save_requirements=False,
            init_timeout=TIMEOUT,
            finish_timeout=TIMEOUT,
        ),
    )
    return WandbTracker(run)


class WandbTracker:
    """An open wandb run."""

    def __init__(self, run):
        self._run = run
        self._stages: set[str] = set()

    def log(self, stage: str, step: int, values: dict[str, float]) -> None:
        """Log the values of a step.

        The x axis is the stage's step, so that a resumed run overwrites repeated steps.
        """
        if stage not in self._stages:
            self._stages.add(stage)
            self._run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")
        values = {f"{stage}/{name}": value for name, value in values.items()}
        self._run.log({f"{stage}/step": step} | values)

    def finish(self, summary: dict, code: int) -> None:
        """Log the final metrics and the exit code."""
        self._run.summary.update(summary)
        self._run.finish(exit_code=code)

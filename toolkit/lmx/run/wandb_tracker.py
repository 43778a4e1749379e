"""Weights & Biases: charts on its server, or files in the run folder to send later."""

import os
import secrets
from pathlib import Path

from ..config.schema import WandbConfig
from .fs import write_atomic

# Seconds to reach the server, and to send what is left at the end.
PATIENCE = 30


def start_wandb(
    config: WandbConfig, *, folder: Path, name: str, recipe: dict
) -> "WandbTracker":
    """Open the run, or the one that was begun in this run folder.

    Args:
        folder: the run folder; wandb's files go into its folder `wandb`.
        recipe: the resolved recipe, shown with the run.
    """
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    if config.mode == "online":
        wandb.setup(wandb.Settings(silent=True))
        # Else it would ask for a key in the terminal.
        if not wandb.login(prompt=False, verify=False):
            raise RuntimeError("there is no API key: see `wandb login`")
    run = wandb.init(
        project=config.project,
        name=config.name or name,
        id=_run_id(folder / "wandb" / "run-id"),
        resume="allow",
        mode=config.mode,
        dir=str(folder),
        config=recipe,
        settings=wandb.Settings(
            silent=True,
            console="off",
            disable_code=True,
            disable_git=True,
            disable_job_creation=True,
            x_disable_machine_info=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
            init_timeout=PATIENCE,
            finish_timeout=PATIENCE,
        ),
    )
    return WandbTracker(run)


class WandbTracker:
    """An open run."""

    def __init__(self, run):
        self._run = run
        self._stages: set[str] = set()

    def log(self, row: dict) -> None:
        """Take in a row of metrics.jsonl.

        Charts are over the stage's step, so that rows which a resumed run writes again
        fall on those written before.
        """
        stage, kind = row["stage"], row["kind"]
        if stage not in self._stages:
            self._stages.add(stage)
            self._run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")
        figures = {
            f"{stage}/{kind}/{key}": value
            for key, value in row.items()
            if isinstance(value, int | float) and key != "step"
        }
        self._run.log({f"{stage}/step": row["step"]} | figures)

    def finish(self, summary: dict, code: int) -> None:
        """Say how the run ended, with the figures of its report by dotted name."""
        self._run.summary.update(summary)
        self._run.finish(exit_code=code)


def _run_id(path: Path) -> str:
    """The name by which the server knows this run folder."""
    if not path.exists():
        write_atomic(path, secrets.token_hex(4))
    return path.read_text()

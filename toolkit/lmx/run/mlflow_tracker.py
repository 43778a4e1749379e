"""MLflow: a tracking server, or a database on disk for `mlflow ui`."""

import logging
import os
import time
from pathlib import Path

from ..config.trackers import TrackerConfig
from ..files.atomic import write_atomic
from .tables import recipe_values

PACKAGE = "mlflow"
EXTRA = "mlflow"
# MLflow's own limits of a request, and of a parameter's characters.
MAX_PARAMS, MAX_CHARACTERS = 100, 6000


def start(
    config: TrackerConfig, *, folder: Path, name: str, recipe: dict
) -> "MLflowTracker":
    """Start or resume an MLflow run, whose parameters are the recipe.

    The client is used instead of `mlflow.start_run`, which would add the user's name,
    the command line and the git commit.
    """
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow import MlflowClient
    from mlflow.entities import Param

    for logger in ("mlflow", "alembic"):
        # The creation of a database is logged as information, on the terminal.
        logging.getLogger(logger).setLevel(logging.WARNING)
    client = MlflowClient(tracking_uri=config.tracking_uri)
    file = folder / "mlflow" / "run-id"
    if file.exists():
        run_id = file.read_text()
        client.update_run(run_id, status="RUNNING")
        return MLflowTracker(client, run_id)
    experiment = client.get_experiment_by_name(config.project)
    known = experiment and experiment.experiment_id
    experiment_id = known or client.create_experiment(config.project)
    run = client.create_run(experiment_id, run_name=config.name or name)
    run_id = run.info.run_id
    write_atomic(file, run_id)
    params = [
        Param(key, str(value)[:MAX_CHARACTERS])
        for key, value in recipe_values(recipe).items()
    ]
    for first in range(0, len(params), MAX_PARAMS):
        client.log_batch(run_id, params=params[first : first + MAX_PARAMS])
    return MLflowTracker(client, run_id)


class MLflowTracker:
    """An open MLflow run."""

    def __init__(self, client, run_id: str):
        self._client = client
        self._run_id = run_id

    def log(self, stage: str, step: int, values: dict[str, float]) -> None:
        """Log the values of a step. MLflow keeps both values of a repeated step."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [
            Metric(_valid(f"{stage}/{name}"), value, now, step)
            for name, value in values.items()
        ]
        self._client.log_batch(self._run_id, metrics=metrics)

    def finish(self, summary: dict, code: int) -> None:
        """Log the final metrics and the status."""
        if summary:
            self.log("summary", 0, summary)
        status = "FAILED" if code else "FINISHED"
        self._client.set_terminated(self._run_id, status)


def _valid(name: str) -> str:
    """The name with the characters that MLflow accepts."""
    return "".join(c if c.isalnum() or c in "_-. /" else "-" for c in name)

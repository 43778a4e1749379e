"""The `tracker` block: experiment trackers, one or several at once."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from .base import ConfigModel

TrackerName = Literal["wandb", "tensorboard", "trackio", "mlflow"]


class WandbConfig(ConfigModel):
    """Log metrics to Weights & Biases."""

    type: Literal["wandb"]
    """Name of the tracker."""
    project: str = "lmx"
    """Project of the run."""
    name: str | None = None
    """Name of the run. Default: the name of the recipe."""
    mode: Literal["online", "offline"] = "offline"
    """offline: log to disk only, for `wandb sync`. online: also send."""


class TensorBoardConfig(ConfigModel):
    """Write event files for TensorBoard, in `tensorboard/` of the run directory.

    Needs `pip install lmx-toolkit[tensorboard]`.
    """

    type: Literal["tensorboard"]
    """Name of the tracker."""


class TrackioConfig(ConfigModel):
    """Log metrics to Trackio, which `trackio show` displays.

    Needs `pip install lmx-toolkit[trackio]`.
    """

    type: Literal["trackio"]
    """Name of the tracker."""
    project: str = "lmx"
    """Project of the run."""
    name: str | None = None
    """Name of the run. Default: the name of the recipe."""
    space_id: str | None = None
    """Hugging Face Space to log to. Default: log to disk only."""


class MLflowConfig(ConfigModel):
    """Log metrics to MLflow.

    Needs `pip install lmx-toolkit[mlflow]`.
    """

    type: Literal["mlflow"]
    """Name of the tracker."""
    experiment: str = "lmx"
    """Experiment of the run."""
    name: str | None = None
    """Name of the run. Default: the name of the recipe."""
    tracking_uri: str | None = Field(None, examples=["http://localhost:5000"])
    """MLflow server or database. Default: the environment variable
    `MLFLOW_TRACKING_URI`, else mlflow.db in the working directory. A password belongs
    to `MLFLOW_TRACKING_PASSWORD`."""


TrackerConfig = Annotated[
    WandbConfig | TensorBoardConfig | TrackioConfig | MLflowConfig,
    Field(discriminator="type"),
]


def _as_list(value: Any) -> Any:
    """One tracker is a list of one; a name is a block with only this `type`."""
    entries = [] if value is None else value if isinstance(value, list) else [value]
    return [{"type": entry} if isinstance(entry, str) else entry for entry in entries]


def _check_unique(trackers: list) -> list:
    names = [tracker.type for tracker in trackers]
    if len(set(names)) < len(names):
        raise ValueError("tracker names the same type twice")
    return trackers


Trackers = Annotated[
    list[TrackerConfig],
    BeforeValidator(
        _as_list,
        json_schema_input_type=TrackerName
        | TrackerConfig
        | list[TrackerName | TrackerConfig]
        | None,
    ),
    AfterValidator(_check_unique),
]

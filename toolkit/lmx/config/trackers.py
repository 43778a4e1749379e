"""The `tracker` block: experiment trackers, one or several at once."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from .base import ConfigModel

TrackerName = Literal["wandb", "tensorboard", "trackio", "mlflow"]
# Keys of one tracker alone.
OWN_KEYS = {"mode": "wandb", "space_id": "trackio", "tracking_uri": "mlflow"}


class TrackerConfig(ConfigModel):
    """Log metrics to Weights & Biases, TensorBoard, Trackio or MLflow.

    All but wandb need the extra of this name. Nothing is sent before a recipe names a
    tracker, and wandb is not imported.
    """

    type: TrackerName
    """Name of the tracker. tensorboard: event files in `tensorboard/` of the run
    directory."""
    project: str = "lmx"
    """Project of the run; the experiment of mlflow."""
    name: str | None = None
    """Name of the run. Default: the name of the recipe."""
    mode: Literal["online", "offline"] = "offline"
    """wandb: offline logs to disk only, for `wandb sync`; online also sends."""
    space_id: str | None = None
    """trackio: Hugging Face Space to log to. Default: log to disk only."""
    tracking_uri: str | None = Field(None, examples=["http://localhost:5000"])
    """mlflow: server or database. Default: the environment variable
    `MLFLOW_TRACKING_URI`, else mlflow.db in the working directory. A password belongs
    to `MLFLOW_TRACKING_PASSWORD`."""

    @model_validator(mode="after")
    def _check_own_keys(self):
        for key, tracker in OWN_KEYS.items():
            default = type(self).model_fields[key].default
            if self.type != tracker and getattr(self, key) != default:
                raise ValueError(f"{key} is a key of {tracker}, not of {self.type}")
        return self


def _as_list(value: Any) -> Any:
    """One tracker is a list of one; a name is a block with only this `type`."""
    entries = [] if value is None else value if isinstance(value, list) else [value]
    return [{"type": entry} if isinstance(entry, str) else entry for entry in entries]


def _check_unique(trackers: list) -> list:
    names = [tracker.type for tracker in trackers]
    if len(set(names)) < len(names):
        raise ValueError("tracker names the same type twice")
    return trackers


_Entry = TrackerName | TrackerConfig
Trackers = Annotated[
    list[TrackerConfig],
    BeforeValidator(_as_list, json_schema_input_type=_Entry | list[_Entry] | None),
    AfterValidator(_check_unique),
]

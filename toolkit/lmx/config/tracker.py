"""TODO."""

from typing import Literal

from .base import ConfigModel


class WandbConfig(ConfigModel):
    """Send the figures to Weights & Biases, or keep them for `wandb sync`."""

    type: Literal["wandb"]
    """The tracker's name."""
    project: str = "lmx"
    """The project the run is filed under."""
    name: str | None = None
    """The run's name there; absent = the recipe's."""
    mode: Literal["online", "offline"] = "offline"
    """offline = nothing is sent, `wandb sync` does it later; online = sent at once."""

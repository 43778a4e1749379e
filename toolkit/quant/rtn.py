"""Round-to-nearest weight quantization: MLX's own grids, no calibration."""

from typing import Literal

from .spec import QuantSpec


class Config(QuantSpec):
    """Round every weight to the nearest point of its group's grid."""

    method: Literal["rtn"] = "rtn"
    """The method's name."""
    embeddings: bool = True
    """Round the embedding (and, when tied, the output head) too."""
    head: bool = True
    """Round the output head too, where it has weights of its own."""

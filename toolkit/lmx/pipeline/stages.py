"""The stage kinds by their key in a recipe."""

from .draft import DraftStage
from .evaluate import EvaluateStage
from .export import ExportStage
from .quantize import QuantizeStage
from .stage import Stage
from .train import TrainStage

STAGES: dict[str, type[Stage]] = {
    "train": TrainStage,
    "quantize": QuantizeStage,
    "draft": DraftStage,
    "evaluate": EvaluateStage,
    "export": ExportStage,
}

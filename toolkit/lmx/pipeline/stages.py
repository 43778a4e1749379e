"""The stage kinds by their key in a recipe."""

from .draft.stage import DraftStage
from .evaluate.stage import EvaluateStage
from .export.stage import ExportStage
from .quantize.stage import QuantizeStage
from .stage import Stage
from .train.stage import TrainStage

STAGES: dict[str, type[Stage]] = {
    "train": TrainStage,
    "quantize": QuantizeStage,
    "draft": DraftStage,
    "evaluate": EvaluateStage,
    "export": ExportStage,
}

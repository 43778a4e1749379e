"""What follows a quantization method: gates between its steps, and scale tuning."""

import mlx.core as mx
from mlx.utils import tree_flatten

from ..config.quantize import PTQConfig, ScaleTuningConfig
from ..data.calibration import CalibrationBatch
from ..models.checkpoint import weights_digest
from ..models.loader import LoadedModel
from ..quantization.packing import pack
from ..quantization.ptq.candidates import CandidateModel, CandidateSelector
from ..quantization.ptq.scale_tuning import ScaleTuner
from ..quantization.target_layers import QuantizationPlan
from ..training.teacher_cache import PartTargets, cache_part_targets
from .calibration import CalibrationData
from .context import StageContext, write_model

# Tokens at once where nothing is trained, and where a step adds up gradients.
AT_ONCE, TRAINED_AT_ONCE = 2048, 1024


def uses_eval_tokens(config: PTQConfig) -> bool:
    """Whether anything of this quantization is compared on tokens held out."""
    return bool(
        config.scale_tuning or (config.rollback_if_worse and config.method != "rtn")
    )


class PostQuantRefinement:
    """The unquantized model's predictions, and candidates measured against them.

    Args:
        loaded: the unquantized model; its weights may have been let go.
    """

    def __init__(
        self,
        config: PTQConfig,
        context: StageContext,
        calibrating: CalibrationData,
        loaded: LoadedModel,
        selection: QuantizationPlan,
    ):
        self.config = config
        self.context = context
        self.calibrating = calibrating
        self.loaded = loaded
        # Unread, so that of what is large little is in memory.
        self.weights = dict(tree_flatten(loaded.reread().parameters()))
        self.selection = selection
        self.tune = config.scale_tuning or ScaleTuningConfig()

    def run(self, tensors: dict[str, mx.array]) -> tuple[dict[str, mx.array], dict]:
        """The best there is from a method's tensors on, and what was measured."""
        held_out, training = self._targets()
        candidate = self.context.folder / "candidate"
        weights = dict(self.weights)
        write_model(candidate, self.loaded, weights, self.selection, dict(tensors))
        student = CandidateModel(self.context.load(candidate).model, self.loaded.dtype)
        gates = CandidateSelector(student, held_out, self.context.logger.info)
        if self.config.rollback_if_worse and self.config.method != "rtn":
            gates.judge("rounding", self._rounded(tensors))
        gates.judge(self.config.method, tensors)
        if self.config.scale_tuning:
            tuning = ScaleTuner(
                self.config.scale_tuning,
                student,
                training,
                held_out,
                folder=self.context.folder / "tuning",
                seed=self.context.seed,
                logger=self.context.logger,
            )
            gates.judge("tuned", gates.tensors | tuning.run())
        return gates.tensors, {
            "eval_kl": gates.divergences,
            "selected_candidate": gates.kept,
        }

    def _targets(self) -> tuple[PartTargets, PartTargets | None]:
        """What the unquantized model predicts where it is judged, and where trained."""
        reference = self.context.load(self.loaded.path)
        digest = weights_digest(reference.path)

        def predicted(
            name: str, windows: CalibrationBatch, at_once: int, temperature: float
        ):
            parts = windows.parts(at_once)
            return cache_part_targets(
                self.context.folder / name,
                [mx.array(part.tokens) for part in parts],
                reference.model,
                counted=[mx.array(part.counted) for part in parts],
                digest=digest,
                top_k=self.tune.top_k,
                temperature=temperature,
                info=self.context.logger.info,
            )

        held_out = predicted("held-out", self.calibrating.held_out, AT_ONCE, 1.0)
        if not self.config.scale_tuning:
            return held_out, None
        size = self.tune.batch_tokens
        most = self.config.calibration.num_tokens or self.tune.steps * size
        windows = self.calibrating.watched(min(most, self.tune.steps * size))
        at_once = min(size, TRAINED_AT_ONCE)
        return held_out, predicted("training", windows, at_once, self.tune.temperature)

    def _rounded(self, tensors: dict[str, mx.array]) -> dict[str, mx.array]:
        """The model rounded to nearest, in place of all that the method left."""
        rounded = {k: self.weights[k] for k in tensors if k in self.weights}
        for path, spec in self.selection.specs.items():
            packed = pack(self.weights[f"{path}.weight"], spec, self.loaded.dtype)
            rounded |= {f"{path}.{name}": value for name, value in packed.items()}
        return rounded

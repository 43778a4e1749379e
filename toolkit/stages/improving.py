"""What follows a quantization method: gates between its steps, and scale tuning."""

import mlx.core as mx
from mlx.utils import tree_flatten

from ..data.windows import Windows
from ..model.folder import weights_digest
from ..model.load import Loaded
from ..quant.gates import Gates
from ..quant.layers import Selection
from ..quant.spec import pack
from ..quant.student import Student
from ..quant.task import PostTraining, Tune
from ..quant.tune import Tuning
from ..train.targets import Targets, make_targets
from .calibrating import Calibrating
from .context import Context, write_checkpoint

# Tokens at once where nothing is trained, and where a step adds up gradients.
AT_ONCE, TRAINED_AT_ONCE = 2048, 1024


def is_judged(config: PostTraining) -> bool:
    """Whether anything of this quantization is compared on tokens held out."""
    return bool(config.tune or (config.gates and config.method != "rtn"))


class Improving:
    """The unquantized model's predictions, and candidates measured against them.

    Args:
        loaded: the unquantized model; its weights may have been let go.
    """

    def __init__(
        self,
        config: PostTraining,
        context: Context,
        calibrating: Calibrating,
        loaded: Loaded,
        selection: Selection,
    ):
        self.config = config
        self.context = context
        self.calibrating = calibrating
        self.loaded = loaded
        # Unread, so that of what is large little is in memory.
        self.weights = dict(tree_flatten(loaded.reread().parameters()))
        self.selection = selection
        self.tune = config.tune or Tune()

    def run(self, tensors: dict[str, mx.array]) -> tuple[dict[str, mx.array], dict]:
        """The best there is from a method's tensors on, and what was measured."""
        held_out, training = self._targets()
        candidate = self.context.folder / "candidate"
        weights = dict(self.weights)
        write_checkpoint(candidate, self.loaded, weights, self.selection, dict(tensors))
        student = Student(self.context.load(candidate).model, self.loaded.dtype)
        gates = Gates(student, held_out, self.context.report.say)
        if self.config.gates and self.config.method != "rtn":
            gates.judge("rounding", self._rounded(tensors))
        gates.judge(self.config.method, tensors)
        if self.config.tune:
            tuning = Tuning(
                self.config.tune,
                student,
                training,
                held_out,
                folder=self.context.folder / "tuning",
                seed=self.context.seed,
                report=self.context.report,
            )
            gates.judge("tuned", gates.tensors | tuning.run())
        return gates.tensors, {
            "held_out_kl": gates.divergences,
            "step_kept": gates.kept,
        }

    def _targets(self) -> tuple[Targets, Targets | None]:
        """What the unquantized model predicts where it is judged, and where trained."""
        reference = self.context.load(self.loaded.path)
        digest = weights_digest(reference.path)

        def predicted(name: str, windows: Windows, at_once: int, temperature: float):
            parts = windows.parts(at_once)
            return make_targets(
                self.context.folder / name,
                [mx.array(part.tokens) for part in parts],
                reference.model,
                counted=[mx.array(part.counted) for part in parts],
                digest=digest,
                top_k=self.tune.top_k,
                temperature=temperature,
                say=self.context.report.say,
            )

        held_out = predicted("held-out", self.calibrating.held_out, AT_ONCE, 1.0)
        if not self.config.tune:
            return held_out, None
        size = self.tune.batch_tokens
        most = self.config.calibration.tokens or self.tune.steps * size
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

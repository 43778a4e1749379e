"""The layers that a train stage rounds: chosen, or those of a model in codes."""

from dataclasses import dataclass

import mlx.core as mx

from ..errors import UserError
from ..model.expanded import Packed, coded, expanded, grids
from ..model.grids.settings import FROM_CODES, Rounding
from ..model.load import Loaded
from ..quant.layers import Selection, select
from ..quant.spec import QuantSpec
from ..run.report import Report
from .train import Config


@dataclass(frozen=True)
class Rounded:
    """A model to train.

    Attributes:
        loaded: its layers are dense, but where only adapters of codes are trained.
        rounding: how they are rounded; None = not at all.
        packed: the codes its rounded layers begin with; None of a model without.
    """

    loaded: Loaded
    selection: Selection
    rounding: Rounding | None = None
    packed: Packed | None = None


def prepare(config: Config, loaded: Loaded, report: Report) -> Rounded:
    """Choose the layers to round; of a model in codes go on from these.

    The weights to train are then the codes' own values, not those that were quantized:
    a method may have left a weight another code than the nearest, and from the dense
    weights the first step would undo all of it.

    Raises:
        UserError: a quantized model, and training would round it anew.
    """
    rounding = config.quantization
    if config.keeps_codes:
        return _in_codes(loaded)
    if "quantization" not in loaded.config:
        chosen = select(loaded.model, rounding) if rounding else Selection({}, {})
        return Rounded(loaded, chosen, rounding)
    if rounding:
        adapts = config.adapter is not None
        return _from_codes(rounding.of_codes(adapts=adapts), loaded, report)
    if not config.adapter:
        raise UserError(
            "this model is already quantized, and full training needs its weights",
            place=str(loaded.path),
            hint="train an adapter, or add quantization: with grid: learned",
        )
    report.say(
        "the model is quantized: the adapter will be fused into its expanded "
        "weights, for rounding them again would lose part of the gain"
    )
    return Rounded(loaded, Selection({}, {}))


def _in_codes(loaded: Loaded) -> Rounded:
    """A model whose biases alone will change."""
    specs = grids(loaded.model)
    if not specs:
        raise UserError(
            "a qa_lora adapter is for a model in codes, and this one has none",
            place=str(loaded.path),
            hint="quantize it first, or use type lora",
        )
    return Rounded(loaded, Selection(specs, _kept(loaded)), None, coded(loaded.model))


def require_time(rounding: Rounding | None, steps: int) -> None:
    """Raise UserError if the rounding would begin after the last of the steps."""
    if rounding and rounding.starts[-1] >= steps:
        raise UserError(
            f"rounding to {rounding.bits} bits begins after {rounding.starts[-1]} "
            f"steps, and there are {steps}",
            hint="lower start_step or the steps of progressive, or train longer",
        )


def _from_codes(rounding: Rounding, loaded: Loaded, report: Report) -> Rounded:
    specs = grids(loaded.model)
    _require_same(rounding, specs, loaded)
    kept = _kept(loaded)
    dtype = loaded.dtype if rounding.grid == "frozen" else mx.float32
    dense, packed = expanded(loaded, dtype)
    report.say(f"training goes on from the codes of {len(packed)} layers")
    return Rounded(dense, Selection(specs, kept), rounding, packed)


def _kept(loaded: Loaded) -> dict[str, str]:
    return {
        path: "it is not quantized in the model that is trained"
        for path, module in loaded.model.named_modules()
        if hasattr(module, "to_quantized")
    }


def _require_same(
    rounding: Rounding, specs: dict[str, QuantSpec], loaded: Loaded
) -> None:
    place = str(loaded.path)
    if rounding.grid not in FROM_CODES or rounding.starts[-1]:
        raise UserError(
            "this model is already quantized, and training would round it again",
            place=place,
            hint=f"grid: {', '.join(FROM_CODES)} go on from its codes, without "
            "start_step or progressive; or start from the unquantized model",
        )
    asked = QuantSpec(**rounding.model_dump(include=set(QuantSpec.model_fields)))
    found = {_told(spec): spec for spec in specs.values()}
    if any(spec.mode != "affine" for spec in found.values()):
        raise UserError(f"only affine grids can be trained, not {', '.join(found)}")
    if asked not in found.values():
        raise UserError(
            f"the model is quantized to {', '.join(found)}; the recipe asks for "
            f"{_told(asked)}",
            place=place,
            hint="ask for the same: training goes on from the codes",
        )


def _told(spec: QuantSpec) -> str:
    return f"{spec.bits} bits in groups of {spec.group_size} ({spec.mode})"

"""The methods that `qat_quality.py` compares: each is a list of recipe stages."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from lmx.config.quant_spec import FLOAT_MODES, Bits

GROUP_SIZE, RANK = 64, 32
DATA = Path(__file__).parents[2] / "data"
# Learning rates of training from codes, relative to that at 2 bits; 0.1 above 3 bits.
CODES_LR_RATIO = {2: 1.0, 3: 0.3}
ADAPTER = {"type": "lora", "rank": RANK}
BITS = get_args(Bits)
ALL_GRIDS = (*BITS, *FLOAT_MODES)
Stages = list[dict]
Grid = int | str


@dataclass(frozen=True)
class Method:
    """A way to make a quantized model.

    Attributes:
        stages: recipe stages for (arguments, grid).
        start: method whose model, on the same grid, it starts from; None = the base.
        baseline: full-precision method that it is compared with.
        grids: affine bit widths and floating-point modes that it supports; empty = not
            quantized, run once.
        fused: mlx_lm fuses the adapter into the quantized weights.
    """

    name: str
    stages: Callable[[Namespace, Grid], Stages]
    start: str | None = None
    baseline: str = "full"
    grids: tuple[Grid, ...] = BITS
    fused: bool = False


def _train(arguments: Namespace, fraction: float = 1.0, **settings) -> dict:
    """A train stage with a fraction of the steps."""
    steps = max(1, round(fraction * arguments.steps))
    block = {
        "steps": steps,
        "batch_size": arguments.batch_size,
        "eval_steps": steps,
        "learning_rate": arguments.learning_rate,
        "weight_decay": 0.0,
        # Validation uses all examples, as the final evaluation does.
        "eval_batches": 10_000,
        "save_steps": 50,
    }
    return {"train": block | settings}


def _grid(grid: Grid, **settings) -> dict:
    if grid in FLOAT_MODES:
        return {"mode": grid} | settings
    return {"bits": grid, "group_size": GROUP_SIZE} | settings


def _codes_rate(
    arguments: Namespace, grid: Grid, quantizer: str | None = None
) -> float:
    """The learning rate from codes: lower for more bits, where weights are trained.

    The default quantizer of affine grids trains scales in mean scales, so that an
    update has the same size for all bits.
    """
    trains_weights = quantizer is not None or grid in FLOAT_MODES
    ratio = CODES_LR_RATIO.get(grid, 0.1) if trains_weights else 1.0
    return arguments.codes_learning_rate * ratio


def _gptq(arguments: Namespace, grid: Grid) -> Stages:
    """GPTQ on the completions of the examples."""
    block = {
        "method": "gptq",
        "effort": arguments.effort,
        "calibration": {
            "max_seq_length": arguments.max_seq_length,
            "loss_on": "completions",
            "num_tokens": arguments.num_calibration_tokens,
            "num_eval_tokens": 16384,
        },
    }
    return [{"quantize": block | _grid(grid)}]


def _rtn(_: Namespace, grid: Grid) -> Stages:
    return [{"quantize": {"method": "rtn"} | _grid(grid)}]


def _qat(quantizer: str) -> Callable[..., Stages]:
    """QAT from the first step."""

    def stages(arguments: Namespace, grid: Grid, **settings) -> Stages:
        return [_train(arguments, qat=_grid(grid, quantizer=quantizer, **settings))]

    return stages


def _late_qat(arguments: Namespace, grid: Grid) -> Stages:
    """Full precision for a fraction of the steps, then fake quantization."""
    begin = round(arguments.fp_fraction * arguments.steps)
    return _qat("lsq")(arguments, grid, fake_quant_after_n_steps=begin)


def _from_codes(arguments: Namespace, grid: Grid, **settings) -> Stages:
    """Full precision for a fraction of the steps, GPTQ, then QAT from its codes.

    More bits leave less error to repair, and a high learning rate undoes more.
    """
    fraction = arguments.fp_fraction
    settings = {
        "qat": _grid(grid, quantizer="lsq"),
        # The checkpoints include the quantized model itself.
        "load_best_at_end": True,
    } | settings
    settings["learning_rate"] = _codes_rate(
        arguments, grid, settings["qat"].get("quantizer")
    )
    return [
        _train(arguments, fraction),
        *_gptq(arguments, grid),
        _train(arguments, 1 - fraction, **settings),
    ]


def _from_codes_distill(arguments: Namespace, grid: Grid) -> Stages:
    """As `_from_codes`, with the model before GPTQ as teacher."""
    teacher = {"ce_weight": arguments.ce_weight}
    return _from_codes(arguments, grid, teacher=teacher, qat=_grid(grid))


def _from_gptq(arguments: Namespace, grid: Grid) -> Stages:
    """GPTQ of the base, then all steps as QAT from its codes."""
    quantizer = "fixed_scale" if grid in FLOAT_MODES else "lsq"
    qat = _grid(grid, quantizer=quantizer)
    return [*_gptq(arguments, grid), _train(arguments, qat=qat)]


def _after_gptq(arguments: Namespace, grid: Grid) -> Stages:
    """GPTQ of the baseline, then QAT from the codes with the baseline as teacher."""
    stage = _train(
        arguments,
        arguments.extra_steps,
        qat=_grid(grid),
        teacher={},
        load_best_at_end=True,
        learning_rate=_codes_rate(arguments, grid),
    )
    stage["train"]["eval_steps"] = max(1, stage["train"]["steps"] // 5)
    return [*_gptq(arguments, grid), stage]


def _distill(quantizer: str) -> Callable[..., Stages]:
    """QAT from the unquantized baseline, which is also the teacher."""

    def stages(arguments: Namespace, grid: Grid) -> Stages:
        teacher = {"model": str(arguments.baseline)}
        rate = _codes_rate(arguments, grid, quantizer)
        qat = _grid(grid, quantizer=quantizer)
        return [_train(arguments, qat=qat, teacher=teacher, learning_rate=rate)]

    return stages


def _lora(arguments: Namespace, _: Grid, **settings) -> Stages:
    rate = arguments.lora_learning_rate
    return [_train(arguments, adapter=ADAPTER, learning_rate=rate, **settings)]


def _lora_qat(arguments: Namespace, grid: Grid) -> Stages:
    return _lora(arguments, grid, qat=_grid(grid))


def _qlora(arguments: Namespace, grid: Grid) -> Stages:
    return [*_rtn(arguments, grid), *_lora(arguments, grid)]


def _lora_from_gptq(arguments: Namespace, grid: Grid) -> Stages:
    """GPTQ of the base, then LoRA merged into its codes."""
    return [*_gptq(arguments, grid), *_lora_qat(arguments, grid)]


METHODS = (
    Method("full", lambda a, _: [_train(a)], grids=()),
    Method("rtn", _rtn, "full", grids=ALL_GRIDS),
    Method("gptq", _gptq, "full", grids=ALL_GRIDS),
    Method("qat minmax", _qat("minmax"), grids=ALL_GRIDS),
    Method("qat fixed_scale", _qat("fixed_scale"), grids=ALL_GRIDS),
    Method("qat lsq", _qat("lsq")),
    Method("qat ternary", _qat("ternary"), grids=(2,)),
    Method("qat late", _late_qat),
    Method("qat from gptq", _from_gptq, grids=ALL_GRIDS),
    Method("qat from codes", _from_codes),
    Method("qat from codes, distill", _from_codes_distill),
    Method("qat after gptq, distill", _after_gptq, "full", grids=ALL_GRIDS),
    Method("qat minmax, distill", _distill("minmax"), "full", grids=ALL_GRIDS),
    Method(
        "qat fixed_scale, distill", _distill("fixed_scale"), "full", grids=ALL_GRIDS
    ),
    Method("lora", _lora, baseline="lora", grids=()),
    Method("rtn of lora", _rtn, "lora", "lora"),
    Method("rtn of the base", _rtn, None, "lora"),
    Method("lora qat", _lora_qat, None, "lora"),
    Method("lora qat from gptq", _lora_from_gptq),
    Method("qlora", _qlora, None, "lora", fused=True),
)

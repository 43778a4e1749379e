"""The routes of `qat_quality.py`: a recipe each, for a model of few bits."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

GROUP, RANK = 64, 32
DATA = Path(__file__).parents[1] / "data"
# Learning rates from codes by bits, as shares of that at 2; a tenth above 3.
RATES = {2: 1.0, 3: 0.3}
# The share of the steps that a training after everything has besides.
AFTER = 0.2
ADAPTER = {"type": "lora", "rank": RANK}
Stages = list[dict]


@dataclass(frozen=True)
class Route:
    """A way to a model.

    Attributes:
        stages: the recipe's, for (arguments, bits).
        start: the route whose model, of its bits, it begins with; None = the base.
        twin: the route it is compared with.
        bits: widths it is for; empty = it rounds nothing and is run once.
        fused: whether mlx_lm puts its adapter into the codes.
    """

    name: str
    stages: Callable[[Namespace, int], Stages]
    start: str | None = None
    twin: str = "full"
    bits: tuple[int, ...] = (2, 3, 4, 5, 6, 8)
    fused: bool = False


def _train(arguments: Namespace, share: float = 1.0, **more) -> dict:
    """A train stage of so many of the steps."""
    steps = max(1, round(share * arguments.steps))
    block = {"steps": steps, "batch_size": arguments.batch, "eval_steps": steps}
    block |= {"learning_rate": arguments.rate, "weight_decay": 0.0}
    # Validations are of all rows, as the judge's.
    block |= {"eval_batches": 10_000, "save_steps": 50}
    return {"train": block | more}


def _grid(bits: int, **more) -> dict:
    return {"bits": bits, "group_size": GROUP} | more


def _gptq(arguments: Namespace, bits: int, tune: bool | dict) -> dict:
    # As the training before it: row by row, and its answers alone count.
    taken = {
        "max_seq_length": arguments.max_seq_length,
        "loss_on": "completions",
        "num_eval_tokens": 16384,
    }
    taken["tokens"] = arguments.calibration
    # On one task layers make up for all errors before them, and their inputs are known.
    block = {"method": "gptq", "calibration": taken, "scale_tuning": tune}
    block["damping"] = 0.003
    return {"quantize": block | _grid(bits)}


def _rounded(_: Namespace, bits: int) -> Stages:
    return [{"quantize": {"method": "rtn"} | _grid(bits)}]


def _post_training(arguments: Namespace, bits: int) -> Stages:
    tune = {"steps": arguments.tune} if arguments.tune else False
    return [_gptq(arguments, bits, tune)]


def _aware(grid: str) -> Callable[..., Stages]:
    """Quantization-aware from the first step on."""

    def stages(arguments: Namespace, bits: int, **more) -> Stages:
        return [_train(arguments, quantization=_grid(bits, grid=grid, **more))]

    return stages


def _progressive(arguments: Namespace, bits: int) -> Stages:
    """A fifth of the steps at 8 bits, a fifth at 4, and the rest at those wanted."""
    steps = max(1, arguments.steps // 5)
    down = [{"bits": wide, "steps": steps} for wide in (8, 4) if wide > bits]
    return _aware("learned")(arguments, bits, progressive=down)


def _late(arguments: Namespace, bits: int) -> Stages:
    """The twin's own way to the share of its steps, and rounding from there on."""
    begins = round(arguments.share * arguments.steps)
    return _aware("learned")(arguments, bits, fake_quant_after_n_steps=begins)


def _from_codes(arguments: Namespace, bits: int, **more) -> Stages:
    """A share in full precision, GPTQ, and the rest of the steps from its codes.

    The finer the grid, the less there is to mend, and the more a high rate undoes.
    """
    share, rounding = arguments.share, _grid(bits, grid="learned")
    # The best validation, that of the codes themselves among them.
    after = {"qat": rounding, "load_best_at_end": "True"} | more
    after["learning_rate"] = arguments.codes_rate * RATES.get(bits, 0.1)
    return [
        _train(arguments, share),
        *_post_training(arguments, bits),
        _train(arguments, 1 - share, **after),
    ]


def _taught(arguments: Namespace, bits: int) -> Stages:
    """As from codes, but towards what the model predicted before it had codes."""
    teacher = {"ce_weight": arguments.cross_entropy}
    return _from_codes(arguments, bits, teacher=teacher)


def _from_gptq(arguments: Namespace, bits: int) -> Stages:
    """GPTQ of the base, and all steps from its codes."""
    grid = _grid(bits, grid="learned")
    return [*_post_training(arguments, bits), _train(arguments, quantization=grid)]


def _after(arguments: Namespace, bits: int) -> Stages:
    """From the codes of a model towards its twin, which has learned all there is."""
    grid = _grid(bits, grid="learned", at_points=True)
    more = {"qat": grid, "load_best_at_end": "True"}
    more["learning_rate"] = arguments.codes_rate * RATES.get(bits, 0.1)
    stage = _train(arguments, AFTER, teacher={"model": str(arguments.twin)}, **more)
    stage["train"]["eval_steps"] = max(1, stage["train"]["steps"] // 5)
    return [stage]


def _lora(arguments: Namespace, _: int) -> Stages:
    return [_train(arguments, adapter=ADAPTER, learning_rate=arguments.lora_rate)]


def _lora_aware(arguments: Namespace, bits: int) -> Stages:
    more = {"adapter": ADAPTER, "learning_rate": arguments.lora_rate}
    return [_train(arguments, quantization=_grid(bits), **more)]


def _lora_of_codes(arguments: Namespace, bits: int) -> Stages:
    return [*_rounded(arguments, bits), *_lora(arguments, bits)]


ROUTES = (
    Route("full", lambda a, _: [_train(a)], bits=()),
    Route("rtn of the twin", _rounded, "full"),
    Route("gptq of the twin", _post_training, "full"),
    Route("qat minmax", _aware("minmax")),
    Route("qat learned", _aware("learned")),
    Route("qat late", _late),
    Route("qat progressive", _progressive),
    Route("qat ternary", _aware("ternary"), bits=(2,)),
    Route("qat from gptq", _from_gptq),
    Route("qat from codes", _from_codes),
    Route("qat from codes, taught", _taught),
    Route("qat after gptq, taught", _after, "gptq of the twin"),
    Route("lora", _lora, twin="lora", bits=()),
    Route("rtn of lora", _rounded, "lora", "lora"),
    Route("rtn of the base", _rounded, None, "lora"),
    Route("lora qat", _lora_aware, None, "lora"),
    Route("qlora", _lora_of_codes, None, "lora", fused=True),
)

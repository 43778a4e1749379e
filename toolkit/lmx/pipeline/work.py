"""The time of a stage: its work by kind, at this machine's rates of each kind.

The rates are measured on a small Llama with the code of a run, so that they include
attention, norms, the optimizer and the cost of launching operations. They are kept in
the cache. Other programs only make a measurement slower: `lmx doctor` and a training
that was faster than its rate measure again, and the best of all is kept.
"""

import time
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import AdamW
from mlx.utils import tree_flatten

from .. import cpu
from ..config.model import ScratchModelConfig
from ..config.quant_spec import QuantSpec
from ..data import cache
from ..errors import UserError
from ..evaluation.memory_bandwidth import decoding_seconds, shortest_time
from ..models.from_scratch import llama_config
from ..models.loader import build_model

# The kind of the artifacts in the cache.
RATES = "rates"
# Sequences and their tokens in a measured step, and the width of the measured model:
# on the CPU, and on a GPU, which a small step does not fill.
CPU_PROBE, GPU_PROBE = (4, 64, 512), (16, 128, 2048)
# Sequences that are generated together.
TOGETHER = 16
# A training that is so many times as fast as its rate says that the rate is wrong.
FASTER = 1.25


@dataclass(frozen=True)
class Work:
    """Amounts of work; as rates, amounts per second.

    Attributes:
        trained: operations of forward and backward passes, two for a multiply-add.
        forward: operations of forward passes of many tokens.
        generated: operations of tokens that are generated in batches.
        decoded: operations of tokens that are generated one by one.
        solved: weights that a calibrated method solves, times its rounds.
    """

    trained: float = 0
    forward: float = 0
    generated: float = 0
    decoded: float = 0
    solved: float = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, count: float) -> "Work":
        return Work(*(count * amount for amount in astuple(self)))

    def seconds(self, dtype: mx.Dtype) -> float:
        """The time on this machine, with models of this dtype."""
        if not any(amounts := astuple(self)):
            return 0.0
        speeds = astuple(rates(dtype))
        return sum(a / speed for a, speed in zip(amounts, speeds, strict=True))


class KeptRates(NamedTuple):
    """Rates, and when they were measured, in seconds since the epoch."""

    rates: Work
    time: float


def rates(dtype: mx.Dtype, *, again: bool = False) -> Work:
    """This machine's rates, measured in a few seconds unless the cache has them.

    Args:
        again: measure them also if the cache has them, and keep the best ones.
    """
    known = _find(dtype)
    if known and not again:
        return known.rates
    measured = _measure(dtype)
    return _keep(dtype, _best(measured, known.rates) if known else measured)


def rates_age(dtype: mx.Dtype) -> float | None:
    """Seconds since the rates were measured; None = the cache has none."""
    known = _find(dtype)
    return known and max(0.0, time.time() - known.time)


def correct_rates(dtype: mx.Dtype, work: Work, seconds: float) -> float | None:
    """Measure again if work took less time than the rates say, and raise them to it.

    Args:
        work: what a training has done.
        seconds: the time it took.

    Returns:
        How many times as fast it was; None = the rates are right, or unknown.
    """
    known = _find(dtype)
    if known is None or work.seconds(dtype) < FASTER * seconds:
        return None
    factor = work.seconds(dtype) / seconds
    best = rates(dtype, again=True)
    _keep(dtype, _best(best, Work(trained=work.trained / seconds)))
    return factor


def _find(dtype: mx.Dtype) -> KeptRates | None:
    with suppress(UserError):  # No folder for the cache.
        if found := cache.store(lambda text: None).find(RATES, _key(dtype)):
            return KeptRates(Work(**found.facts["rates"]), found.facts["time"])
    return None


def _keep(dtype: mx.Dtype, kept: Work) -> Work:
    facts = {"rates": asdict(kept), "time": time.time()}
    with suppress(UserError):  # No folder for the cache, or a full disk.
        cache.store(lambda text: None).put(RATES, _key(dtype), lambda folder: facts)
    return kept


def _key(dtype: mx.Dtype) -> str:
    blas = cpu.enable().blas
    device = sorted(mx.device_info().items())
    facts = [str(device), blas.name, blas.threads, mx.__version__, str(dtype)]
    return cache.key_of([*facts, *asdict(Work()), *KeptRates._fields])


def _best(one: Work, other: Work) -> Work:
    return Work(*map(max, astuple(one), astuple(other)))


def _measure(dtype: mx.Dtype) -> Work:
    # Needs NumPy, which reading a recipe does not load.
    from ..quantization.ptq.gptq.solver import LayerProblem, solve_layers
    from ..quantization.ptq.hessian import damped

    rows, length, width = CPU_PROBE if cpu.on_cpu() else GPU_PROBE
    sizes = {"hidden_size": width, "intermediate_size": 2 * width}
    shape = ScratchModelConfig(vocab_size=2048, num_hidden_layers=2, **sizes)
    model = build_model(llama_config(shape))
    model.set_dtype(dtype)
    cpu.enable(model)
    parameters = tree_flatten(model.parameters())
    per_token = 2 * sum(value.size for _, value in parameters if value.ndim > 1)
    tokens = mx.zeros((rows, length), mx.int32)
    spec = QuantSpec(bits=4, group_size=64)
    weight = mx.random.normal((width, width), key=mx.random.key(0))
    hessian = damped(weight.T @ weight, spec.group_size, 0.01)
    optimizer = AdamW(learning_rate=1e-4)

    def loss(model: nn.Module) -> mx.array:
        return nn.losses.cross_entropy(model(tokens), tokens, reduction="sum")

    gradients = nn.value_and_grad(model, loss)

    def train() -> None:
        optimizer.update(model, gradients(model)[1])
        mx.eval(model.parameters(), optimizer.state)

    def solve() -> None:
        """Twice: without and with a round of refinement."""
        layer = {"": LayerProblem(weight)}
        solved = solve_layers(layer, hessian, spec, mx.float16, refine_iters=1)
        mx.eval(solved[""].tensors)

    count = rows * length
    # The training is last: it changes the weights.
    return Work(
        forward=per_token * count / shortest_time(lambda: mx.eval(model(tokens))),
        generated=per_token * TOGETHER / decoding_seconds(model, TOGETHER),
        decoded=per_token / decoding_seconds(model, 1),
        solved=2 * width**2 / shortest_time(solve),
        trained=3 * per_token * count / shortest_time(train),
    )

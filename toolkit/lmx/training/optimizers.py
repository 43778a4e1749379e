"""Optimizers by name: moments in float32 or 8 bits, and no weight decay of their own.

The 8-bit optimizers (arXiv 2110.02861) are those of bitsandbytes and torchao: moments
of at least 4096 values are stored as codes. An update dequantizes them, computes in
float32, and quantizes the new moments.
"""

import math
from dataclasses import dataclass, field

import mlx.core as mx
import mlx.optimizers as optimizers

from ..errors import UserError
from .dynamic_quantization import BLOCK_SIZE, DynamicCodes, dequantize, quantize, zeros

# Smaller parameters have float32 moments, as in bitsandbytes and torchao.
MIN_8BIT_SIZE = 4096
# Values whose 8-bit moments are updated at once; a multiple of the block size.
MAX_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class OptimizerConfig:
    """An optimizer's algorithm and hyperparameters.

    Attributes:
        name: "adamw", "adamw_8bit", "adafactor", "lion", "lion_8bit", "sgd" or "muon".
        beta1, beta2: decay rates of the moments of AdamW and Lion.
        momentum: of SGD and Muon.
        weight_decay: decoupled, for matrices only.
        max_grad_norm: largest joint gradient norm; None = no clipping.
        lr_multipliers: factors of the learning rate by parameter path; others have 1.
    """

    name: str = "adamw"
    beta1: float = 0.9
    beta2: float = 0.95
    momentum: float = 0.95
    weight_decay: float = 0.0
    max_grad_norm: float | None = None
    lr_multipliers: dict[str, float] = field(default_factory=dict)


def make_optimizer(
    config: OptimizerConfig,
    parameters: dict[str, mx.array],
    *,
    block_prefix: str,
    sizes: dict[str, int] | None = None,
):
    """An optimizer with initialized state for `parameters` by path.

    Args:
        parameters: whole ones, or shards of them.
        block_prefix: prefix of the paths of the blocks' parameters. Muon updates their
            matrices; AdamW updates everything else.
        sizes: values of the whole parameters; None = those of `parameters`.

    Raises:
        UserError: blocks of 8-bit moments would lie in two shards.
    """
    betas = [config.beta1, config.beta2]
    makers = {
        "adamw": lambda: optimizers.Adam(0.0, betas, bias_correction=True),
        "adamw_8bit": lambda: Adam8bit(0.0, betas, bias_correction=True),
        "adafactor": lambda: optimizers.Adafactor(
            0.0, scale_parameter=False, relative_step=False
        ),
        "lion": lambda: optimizers.Lion(0.0, betas),
        "lion_8bit": lambda: Lion8bit(0.0, betas),
        "sgd": lambda: optimizers.SGD(0.0, config.momentum),
        "muon": lambda: _MuonWithAdamW(
            Muon(0.0, config.momentum, weight_decay=0.0),
            makers["adamw"](),
            {
                path
                for path, value in parameters.items()
                if path.startswith(block_prefix) and value.ndim == 2
            },
        ),
    }
    optimizer = makers[config.name]()
    optimizer.init(parameters)
    if isinstance(optimizer, Moments8bit):
        for path, size in (sizes or {k: v.size for k, v in parameters.items()}).items():
            if size >= MIN_8BIT_SIZE:
                shard_size = parameters[path].size
                if shard_size != size and shard_size % BLOCK_SIZE:
                    raise UserError(
                        f"a shard of {path} has {shard_size} values: 8-bit moments "
                        f"have blocks of {BLOCK_SIZE}, which must not lie in two "
                        "shards",
                        hint="use an optimizer without 8bit, or another number of "
                        "processes",
                    )
                optimizer.use_8_bits(parameters[path], optimizer.state[path])
    return optimizer


class Moments8bit(optimizers.Optimizer):
    """An optimizer whose moments are blockwise 8-bit codes, for chosen parameters.

    The first moment uses the signed map, the second one the unsigned map. In the state,
    codes are `m` and `v`, and their scales `m_absmax` and `v_absmax`.
    """

    # Codes of the parameter that was updated last.
    _last: tuple[mx.array, ...] = ()

    def use_8_bits(self, parameter: mx.array, state: dict) -> None:
        """Replace a parameter's initial moments with codes of zero."""
        for name in set(state) & {"m", "v"}:
            _set_codes(state, name, zeros(parameter.shape, signed=name == "m"))

    def apply_single(
        self, gradient: mx.array, parameter: mx.array, state: dict
    ) -> mx.array:
        """The updated parameter."""
        if "m_absmax" not in state:
            return super().apply_single(gradient, parameter, state)
        size = parameter.size
        if size <= MAX_AT_ONCE:
            return self._apply_codes(gradient, parameter, state)
        # Flat parts of whole blocks: their float32 moments are in memory alone.
        flat = [x.reshape(-1) for x in (gradient, parameter)]
        parts, states = [], []
        for start in range(0, size, MAX_AT_ONCE):
            values = slice(start, start + MAX_AT_ONCE)
            blocks = slice(start // BLOCK_SIZE, values.stop // BLOCK_SIZE)
            part = {
                key: value[blocks] if "absmax" in key else value.reshape(-1)[values]
                for key, value in state.items()
            }
            parts.append(self._apply_codes(*(x[values] for x in flat), part))
            states.append(part)
        for key, value in state.items():
            whole = mx.concatenate([part[key] for part in states])
            state[key] = whole.reshape(value.shape)
        return mx.concatenate(parts).reshape(parameter.shape)

    def _apply_codes(
        self, gradient: mx.array, parameter: mx.array, state: dict
    ) -> mx.array:
        # One parameter after the other, moments and weight together. Otherwise MLX
        # computes all weights first, and all float32 moments wait for their codes.
        [gradient, *codes] = mx.depends([gradient, *state.values()], self._last)
        codes = dict(zip(state, codes, strict=True))
        moments = {
            name: dequantize(
                DynamicCodes(codes[name], codes[f"{name}_absmax"]), signed=name == "m"
            )
            for name in ("m", "v")
            if name in codes
        }
        updated = super().apply_single(gradient, parameter, moments)
        for name, moment in moments.items():
            _set_codes(state, name, quantize(moment, signed=name == "m"))
        self._last = tuple(state.values())
        return mx.depends([updated], self._last)[0]

    def apply_gradients(self, gradients: dict, parameters: dict) -> dict:
        """The updated parameters by path."""
        self._last = ()
        try:
            return super().apply_gradients(gradients, parameters)
        finally:
            self._last = ()


def _set_codes(state: dict, name: str, quantized: DynamicCodes) -> None:
    state[name], state[f"{name}_absmax"] = quantized


class Adam8bit(Moments8bit, optimizers.Adam):
    """Adam with 8-bit moments."""


class Lion8bit(Moments8bit, optimizers.Lion):
    """Lion with an 8-bit moment."""


class Muon(optimizers.Muon):
    """Muon with updates of AdamW's size (arXiv 2502.16982), to share one learning rate.

    A matrix with orthogonal rows has a mean square of one over its longer side; the
    root mean square of AdamW's updates is about 0.2.
    """

    def apply_single(
        self, gradient: mx.array, parameter: mx.array, state: dict
    ) -> mx.array:
        """The updated parameter, a matrix."""
        rows, columns = parameter.shape
        origin = mx.zeros_like(parameter)
        update = super().apply_single(gradient, origin, state)
        scale = math.sqrt(max(1, rows / columns))
        return parameter + 0.2 * math.sqrt(max(rows, columns)) / scale * update


class _MuonWithAdamW:
    """Muon for the parameters at some paths, AdamW for all others."""

    def __init__(self, muon: Muon, adamw: optimizers.Adam, muon_paths: set[str]):
        # The keys are part of the names of tensors in checkpoints.
        self._optimizers = {"muon": muon, "adamw": adamw}
        self._muon_paths = muon_paths
        self.state = {name: o.state for name, o in self._optimizers.items()}

    def init(self, parameters: dict[str, mx.array]) -> None:
        for name, optimizer in self._optimizers.items():
            optimizer.init(self._select(name, parameters))

    def apply_gradients(self, gradients: dict, parameters: dict) -> dict:
        updated = {}
        for name, optimizer in self._optimizers.items():
            selected = self._select(name, gradients)
            updated |= optimizer.apply_gradients(selected, parameters)
        return updated

    @property
    def learning_rate(self) -> mx.array:
        return self._optimizers["adamw"].learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: mx.array) -> None:
        for optimizer in self._optimizers.values():
            optimizer.learning_rate = learning_rate

    def _select(self, name: str, values: dict) -> dict:
        is_muon = name == "muon"
        return {k: v for k, v in values.items() if (k in self._muon_paths) == is_muon}

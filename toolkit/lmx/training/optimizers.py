"""Optimizers by name: float32 moments, and no weight decay of their own."""

import math
from dataclasses import dataclass, field

import mlx.core as mx
import mlx.optimizers as optimizers


@dataclass(frozen=True)
class OptimizerConfig:
    """An optimizer's algorithm and hyperparameters.

    Attributes:
        name: "adamw", "adafactor", "lion", "sgd" or "muon".
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
    config: OptimizerConfig, parameters: dict[str, mx.array], *, block_prefix: str
):
    """An optimizer with initialized state for `parameters` by path.

    Args:
        block_prefix: prefix of the paths of the blocks' parameters. Muon updates their
            matrices; AdamW updates everything else.
    """
    betas = [config.beta1, config.beta2]
    makers = {
        "adamw": lambda: optimizers.Adam(0.0, betas, bias_correction=True),
        "adafactor": lambda: optimizers.Adafactor(
            0.0, scale_parameter=False, relative_step=False
        ),
        "lion": lambda: optimizers.Lion(0.0, betas),
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
    return optimizer


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

"""Optimizers by name; all keep float32 moments, none decays weights by itself."""

import math

import mlx.core as mx
import mlx.optimizers as optimizers


def make_optimizer(
    name: str,
    parameters: dict[str, mx.array],
    *,
    beta1: float,
    beta2: float,
    momentum: float,
    blocks: str,
):
    """An optimizer with its state in place, for `parameters` by path.

    Args:
        blocks: what the paths of the blocks' parameters begin with; of these Muon has
            the matrices, AdamW all the rest.
    """
    betas = [beta1, beta2]
    makers = {
        "adamw": lambda: optimizers.Adam(0.0, betas, bias_correction=True),
        "adafactor": lambda: optimizers.Adafactor(
            0.0, scale_parameter=False, relative_step=False
        ),
        "lion": lambda: optimizers.Lion(0.0, betas),
        "sgd": lambda: optimizers.SGD(0.0, momentum),
        "muon": lambda: _Split(
            Muon(0.0, momentum, weight_decay=0.0),
            makers["adamw"](),
            {k for k, v in parameters.items() if k.startswith(blocks) and v.ndim == 2},
        ),
    }
    optimizer = makers[name]()
    optimizer.init(parameters)
    return optimizer


class Muon(optimizers.Muon):
    """Muon with updates of AdamW's size (arXiv 2502.16982), to share one rate with it.

    A matrix with orthogonal rows has a mean square of one over its longer side; AdamW's
    updates are about 0.2 large.
    """

    def apply_single(
        self, gradient: mx.array, parameter: mx.array, state: dict
    ) -> mx.array:
        """The updated parameter, a matrix."""
        rows, columns = parameter.shape
        origin = mx.zeros_like(parameter)
        update = super().apply_single(gradient, origin, state)
        own = math.sqrt(max(1, rows / columns))
        return parameter + 0.2 * math.sqrt(max(rows, columns)) / own * update


class _Split:
    """Two optimizers, each for its own parameters."""

    def __init__(self, first, rest, names: set[str]):
        self._parts = {"first": first, "rest": rest}
        self._names = names
        self.state = {name: part.state for name, part in self._parts.items()}

    def init(self, parameters: dict[str, mx.array]) -> None:
        for name, part in self._parts.items():
            part.init(self._of(name, parameters))

    def apply_gradients(self, gradients: dict, parameters: dict) -> dict:
        updated = {}
        for name, part in self._parts.items():
            own = self._of(name, gradients)
            updated |= part.apply_gradients(own, parameters)
        return updated

    @property
    def learning_rate(self) -> mx.array:
        return self._parts["rest"].learning_rate

    @learning_rate.setter
    def learning_rate(self, rate: mx.array) -> None:
        for part in self._parts.values():
            part.learning_rate = rate

    def _of(self, name: str, values: dict) -> dict:
        first = name == "first"
        return {k: v for k, v in values.items() if (k in self._names) == first}

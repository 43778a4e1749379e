"""What Python code adds to a run: callbacks, a loss and metrics."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import mlx.core as mx

from ..config.schema import RecipeConfig
from ..data.record_formats import DataRecord
from ..errors import UserError
from ..models.loader import LoadedModel
from ..run.callbacks import CallbackList

Loss = Callable[[mx.array, mx.array, mx.array], mx.array]
Metric = Callable[[LoadedModel, list[DataRecord]], float]


@dataclass(frozen=True)
class Extensions:
    """Python functions of one run.

    Attributes:
        loss: as `models.cross_entropy.cross_entropy_sum`; None = cross-entropy.
        metrics: measure a model on validation examples, by name.
        allow_python: whether the recipe may name Python files of reward functions.
    """

    callbacks: CallbackList = field(default_factory=CallbackList)
    loss: Loss | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    allow_python: bool = False

    def require(self, recipe: RecipeConfig) -> None:
        """Refuse a recipe that needs functions which are not here.

        Raises:
            UserError: naming the functions.
        """
        needed = recipe.python
        if needed is None:
            return
        has_loss = self.loss is not None or needed.loss is None
        if has_loss and needed.metrics.keys() <= self.metrics.keys():
            return
        raise UserError(
            "this recipe needs Python functions, which a file does not have",
            hint=f"run it in Python: lmx.train(recipe, {', '.join(needed.names)})",
        )

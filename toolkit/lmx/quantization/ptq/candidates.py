"""Candidates of a quantization, compared by the KL divergence on held-out tokens."""

import math
from itertools import islice

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from ...run.logger import NullLogger, RunLogger
from ...training.distillation import kl_sum
from ...training.teacher_cache import PartTargets


class CandidateModel:
    """A quantized model with MLX's own quantized layers, whose tensors can be replaced.

    Args:
        model: as loaded. Its parameters may have been cast to a compute dtype.
        dtype: dtype that its checkpoint stores.
    """

    def __init__(self, model: nn.Module, dtype: mx.Dtype):
        self.model = model
        self.dtype = dtype
        self._dtypes = {k: v.dtype for k, v in tree_flatten(model.parameters())}

    @property
    def affine_layers(self) -> dict[str, nn.Module]:
        """Layers with scales and biases by path, those of experts included."""
        return {
            path: module
            for path, module in self.model.named_modules()
            if getattr(module, "mode", None) == "affine" and "scales" in module
        }

    def set_tensors(self, tensors: dict[str, mx.array]) -> None:
        """Set tensors by name, given in the dtypes of the checkpoint."""
        cast = {k: v.astype(self._dtypes[k]) for k, v in tensors.items()}
        self.model.update(tree_unflatten(list(cast.items())))

    def forward_values(self, masters: dict[str, mx.array]) -> dict[str, mx.array]:
        """Float32 masters, rounded to the stored dtype for the forward pass."""
        return {
            name: value.astype(self.dtype).astype(self._dtypes[name])
            for name, value in masters.items()
        }

    def divergence(
        self,
        targets: PartTargets,
        num_parts: int | None = None,
        *,
        logger: RunLogger | None = None,
    ) -> float:
        """KL(teacher || this model) in nats, a mean over the positions that count.

        Args:
            num_parts: use the first parts only. None = all.
            logger: shows the progress. None = none is shown.
        """
        total = count = 0
        parts = zip(targets.tokens, targets.counted, targets, strict=True)
        number = min(num_parts or len(targets), len(targets))
        with (logger or NullLogger()).progress(number, "held-out KL") as progress:
            for tokens, counted, target in islice(parts, number):
                total += kl_sum(self.model(tokens), target, counted).item()
                count += counted.sum().item()
                progress.advance()
        return total / count


class CandidateSelector:
    """Keeps the candidate with the least KL divergence on held-out tokens.

    Args:
        model: the tensors of every candidate fit it.
        targets: predictions of the unquantized model on held-out tokens.
        logger: gets a line for every candidate, and the progress.

    Attributes:
        tensors: of the best candidate, by name.
        best_name: its name.
        divergences: of all candidates by name, in nats per position.
    """

    def __init__(
        self,
        model: CandidateModel,
        targets: PartTargets,
        logger: RunLogger,
    ):
        self.tensors: dict[str, mx.array] = {}
        self.divergences: dict[str, float] = {}
        self.best_name = ""
        self._model = model
        self._targets = targets
        self._logger = logger

    @property
    def best(self) -> float:
        """The divergence of the best candidate."""
        return self.divergences.get(self.best_name, math.inf)

    def add(self, name: str, tensors: dict[str, mx.array]) -> bool:
        """Measure a candidate and select it if it is better than the best one.

        Afterwards the model has the tensors of the best candidate.
        """
        self._model.set_tensors(tensors)
        divergence = self._model.divergence(self._targets, logger=self._logger)
        divergence = math.inf if math.isnan(divergence) else divergence
        self.divergences[name] = divergence
        line = f"{name}: held-out KL {divergence:.4g}"
        if self.best_name:
            line += f" ({self.best_name} {self.best:.4g})"
        is_better = divergence < self.best
        if is_better or not self.best_name:
            self.best_name, self.tensors = name, tensors
        else:
            line += f": rejected, keeping {self.best_name}"
            self._model.set_tensors(self.tensors)
        self._logger.info(line)
        return is_better

"""A quantized model whose tensors can be exchanged, judged by what it predicts."""

import math
from collections.abc import Callable
from itertools import islice

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from ...training.distillation import kl_sum
from ...training.teacher_cache import PartTargets


class CandidateModel:
    """The model as it is served: MLX's own quantized layers, reloaded from disk.

    Args:
        model: as loaded; its parameters may have been cast to a type to compute in.
        dtype: the type its checkpoint stores.
    """

    def __init__(self, model: nn.Module, dtype: mx.Dtype):
        self.model = model
        self.dtype = dtype
        self._types = {k: v.dtype for k, v in tree_flatten(model.parameters())}

    @property
    def affine(self) -> dict[str, nn.Module]:
        """Its layers with scales and biases, by path; those of experts too."""
        return {
            path: module
            for path, module in self.model.named_modules()
            if getattr(module, "mode", None) == "affine" and "scales" in module
        }

    def put(self, tensors: dict[str, mx.array]) -> None:
        """Take tensors by name, in the types they are stored in."""
        cast = {k: v.astype(self._types[k]) for k, v in tensors.items()}
        self.model.update(tree_unflatten(list(cast.items())))

    def served(self, masters: dict[str, mx.array]) -> dict[str, mx.array]:
        """Float32 masters as the forward takes them, by way of the type stored."""
        return {
            k: v.astype(self.dtype).astype(self._types[k]) for k, v in masters.items()
        }

    def divergence(
        self, targets: PartTargets, parts: int | None = None
    ) -> float:
        """KL(teacher || this model as it is), in nats, mean over what counts.

        Args:
            parts: the first ones alone, that many; None = all.
        """
        total = count = 0
        shown = zip(targets.tokens, targets.counted, targets, strict=True)
        for tokens, counted, target in islice(shown, parts):
            total += kl_sum(self.model(tokens), target, counted).item()
            count += counted.sum().item()
        return total / count


# --- from quant.gates: What every step of a quantization is worth, on tokens held out; undone if nothing.


class CandidateSelector:
    """Keeps the best of what it is shown.

    Args:
        student: any candidate's tensors fit into it.
        held_out: what the unquantized model predicts, on tokens to judge by.
        say: told what every step is worth.

    Attributes:
        tensors: of the best candidate so far, by name.
        divergences: of all candidates by name, in nats per position.
    """

    def __init__(
        self,
        student: CandidateModel,
        held_out: PartTargets,
        info: Callable[[str], None],
    ):
        self.tensors: dict[str, mx.array] = {}
        self.divergences: dict[str, float] = {}
        self.kept = ""
        self._student = student
        self._held_out = held_out
        self._say = info

    @property
    def best(self) -> float:
        """The divergence of the best candidate."""
        return self.divergences.get(self.kept, math.inf)

    def judge(self, name: str, tensors: dict[str, mx.array]) -> bool:
        """Measure a candidate and keep it if it is better than what was kept.

        The student has the tensors of the best one afterwards.
        """
        self._student.put(tensors)
        found = self._student.divergence(self._held_out)
        found = math.inf if math.isnan(found) else found
        self.divergences[name] = found
        line = f"{name}: held-out KL {found:.4g}"
        if self.kept:
            line += f" ({self.kept} {self.best:.4g})"
        is_better = found < self.best
        if is_better or not self.kept:
            self.kept, self.tensors = name, tensors
        else:
            line += f": undone, {self.kept} is kept"
            self._student.put(self.tensors)
        self._say(line)
        return is_better

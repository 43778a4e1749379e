"""Candidates of a quantization, compared by the KL divergence on held-out tokens."""

import math
from collections.abc import Collection

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from ...config.train import MANY_LOGITS, loss_chunk
from ...cpu import on_cpu
from ...interfaces import SINGLE_PROCESS, Communicator, Logger
from ...models.blockwise import NoTrunkHeadSplit
from ...training.chunked_loss import ChunkedLoss
from ...training.distillation import divergence_sum
from ...training.teacher_cache import PartTargets
from ...training.teacher_targets import TeacherTarget


class TeacherDivergence:
    """Summed KL(teacher || model) of tokens, with the logits of some at a time.

    Args:
        names: the model's parameters that get gradients. With any, all logits exist at
            once unless they are many: on a CPU the head is dequantized for every chunk.
    """

    def __init__(self, model: nn.Module, names: Collection[str] = ()):
        self._model = model
        # Only the shape is used, so nothing is computed.
        self._vocabulary = model(mx.zeros((1, 1), mx.int32)).shape[-1]
        self._min_logits = MANY_LOGITS if names else 0
        try:
            chunk = loss_chunk(self._vocabulary, on_cpu=on_cpu() and not names)
            chunked = ChunkedLoss(model, chunk, names)
            self._chunked = chunked if names else chunked.value
        except NoTrunkHeadSplit:
            self._chunked = None

    def __call__(
        self,
        tokens: mx.array,
        counted: mx.array,
        target: TeacherTarget,
    ) -> mx.array:
        """The sum in nats over the positions that count.

        Args:
            tokens: int [B, L].
            counted: bool [B, L].
            target: of all positions.
        """

        def loss(logits, counted, *target):
            return divergence_sum(logits, TeacherTarget(*target), counted)

        labels = counted, *target
        num_logits = tokens.size * self._vocabulary
        if self._chunked is None or num_logits < self._min_logits:
            return loss(self._model(tokens), *labels)
        return self._chunked(tokens, labels, loss=loss)


class CandidateModel:
    """A quantized model with MLX's own quantized layers, whose tensors can be replaced.

    Args:
        model: as loaded. Its parameters may have been cast to a compute dtype.
        dtype: dtype that its checkpoint stores.
        ranks: the processes that divide the tokens; all have the same candidates.
    """

    def __init__(
        self, model: nn.Module, dtype: mx.Dtype, ranks: Communicator = SINGLE_PROCESS
    ):
        self.model = model
        self.ranks = ranks
        self.dtype = dtype
        self._divergence = TeacherDivergence(model)
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
        """Set tensors by name, given in the dtypes of the checkpoint.

        The factors of GGUF's blocks are none of the model.
        """
        known = tensors.keys() & self._dtypes
        cast = {k: tensors[k].astype(self._dtypes[k]) for k in known}
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
        logger: Logger | None = None,
    ) -> float:
        """KL(teacher || this model) in nats, a mean over the positions that count.

        Args:
            num_parts: use the first parts only. None = all.
            logger: shows the progress. None = none is shown.
        """
        total, logger = 0.0, logger or Logger()
        number = min(num_parts or len(targets), len(targets))
        own = list(self.ranks.shard(range(number)))
        with logger.progress(len(own), "held-out KL") as progress:
            for part in progress.track(own):
                tokens, counted = targets.tokens[part], targets.counted[part]
                total += self._divergence(tokens, counted, targets[part]).item()
        [total] = self.ranks.all_reduce_scalars(total)
        return total / sum(part.sum().item() for part in targets.counted[:number])


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
        logger: Logger,
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

"""Candidates of a quantization, compared by the KL divergence on held-out tokens."""

import math

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from ...config.train import MANY_LOGITS, TeacherConfig, loss_chunk
from ...cpu import on_cpu
from ...interfaces import SINGLE_PROCESS, Communicator, Logger
from ...models.blockwise import NoTrunkHeadSplit
from ...training.chunked_loss import ChunkedLossModel
from ...training.distillation import DistillationLoss
from ...training.losses import LossModel
from ...training.teacher_cache import PartTargets

# Summed KL(teacher || model) of the targets of a batch.
DIVERGENCE = DistillationLoss(TeacherConfig())


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
        self._dtypes = {k: v.dtype for k, v in tree_flatten(model.parameters())}
        # Only the shape is used, so nothing is computed.
        self._vocabulary = model(mx.zeros((1, 1), mx.int32)).shape[-1]
        model.freeze()
        self._loss_model = self.loss_model()

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

    def loss_model(self, trained_tokens: int | None = None) -> LossModel:
        """The model for a loss, with the logits of some tokens at a time.

        On a CPU the head is dequantized for every chunk, so a training computes all
        logits at once unless they are many.

        Args:
            trained_tokens: in a batch of a training; None = without gradients.
        """
        trains = trained_tokens is not None
        if trains and trained_tokens * self._vocabulary < MANY_LOGITS:
            return LossModel(self.model)
        chunk = loss_chunk(self._vocabulary, on_cpu=on_cpu() and not trains)
        try:
            return ChunkedLossModel(self.model, chunk)
        except NoTrunkHeadSplit:
            return LossModel(self.model)

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
        self.model.eval()
        number = min(num_parts or len(targets), len(targets))
        own = list(self.ranks.shard(range(number)))
        with logger.progress(len(own), "held-out KL") as progress:
            for part in progress.track(own):
                batch = targets.batch(part).arrays(with_places=False)
                total += DIVERGENCE(self._loss_model, batch)[0].item()
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

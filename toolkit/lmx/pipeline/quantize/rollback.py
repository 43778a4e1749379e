"""`rollback_if_worse`: a method's result is kept if it is better than RTN.

Better is a smaller KL divergence from the unquantized model on held-out tokens.
"""

import math

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from ...config.quantize import PTQConfig
from ...config.train import TeacherConfig, loss_chunk
from ...cpu import on_cpu
from ...interfaces import SINGLE_PROCESS, Communicator, Logger
from ...models.blockwise import NoTrunkHeadSplit
from ...models.checkpoint import weights_digest
from ...models.loader import LoadedModel
from ...quantization.packing import pack
from ...quantization.target_layers import QuantizationPlan
from ...training.chunked_loss import ChunkedLossModel
from ...training.distillation import DistillationLoss
from ...training.losses import LossModel
from ...training.teacher_cache import PartTargets, cache_part_targets
from ..context import StageContext, write_model
from .calibration import CalibrationData

# Held-out tokens per forward pass.
TOKENS_AT_ONCE = 512
# Most probable tokens of the unquantized model that are cached per position; the
# remaining probability counts as one outcome.
TOP_K = 256
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
        vocabulary = model(mx.zeros((1, 1), mx.int32)).shape[-1]
        model.freeze()
        chunk = loss_chunk(vocabulary, on_cpu=on_cpu())
        # The logits of some tokens at a time.
        self._loss_model: LossModel
        try:
            self._loss_model = ChunkedLossModel(model, chunk)
        except NoTrunkHeadSplit:
            self._loss_model = LossModel(model)

    def set_tensors(self, tensors: dict[str, mx.array]) -> None:
        """Set tensors by name, given in the dtypes of the checkpoint.

        The factors of GGUF's blocks are none of the model.
        """
        known = tensors.keys() & self._dtypes
        cast = {k: tensors[k].astype(self._dtypes[k]) for k in known}
        self.model.update(tree_unflatten(list(cast.items())))

    def divergence(
        self, targets: PartTargets, *, logger: Logger | None = None
    ) -> float:
        """KL(teacher || this model) in nats, a mean over the positions that count.

        Args:
            logger: shows the progress. None = none is shown.
        """
        total, logger = 0.0, logger or Logger()
        self.model.eval()
        own = list(self.ranks.shard(range(len(targets))))
        with logger.progress(len(own), "held-out KL") as progress:
            for part in progress.track(own):
                batch = targets.batch(part).arrays(with_places=False)
                total += DIVERGENCE(self._loss_model, batch)[0].item()
        [total] = self.ranks.all_reduce_scalars(total)
        return total / sum(part.sum().item() for part in targets.counted)


def select_candidate(
    model: CandidateModel,
    targets: PartTargets,
    candidates: dict[str, dict[str, mx.array]],
    logger: Logger,
) -> tuple[str, dict[str, float]]:
    """The name of the candidate with the least KL divergence on held-out tokens.

    Args:
        model: the tensors of every candidate fit it.
        targets: predictions of the unquantized model on held-out tokens.
        candidates: tensors by name, of each candidate by its name. Of equal ones the
            first is selected.
        logger: gets a line for every candidate, and the progress.

    Returns:
        It, and the divergences of all candidates, in nats per position.
    """
    divergences: dict[str, float] = {}
    best = next(iter(candidates))
    for name, tensors in candidates.items():
        model.set_tensors(tensors)
        divergence = model.divergence(targets, logger=logger)
        divergences[name] = math.inf if math.isnan(divergence) else divergence
        line = f"{name}: held-out KL {divergences[name]:.4g}"
        if name != best:
            line += f" ({best} {divergences[best]:.4g})"
            if divergences[name] < divergences[best]:
                best = name
            else:
                line += f": rejected, keeping {best}"
        logger.info(line)
    return best, divergences


def better_than_rtn(
    config: PTQConfig,
    context: StageContext,
    calibration: CalibrationData,
    loaded: LoadedModel,
    selection: QuantizationPlan,
    tensors: dict[str, mx.array],
) -> tuple[dict[str, mx.array], dict]:
    """The tensors of a method, or those of RTN if they are better.

    Args:
        loaded: the unquantized model; its weights may have been freed.
        tensors: of the method, by name.

    Returns:
        Tensors by name, and facts for the report.
    """
    ranks = context.ranks
    targets = _held_out_targets(context, calibration, loaded)
    candidate = context.folder / "candidate"
    # Lazy, so that a large model needs little memory.
    weights = dict(tree_flatten(loaded.reread().parameters()))
    if ranks.is_first:
        write_model(
            candidate,
            loaded,
            dict(weights),
            selection,
            dict(tensors),
            keeps_mtp=False,
        )
    ranks.wait_for_all()
    # In place of all tensors that the method changed.
    rtn = {name: weights[name] for name in tensors if name in weights}
    for path, spec in selection.specs.items():
        packed = pack(weights[f"{path}.weight"], spec, loaded.dtype)
        rtn |= {f"{path}.{name}": value for name, value in packed.items()}
    model = CandidateModel(context.load(candidate).model, loaded.dtype, ranks)
    # What is compared with RTN, if RTN is the method, are its smoothed weights.
    name = "smoothquant" if config.method == "rtn" else config.method
    candidates = {"rtn": rtn, name: tensors}
    best, divergences = select_candidate(model, targets, candidates, context.logger)
    facts = {"eval_kl": divergences, "selected_candidate": best}
    return candidates[best], facts


def _held_out_targets(
    context: StageContext, calibration: CalibrationData, loaded: LoadedModel
) -> PartTargets:
    """The unquantized model's predictions of the held-out tokens."""
    ranks, reference = context.ranks, context.load(loaded.path)
    # Of rank 0's folders.
    digest = weights_digest(reference.path) if ranks.is_first else ""
    parts = calibration.eval_sequences.parts(TOKENS_AT_ONCE)
    return cache_part_targets(
        context.artifacts,
        "eval-targets",
        [mx.array(part.tokens) for part in parts],
        reference.model,
        counted=[mx.array(part.counted) for part in parts],
        digest=ranks.broadcast_object(digest),
        top_k=TOP_K,
        logger=context.logger,
    )

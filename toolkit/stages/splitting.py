"""How a train stage cuts its work: rows into documents, and the loss into chunks."""

from ..model.cpu import on_cpu
from ..model.folder import setting
from ..model.load import Loaded
from ..train.chunked import ChunkedLoss
from ..train.documents import CannotPack, DocumentCaches
from ..train.split import CannotSplit
from .context import Context
from .teaching import Teaching
from .train import Config


def document_caches(
    loaded: Loaded, context: Context, teaching: Teaching | None
) -> DocumentCaches | None:
    """What keeps packed documents apart; None, aloud, if a model cannot do that."""
    try:
        caches = DocumentCaches(loaded.model)
        if teaching:
            teaching.keep_apart()
        return caches
    except CannotPack as reason:
        context.report.warn(
            f"rows are padded, packing is off: this model does not keep documents "
            f"apart: {reason}"
        )
        return None


def chunked_loss(
    config: Config, context: Context, loaded: Loaded
) -> ChunkedLoss | None:
    """The loss by chunks; None, aloud where it matters, if the model does not split."""
    longest = context.data.max_length
    tokens = max(config.batch_tokens or config.batch_size * longest, longest)
    sizes = {"vocabulary": setting(loaded.config, "vocab_size"), "tokens": tokens}
    try:
        return ChunkedLoss(loaded.model, config.chunk(**sizes, on_cpu=on_cpu()))
    except CannotSplit as reason:
        # Else it is but a little slower.
        if config.chunk(**sizes, on_cpu=False):
            context.report.warn(
                f"the loss is made of all logits at once, loss_chunk is off: {reason}"
            )
        return None

"""The model that a train stage begins with: the current one, or a fresh one."""

from pathlib import Path
from tempfile import TemporaryDirectory

import mlx.core as mx
from mlx.utils import tree_flatten

from ..models import checkpoint_writer, from_scratch
from ..run.fs import atomic_folder
from .context import StageContext


def start(context: StageContext) -> Path:
    """The checkpoint that is trained, which `begin` has made of a fresh model."""
    return context.current.model if context.current else context.folder / "fresh"


def origin(context: StageContext) -> dict[str, mx.array]:
    """Weights that the current model was quantized from, unread; none if not known."""
    current = context.current
    # A training after it has moved the codes away from there.
    if not (current and current.is_quantized and "method" in current.facts):
        return {}
    folder = context.visible(current.reference)
    loaded = context.load(folder, compute="stored", lazy=True)
    return dict(tree_flatten(loaded.model.parameters()))


def begin(context: StageContext) -> None:
    """Make a fresh model: tokenizer trained on the data, random weights."""
    target = start(context)
    if context.current or target.is_dir():
        return
    settings = context.source.from_scratch
    config = from_scratch.llama_config(settings)
    weights = from_scratch.initial_weights(config, context.seed)
    context.logger.info("training the tokenizer")
    with TemporaryDirectory() as scratch, atomic_folder(target) as partial:
        texts = (row.as_text() for row in context.rows.train)
        from_scratch.train_tokenizer(texts, settings.vocab_size, Path(scratch))
        checkpoint_writer.write_checkpoint(
            partial, weights, config, companions=Path(scratch)
        )

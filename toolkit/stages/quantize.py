"""The quantize stage: one post-training method over the current model."""

from mlx.utils import tree_flatten

from ..quant.layers import select
from ..registry import entries
from .context import Artefact, Context, write_checkpoint


def run(config, context: Context) -> Artefact:
    """Quantize the current model; leave it beside its unquantized reference.

    Args:
        config: the `Config` of a method in toolkit.quant.
    """
    reference = context.current.model
    loaded = context.load(reference, compute="stored")
    selection = select(loaded.model, config)
    for path, reason in sorted(selection.kept.items()):
        context.report.say(f"{path} is kept: {reason}")
    method = entries("toolkit.quant", "Config")[config.method]
    tensors = method.quantize(loaded.model, selection.specs, loaded.dtype)
    weights = dict(tree_flatten(loaded.model.parameters()))
    target = context.folder / "model"
    write_checkpoint(target, loaded, weights, selection, tensors)
    facts = context.current.facts | {"method": config.method, "kept": selection.kept}
    return Artefact(target, reference, context.current.adapters, facts)

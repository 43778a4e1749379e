"""The quantize stage: one post-training method over the current model."""

from mlx.utils import tree_flatten

from ..export import mlx as checkpoints
from ..quant.layers import select
from ..registry import entries
from ..run.files import atomic_folder
from .context import Artefact, Context


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
    rounded = {f"{path}.weight" for path in selection.specs}
    weights = dict(tree_flatten(loaded.model.parameters()))
    kept = {name: value for name, value in weights.items() if name not in rounded}
    target = context.folder / "model"
    with atomic_folder(target) as partial:
        checkpoints.write(
            partial,
            kept | tensors,
            loaded.config,
            companions=loaded.path,
            specs=selection.specs,
            kept=list(selection.kept),
        )
    facts = context.current.facts | {"method": config.method, "kept": selection.kept}
    return Artefact(target, reference, context.current.adapters, facts)

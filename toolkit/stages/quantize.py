"""The quantize stage: a post-training method over the current model, and its gates."""

import shutil

from mlx.utils import tree_flatten

from ..quant.layers import select
from ..quant.task import Task
from ..registry import entries
from .calibrating import Calibrating
from .context import Artefact, Context, write_checkpoint
from .improving import Improving, is_judged


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
    weights = dict(tree_flatten(loaded.model.parameters()))
    judging = is_judged(config)
    calibrating = Calibrating(
        config.calibration, context, loaded.tokenizer, judging=judging
    )
    method = entries("toolkit.quant", "Config")[config.method]
    task = Task(
        loaded.model,
        selection.specs,
        loaded.dtype,
        lambda _, tokens: calibrating.watched(tokens),
        context.folder,
        context.report,
    )
    tensors = method.quantize(config, task)
    facts = context.current.facts | {"method": config.method, "kept": selection.kept}
    if judging:
        improving = Improving(config, context, calibrating, loaded, weights, selection)
        tensors, measured = improving.run(tensors)
        facts |= measured
    target = context.folder / "model"
    write_checkpoint(target, loaded, weights, selection, tensors)
    for name in ("candidate", "held-out", "training", "tuning"):
        shutil.rmtree(context.folder / name, ignore_errors=True)
    return Artefact(target, reference, context.current.adapters, facts)

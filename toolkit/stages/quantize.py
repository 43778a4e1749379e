"""The quantize stage: a post-training method over the current model, and its gates."""

from dataclasses import replace

from mlx.utils import tree_flatten

from ..quant.budget import allocate
from ..quant.layers import select
from ..quant.settings import METHODS
from ..quant.task import Task
from ..run.files import remove_folder
from .calibrating import Calibrating
from .context import Artefact, Context, write_checkpoint
from .improving import Improving, is_judged

# Left by the steps of the stage, and of no use after the checkpoint.
PASSING = ("scratch", "candidate", "held-out", "training", "tuning")


def run(config, context: Context) -> Artefact:
    """Quantize the current model; leave it beside its unquantized reference.

    Args:
        config: the `Config` of a method in toolkit.quant.
    """
    reference = context.current.model
    loaded = context.load(reference, compute="stored", lazy=True)
    selection = select(loaded.model, config)
    for path, reason in sorted(selection.kept.items()):
        context.report.say(f"{path} is kept: {reason}")
    judging = is_judged(config)
    calibrating = Calibrating(
        config.calibration, context, loaded.tokenizer, judging=judging
    )
    method = METHODS[config.method]
    task = Task(
        loaded.model,
        selection.specs,
        loaded.dtype,
        calibrating.watched,
        context.folder / "scratch",
        context.report,
        loaded.reread,
    )
    facts = context.current.facts | {"method": config.method, "kept": selection.kept}
    if config.budget:
        computing, own = context.load(reference).model, context.folder
        here = replace(task, folder=own)
        selection, found = allocate(config, selection, here, computing, reference)
        task, facts = replace(task, specs=selection.specs), facts | {"budget": found}
    tensors = method.quantize(config, task)
    if judging:
        improving = Improving(config, context, calibrating, loaded, selection)
        tensors, measured = improving.run(tensors)
        facts |= measured
    # Unread, and in no other place, so that each is let go once it is written.
    weights = dict(tree_flatten(loaded.reread().parameters()))
    target = context.folder / "model"
    write_checkpoint(target, loaded, weights, selection, tensors)
    for name in PASSING:
        remove_folder(context.folder / name)
    return Artefact(target, reference, context.current.adapters, facts)

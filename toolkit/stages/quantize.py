"""The quantize stage: one post-training method over the current model."""

from dataclasses import replace

import mlx.core as mx
from mlx.utils import tree_flatten

from ..data.sources import Splits
from ..data.windows import windows
from ..model.load import Loaded
from ..quant.budget import allocate
from ..quant.layers import select
from ..quant.task import Calibration, Task
from ..registry import entries
from ..run.files import remove_folder
from .context import Artefact, Context, write_checkpoint

WITHOUT_ROWS = "builtin:stdlib"


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
    method = entries("toolkit.quant", "Config")[config.method]
    scratch = context.folder / "scratch"
    task = Task(
        loaded.model,
        selection.specs,
        loaded.dtype,
        lambda calibration, tokens: _windows(calibration, tokens, context, loaded),
        scratch,
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
    # Unread, and in no other place, so that each is let go once it is written.
    weights = dict(tree_flatten(loaded.reread().parameters()))
    target = context.folder / "model"
    write_checkpoint(target, loaded, weights, selection, tensors)
    remove_folder(scratch)
    return Artefact(target, reference, context.current.adapters, facts)


def _windows(
    calibration: Calibration, tokens: int, context: Context, loaded: Loaded
) -> mx.array:
    source = calibration.source
    if source is None and not context.data.train:
        source = WITHOUT_ROWS
    rows = context.rows if source is None else _splits(source, context)
    found = windows(
        rows.train,
        loaded.tokenizer,
        length=calibration.length,
        tokens=tokens,
        seed=context.seed,
    )
    name = source or ", ".join(context.data.train)
    context.report.say(f"calibrating on {found.size:,} tokens of {name}")
    return mx.array(found)


def _splits(source: str, context: Context) -> Splits:
    rows = context.rows
    # What is held out of a training source by itself is not held out of this one.
    data = rows.data.model_copy(update={"train": [source], "valid": [source]})
    return Splits(data, find=rows.find, seed=rows.seed, say=rows.say, warn=rows.warn)

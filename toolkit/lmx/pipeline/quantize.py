"""The quantize stage: a post-training method over the current model, and its gates."""

from dataclasses import replace

from mlx.utils import tree_flatten

from ..quantization.mixed_precision.search import search_plan
from ..quantization.ptq.base import PTQContext
from ..quantization.ptq.methods import METHODS
from ..quantization.target_layers import select_layers
from ..run.fs import remove_folder
from .calibration import CalibrationData
from .context import ModelArtifact, StageContext, write_model
from .refinement import PostQuantRefinement, uses_eval_tokens

# Left by the steps of the stage, and of no use after the checkpoint.
PASSING = ("scratch", "candidate", "held-out", "training", "tuning")


def run(config, context: StageContext) -> ModelArtifact:
    """Quantize the current model; leave it beside its unquantized reference.

    Args:
        config: the `Config` of a method in lmx.quantization.
    """
    reference = context.current.model
    loaded = context.load(reference, compute="stored", lazy=True)
    selection = select_layers(loaded.model, config)
    for path, reason in sorted(selection.kept.items()):
        context.logger.info(f"{path} is kept: {reason}")
    judging = uses_eval_tokens(config)
    calibrating = CalibrationData(
        config.calibration, context, loaded.tokenizer, judging=judging
    )
    task = PTQContext(
        loaded.model,
        selection.specs,
        loaded.dtype,
        calibrating.watched,
        context.folder / "scratch",
        context.logger,
        loaded.reread,
    )
    facts = context.current.facts | {"method": config.method, "kept": selection.kept}
    if config.mixed_precision:
        computing, own = context.load(reference).model, context.folder
        here = replace(task, folder=own)
        selection, found = search_plan(config, selection, here, computing, reference)
        task, facts = (
            replace(task, specs=selection.specs),
            facts | {"mixed_precision": found},
        )
    tensors = METHODS[config.method](config, task)
    if judging:
        improving = PostQuantRefinement(config, context, calibrating, loaded, selection)
        tensors, measured = improving.run(tensors)
        facts |= measured
    # Unread, and in no other place, so that each is let go once it is written.
    weights = dict(tree_flatten(loaded.reread().parameters()))
    target = context.folder / "model"
    write_model(target, loaded, weights, selection, tensors)
    for name in PASSING:
        remove_folder(context.folder / name)
    return ModelArtifact(target, reference, context.current.adapters, facts)

"""The train stage: full or LoRA, plain or quantization-aware, through the one loop."""

from typing import TYPE_CHECKING

from ..config.train import TrainConfig

if TYPE_CHECKING:
    from .context import ModelArtifact, StageContext


# All processes of a run take part.
TOGETHER = True


def run(config: TrainConfig, context: "StageContext") -> "ModelArtifact":
    """Train the current model; leave it as a checkpoint, rounded if so trained."""
    from .fp_baseline import FullPrecisionBaseline
    from .initial_model import begin
    from .train_run import TrainRun

    ranks = context.ranks
    with ranks.collective_errors():
        if ranks.is_first:
            begin(context)
    with ranks.collective_errors():
        twin = (
            FullPrecisionBaseline(config, context)
            if config.compare_full_precision
            else None
        )
        training = TrainRun(config, context)
    try:
        training.run()
    finally:
        # Also of what was stopped, or went wrong.
        if ranks.is_first:
            _draw(context)
    with ranks.collective_errors():
        artefact = training.write() if ranks.is_first else context.current
    if twin is None:
        return artefact
    selection, held_out = training.selection, training.trainer.eval_batches
    # Its weights and moments make room for the twin's.
    del training
    twin.train()
    with ranks.collective_errors():
        is_first = ranks.is_first
        return twin.compared(artefact, selection, held_out) if is_first else artefact


def _draw(context: "StageContext") -> None:
    from ..run.html.page import draw_curves

    target = context.folder / "curves.svg"
    if draw_curves(context.output, context.folder.name, target):
        context.logger.info(f"curves: {target}")

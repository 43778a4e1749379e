"""What a quantization-aware stage won back, beside its twin in full precision."""

from dataclasses import replace

from mlx.utils import tree_flatten

from ..config.train import TrainConfig
from ..data.batching import Batch
from ..errors import UserError
from ..evaluation.gap_recovery import (
    PerSequenceSums,
    gap_recovered,
    measure_per_sequence,
)
from ..models.checkpoint import read_config
from ..quantization.packing import pack
from ..quantization.target_layers import QuantizationPlan
from ..run.tables import recovery_table
from .context import ModelArtifact, StageContext, write_model
from .train_run import TrainRun

NAME = "fp_baseline"


class FullPrecisionBaseline:
    """The same training without quantization, and what it is when simply rounded.

    Everything of it lies in `twin`, in the folder of the stage: `dense` and `rounded`,
    by the grids of the stage, are checkpoints. Where the unquantized model itself is
    the teacher it has nothing to learn, and is the twin as it is.

    Raises:
        UserError: the stage goes on from codes, and what these were made of is gone.
    """

    def __init__(self, config: TrainConfig, context: StageContext):
        self.folder = context.folder / NAME
        self.config = config.model_copy(
            update={"qat": None, "compare_full_precision": False, "sample_prompts": []}
        )
        current = context.current
        origin = context.require_visible(
            current.reference if current else context.initial_model
        )
        if "quantization" in read_config(origin):
            raise UserError(
                "the twin in full precision has nothing to begin with: this model is "
                "known in codes alone",
                place=str(origin),
                hint="leave twin out, or begin with the unquantized model",
            )
        self.dense = origin if config.is_self_distillation else self.folder / "dense"
        self.context = replace(
            context,
            folder=self.folder,
            output=self.folder,
            current=ModelArtifact(origin, origin),
        )

    def train(self) -> None:
        """Train it, if that is not done yet; a run that was stopped goes on."""
        ranks, logger = self.context.ranks, self.context.logger
        if ranks.broadcast_object(self.dense.is_dir()):
            return
        stage, logger.stage = logger.stage, f"{logger.stage}, {NAME}"
        try:
            logger.info("the same training in full precision, to compare with")
            with ranks.collective_errors():
                training = TrainRun(self.config, self.context)
            training.run()
            with ranks.collective_errors():
                if ranks.is_first:
                    training.write()
        finally:
            logger.stage = stage

    def compared(
        self, trained: ModelArtifact, selection: QuantizationPlan, held_out: list[Batch]
    ) -> ModelArtifact:
        """What was trained, with `recovered` among its facts, which is also shown.

        Args:
            selection: the grids to round the twin to, and what is kept.
            held_out: of validation rows.
        """
        self._round(selection)
        full = self.context.load(self.dense).model
        sums = [measure_per_sequence(full, full, held_out)]
        for folder in (self.folder / "rtn", trained.model):
            found = self.context.load(folder).model
            sums.append(measure_per_sequence(full, found, held_out))
        gain = trained.facts["improvement"]
        is_gain = gain["in_training"] > 0
        kept = gain["exported"] / gain["in_training"] if is_gain else None
        found = _shares(*sums) | {"gain_retained": kept}
        logger = self.context.logger
        logger.table(f"{logger.stage}: recovered", *recovery_table(found))
        return replace(trained, facts=trained.facts | {"gap_recovered": found})

    def _round(self, selection: QuantizationPlan) -> None:
        loaded = self.context.load(self.dense, compute="stored")
        weights, packed = dict(tree_flatten(loaded.model.parameters())), {}
        for path, spec in selection.specs.items():
            tensors = pack(weights[f"{path}.weight"], spec, loaded.dtype)
            packed |= {f"{path}.{name}": value for name, value in tensors.items()}
        write_model(self.folder / "rtn", loaded, weights, selection, packed)


def _shares(
    full: PerSequenceSums, rounded: PerSequenceSums, trained: PerSequenceSums
) -> dict:
    """As logger.json has it: what was measured, and what was won back of it."""
    found = {
        "fp_baseline": full.means,
        "fp_baseline_rtn": rounded.means,
        "qat": trained.means,
    }
    for name in ("loss", "kl"):
        sums = (getattr(each, name) for each in (full, rounded, trained))
        share, error = gap_recovered(*sums) or (None, None)
        found |= {name: share, f"{name}_stderr": error}
    return found

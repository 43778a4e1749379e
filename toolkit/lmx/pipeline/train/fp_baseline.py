"""The full-precision baseline of a QAT stage, and the RTN gap that QAT recovers."""

from dataclasses import replace
from pathlib import Path

from mlx.utils import tree_flatten

from ...config.train import TrainConfig
from ...data.batching import Batch
from ...errors import UserError
from ...evaluation.gap_recovery import gap_recovered, measure_per_sequence
from ...files.hashes import hash_folder
from ...models.checkpoint import read_config
from ...quantization.packing import pack
from ...quantization.target_layers import QuantizationPlan
from ...run.tables import recovery_table
from ..context import ModelArtifact, StageContext, write_model
from .run import TrainRun

BASELINE_FOLDER = "fp_baseline"
# Artifacts: the hashes of a model that is whole.
HASHES = "hashes"


class FullPrecisionBaseline:
    """The same training without quantization, and its RTN quantization.

    Its checkpoints `dense` and `rtn` are in the folder `fp_baseline` of the stage. If
    the teacher is the unquantized model itself, that model is the baseline.

    Raises:
        UserError: the stage continues from codes, and the weights before the
            quantization are unknown.
    """

    def __init__(self, config: TrainConfig, context: StageContext):
        self.folder = context.folder / BASELINE_FOLDER
        self.config = config.model_copy(
            update={"qat": None, "compare_full_precision": False, "sample_prompts": []}
        )
        current = context.current
        initial = context.require_visible(
            current.reference if current else context.initial_model
        )
        if "quantization" in read_config(initial):
            raise UserError(
                "the full-precision baseline has nothing to begin with: the weights "
                "before the quantization are unknown",
                place=str(initial),
                hint="leave compare_full_precision out, or begin with the unquantized "
                "model",
            )
        self.model = initial if config.is_self_distillation else self.folder / "dense"
        self.context = replace(
            context,
            folder=self.folder,
            output=self.folder,
            current=ModelArtifact(initial, initial),
        )

    def train(self, steps: int) -> None:
        """Train the baseline if it is not complete. An interrupted training resumes."""
        ranks, logger = self.context.ranks, self.context.logger
        # If the model is its own teacher, it is the baseline.
        artifacts = self.context.artifacts
        known = artifacts.find_on_first(HASHES, self.model.name)
        is_done = self.model == self.context.current.model or (
            ranks.is_first and known and known.facts == hash_folder(self.model)
        )
        if ranks.broadcast_object(bool(is_done)):
            return
        if known and ranks.is_first:
            logger.warning(f"{self.model}: damaged, made again")
        stage, logger.stage = logger.stage, f"{logger.stage}, {BASELINE_FOLDER}"
        try:
            logger.info("the same training in full precision, to compare with")
            lengths = {"steps": steps, "epochs": None, "budget": None}
            config = self.config.model_copy(update=lengths)
            training = TrainRun(config, self.context)
            training.run()
            training.finish()
            if ranks.is_first:
                hashes = hash_folder(self.model)
                artifacts.put(HASHES, self.model.name, lambda _: hashes)
            ranks.wait_for_all()
        finally:
            logger.stage = stage

    def compare(
        self,
        trained: ModelArtifact,
        selection: QuantizationPlan,
        eval_batches: list[Batch],
    ) -> ModelArtifact:
        """The trained model, whose reference is the baseline from now on.

        `gap_recovered` is one of its facts, and is logged. All ranks measure, and the
        first one, which has the trained model, makes the result.

        Args:
            selection: the layers to quantize with RTN.
        """
        rtn, context, ranks = self.folder / "rtn", self.context, self.context.ranks
        if ranks.is_first:
            loaded = context.load(self.model, compute="stored")
            weights, packed = dict(tree_flatten(loaded.model.parameters())), {}
            for path, spec in selection.specs.items():
                tensors = pack(weights[f"{path}.weight"], spec, loaded.dtype)
                packed |= {f"{path}.{name}": value for name, value in tensors.items()}
            write_model(rtn, loaded, weights, selection, packed, keeps_mtp=False)
            del loaded, weights, packed
        ranks.wait_for_all()
        folders = self.model, rtn, Path(ranks.broadcast_object(str(trained.model)))
        baseline, sums = None, []
        for folder in folders:
            model = context.load(context.require_visible(folder)).model
            if baseline is None:
                baseline = model
            sums.append(measure_per_sequence(baseline, model, eval_batches, ranks))
        if not ranks.is_first:
            return trained
        names = ("fp_baseline", "fp_baseline_rtn", "qat")
        result = {name: each.means for name, each in zip(names, sums, strict=True)}
        for name in ("loss", "kl"):
            values = [getattr(each, name) for each in sums]
            share, error = gap_recovered(*values) or (None, None)
            result |= {name: share, f"{name}_stderr": error}
        gain = trained.facts["improvement"]
        result["gain_retained"] = None
        if gain["in_training"] > 0:
            result["gain_retained"] = gain["exported"] / gain["in_training"]
        logger = self.context.logger
        logger.table(f"{logger.stage}: gap recovered", *recovery_table(result))
        facts = trained.facts | {"gap_recovered": result}
        return replace(trained, reference=self.model, rounded=rtn, facts=facts)

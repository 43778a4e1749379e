"""The quantize stage: a PTQ method, whose result is kept if it is better than RTN."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from mlx.utils import tree_flatten

from ...config.data import DataConfig
from ...config.messages import Problem
from ...config.quantize import PTQConfig
from ...files.atomic import remove
from ...quantization.target_layers import select_layers
from ..context import ModelArtifact, StageContext, write_model
from ..dataset_checks import check_source, known_columns, named_sources
from ..estimate import Estimate, ModelShape, Workload
from ..stage import ModelState, RawStage, Stage, quantization_values
from .estimate import estimate_quantization

if TYPE_CHECKING:
    from ...models.loader import LoadedModel
    from ...quantization.ptq.base import PTQContext
    from ...quantization.target_layers import QuantizationPlan
    from .calibration import CalibrationData

# Folders of intermediate results, which the finished checkpoint replaces.
INTERMEDIATE = ("scratch", "candidate", "artifacts")


class QuantizeStage(Stage):
    """Quantize the current model after training; leaves a quantized checkpoint."""

    kind = "quantize"
    runs_on_all_ranks = True
    changes_model = True
    config: PTQConfig

    @classmethod
    def check(cls, raw: RawStage, state: ModelState) -> Iterator[Problem]:
        yield from super().check(raw, state)
        if state.quantization is not None:
            hint = "quantizing twice adds error; keep one quantization"
            if state.source:
                hint = (
                    "quantizing twice adds error; start from the model before it was "
                    f"quantized, or expand this one: lmx convert {state.source} TARGET "
                    "--dequantize"
                )
            yield Problem(raw.path, "the model is already quantized here", hint, "key")
        columns, keys = known_columns(raw.data), ("calibration", "dataset")
        for path, source in named_sources((*raw.path, *keys), raw.value(*keys)):
            problem, _ = check_source(path, source, "train", raw.find, columns)
            if problem:
                yield problem

    @classmethod
    def next_state(cls, raw: RawStage, state: ModelState) -> ModelState:
        state = super().next_state(raw, state)
        return replace(state, quantization=quantization_values(raw.block))

    @property
    def quantization(self) -> PTQConfig:
        return self.config

    def estimate(self, workload: Workload, current: ModelShape) -> Estimate:
        return estimate_quantization(self.config, workload.shape)

    def data_read(self, data: dict) -> dict:
        config = self.config
        if config.compares_with_rtn or config.kv_cache:
            return data
        if config.method == "rtn" and not (config.smoothing or config.mixed_precision):
            return {}
        # Without validation data, some of the training data is not calibrated on.
        return data | {"valid": bool(data["valid"])}

    def sources(self, data: DataConfig) -> list[tuple[str, str]]:
        names = self.config.calibration.dataset
        read = super().sources(data)
        return [*read, *(("calibration.dataset", name) for name in names)]

    def run(self, context: StageContext) -> ModelArtifact:
        """Quantize the current model, which becomes the full-precision reference.

        All processes of the run share the examples, also those of a tensor group: each
        holds one block at a time.
        """
        # Imported here, so that a recipe is checked without the libraries of a run.
        from ...quantization.mixed_precision.search import search_plan
        from ...quantization.ptq.channel_scales.channel_scales import (
            ChannelScales,
            smooth,
        )
        from ...quantization.ptq.methods import METHODS
        from .kv_cache import quantize_kv_cache
        from .rollback import better_than_rtn

        config, ranks = self.config, context.ranks
        loaded, selection, calibration, task = self._begin(context)
        reference = loaded.path
        facts = context.current.facts
        facts = facts | {"method": config.method, "kept": selection.skipped}
        if config.mixed_precision:
            model = context.load(reference).model
            search = replace(task, folder=context.folder)
            selection, result = search_plan(config, selection, search, model, reference)
            del model
            task = replace(task, specs=selection.specs)
            facts["mixed_precision"] = result
        smoothing = smooth(task, config) if config.smoothing else ChannelScales([])
        # Without names for the method and the models, which are freed.
        tensors = smoothing.unquantized(task)
        # AWQ scales some of these once more.
        tensors |= METHODS[config.method](config, smoothing.context(task)).quantize()
        measured = {}
        if config.compares_with_rtn:
            tensors, measured = better_than_rtn(
                config, context, calibration, loaded, selection, tensors
            )
        target = context.folder / "model"
        if ranks.is_first:
            # Lazy, referenced nowhere else, so that each is freed once written.
            weights = dict(tree_flatten(loaded.reread().parameters()))
            with context.logger.activity("writing the quantized model"):
                write_model(target, loaded, weights, selection, tensors)
        ranks.wait_for_all()
        if config.kv_cache:
            measured["kv_cache"] = quantize_kv_cache(
                config.kv_cache, target, calibration, context
            )
        for name in INTERMEDIATE if ranks.is_first else ():
            remove(context.folder / name)
        adapters, facts = context.current.adapters, facts | measured
        return ModelArtifact(target, reference, adapters, facts)

    def _begin(
        self, context: StageContext
    ) -> "tuple[LoadedModel, QuantizationPlan, CalibrationData, PTQContext]":
        """The model, its grids, the calibration data, and the task of a method."""
        from ...quantization.ptq.base import PTQContext
        from .calibration import CalibrationData

        config, ranks = self.config, context.ranks
        context.require_shared_folder()
        reference = context.require_visible(context.current.model)
        if ranks.is_first:
            context.check_base()
        loaded = context.load(reference, compute="stored", lazy=True)
        selection = select_layers(loaded.model, config)
        for path, reason in sorted(selection.skipped.items()):
            context.logger.info(f"left unquantized: {path}: {reason}")
        calibration = CalibrationData(
            config.calibration,
            context,
            loaded.tokenizer,
            holds_out=config.compares_with_rtn or config.kv_cache is not None,
        )
        task = PTQContext(
            loaded.model,
            selection.specs,
            loaded.dtype,
            calibration.train_sequences,
            context.folder / "scratch",
            context.logger,
            loaded.reread,
            ranks,
        )
        return loaded, selection, calibration, task

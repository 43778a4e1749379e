"""Memory, disk and speed of this machine, and whether a plan fits."""

from collections.abc import Iterator

import mlx.core as mx

from ..config.loader import LoadedRecipe
from ..convert import importers
from ..convert.importers import gguf
from ..cpu.memory import memory_limit
from ..data.batching import bucket_lengths
from ..errors import WILL_NOT_FIT, UserError
from ..models.loader import check_loadable
from ..run.fs import free_bytes
from ..run.progress import format_duration, readable_size
from .estimate import ModelShape, StageResources, Workload, config_dtype
from .plan import RunPlan


class ResourceCheck:
    """What a plan needs of this machine.

    Args:
        shape: the recipe's model.
        lengths: tokens of a sample of the examples; none = all have max_seq_length.
        share: training examples for every one in `lengths`.
    """

    def __init__(
        self,
        loaded: LoadedRecipe,
        plan: RunPlan,
        shape: ModelShape,
        lengths: list[int],
        share: float,
    ):
        longest = loaded.recipe.data.max_seq_length
        workload = Workload(
            shape,
            config_dtype(shape.config),
            _padded(lengths or [longest], longest),
            longest,
            len(lengths) * share,
            loaded.find,
        )
        self.output = plan.output
        self.stages: dict[str, StageResources] = {}
        current, finished = shape, plan.finished()
        for planned in plan.stages:
            needs = planned.stage.resources(workload, current)
            current = needs.model
            if planned.name in finished:
                needs = StageResources(current)
            self.stages[planned.name] = needs
        self.disk = sum(needs.disk for needs in self.stages.values())
        self.free = free_bytes(plan.output)
        self.limit = memory_limit()

    def memory(self, name: str) -> int:
        """The estimated memory of a stage, in bytes."""
        needs = self.stages[name]
        parts = needs.training.memory if needs.training else needs.memory
        return int(sum(parts.values()))

    def lines(self) -> Iterator[tuple[str, str]]:
        """Memory, time and disk: topics and texts."""
        for name, needs in self.stages.items():
            for topic, text in self._stage_lines(name, needs):
                yield topic, f"{name}: {text}"
        yield (
            "disk",
            f"needs {readable_size(self.disk)}, free {readable_size(self.free)}",
        )

    @property
    def fits(self) -> bool:
        """Whether memory and disk suffice."""
        try:
            self.require()
        except UserError:
            return False
        return True

    def require(self) -> None:
        """Raise UserError with code 3 if something does not fit."""
        for name, needs in self.stages.items():
            memory = self.memory(name)
            if memory > self.limit:
                raise UserError(
                    f"{name} needs about {readable_size(memory)} of memory, and the "
                    f"limit is {readable_size(self.limit)}",
                    hint=_remedy(needs),
                    code=WILL_NOT_FIT,
                )
        if self.disk > self.free:
            raise UserError(
                f"the run needs {readable_size(self.disk)} of disk, and "
                f"{readable_size(self.free)} are free",
                hint="output=<a folder on another disk>; --ignore-limits runs anyway",
                place=str(self.output),
                code=WILL_NOT_FIT,
            )

    def _stage_lines(
        self, name: str, needs: StageResources
    ) -> Iterator[tuple[str, str]]:
        if needs.data:
            yield "data", needs.data
        if size := self.memory(name):
            parts, trained = "", ""
            if cost := needs.training:
                sizes = (f"{k} {readable_size(v)}" for k, v in cost.memory.items())
                parts = f" ({', '.join(sizes)})"
                trained = (
                    f"; {cost.trained:,} of {cost.parameters:,} parameters trained"
                )
            limit = readable_size(self.limit)
            yield "memory", f"about {readable_size(size)}{parts} of {limit}{trained}"
        if (seconds := needs.seconds) is None:
            yield "time", "unknown before the data is read"
        elif seconds:
            steps = f" for {needs.steps:,} steps" if needs.steps else ""
            yield "time", f"roughly {format_duration(seconds)}{steps}"
        if needs.disk:
            yield "disk", readable_size(needs.disk)


def _remedy(needs: StageResources) -> str:
    options = f"try {' or '.join(needs.remedies)}; " if needs.remedies else ""
    return f"{options}--ignore-limits runs it anyway"


def model_shape(loaded: LoadedRecipe) -> ModelShape | None:
    """The shape of the recipe's model; None if the model is not on this disk.

    Raises:
        UserError: the folder is not a model that can be loaded.
    """
    model = loaded.recipe.model
    if model.from_scratch:
        from ..models.from_scratch import llama_config

        config = llama_config(model.from_scratch)
        empty = ModelShape(config, 0)
        size = empty.parameters * getattr(mx, model.from_scratch.dtype).size
        return ModelShape(config, size)
    folder = loaded.find(model.path)
    source = importers.find_importable(folder) if folder else None
    if source and source.is_file():
        return ModelShape(*gguf.outline(source))
    # The shape of a folder in another format is known once it has been imported.
    if folder is None or source:
        return None
    config = check_loadable(folder, trust_remote_code=model.trust_remote_code)
    if "model_file" in config:
        return None
    return ModelShape.of_folder(folder, config)


def _padded(lengths: list[int], max_seq_length: int) -> list[int]:
    """Lengths of examples as batches pad them."""
    buckets = bucket_lengths(max_seq_length)
    return [next(b for b in buckets if length <= b) for length in lengths]

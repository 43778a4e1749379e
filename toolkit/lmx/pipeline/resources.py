"""What a plan needs of this machine, and whether it fits."""

from collections.abc import Iterator, Sequence

from ..config.loader import LoadedRecipe
from ..convert import importers
from ..convert.importers import gguf
from ..cpu.memory import memory_limit
from ..data.batching import bucket_lengths
from ..errors import WILL_NOT_FIT, UserError
from ..files.atomic import free_bytes
from ..models.loader import check_loadable
from ..run.progress import format_duration, readable_size
from .estimate import Estimate, ModelShape, Workload
from .plan import RunPlan
from .work import rates_age

# A fine-tuned model seldom gains from more passes over its data.
MANY_EPOCHS = 5
# Seconds after which the age of a measurement is worth its number.
JUST_NOW = 120


class ResourceCheck:
    """What a plan needs of this machine.

    Args:
        shape: the recipe's model.
        lengths: tokens of a sample of the examples; none = all have max_seq_length.
        share: training examples for every one in `lengths`.
        valid_tokens: of the validation examples; None = unknown.
    """

    def __init__(
        self,
        loaded: LoadedRecipe,
        plan: RunPlan,
        shape: ModelShape,
        lengths: Sequence[int] = (),
        share: float = 1.0,
        valid_tokens: float | None = None,
    ):
        recipe = loaded.recipe
        longest = recipe.data.max_seq_length
        buckets = bucket_lengths(longest)
        workload = Workload(
            shape,
            [next(b for b in buckets if n <= b) for n in lengths or [longest]],
            longest,
            len(lengths) * share,
            loaded.find,
            recipe.parallel.tensor,
            valid_tokens,
        )
        self.output, self.stages = plan.output, {}
        finished = plan.finished()
        for planned in plan.stages:
            needs = planned.stage.estimate(workload, shape)
            shape = needs.model
            is_done = planned.name in finished
            self.stages[planned.name] = Estimate(shape) if is_done else needs
        self.disk = sum(needs.disk for needs in self.stages.values())
        self.free, self.limit = free_bytes(plan.output), memory_limit()

    def lines(self) -> Iterator[tuple[str, str]]:
        """Memory, time and disk: topics and texts."""
        limit = readable_size(self.limit)
        for name, needs in self.stages.items():
            if needs.data:
                yield "data", f"{name}: {needs.data}"
            if needs.memory:
                parts = (f"{k} {readable_size(v)}" for k, v in needs.parts.items())
                size = f"about {readable_size(needs.memory)} of {limit}"
                text = f"{name}: {size} ({', '.join(parts)})"
                if needs.trained:
                    text += f"; {needs.trained:,} of {needs.parameters:,} parameters "
                    text += "trained"
                yield "memory", text
            if (seconds := needs.seconds) is None:
                yield "time", f"{name}: unknown before the data is read"
            elif seconds:
                steps = f" for {needs.steps:,} steps" if needs.steps else ""
                epochs = f", {needs.epochs:.1f} epochs" if needs.epochs else ""
                text = f"roughly {format_duration(seconds)}{steps}{epochs}"
                yield "time", f"{name}: {text}"
            if (needs.epochs or 0) > MANY_EPOCHS:
                text = f"more than {MANY_EPOCHS} epochs teach most data by heart"
                yield "warning", f"{name}: {text}; 3 are usual"
            if needs.disk:
                yield "disk", f"{name}: {readable_size(needs.disk)}"
        dtypes = {needs.dtype for needs in self.stages.values() if needs.seconds}
        if age := max(filter(None, map(rates_age, dtypes)), default=None):
            when = f"{format_duration(age)} ago" if age > JUST_NOW else "just now"
            text = f"at the speed measured {when}; `lmx doctor` measures it again"
            yield "time", text
        disk, free = map(readable_size, (self.disk, self.free))
        yield "disk", f"needs {disk}, free {free}"

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
            if needs.memory > self.limit:
                options = " or ".join(needs.remedies)
                options = f"try {options}; " if options else ""
                raise UserError(
                    f"{name} needs about {readable_size(needs.memory)} of memory, and "
                    f"the limit is {readable_size(self.limit)}",
                    hint=f"{options}--ignore-limits runs it anyway",
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


def model_shape(loaded: LoadedRecipe) -> ModelShape | None:
    """The shape of the recipe's model; None if the model is not on this disk.

    Raises:
        UserError: the folder is not a model that can be loaded.
    """
    model = loaded.recipe.model
    if model.from_scratch:
        from ..models.from_scratch import llama_config

        return ModelShape.of_config(llama_config(model.from_scratch))
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

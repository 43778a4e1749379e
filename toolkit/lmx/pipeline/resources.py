"""What a plan needs of this machine, whether it fits, and what would fit."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import mlx.core as mx

from ..config.loader import LoadedRecipe, load_recipe_data
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
from .plan import plan as make_plan

FitKey = Literal["max_seq_length", "batch_size", "batch_tokens"]
FIT_KEYS: tuple[FitKey, ...] = get_args(FitKey)
SHORTEST = 8
# Of the limit: measured peaks are 0.9 to 1.26 times the estimate.
USABLE = 0.8
# The largest values that are tried if neither the model nor the data has a bound.
MOST_TOKENS, MOST_EXAMPLES = 1 << 17, 1 << 12


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
        lengths: Sequence[int] = (),
        share: float = 1.0,
    ):
        longest = loaded.recipe.data.max_seq_length
        buckets = bucket_lengths(longest)
        padded = [next(b for b in buckets if n <= b) for n in lengths or [longest]]
        examples = len(lengths) * share
        dtype = config_dtype(shape.config)
        workload = Workload(
            shape,
            dtype,
            padded,
            longest,
            examples,
            loaded.find,
            loaded.recipe.parallel.tensor,
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

    def lines(self) -> Iterator[tuple[str, str]]:
        """Memory, time and disk: topics and texts."""
        for name, needs in self.stages.items():
            for topic, text in _lines(needs, self.limit):
                yield topic, f"{name}: {text}"
        disk, free = map(readable_size, (self.disk, self.free))
        yield "disk", f"needs {disk}, free {free}"

    @property
    def fits(self) -> bool:
        """Whether memory and disk suffice."""
        memory = max((needs.memory for needs in self.stages.values()), default=0)
        return memory <= self.limit and self.disk <= self.free

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


def _lines(needs: StageResources, limit: int) -> Iterator[tuple[str, str]]:
    if needs.data:
        yield "data", needs.data
    if needs.memory:
        parts = ", ".join(f"{k} {readable_size(v)}" for k, v in needs.parts.items())
        text = (
            f"about {readable_size(needs.memory)} of {readable_size(limit)} ({parts})"
        )
        if cost := needs.training:
            text += f"; {cost.trained:,} of {cost.parameters:,} parameters trained"
        yield "memory", text
    if (seconds := needs.seconds) is None:
        yield "time", "unknown before the data is read"
    elif seconds:
        steps = f" for {needs.steps:,} steps" if needs.steps else ""
        yield "time", f"roughly {format_duration(seconds)}{steps}"
    if needs.disk:
        yield "disk", readable_size(needs.disk)


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


@dataclass(frozen=True)
class LargestFit:
    """The largest value of a key that fits.

    Attributes:
        address: the key of an override, such as "data.max_seq_length".
        limit: bytes of memory that the estimate may reach, USABLE of the machine's.
        reason: why the value is not larger.
    """

    address: str
    value: int
    limit: int
    reason: str

    def __str__(self) -> str:
        return (
            f"{self.address}={self.value} is the largest in {USABLE:.0%} of the limit, "
            f"{readable_size(self.limit)}, if every example has max_seq_length tokens: "
            f"{self.reason}"
        )


def check_with(
    loaded: LoadedRecipe, shape: ModelShape, overrides: dict[str, int]
) -> ResourceCheck:
    """What a recipe with other values needs of this machine.

    Every example has `max_seq_length` tokens. So the estimate grows with each of
    FIT_KEYS, whatever the data, and a run with the result is never refused.
    """
    # Without the checks of files and data, which the recipe has passed.
    other = load_recipe_data(
        loaded.data, [*overrides.items()], name=loaded.name, root=loaded.root
    )
    return ResourceCheck(other, make_plan(other), shape)


def find_largest(
    loaded: LoadedRecipe, plan: RunPlan, shape: ModelShape, key: FitKey, sequences: int
) -> list[LargestFit]:
    """The largest value of a key for the stages of a recipe that train.

    Args:
        sequences: of the training data, about; 0 = unknown.

    Returns:
        One result for max_seq_length, else one for each stage that has the key.

    Raises:
        UserError: no stage trains, none has the key, or, with code 3, not even the
            smallest value fits.
    """
    needs = check_with(loaded, shape, {}).stages
    addresses = {planned.name: planned.stage.address for planned in plan.stages}
    trained = [name for name in addresses if needs[name].training]
    if not trained:
        raise UserError(
            f"no stage of this recipe trains, so there is no {key} to find",
            hint="--dry-run without --find checks it",
        )
    reason = "larger values were not tried"
    if key == "max_seq_length":
        if bound := shape.setting("max_position_embeddings"):
            reason = f"the model has {bound:,} positions"
        bound = bound or MOST_TOKENS
        values = range(min(SHORTEST, bound), bound + 1)
        return [_largest(loaded, shape, f"data.{key}", trained, values, reason)]
    having = [name for name in trained if needs[name].batch_key == key]
    if not having:
        other = needs[trained[0]].batch_key
        raise UserError(f"{trained[0]} has {other}, not {key}", hint=f"--find {other}")
    # A batch has at least one sequence.
    length = loaded.recipe.data.max_seq_length if key == "batch_tokens" else 1
    if sequences:
        reason = f"one batch then has all {sequences:,} training sequences"
    values = range(length, length * (sequences or MOST_EXAMPLES) + 1)
    return [
        _largest(loaded, shape, f"{addresses[name]}.{key}", [name], values, reason)
        for name in having
    ]


def _largest(
    loaded: LoadedRecipe,
    shape: ModelShape,
    address: str,
    stages: list[str],
    values: range,
    reason: str,
) -> LargestFit:
    """The last of `values` with which all stages fit, by bisection.

    Args:
        reason: why no larger value is tried.
    """
    limit = int(USABLE * memory_limit())

    def needs(value: int) -> tuple[int, str, StageResources]:
        check = check_with(loaded, shape, {address: value})
        return max((check.stages[n].memory, n, check.stages[n]) for n in stages)

    if needs(values[-1])[0] <= limit:
        return LargestFit(address, values[-1], limit, reason)
    position = bisect_left(values, True, key=lambda value: needs(value)[0] > limit)
    if position == 0:
        memory, name, stage = needs(values[0])
        others = [remedy for remedy in stage.remedies if address not in remedy]
        raise UserError(
            f"{name} needs about {readable_size(memory)} of memory even with "
            f"{address}={values[0]}, and {USABLE:.0%} of the limit are "
            f"{readable_size(limit)}",
            hint=f"try {' or '.join(others)}" if others else None,
            code=WILL_NOT_FIT,
        )
    return LargestFit(address, values[position - 1], limit, "more does not fit")

"""`--dry-run --find`: the largest sequence length or batch that fits into memory.

The estimate assumes that every example has `max_seq_length` tokens. So it grows with
each of the keys, whatever the data, and a run with the result is never refused.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from ...config.loader import LoadedRecipe, load_recipe_data
from ...errors import WILL_NOT_FIT, UserError
from ...run.progress import readable_size
from ...run.tables import aligned
from ..estimate import ModelShape
from ..plan import RunPlan
from ..plan import plan as make_plan
from ..resources import ResourceCheck

FitKey = Literal["max_seq_length", "batch_size", "batch_tokens"]
FIT_KEYS: tuple[FitKey, ...] = get_args(FitKey)
SHORTEST = 8
# Of the limit: measured peaks are 0.9 to 1.26 times the estimate.
USABLE = 0.8
# The largest values that are tried if neither the model nor the data has a bound.
MOST_TOKENS, MOST_EXAMPLES = 1 << 17, 1 << 12
NOT_TRIED = "larger values were not tried"
# Values that are shown on each side of the result.
MAX_SHOWN = 6


@dataclass(frozen=True)
class FitBounds:
    """Above these values, nothing changes or the model does not work.

    Attributes:
        positions: of the model, in tokens; 0 = unknown.
        sequences: of the training data, about; 0 = unknown.
        longest: tokens of the longest training example; 0 = unknown.
        is_sample: only some examples, and that with most characters, were tokenized.
    """

    positions: int = 0
    sequences: int = 0
    longest: int = 0
    is_sample: bool = False


@dataclass(frozen=True)
class LargestFit:
    """The largest value of a key that fits.

    Attributes:
        address: the key of an override, such as "data.max_seq_length".
        trials: by value that was tried, ascending, the estimated bytes of the stage
            that needs most.
        limit: bytes of memory that the estimate may reach, USABLE of the machine's.
        reason: why the value is not larger.
    """

    address: str
    value: int
    trials: dict[int, int]
    limit: int
    reason: str

    def lines(self) -> Iterator[tuple[str, str]]:
        """Topics and texts of a dry run."""
        block, _, key = self.address.rpartition(".")
        yield (
            "find",
            f"{self.address}, if every example has max_seq_length tokens, in "
            f"{readable_size(self.limit)}: {USABLE:.0%} of the limit, as estimates may "
            "be too low",
        )
        place, tried = [*self.trials].index(self.value), [*self.trials.items()]
        rows = [
            [f"{v:,}", readable_size(size), "yes" if size <= self.limit else "no"]
            for v, size in tried[max(0, place - MAX_SHOWN) : place + MAX_SHOWN + 1]
        ]
        for line in aligned([[key, "estimate", "fits"], *rows]):
            yield "", line
        yield "find", f"largest: {self.value:,}; {self.reason}"
        override = f"{self.address}={self.value}"
        yield "find", f"in the recipe, {block}: `{key}: {self.value}`; or: {override}"


@dataclass(frozen=True)
class _Search:
    """A search for the value of one key, from `smallest` to `bound`.

    Attributes:
        stages: the stages that must fit.
        reason: why no larger value is tried.
    """

    address: str
    stages: tuple[str, ...]
    smallest: int
    bound: int
    reason: str


def find_largest(
    loaded: LoadedRecipe,
    plan: RunPlan,
    shape: ModelShape,
    key: FitKey,
    bounds: FitBounds,
) -> Iterator[LargestFit]:
    """The largest value of a key for the stages of a recipe that train.

    Yields:
        One result for max_seq_length, else one for each stage that has the key.

    Raises:
        UserError: no stage trains, none has the key, or, with code 3, not even the
            smallest value fits.
    """
    needs = check_with(loaded, shape, {}).stages
    trained = {
        planned.name: planned.stage.address
        for planned in plan.stages
        if needs[planned.name].training
    }
    if not trained:
        raise UserError(
            f"no stage of this recipe trains, so there is no {key} to find",
            hint="--dry-run without --find checks it",
        )
    if key == "max_seq_length":
        # Packed sequences are as long as they may be.
        is_packed = any(needs[name].is_packed for name in trained)
        bound, reason = _longest_sequence(bounds, is_packed=is_packed)
        smallest = min(SHORTEST, bound)
        searches = [_Search(f"data.{key}", (*trained,), smallest, bound, reason)]
    else:
        keys = {name: needs[name].batch_key for name in trained}
        if key not in keys.values():
            name, other = next(iter(keys.items()))
            raise UserError(f"{name} has {other}, not {key}", hint=f"--find {other}")
        # A batch has at least one sequence.
        length = loaded.recipe.data.max_seq_length if key == "batch_tokens" else 1
        reason = NOT_TRIED
        if count := bounds.sequences:
            reason = f"one batch then has all {count:,} training sequences"
        bound = length * (count or MOST_EXAMPLES)
        searches = [
            _Search(f"{trained[name]}.{key}", (name,), length, bound, reason)
            for name, its_key in keys.items()
            if its_key == key
        ]
    for search in searches:
        yield _largest(loaded, shape, search)


def check_with(
    loaded: LoadedRecipe, shape: ModelShape, overrides: dict[str, int]
) -> ResourceCheck:
    """What a recipe with other values needs of this machine."""
    # Without the checks of files and data, which the recipe has passed.
    other = load_recipe_data(
        loaded.data, [*overrides.items()], name=loaded.name, root=loaded.root
    )
    return ResourceCheck(other, make_plan(other), shape, [], 1.0)


def _longest_sequence(bounds: FitBounds, *, is_packed: bool) -> tuple[int, str]:
    """The largest max_seq_length to try, and why none is larger."""
    positions, longest = bounds.positions, 0 if is_packed else bounds.longest
    if longest and longest <= (positions or longest):
        example = f"the longest training example has {longest:,} tokens"
        effect = "little" if bounds.is_sample else "nothing"
        reason = f"{example}, and a larger value changes {effect}"
        return max(SHORTEST, longest), reason
    if positions:
        return positions, f"the model has {positions:,} positions"
    return MOST_TOKENS, NOT_TRIED


def _largest(loaded: LoadedRecipe, shape: ModelShape, search: _Search) -> LargestFit:
    """Halve the range until the largest value that fits is known."""
    trials: dict[int, int] = {}
    limit = int(USABLE * check_with(loaded, shape, {}).limit)

    def fails(value: int) -> bool:
        check = check_with(loaded, shape, {search.address: value})
        trials[value] = max(map(check.memory, search.stages))
        return trials[value] > limit

    values = range(search.smallest, search.bound + 1)
    too_large = fails(search.bound)
    position = bisect_left(values, True, key=fails) if too_large else len(values)
    if position == 0:
        check = check_with(loaded, shape, {search.address: search.smallest})
        name = max(search.stages, key=check.memory)
        remedies = check.stages[name].remedies
        others = [remedy for remedy in remedies if search.address not in remedy]
        raise UserError(
            f"{name} needs about {readable_size(check.memory(name))} of memory even "
            f"with {search.address}={search.smallest}, and {USABLE:.0%} of the limit "
            f"are {readable_size(limit)}",
            hint=f"try {' or '.join(others)}" if others else None,
            code=WILL_NOT_FIT,
        )
    reason = "more does not fit" if too_large else search.reason
    ordered = dict(sorted(trials.items()))
    return LargestFit(search.address, values[position - 1], ordered, limit, reason)

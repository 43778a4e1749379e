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
from ..plan import RunPlan, plan
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
    """A search for the value of one key.

    Attributes:
        stages: the stages that must fit.
        bound: the largest value that is tried.
        reason: why no larger value is tried.
    """

    address: str
    stages: tuple[str, ...]
    smallest: int
    bound: int
    reason: str


class FitFinder:
    """Searches the largest value of a key for the stages of a recipe that train.

    Args:
        bounds: of the model and the data.

    Raises:
        UserError: no stage trains, or none has the key.
    """

    def __init__(
        self,
        loaded: LoadedRecipe,
        plan: RunPlan,
        shape: ModelShape,
        key: FitKey,
        bounds: FitBounds,
    ):
        self._loaded = loaded
        self._shape = shape
        self._key = key
        self._bounds = bounds
        recipe = self.check({})
        self._limit, self._needs = int(USABLE * recipe.limit), recipe.stages
        stages = [planned.stage for planned in plan.stages]
        self._trained = [s for s in stages if self._needs[s.name].training]
        if not self._trained:
            raise UserError(
                f"no stage of this recipe trains, so there is no {key} to find",
                hint="--dry-run without --find checks it",
            )
        self._searches = self._plan_searches()

    def results(self) -> Iterator[LargestFit]:
        """One for max_seq_length, else one for each stage that has the key.

        Raises:
            UserError: not even the smallest value fits; its code is 3.
        """
        for search in self._searches:
            yield self._largest(search)

    def check(self, overrides: dict[str, int]) -> ResourceCheck:
        """What the recipe with other values needs of this machine."""
        # Without the checks of files and data, which the recipe has passed.
        loaded = load_recipe_data(
            self._loaded.data,
            [*overrides.items()],
            name=self._loaded.name,
            root=self._loaded.root,
        )
        return ResourceCheck(loaded, plan(loaded), self._shape, [], 1.0)

    def _plan_searches(self) -> list[_Search]:
        key = self._key
        if key == "max_seq_length":
            names = tuple(stage.name for stage in self._trained)
            bound, reason = self._longest_sequence()
            smallest = min(SHORTEST, bound)
            return [_Search(f"data.{key}", names, smallest, bound, reason)]
        stages = [s for s in self._trained if self._needs[s.name].batch_key == key]
        if not stages:
            other = self._needs[self._trained[0].name].batch_key
            raise UserError(
                f"{self._trained[0].name} has {other}, not {key}",
                hint=f"--find {other}",
            )
        smallest, bound, reason = self._largest_batch()
        return [
            _Search(f"{stage.address}.{key}", (stage.name,), smallest, bound, reason)
            for stage in stages
        ]

    def _longest_sequence(self) -> tuple[int, str]:
        """The largest max_seq_length to try, and why none is larger."""
        positions, longest = self._bounds.positions, self._bounds.longest
        # Packed sequences are as long as they may be.
        if any(self._needs[stage.name].is_packed for stage in self._trained):
            longest = 0
        if longest and longest <= (positions or longest):
            value = max(SHORTEST, longest)
            example = f"the longest training example has {longest:,} tokens"
            effect = "little" if self._bounds.is_sample else "nothing"
            return value, f"{example}, and a larger value changes {effect}"
        if positions:
            return positions, f"the model has {positions:,} positions"
        return MOST_TOKENS, NOT_TRIED

    def _largest_batch(self) -> tuple[int, int, str]:
        """The smallest and largest batch to try, and why none is larger."""
        sequences, length = self._bounds.sequences, 1
        if self._key == "batch_tokens":
            # A batch has at least one sequence.
            length = self._loaded.recipe.data.max_seq_length
        if not sequences:
            return length, length * MOST_EXAMPLES, NOT_TRIED
        reason = f"one batch then has all {sequences:,} training sequences"
        return length, length * sequences, reason

    def _largest(self, search: _Search) -> LargestFit:
        """Halve the range until the largest value that fits is known."""
        trials: dict[int, int] = {}

        def fails(value: int) -> bool:
            check = self.check({search.address: value})
            trials[value] = max(map(check.memory, search.stages))
            return trials[value] > self._limit

        values = range(search.smallest, search.bound + 1)
        too_large = fails(search.bound)
        position = bisect_left(values, True, key=fails) if too_large else len(values)
        if position == 0:
            raise self._nothing_fits(search)
        value = values[position - 1]
        reason = "more does not fit" if too_large else search.reason
        ordered = dict(sorted(trials.items()))
        return LargestFit(search.address, value, ordered, self._limit, reason)

    def _nothing_fits(self, search: _Search) -> UserError:
        smallest = search.smallest
        check = self.check({search.address: smallest})
        name = max(search.stages, key=check.memory)
        others = [
            remedy
            for remedy in check.stages[name].remedies
            if search.address not in remedy
        ]
        return UserError(
            f"{name} needs about {readable_size(check.memory(name))} of memory even "
            f"with {search.address}={smallest}, and {USABLE:.0%} of the limit are "
            f"{readable_size(self._limit)}",
            hint=f"try {' or '.join(others)}" if others else None,
            code=WILL_NOT_FIT,
        )

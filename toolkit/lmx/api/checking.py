"""`lmx.check`: what a recipe would read, need and write, without running it."""

from dataclasses import dataclass
from pathlib import Path

from ..pipeline.dry_run import DryRun
from .arguments import checked
from .recipe import Overrides, Recipe, RecipeLike, as_recipe
from .run import Table


@dataclass(frozen=True)
class StageCheck:
    """The estimated needs of one stage; None = unknown.

    Attributes:
        memory: bytes.
        disk: bytes.
        seconds: on this machine, at the rates that `lmx doctor` measures.
    """

    memory: int | None
    disk: int | None
    seconds: float | None


@dataclass(frozen=True, repr=False)
class Check:
    """The result of a dry run.

    Attributes:
        recipe: the checked recipe.
        output: the run directory.
        lines: topic and text of every line that `lmx-train --dry-run` prints.
        stages: needs by stage, such as "1-train".
        memory_limit, free_disk: bytes that this machine has; None if the size of the
            model is unknown.
    """

    recipe: Recipe
    output: Path
    lines: list[tuple[str, str]]
    stages: dict[str, StageCheck]
    memory_limit: int | None
    free_disk: int | None

    @property
    def memory(self) -> int | None:
        """Bytes of the stage that needs most; None if the model's size is unknown."""
        return max((s.memory for s in self.stages.values() if s.memory), default=None)

    @property
    def disk(self) -> int | None:
        """Bytes of all stages together; None if the size of the model is unknown."""
        if self.free_disk is None:
            return None
        return sum(stage.disk or 0 for stage in self.stages.values())

    @property
    def seconds(self) -> float | None:
        """Estimated time of all stages; None if that of one is unknown."""
        times = [stage.seconds for stage in self.stages.values()]
        known = [seconds for seconds in times if seconds is not None]
        return sum(known) if len(known) == len(times) else None

    @property
    def fits(self) -> bool | None:
        """Whether memory and disk suffice; None if the size of the model is unknown."""
        if self.memory_limit is None or self.free_disk is None:
            return None
        memory, disk = self.memory or 0, self.disk or 0
        return memory <= self.memory_limit and disk <= self.free_disk

    def __str__(self) -> str:
        return "\n".join(f"{topic:<9}{text}" for topic, text in self.lines)

    def __repr__(self) -> str:
        texts = {True: "fits", False: "does not fit", None: "size unknown"}
        return f"<lmx.Check {self.recipe.name}: {texts[self.fits]}>"

    def _repr_html_(self) -> str:
        return Table(["", ""], self.lines)._repr_html_()


@checked
def check(recipe: RecipeLike, *, overrides: Overrides | None = None) -> Check:
    """The checks of `lmx-train --dry-run`: no weight is loaded, nothing is written.

    The cache keeps this machine's speed, which the first call measures.

    Raises:
        ConfigErrors: all errors of the recipe.
        UserError: the model or the data cannot be used.
    """
    resolved = as_recipe(recipe, overrides)
    run = DryRun(resolved.loaded, resolved.plan)
    lines = list(run.lines())
    needs = run.resources
    if needs:
        stages = {
            name: StageCheck(each.memory or None, int(each.disk), each.seconds)
            for name, each in needs.stages.items()
        }
    else:
        unknown = StageCheck(None, None, None)
        stages = {planned.name: unknown for planned in resolved.plan.stages}
    return Check(
        resolved,
        resolved.output,
        lines,
        stages,
        needs.limit if needs else None,
        needs.free if needs else None,
    )

"""The run that a folder has, and what of it the same or a changed recipe continues."""

import os
from collections.abc import Callable
from pathlib import Path

from ..errors import UserError
from ..files.atomic import old_name, remove
from .manifest import INPUTS, STAGES, StageInputs, changed_inputs

# Changed values that the note about an earlier run names.
MAX_CHANGES = 3
# In the folder of a training's checkpoints; the name of the folder above is its step.
CHECKPOINTS = "*/*/content"


class EarlierRun:
    """The run of a folder, which the same or a changed recipe continues.

    A recipe keeps the stages up to the first one whose identity has changed.

    Args:
        content: the manifest of that run.
        plan: the identities of the stages that will run, by name, in order.
        changes: the values in which the recipes differ, one per line.
        inputs: returns the `StageInputs` of a stage as they are now.

    Attributes:
        kept: the stages that are the same in both recipes, with the same inputs.
        discarded: the other stages of both recipes.
    """

    def __init__(
        self,
        path: Path,
        content: dict,
        plan: dict[str, str],
        changes: str,
        inputs: Callable[[str], StageInputs],
    ):
        self.path = path
        self.changes = changes
        self._plan = plan
        self._finished: dict[str, dict] = content["stages"]
        # An identity is that of all stages before, too.
        same = content["plan"].items() & plan.items()
        self.kept = [name for name in plan if (name, plan[name]) in same]
        self._changed_stage, self._changed_inputs = "", []
        for name in [n for n in self.kept if n in content["inputs"]]:
            before, is_finished = content["inputs"][name], name in self._finished
            kinds = INPUTS if is_finished else INPUTS[:1]
            if changed := changed_inputs(before, inputs(name), kinds):
                self._changed_stage, self._changed_inputs = name, changed
                self.kept = self.kept[: self.kept.index(name)]
                break
        is_same = list(content["plan"].items()) == list(plan.items())
        self.is_changed = not is_same or bool(self._changed_inputs)
        names = dict.fromkeys([*content["plan"], *plan, *self._finished])
        self.discarded = [name for name in names if name not in self.kept]

    @property
    def records(self) -> dict[str, dict]:
        """The records of the stages that are finished and kept."""
        return {k: self._finished[k] for k in self.kept if k in self._finished}

    def require_same_inputs(self) -> None:
        """Refuse to keep nothing of a run whose inputs have changed, and to go on with
        other models than those that a stage began with.

        Raises:
            UserError: with the inputs that differ.
        """
        is_unfinished = self._changed_stage not in self._finished
        if self._changed_inputs and (is_unfinished or not self.kept):
            names = " and ".join(self._changed_inputs)
            raise UserError(
                f"changed since this run started: {names}",
                place=str(self.path),
                hint=f"restore what was there; or {self._ways_out}",
            )

    def require_kept_results(self) -> None:
        """Refuse a recipe that keeps nothing of a run with finished stages.

        Raises:
            UserError: with the values that differ.
        """
        if self.kept or not self._finished:
            return
        lines = self.changes.replace("\n", "\n    ")
        raise UserError(
            "this folder has the run of another recipe, whose first stage has other "
            f"values:\n    {lines}",
            place=str(self.path),
            hint=self._ways_out,
        )

    @property
    def _ways_out(self) -> str:
        return (
            "use --restart to start over (the old run moves to "
            f"{old_name(self.path).name}), or output=... for another folder"
        )

    def discard(self) -> list[str]:
        """Remove the folders of the stages that are not kept.

        The checkpoints of an unfinished training are set aside, not removed.

        Returns:
            What was set aside, in words.
        """
        notes = []
        for name in self.discarded:
            folder = self.path / STAGES / name
            checkpoints = folder / "checkpoints"
            is_finished = name in self._finished
            if not is_finished and any(checkpoints.glob(CHECKPOINTS)):
                target = old_name(folder)
                os.rename(folder, target)
                notes.append(
                    f"the unfinished {name} was started with other values: its "
                    f"checkpoints are now in {target.relative_to(self.path)}"
                )
            else:
                remove(folder)
        return notes

    def change_note(self, set_aside: list[str]) -> str:
        """One line: what changed, which stages are kept, and which will run."""
        lines = [*filter(None, self.changes.split("\n"))]
        what = "the recipe has" if lines else "files have"
        lines += [f"{name}: other content" for name in self._changed_inputs]
        shown = ", ".join(lines[:MAX_CHANGES])
        if more := len(lines) - MAX_CHANGES:
            shown += f" and {more} more" if more > 0 else ""
        steps = self._steps
        will_run = [n for n in self._plan if n not in self.records and n not in steps]
        parts = [f"continues {name} at step {step}" for name, step in steps.items()]
        for heading, names in (("kept", self.records), ("to run", will_run)):
            if names or not steps:
                parts.append(f"{heading}: {', '.join(names) or 'nothing'}")
        parts += set_aside
        if published := self._outdated():
            names = ", ".join(published)
            parts.append(f"of the earlier recipe until a stage replaces it: {names}")
        return f"{what} changed ({shown}): {'; '.join(parts)}"

    @property
    def _steps(self) -> dict[str, int]:
        """The step of the newest checkpoint of every unfinished stage that is kept."""
        steps = {}
        for name in (name for name in self.kept if name not in self._finished):
            saved = (self.path / STAGES / name / "checkpoints").glob(CHECKPOINTS)
            if numbers := [int(path.parent.name) for path in saved]:
                steps[name] = max(numbers)
        return steps

    def _outdated(self) -> list[str]:
        """Published folders that only stages wrote which are not kept."""
        kept = {f for record in self.records.values() for f in record["artifacts"]}
        gone = [f for record in self._finished.values() for f in record["artifacts"]]
        return [
            folder
            for folder in dict.fromkeys(gone)
            if folder not in kept
            and not folder.startswith(STAGES)
            and (self.path / folder).is_dir()
        ]

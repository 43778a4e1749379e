"""What a recipe will do: its stages in order, with what each reads and leaves."""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from ..config import yaml_io
from ..config.base import ConfigModel
from ..config.loader import LoadedRecipe
from ..convert.exporters import FORMATS
from ..run.tables import OUTPUT_KEYS, one_line, recipe_values

RUNS = Path("exports")


@dataclass(frozen=True)
class PlannedStage:
    """One stage of a plan.

    Attributes:
        index: position in the recipe, from 1.
        inputs: the model artefact read (a folder, a Hub id or "fresh"), a teacher or
            sibling of another name, then the data.
        outputs: folders left behind; the first one is the stage's own.
    """

    index: int
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[Path, ...]
    config: ConfigModel

    @property
    def name(self) -> str:
        """The stage's folder in the run folder."""
        return f"{self.index}-{self.kind}"


@dataclass(frozen=True)
class RunPlan:
    """The steps of a recipe, its run folder, and the hash that names the experiment."""

    output: Path
    steps: tuple[PlannedStage, ...]
    recipe_hash: str


def plan(loaded: LoadedRecipe) -> RunPlan:
    """Lay out a recipe's stages; a relative run folder is in the working directory."""
    recipe = loaded.recipe
    output = Path(os.path.expanduser(recipe.output or RUNS / loaded.name))
    artefact = recipe.model.path or "fresh"
    steps = []
    for index, stage in enumerate(recipe.stages, 1):
        outputs = _outputs(output, index, stage.kind, stage.config)
        rows, others = _rows(recipe.data, stage.kind), _others(stage.config)
        inputs = tuple(dict.fromkeys((artefact, *others, *rows)))
        steps.append(PlannedStage(index, stage.kind, inputs, outputs, stage.config))
        if stage.kind in ("train", "quantize"):
            artefact = str(outputs[0])
    return RunPlan(output, tuple(steps), recipe_hash(loaded.resolved))


def recipe_hash(resolved: str) -> str:
    """Sha256 of a resolved recipe; where its results go is no part of it."""
    data = yaml_io.read(resolved).data
    for key in OUTPUT_KEYS:
        data.pop(key, None)
    canonical = json.dumps(data, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def difference(old: str, new: str) -> str:
    """The values in which two resolved recipes differ, one line each, as arguments."""
    before, after = (recipe_values(yaml_io.read(text).data) for text in (old, new))
    lines = []
    for key in [*before, *(k for k in after if k not in before)]:
        if key not in after:
            lines.append(f"{key}: {one_line(before[key])} -> (gone)")
        elif key not in before:
            lines.append(f"{key}: (new) -> {one_line(after[key])}")
        elif before[key] != after[key]:
            lines.append(f"{key}: {one_line(before[key])} -> {one_line(after[key])}")
    return "\n".join(lines)


def _outputs(
    output: Path, index: int, kind: str, config: ConfigModel
) -> tuple[Path, ...]:
    own = output / "stages" / f"{index}-{kind}"
    if kind == "export":
        return own, *(output / FORMATS[name].FOLDER for name in config.formats)
    if kind == "draft":
        return own, output / "draft"
    if kind == "train" and config.adapter is not None:
        return own, output / "adapters"
    return (own,)


def _rows(data: ConfigModel, kind: str) -> tuple[str, ...]:
    if kind in ("train", "draft"):
        return (*data.train, *data.valid)
    return tuple(data.valid or data.train) if kind == "evaluate" else ()


def _others(config: ConfigModel) -> tuple[str, ...]:
    teacher = getattr(config, "teacher", None)
    student, trial = (
        getattr(config, name, None) for name in ("draft_model", "benchmark")
    )
    named = (
        teacher and teacher.model,
        student and student.init_from,
        trial and trial.baseline_model,
    )
    return tuple(filter(None, named))

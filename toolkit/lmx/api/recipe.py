"""`lmx.Recipe`: a checked recipe, from a file, a dict or keyword arguments."""

import html
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict, Unpack

from ..config import bundled, yaml_io
from ..config.errors import ConfigErrors, Problem
from ..config.loader import LoadedRecipe, plain_data
from ..config.overrides import Override
from ..config.redaction import redact
from ..config.schema import RecipeConfig
from ..errors import UserError
from ..files.atomic import write_atomic
from ..pipeline.plan import RunPlan, load, load_data, plan
from .arguments import Keys, PathLike, checked

Overrides = Keys | Sequence[Override]
# Characters of the recipe's hash in the name of a run without a file.
HASH_CHARACTERS = 8


class RecipeKeys(TypedDict, total=False):
    """The top-level keys of a recipe; docs/recipes.md describes them."""

    model: str | os.PathLike[str] | Mapping[str, Any]
    data: Mapping[str, Any]
    seed: int
    output: str | os.PathLike[str] | None
    tracker: Mapping[str, Any] | None
    stages: Sequence[Mapping[str, Any]]
    python: Mapping[str, Any] | None


class Recipe:
    """A recipe that was read and checked; no weight is loaded.

    ```python
    Recipe("recipes/qat_4bit.yaml")
    Recipe("qat_4bit", overrides={"stages.train.steps": 50})
    Recipe(model="data/tiny-base", stages=[{"quantize": {"bits": 4}}, {"export": {}}])
    ```

    Args:
        source: a file, the name of a bundled recipe, a dict, or another Recipe; absent
            = the recipe is in `keys`.
        overrides: values by dotted key, as on the command line of lmx-train:
            `stages.train.steps`, or `stages.2.train.steps` if there are several. A list
            of `key=value` texts works, too.
        keys: the top-level keys of a recipe.

    Attributes:
        loaded: the recipe with its source.

    Raises:
        ConfigErrors: all errors at once. The place of an error is a position in the
            file, or a key such as `stages.1.train.steps` in a dict.
        UserError: the file cannot be read.
    """

    loaded: LoadedRecipe

    def __init__(
        self,
        source: "RecipeLike | None" = None,
        /,
        *,
        overrides: Overrides | None = None,
        **keys: Unpack[RecipeKeys],
    ):
        if (source is None) == (not keys):
            raise UserError("give either a recipe or its keys")
        self.loaded = _recipe(keys if source is None else source, overrides)

    @property
    def name(self) -> str:
        """The stem of the file, the last part of `output`, or model and hash."""
        return self.loaded.name

    @property
    def config(self) -> RecipeConfig:
        """All values, defaults included, as typed attributes."""
        return self.loaded.recipe

    @cached_property
    def plan(self) -> RunPlan:
        """The stages with their inputs and outputs."""
        return plan(self.loaded)

    @property
    def output(self) -> Path:
        """The run directory."""
        return self.plan.output

    @property
    def hash(self) -> str:
        """Sha256 of all values that affect the result."""
        return self.plan.recipe_hash

    def to_dict(self, *, resolved: bool = False) -> dict[str, Any]:
        """The recipe as plain data, with the overrides.

        Args:
            resolved: include all defaults.
        """
        text = self.loaded.resolved if resolved else yaml_io.write(self.loaded.data)
        data: dict[str, Any] = yaml_io.read(text).data
        return data

    def to_yaml(self, *, resolved: bool = False) -> str:
        """The text of a recipe file that is this recipe.

        Args:
            resolved: include all defaults. A file without overrides is else returned as
                it is, with its comments.
        """
        if resolved:
            return self.loaded.resolved
        loaded = self.loaded
        if loaded.path and not (loaded.overrides or loaded.secrets):
            return loaded.text
        return yaml_io.write(loaded.data)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write `to_yaml()` to a file; returns its path.

        Raises:
            UserError: the disk reports an error.
        """
        write_atomic(Path(path), self.to_yaml())
        return Path(path)

    def __eq__(self, other: object) -> bool:
        """Whether another recipe has the same values, those of `output` included."""
        if not isinstance(other, Recipe):
            return NotImplemented
        return self.config == other.config

    def __hash__(self) -> int:
        return hash(self.loaded.resolved)

    def __repr__(self) -> str:
        kinds = ", ".join(stage.kind for stage in self.config.stages)
        return f"<lmx.Recipe {self.name}: {kinds}>"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(redact(self.to_yaml()))}</pre>"


RecipeLike = Recipe | PathLike | Keys


@checked
def _recipe(source: RecipeLike, overrides: Overrides | None) -> LoadedRecipe:
    """The recipe of the arguments of `Recipe`."""
    pairs = _pairs(overrides)
    if isinstance(source, Recipe):
        before = source.loaded
        if not pairs:
            return before
        loaded = load_data(before.data, pairs, name=before.name, root=before.root)
        return replace(
            loaded,
            path=before.path,
            arguments=(*before.arguments, *loaded.arguments),
            name=before.name if before.path else _name(loaded),
        )
    if isinstance(source, Mapping):
        loaded = load_data(source, pairs, name="recipe", root=Path.cwd())
        return replace(loaded, name=_name(loaded))
    return load(bundled.locate(os.fspath(source)), pairs)


def as_recipe(
    recipe: RecipeLike,
    overrides: Overrides | None = None,
    output: PathLike | None = None,
    **values: Any,
) -> Recipe:
    """A recipe with overrides, of which `output` and `values` are the last ones.

    Args:
        values: further values by key; None = not given.

    Raises:
        ConfigErrors: all errors of the recipe and the overrides.
    """
    pairs = _pairs(overrides)
    if output is not None:
        pairs.append(("output", os.fspath(output)))
    values = {key: value for key, value in values.items() if value is not None}
    pairs += values.items()
    if isinstance(recipe, Recipe) and not pairs:
        return recipe
    result = Recipe(recipe, overrides=pairs)
    if values:
        # recipe.yaml must have them.
        text = yaml_io.write(result.loaded.data)
        result.loaded = replace(result.loaded, source=text)
    return result


def _pairs(overrides: Overrides | None) -> list[Override]:
    """Overrides with plain values.

    Raises:
        ConfigErrors: a value is no plain data.
    """
    errors: list[Problem] = []
    pairs: list[Override] = []
    items = overrides.items() if isinstance(overrides, Mapping) else overrides or ()
    for item in items:
        if isinstance(item, str):
            pairs.append(item)
            continue
        key, value = item
        plain, faults = plain_data(value, tuple(key.split(".")))
        pairs.append((key, plain))
        errors += faults
    if errors:
        raise ConfigErrors(None, "", errors)
    return pairs


def _name(loaded: LoadedRecipe) -> str:
    """The name of a recipe without a file, the same for the same recipe."""
    recipe = loaded.recipe
    if recipe.output:
        return Path(recipe.output).name or "recipe"
    model = Path(recipe.model.path or "scratch").name
    return f"{model}-{plan(loaded).recipe_hash[:HASH_CHARACTERS]}"

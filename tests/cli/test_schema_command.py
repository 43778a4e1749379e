"""`lmx schema`: the keys of a recipe, from the pydantic models."""

from typing import Annotated, Literal

import pytest
from lmx.cli import main, schema
from lmx.cli.schema import blocks
from lmx.config import json_schema
from lmx.config.base import ConfigModel
from pydantic import Field


class Inner(ConfigModel):
    """A block inside."""

    share: Annotated[float, Field(ge=0, le=1)] | None = 0.5
    """A share of | the whole."""


class One(ConfigModel):
    """The first choice."""

    kind: Literal["one"] = "one"
    """Its name."""
    inner: Inner = Inner()
    """What is
    inside."""


class Two(ConfigModel):
    """The second choice."""

    kind: Literal["two"] = "two"
    """Its name."""
    inner: Inner = Inner()
    """What is
    inside."""
    most: list[Annotated[int, Field(gt=0)]] | Literal["all"] = "all"
    """How many."""


class Whole(ConfigModel):
    """All of it."""

    choice: One | Two
    """One or the other."""
    named: dict[str, Inner] = Field({})
    """By pattern."""


@pytest.fixture
def whole(monkeypatch):
    monkeypatch.setattr(json_schema, "RecipeConfig", Whole)
    cached = (json_schema.recipe_schema, json_schema.sections, blocks)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


def printed(capsys, *arguments) -> str:
    assert main.main(["schema", *arguments]) == 0
    return capsys.readouterr().out


def test_page_of_a_schema(whole):
    assert (
        schema.markdown().removeprefix(schema.HEAD)
        == """
## top level

All of it.

- `choice`: block; required. One or the other.
- `named`: mapping of text to block; default {}. By pattern.

## `choice`

Keys that all variants below have.

- `inner`: block; its defaults. What is inside.

### `choice`, `kind: one`

The first choice.

### `choice`, `kind: two`

The second choice.

- `most`: list of whole number > 0, or all; default all. How many.

## `choice.inner`

A block inside.

- `share`: number ≥ 0, ≤ 1, or null; default 0.5. A share of | the whole.

## `named.<pattern>`

The keys of `choice.inner`.
"""
    )


QUANTIZE = ["stages.quantize\n"]
QUANTIZE += [f"stages.quantize, method: {name}\n" for name in ("gptq", "awq")]
# What a name shows: the beginning, and texts that follow.
SHOWN = {
    "stages.export": ["stages.export\n\nPublish the"],
    "adapter.rank": [
        "stages.train.adapter\n\n",
        "- rank: whole number ≥ 1; default 16. Rank of the update.\n",
    ],
    "stages.quantize": QUANTIZE,
    "quantize": QUANTIZE,
    "tracker": ["tracker\n", "- type: wandb, tensorboard, trackio, mlflow; required."],
    "gptq": ["stages.quantize, method: gptq\n"],
    "method": ["stages.quantize, method: rtn\n"],
    "adamw": ["stages.train\n\n- optimizer: adamw, "],
    "gguf": ["stages.export\n\n- formats: list of "],
    "top level": ["top level\n"],
    # A key of several blocks is shown in each.
    "batch_tokens": ["stages.train\n", *2 * ["- batch_tokens: "]],
}


@pytest.mark.parametrize("name", SHOWN)
def test_schema_shows_a_block_a_key_or_a_value(capsys, name):
    start, *others = SHOWN[name]
    text = printed(capsys, name)
    assert text.startswith(start)
    assert all(text.count(other) == others.count(other) for other in others)
    if name == "adapter.rank":
        assert "alpha" not in text


def listed(capsys) -> dict[str, list[str]]:
    """The blocks that `lmx schema` lists, and the names of their keys."""
    lines = printed(capsys).split("keys:\n", 1)[1].splitlines()
    keys: dict[str, list[str]] = {}
    title = ""
    for line in filter(None, lines):
        assert len(line) <= schema.WIDTH
        if line.startswith("    "):
            keys[title] += line.strip(" ,").split(", ")
        else:
            title = line
            keys[title] = []
    return keys


def test_schema_shows_everything_that_it_lists(capsys):
    found = listed(capsys)
    assert list(found) == [block.title for block in blocks()]
    assert "learning_rate" in found["stages.train"]
    assert "dampening_frac" in found["stages.quantize, method: gptq"]
    for title, keys in found.items():
        assert printed(capsys, title).startswith(title)
        for key in keys:
            key = key.strip(",")
            # A block without keys has a sentence instead.
            if key.isidentifier():
                assert f"- {key}: " in printed(capsys, title)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("learning_rte", "did you mean 'learning_rate'?"),
        ("lr", "called stages.train.learning_rate here"),
        ("iters", "called stages.train.steps here"),
        # A word for a type is no value.
        ("number", "did you mean 'num_layers'?"),
        ("xyzzy", "`lmx schema` lists all blocks and keys"),
    ],
)
def test_unknown_name_hints_at_what_it_may_stand_for(capsys, name, hint):
    assert main.main(["schema", name]) == 2
    assert capsys.readouterr().err.endswith(f"    hint: {hint}\n")

"""What a recipe says of a draft model: its shape, its lessons, how it is judged."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ..section import Section

Count = Annotated[int, Field(ge=1)]
Loss = Literal["forward", "reverse", "jensen_shannon", "total_variation", "acceptance"]


class Student(Section):
    """The draft's shape: cut from the target, from a sibling, or fresh."""

    source: str | None = Field(None, alias="from")
    """A folder or Hub id with the target's tokens to cut from; absent = the target."""
    layers: Count | list[Annotated[int, Field(ge=0)]] | Literal["auto"] = "auto"
    """How many blocks are left, those most missed; or their numbers; auto = as many as
    predict the most speed on this machine after a few steps each."""
    hidden_size: Count | None = None
    """Width that is left, the most active channels; absent = all. Of a fresh one, its
    width."""
    intermediate_size: Count | None = None
    """Width of the feed-forward layers that is left, as above."""
    fresh: bool = False
    """Begin with random weights, in the shape of the target but for what is said."""

    @model_validator(mode="after")
    def _one_beginning(self):
        if self.fresh and (self.source or not isinstance(self.layers, int)):
            raise ValueError("a fresh student needs a number of layers, and no `from`")
        if isinstance(self.layers, list) and len(set(self.layers)) != len(self.layers):
            raise ValueError("layers names a block twice")
        if self.layers == []:
            raise ValueError("layers names no block")
        return self


class Answers(Section):
    """What the target says to the prompts of the rows, for the draft to learn."""

    prompts: int = Field(2000, ge=1)
    """Training prompts, at most."""
    held_out: int = Field(64, ge=1)
    """Validation prompts, at most."""
    max_tokens: int = Field(256, ge=2)
    """Longest answer."""
    temperatures: list[Annotated[float, Field(ge=0)]] = Field([0.0, 0.7], min_length=1)
    """Temperatures of the answers, prompt by prompt in turn."""
    top_k: Count | None = 64
    """Likeliest tokens kept on disk of every prediction of the target, all others as
    one; null = keep nothing, and run the target beside the draft in every step."""


class OnPolicy(Section):
    """Lessons of the last steps: the draft writes on where its own guesses fell, and
    the target tells what it would have said instead (arXiv 2605.29343)."""

    fraction: float = Field(0.5, gt=0, le=1)
    """Of the steps, the last ones."""
    guesses: int = Field(8, ge=1)
    """Tokens that the draft writes from every such place, at most."""
    refresh: int = Field(100, ge=1)
    """Steps that learn from what was written at once, by the draft as it was then."""


class Trial(Section):
    """How the finished draft is judged, on prompts of the validation rows."""

    prompts: int = Field(16, ge=1)
    """How many, at most; chats, texts and copying share them."""
    max_tokens: int = Field(64, ge=8)
    """Longest answer."""
    temperature: float = Field(0.7, gt=0)
    """Of the drawn answers; greedy ones are judged as well."""
    sibling: str | None = None
    """A folder or Hub id of a small model with the target's tokens, as it is to be had:
    it guesses too, for a column of its own."""


class Gates(Section):
    """Limits; a draft that misses one ends the run with exit code 1."""

    acceptance: float | None = Field(None, ge=0, le=1)
    """Smallest share of guesses that stand, greedy and drawn."""
    speedup: float | None = Field(None, gt=0)
    """Smallest speed-up measured, greedy and drawn."""

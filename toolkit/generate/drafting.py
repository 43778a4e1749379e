"""`--draft`: who guesses, by name, and whether it speaks the model's tokens."""

from collections.abc import Callable, Sequence
from functools import partial

import mlx.core as mx

from ..model.load import Loaded, load
from ..model.tokens import require_same_tokens
from .controller import Controller
from .proposal import Proposer
from .proposers.chain import Chain
from .proposers.draft import Draft
from .proposers.lookup import Lookup, Memory
from .proposers.skipping import choose, without

LOOKUP, SELF = "lookup", "self"
TRIED = 128
"""Tokens of the prompt that `self` is chosen on."""


def maker(
    name: str, loaded: Loaded, sample: Sequence[int], *, trust_remote_code: bool = False
) -> Callable[[], Proposer] | None:
    """Makes a proposer for every answer; None = nothing pays on this machine.

    Args:
        name: `lookup`, `self`, a model folder or Hub id, or `lookup+` one of these.
        sample: tokens of the kind the model will read.

    Raises:
        UserError: no such model, or it has other tokens.
    """
    first, plus, rest = name.partition("+")
    # Answers to later prompts are guessed from earlier ones, too.
    lookup = partial(Lookup, Memory())
    if name == LOOKUP:
        return lookup
    if first == LOOKUP and plus:
        second = maker(rest, loaded, sample, trust_remote_code=trust_remote_code)
        return (lambda: Chain(lookup(), second())) if second else lookup
    if name == SELF:
        skipped = choose(loaded.model, mx.array([sample[:TRIED]], mx.int32))
        twin = without(loaded.model, skipped)
        return (lambda: Draft(twin)) if skipped else None
    draft = load(name, trust_remote_code=trust_remote_code)
    require_same_tokens(loaded.tokenizer, draft.tokenizer, role="draft", place=name)
    return lambda: Draft(draft.model)


def controller(guesses: int | None) -> Controller:
    """One that always asks for so many guesses; None = as many as pay."""
    return Controller(longest=guesses, fixed=guesses) if guesses else Controller()

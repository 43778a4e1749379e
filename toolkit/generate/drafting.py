"""`--draft`: who guesses, by name, and whether it speaks the model's tokens."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from ..errors import UserError
from ..model.load import Loaded, load
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
    check_tokens(loaded.tokenizer, draft.tokenizer, place=name)
    return lambda: Draft(draft.model)


def controller(guesses: int | None) -> Controller:
    """One that always asks for so many guesses; None = as many as pay."""
    return Controller(longest=guesses, fixed=guesses) if guesses else Controller()


def check_tokens(target: Any, draft: Any, *, place: str) -> None:
    """Refuse a draft whose tokens mean something else.

    Raises:
        UserError: the vocabularies or the added tokens are not the same.
    """
    own, other = target.get_vocab(), draft.get_vocab()
    pairs = {
        token
        for token in own.keys() | other.keys()
        if own.get(token) != other.get(token)
    }
    if pairs:
        token = min(pairs)
        raise UserError(
            f"the draft has other tokens than the model: {len(pairs):,} differ, "
            f"such as {token!r} ({own.get(token)} and {other.get(token)})",
            place=place,
            hint="a draft must have the model's own tokenizer; or use lookup",
        )
    if strange := _added(target).symmetric_difference(_added(draft)):
        raise UserError(
            f"the draft has other special tokens than the model: {min(strange)}",
            place=place,
            hint="a draft must have the model's own tokenizer; or use lookup",
        )


def _added(tokenizer: Any) -> set[tuple[int, str, bool]]:
    added = tokenizer.added_tokens_decoder
    return {(number, str(token), token.special) for number, token in added.items()}

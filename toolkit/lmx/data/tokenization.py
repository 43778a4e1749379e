"""Rows to tokens, and which of those tokens are trained."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

import numpy as np

from ..errors import UserError
from . import chat_template
from .record_formats import DataRecord

LossOn = Literal["completions", "all"]

LAST_ONLY = "rows train their last answer alone: the template changes earlier ones"
"""What to say of rows that `Encoded.last_only` counts."""


@dataclass(frozen=True)
class Example:
    """Tokens to train on.

    Attributes:
        tokens: int32 [length].
        mask: bool [length], True where the token itself is trained, that is, where
            the loss counts its prediction from the ones before; never the first.
    """

    tokens: np.ndarray
    mask: np.ndarray
    where: str
    skill: str | None = None


@dataclass
class EncodeResult:
    """The examples of many rows, and what became of the other rows.

    Attributes:
        truncated: rows cut at max_seq_length.
        last_only: rows of which the template lets only the last answer be trained.
        dropped: (where, reason) of rows without a token to train.
    """

    examples: list[Example] = field(default_factory=list)
    truncated: int = 0
    last_only: int = 0
    dropped: list[tuple[str, str]] = field(default_factory=list)


def encode(
    row: DataRecord, tokenizer, *, max_seq_length: int, loss_on: LossOn = "completions"
) -> list[Example]:
    """The examples of one row: several windows of a long text, none if untrainable."""
    settings = {"max_seq_length": max_seq_length, "loss_on": loss_on}
    return encode_block([row], tokenizer, **settings).examples


def encode_all(
    rows: Sequence[DataRecord],
    tokenizer,
    *,
    max_seq_length: int,
    loss_on: LossOn = "completions",
) -> EncodeResult:
    """The examples of all rows, in their order.

    Text is cut into windows of `max_seq_length` tokens that overlap by one token: the first
    token of a window cannot be predicted in it, so it is the last of the window before,
    and every token but the document's first is trained exactly once. Other rows are
    truncated at the end. Every assistant turn is trained, end-of-turn token included.

    Raises:
        UserError: no row has a token to train, or chat rows meet a tokenizer without
            a chat template.
    """
    settings = {"max_seq_length": max_seq_length, "loss_on": loss_on}
    encoded = encode_block(rows, tokenizer, **settings)
    if not encoded.examples:
        raise no_trainable_examples(len(rows), encoded.dropped)
    return encoded


def no_trainable_examples(rows: int, dropped: Sequence[tuple[str, str]]) -> UserError:
    """The error to raise when no row has a token to train."""
    where, reason = dropped[0] if dropped else ("", "no rows")
    return UserError(
        f"nothing to train on: all {rows} rows were dropped, the first "
        f"because {reason}",
        hint="raise data.max_seq_length" if "max_seq_length" in reason else None,
        place=where or None,
    )


def encode_block(
    rows: Iterable[DataRecord], tokenizer, *, max_seq_length: int, loss_on: LossOn
) -> EncodeResult:
    """`encode_all` for a part of the rows, of which none may have a token to train."""
    encoded = EncodeResult()
    plans, everything = [], loss_on == "all"
    for row in rows:
        try:
            plans.append(chat_template.render(row, tokenizer, everything=everything))
        except chat_template.NoTrainableTokens as error:
            encoded.dropped.append((row.where, str(error)))
    known = _tokens(plans, tokenizer)
    bos, eos = _bos(tokenizer), tokenizer.eos_token_id
    for plan in plans:
        try:
            tokens, mask = _masked(plan, known, tokenizer)
        except chat_template.NoTrainableTokens as error:
            encoded.dropped.append((plan.row.where, str(error)))
            continue
        if plan.bare:
            tokens, mask = _ended(tokens, mask, bos, eos)
        if everything:
            mask = [True] * len(tokens)
        _add(encoded, plan, tokens, mask, max_seq_length)
    return encoded


def render_mask(example: Example, tokenizer) -> list[tuple[str, bool]]:
    """The example as spans of (text, trained)."""
    pairs = zip(example.tokens.tolist(), example.mask.tolist(), strict=True)
    return [
        (tokenizer.decode([token for token, _ in span]), trained)
        for trained, span in groupby(pairs, key=lambda pair: pair[1])
    ]


def _tokens(
    plans: Iterable[chat_template.RenderedChat], tokenizer
) -> dict[str, list[int]]:
    """The tokens of every text and prefix that the plans need, encoded in one go."""
    texts = {text: None for plan in plans for text in plan.texts()}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return {t: list(tokenizer.encode(t, add_special_tokens=False)) for t in texts}
    # Some tokenizer.json cut or pad by themselves, silently.
    backend.no_truncation()
    backend.no_padding()
    encodings = backend.encode_batch_fast(list(texts), add_special_tokens=False)
    return {text: e.ids for text, e in zip(texts, encodings, strict=True)}


def _masked(
    plan: chat_template.RenderedChat, known: dict, tokenizer
) -> tuple[list[int], list[bool]]:
    """The tokens of the whole text, and a mask whose edges are true token edges."""
    if plan.marked:
        return plan.marked
    tokens = known[plan.text]
    edges = [known[text] for text in plan.prefixes()]
    if any(tokens[: len(edge)] != edge for edge in edges):
        return _by_segment(plan, tokens, tokenizer)
    mask = [False] * len(tokens)
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        mask[len(start) : len(end)] = [True] * (len(end) - len(start))
    return tokens, _until_the_end_of_turn(plan, tokens, mask, tokenizer)


def _by_segment(plan, tokens: list[int], tokenizer) -> tuple[list[int], list[bool]]:
    """Encode what is asked and what is answered apart, as generation does.

    Taken where a token would straddle the edge between the two.
    """
    joined: list[int] = []
    mask: list[bool] = []
    for text, trained in plan.segments():
        ids = list(tokenizer.encode(text, add_special_tokens=False))
        joined += ids
        mask += [trained] * len(ids)
    if tokenizer.decode(joined) != tokenizer.decode(tokens):
        raise chat_template.NoTrainableTokens(
            "its tokens do not split where the answer begins"
        )
    return joined, _until_the_end_of_turn(plan, joined, mask, tokenizer)


def _until_the_end_of_turn(plan, tokens, mask: list[bool], tokenizer) -> list[bool]:
    """Untrain what a template writes after an end-of-turn token: generation stops."""
    if plan.bare:
        return mask
    # mlx-lm has a set of them here, transformers one number.
    ids = getattr(tokenizer, "eos_token_ids", None)
    ids = ids if isinstance(ids, set | list) else {tokenizer.eos_token_id}
    ended, kept = False, []
    for token, trained in zip(tokens, mask, strict=True):
        kept.append(trained and not ended)
        ended = trained and (ended or token in ids)
    return kept


def _ended(tokens, mask, bos: int | None, eos: int | None) -> tuple[list, list]:
    """Add the tokens that mark a whole document, unless they are there."""
    if bos is not None and tokens[:1] != [bos]:
        tokens, mask = [bos, *tokens], [False, *mask]
    if eos is not None and tokens[-1:] != [eos]:
        tokens, mask = [*tokens, eos], [*mask, True]
    return tokens, mask


def _bos(tokenizer) -> int | None:
    """The token that this tokenizer puts before every text, where it does."""
    bos = tokenizer.bos_token_id
    return bos if bos is not None and tokenizer.encode("a")[:1] == [bos] else None


def _add(
    encoded: EncodeResult,
    plan: chat_template.RenderedChat,
    tokens,
    mask,
    max_seq_length: int,
) -> None:
    row, count = plan.row, len(tokens)
    step = max_seq_length - 1
    starts = range(0, max(count - 1, 1), step) if row.text is not None else [0]
    found = []
    for start in starts:
        ids = np.array(tokens[start : start + max_seq_length], np.int32)
        trained = np.array(mask[start : start + max_seq_length], bool)
        trained[:1] = False
        if trained.any():
            found.append(Example(ids, trained, row.where, row.skill))
    if not found:
        encoded.dropped.append((row.where, _why(mask, max_seq_length)))
        return
    encoded.examples += found
    encoded.truncated += row.text is None and count > max_seq_length
    encoded.last_only += plan.last_only


def _why(mask: list[bool], max_seq_length: int) -> str:
    if not any(mask[1:]):
        return "it has no token to train"
    return f"the prompt alone has {mask.index(True)} tokens, max_seq_length is {max_seq_length}"

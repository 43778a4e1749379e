"""Tokenization of records, with the loss mask."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

import numpy as np

from ..errors import UserError
from . import chat_template
from .chat_rendering import NoTrainableTokens
from .record_formats import DataRecord
from .token_edges import EncodedText, encode_with_edges

LossOn = Literal["completions", "all"]

LAST_ONLY = "examples train on the last turn only: the template changes earlier ones"
"""The log text for `EncodeResult.last_only`."""


@dataclass(frozen=True)
class Example:
    """Tokens to train on.

    Attributes:
        tokens: int32 [length].
        mask: bool [length], True where the token is trained: the loss counts its
            prediction from the previous tokens. Never True for the first token.
        label: whether the completion is desirable, in data for KTO.
    """

    tokens: np.ndarray
    mask: np.ndarray
    where: str
    skill: str | None = None
    label: bool | None = None


@dataclass
class EncodeResult:
    """The examples of many records, and counts of the others.

    Attributes:
        truncated: number of records cut at max_seq_length.
        last_only: number of records that train on the last turn only, because the
            template changes earlier turns.
        dropped: (where, reason) of records without a trained token.
    """

    examples: list[Example] = field(default_factory=list)
    truncated: int = 0
    last_only: int = 0
    dropped: list[tuple[str, str]] = field(default_factory=list)


def encode(
    record: DataRecord,
    tokenizer,
    *,
    max_seq_length: int,
    loss_on: LossOn = "completions",
) -> list[Example]:
    """The examples of a record: several for a long text, none if nothing is trained."""
    return encode_block(
        [record], tokenizer, max_seq_length=max_seq_length, loss_on=loss_on
    ).examples


def encode_all(
    records: Sequence[DataRecord],
    tokenizer,
    *,
    max_seq_length: int,
    loss_on: LossOn = "completions",
    encode: Callable[..., EncodeResult] | None = None,
) -> EncodeResult:
    """The examples of all records, in order.

    Text is cut into windows of `max_seq_length` tokens that overlap by one token: the
    first token of a window is not predicted in it, but as the last token of the
    previous window. So every token of a document except its first is trained exactly
    once. Other records are truncated at the end. All assistant turns are trained,
    including the end-of-turn token.

    Args:
        encode: makes the examples of the records; None = `encode_block`.

    Raises:
        UserError: no record has a trained token, or a record is a chat and the
            tokenizer has no chat template.
    """
    encoded = (encode or encode_block)(
        records, tokenizer, max_seq_length=max_seq_length, loss_on=loss_on
    )
    if not encoded.examples:
        raise no_trainable_examples(len(records), encoded.dropped)
    return encoded


def no_trainable_examples(
    records: int, dropped: Sequence[tuple[str, str]]
) -> UserError:
    """The error if no record has a trained token."""
    where, reason = dropped[0] if dropped else ("", "there are no examples")
    return UserError(
        f"nothing to train on: all {records} examples were skipped; the first: "
        f"{reason}",
        hint="raise data.max_seq_length" if "max_seq_length" in reason else None,
        place=where or None,
    )


def encode_block(
    records: Iterable[DataRecord],
    tokenizer,
    *,
    max_seq_length: int,
    loss_on: LossOn,
    include_undesirable: bool = False,
) -> EncodeResult:
    """`encode_all` for some of the records; none of them needs a trained token.

    Args:
        include_undesirable: encode records with a false label, too.
    """
    encoded = EncodeResult()
    plans, everything = [], loss_on == "all"
    for record in records:
        if record.label is False and not include_undesirable:
            reason = "its label is false; a preference loss such as kto learns from it"
            encoded.dropped.append((record.where, reason))
            continue
        try:
            plans.append(chat_template.render(record, tokenizer, everything=everything))
        except NoTrainableTokens as error:
            encoded.dropped.append((record.where, str(error)))
    texts = [("" if plan.marked else plan.text, plan.edges) for plan in plans]
    texts = encode_with_edges(texts, tokenizer)
    bos, eos = _bos(tokenizer), tokenizer.eos_token_id
    for plan, text in zip(plans, texts, strict=True):
        try:
            tokens, mask = _masked(plan, text, tokenizer)
        except NoTrainableTokens as error:
            encoded.dropped.append((plan.record.where, str(error)))
            continue
        if plan.bare:
            tokens, mask = _add_bos_eos(tokens, mask, bos, eos)
        if everything:
            mask = [True] * len(tokens)
        _add(encoded, plan, tokens, mask, max_seq_length)
    return encoded


def render_mask(example: Example, tokenizer) -> list[tuple[str, bool]]:
    """The example as spans of (text, whether it is trained)."""
    pairs = zip(example.tokens.tolist(), example.mask.tolist(), strict=True)
    return [
        (tokenizer.decode([token for token, _ in span]), trained)
        for trained, span in groupby(pairs, key=lambda pair: pair[1])
    ]


def _masked(
    plan: chat_template.RenderedChat, encoded: EncodedText, tokenizer
) -> tuple[list[int], list[bool]]:
    """The tokens of the whole text, and a mask with edges between tokens."""
    if plan.marked:
        return plan.marked
    tokens, edges = encoded.ids, encoded.edges
    if edges is None:
        return _by_segment(plan, tokens, tokenizer)
    mask = [False] * len(tokens)
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        mask[start:end] = [True] * (end - start)
    return tokens, _until_end_of_turn(plan, tokens, mask, tokenizer)


def _by_segment(plan, tokens: list[int], tokenizer) -> tuple[list[int], list[bool]]:
    """Encode prompts and completions separately, as generation does.

    Used if a token would span the edge between a prompt and a completion.
    """
    joined: list[int] = []
    mask: list[bool] = []
    for text, trained in plan.segments():
        ids = list(tokenizer.encode(text, add_special_tokens=False))
        joined += ids
        mask += [trained] * len(ids)
    if tokenizer.decode(joined) != tokenizer.decode(tokens):
        raise NoTrainableTokens("no token boundary lies at the start of the completion")
    return joined, _until_end_of_turn(plan, joined, mask, tokenizer)


def _until_end_of_turn(plan, tokens, mask: list[bool], tokenizer) -> list[bool]:
    """Exclude what follows an end-of-turn token, where generation stops."""
    if plan.bare:
        return mask
    # A set in mlx-lm's wrapper; transformers has a single id.
    ids = getattr(tokenizer, "eos_token_ids", None)
    ids = ids if isinstance(ids, set | list) else {tokenizer.eos_token_id}
    ended, result = False, []
    for token, trained in zip(tokens, mask, strict=True):
        result.append(trained and not ended)
        ended = trained and (ended or token in ids)
    return result


def _add_bos_eos(tokens, mask, bos: int | None, eos: int | None) -> tuple[list, list]:
    """Add BOS and EOS of a document, unless they are present."""
    if bos is not None and tokens[:1] != [bos]:
        tokens, mask = [bos, *tokens], [False, *mask]
    if eos is not None and tokens[-1:] != [eos]:
        tokens, mask = [*tokens, eos], [*mask, True]
    return tokens, mask


def _bos(tokenizer) -> int | None:
    """The BOS token, if this tokenizer adds one to every text."""
    bos = tokenizer.bos_token_id
    return bos if bos is not None and tokenizer.encode("a")[:1] == [bos] else None


def _add(
    encoded: EncodeResult,
    plan: chat_template.RenderedChat,
    tokens,
    mask,
    max_seq_length: int,
) -> None:
    record, count = plan.record, len(tokens)
    step = max_seq_length - 1
    starts = range(0, max(count - 1, 1), step) if record.text is not None else [0]
    examples = []
    for start in starts:
        ids = np.array(tokens[start : start + max_seq_length], np.int32)
        trained = np.array(mask[start : start + max_seq_length], bool)
        trained[:1] = False
        if trained.any():
            examples.append(Example(ids, trained, record.where, record.skill))
    if not examples:
        encoded.dropped.append((record.where, _skip_reason(mask, max_seq_length)))
        return
    encoded.examples += examples
    encoded.truncated += record.text is None and count > max_seq_length
    encoded.last_only += plan.last_only


def _skip_reason(mask: list[bool], max_seq_length: int) -> str:
    if not any(mask[1:]):
        return "it has no trainable token"
    prompt = mask.index(True)
    return f"the prompt alone has {prompt} tokens, max_seq_length is {max_seq_length}"

"""Tokenization of records, with the loss mask."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby, islice
from typing import Any, Literal

import numpy as np

from ..errors import UserError
from .chat.completeness import REASONING, TAG, missing_part
from .chat.messages import is_completion, name_tool_results
from .chat.rendering import ChatTemplate, NoTrainableTokens
from .chat.sequences import Span, find_sequences
from .chat.system_messages import merge_system_messages
from .chat.turns import EMPTY_BLOCK, Chat
from .record_formats import DataRecord
from .token_edges import EncodedText, encode_with_edges

SEVERAL = (
    "with this chat template, its completion of several turns is no single sequence"
)
# Characters of texts that are encoded together.
BLOCK_CHARACTERS = 4_000_000
# The counts of an `EncodeResult`.
COUNTS = (
    *("truncated", "split", "sequences", "ended", "without_thought"),
    "merges_system",
)


@dataclass(frozen=True)
class RecordText:
    """A training sequence as text.

    Attributes:
        spans: (start, end) of the trained completions in characters, in order.
        bare: the text has no chat template, so BOS and EOS must be added.
        add_eos: the last completion ends without a stop token, so EOS must be added.
        merges_system: system messages are not where the record has them.
    """

    record: DataRecord
    text: str
    spans: tuple[Span, ...]
    bare: bool = False
    add_eos: bool = False
    merges_system: bool = False


def texts_of(
    record: DataRecord, template: ChatTemplate, *, everything: bool = False
) -> list[RecordText]:
    """The training sequences of a record: several for a chat whose turns do not nest.

    Args:
        everything: treat the whole text as one completion.

    Raises:
        NoTrainableTokens: a turn cannot be trained as it is served, or the template
            leaves out a part of it.
        UserError: the record is a chat and the tokenizer has no chat template.
    """
    if record.text is not None:
        return [RecordText(record, record.text, ((0, len(record.text)),), bare=True)]
    if record.messages is not None:
        if not template.exists:
            raise UserError(
                "chat examples need a chat template, which this model's tokenizer "
                "lacks",
                hint="use an instruct model, or examples with prompt and completion, "
                "and without system",
                place=record.where,
            )
        return _chat(record, [*record.messages], template, everything)
    if template.exists:
        user = {"role": "user", "content": record.prompt}
        assistant = {"role": "assistant", "content": record.completion}
        return _chat(record, [user, assistant], template, everything)
    text = record.prompt + record.completion
    return [RecordText(record, text, ((len(record.prompt), len(text)),), bare=True)]


def _chat(
    record: DataRecord, messages: list[dict], template: ChatTemplate, everything: bool
) -> list[RecordText]:
    options = record.chat_template_kwargs or {}
    if name := template.unknown(options):
        raise NoTrainableTokens(
            f"the chat template has no {name}, which is in its chat_template_kwargs"
        )
    given = name_tool_results(messages)
    chat = Chat(template, given, record.tools, options)
    messages = merge_system_messages(chat)
    chat, is_merged = replace(chat, messages=messages), messages != given
    if everything:
        # Templates may drop reasoning from earlier turns, as a server does.
        text = chat.render(len(messages))
        if missing := chat.missing_from(len(messages)):
            raise NoTrainableTokens(f"the chat template does not write {missing}")
        for message in filter(is_completion, messages):
            answer = {k: v for k, v in message.items() if k not in REASONING}
            answer["content"] = TAG.split(answer["content"])[-1]
            if missing := missing_part(answer, text):
                raise NoTrainableTokens(
                    f"the chat template does not write its {missing}"
                )
        return [RecordText(record, text, ((0, len(text)),), merges_system=is_merged)]
    untrained = sum(map(is_completion, given[: record.prompt_messages]))
    turns = [n for n, message in enumerate(messages) if is_completion(message)]
    turns = turns[untrained:]
    del messages[turns[-1] + 1 :]
    return [
        RecordText(
            record,
            sequence.text,
            sequence.spans,
            add_eos=sequence.add_eos,
            merges_system=is_merged,
        )
        for sequence in find_sequences(chat, turns)
    ]


LossOn = Literal["completions", "all"]


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
        truncated: number of records of which max_seq_length cuts something off.
        split, sequences: number of chats that became several sequences, because the
            chat template changes earlier turns, and of these sequences.
        ended: number of records whose turns end with the tokenizer's end-of-sequence
            token, because the chat template writes none.
        without_thought: number of records with a target that begins with an empty chain
            of thought, or with the end of the one that the prompt opens.
        merges_system: number of records whose system messages the chat template takes
            in another place.
        dropped: (where, reason) of records without a trained token.
    """

    examples: list[Example] = field(default_factory=list)
    truncated: int = 0
    split: int = 0
    sequences: int = 0
    ended: int = 0
    without_thought: int = 0
    merges_system: int = 0
    dropped: list[tuple[str, str]] = field(default_factory=list)


def template_messages(counts: Mapping[str, int]) -> Iterator[str]:
    """What the chat template changed, by the counts of an `EncodeResult`."""
    if count := counts["split"]:
        yield (
            f"{count:,} chats became {counts['sequences']:,} sequences, because the "
            "chat template changes earlier turns when more turns follow"
        )
    if count := counts["ended"]:
        yield (
            f"{count:,} examples end with the end-of-sequence token, because the chat "
            "template writes no token that ends a turn"
        )
    if count := counts["without_thought"]:
        yield (
            f"{count:,} examples have turns without a chain of thought, whose targets "
            "begin with an empty one or close the one that the prompt opens"
        )
    if count := counts["merges_system"]:
        yield (
            f"{count:,} examples have system messages where the chat template takes "
            "none: they are merged at the start, or with the user's message"
        )


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
    once. Other records are truncated at the end. All assistant turns are trained as
    they are served, up to and with the token that ends the turn. A chat becomes several
    sequences if the chat template changes earlier turns when more turns follow.

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
    for_preference: bool = False,
) -> EncodeResult:
    """`encode_all` for some of the records; none of them needs a trained token.

    Args:
        for_preference: a record is one sequence, and may have a false label. Others
            are dropped.
    """
    everything = loss_on == "all"
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    if bos is not None and tokenizer.encode("a")[:1] != [bos]:
        bos = None
    encoder = _Encoder(tokenizer, bos, eos, max_seq_length, everything, for_preference)
    encoded, template, groups = EncodeResult(), ChatTemplate(tokenizer), []
    for record in records:
        if record.label is False and not for_preference:
            reason = "its label is false; a preference loss such as kto learns from it"
            encoded.dropped.append((record.where, reason))
            continue
        try:
            groups.append(texts_of(record, template, everything=everything))
        except NoTrainableTokens as error:
            encoded.dropped.append((record.where, str(error)))
    for block in in_blocks(groups, lambda g: sum(len(text.text) for text in g)):
        texts = (text for group in block for text in group)
        pairs = [(text.text, [*chain(*text.spans)]) for text in texts]
        tokens = iter(encode_with_edges(pairs, tokenizer))
        for group in block:
            encoder.add_record(encoded, group, list(islice(tokens, len(group))))
    return encoded


def in_blocks(
    items: Iterable, characters: Callable[[Any], int], most: float = float("inf")
) -> Iterator[list]:
    """Lists of at most `most` items that fit in memory together, by their lengths."""
    block, size = [], 0
    for item in items:
        block.append(item)
        size += characters(item)
        if len(block) == most or size > BLOCK_CHARACTERS:
            yield block
            block, size = [], 0
    if block:
        yield block


def render_mask(example: Example, tokenizer) -> list[tuple[str, bool]]:
    """The example as spans of (text, whether it is trained)."""
    pairs = zip(example.tokens.tolist(), example.mask.tolist(), strict=True)
    return [
        (tokenizer.decode([token for token, _ in span]), trained)
        for trained, span in groupby(pairs, key=lambda pair: pair[1])
    ]


@dataclass(frozen=True)
class _Encoder:
    """Makes examples of texts.

    Attributes:
        bos: the BOS token, if this tokenizer adds one to every text.
        everything: whether all tokens are trained.
        is_single: whether a record must be one sequence.
    """

    tokenizer: Any
    bos: int | None
    eos: int | None
    max_seq_length: int
    everything: bool
    is_single: bool

    def add_record(
        self, encoded: EncodeResult, texts: list[RecordText], tokens: list[EncodedText]
    ) -> None:
        """Add the examples of one record, or the reason why it has none."""
        record, examples, longest, mask = texts[0].record, [], 0, []
        pairs = zip(texts, tokens, strict=True)
        try:
            parts = [part for pair in pairs for part in self._in_tokens(*pair)]
            if self.is_single and len(parts) > 1:
                raise NoTrainableTokens(SEVERAL)
        except NoTrainableTokens as error:
            encoded.dropped.append((record.where, str(error)))
            return
        for text, part in parts:
            ids, mask, eos = part.ids, [False] * len(part.ids), self.eos
            for start, end in zip(part.edges[::2], part.edges[1::2], strict=True):
                mask[start:end] = [True] * (end - start)
            if text.bare and self.bos is not None and ids[:1] != [self.bos]:
                ids, mask = [self.bos, *ids], [False, *mask]
            if (text.bare and eos is not None and ids[-1:] != [eos]) or text.add_eos:
                ids, mask = [*ids, eos], [*mask, True]
            mask = [True] * len(ids) if self.everything else mask
            longest = max(longest, len(ids))
            for start, end, trained in windows(
                mask, self.max_seq_length, is_text=record.text is not None
            ):
                part = np.array(ids[start:end], np.int32)
                examples.append(Example(part, trained, record.where, record.skill))
        if not examples:
            reason = "it has no trainable token"
            if any(mask[1:]):
                reason = (
                    f"the prompt alone has {mask.index(True)} tokens, max_seq_length "
                    f"is {self.max_seq_length}"
                )
            encoded.dropped.append((record.where, reason))
            return
        encoded.examples += examples
        encoded.truncated += record.text is None and longest > self.max_seq_length
        encoded.split += len(parts) > 1
        encoded.sequences += len(parts) if len(parts) > 1 else 0
        encoded.ended += any(text.add_eos for text in texts)
        starts = [(text.text, start) for text in texts for start, _ in text.spans]
        encoded.without_thought += any(EMPTY_BLOCK.match(*start) for start in starts)
        encoded.merges_system += texts[0].merges_system

    def _in_tokens(
        self, text: RecordText, encoded: EncodedText
    ) -> Iterator[tuple[RecordText, EncodedText]]:
        """The text with the completions whose edges lie between its tokens, after each
        other completion with its prompt alone: a prompt has the tokens of a request."""
        pairs = zip(encoded.edges[::2], encoded.edges[1::2], strict=True)
        edges = dict(zip(text.spans, pairs, strict=True))
        whole = tuple(span for span in edges if None not in edges[span])
        alone = [(span,) for span in edges if span not in whole]
        for spans in alone + [whole] * bool(whole):
            is_last = spans[-1] == text.spans[-1]
            part = replace(text, spans=spans, add_eos=text.add_eos and is_last)
            if spans is whole:
                found = chain(*(edges[span] for span in spans))
                yield part, EncodedText(encoded.ids, [*found])
                continue
            # A token of the text would span an edge, so prompt and completion are
            # encoded separately, as generation does.
            start, end = spans[0]
            prompt, completion, joined = (
                list(self.tokenizer.encode(part, add_special_tokens=False))
                for part in (text.text[:start], text.text[start:end], text.text[:end])
            )
            ids = prompt + completion
            if self.tokenizer.decode(ids) != self.tokenizer.decode(joined):
                reason = "no token boundary lies at the start of the completion"
                raise NoTrainableTokens(reason)
            yield part, EncodedText(ids, [len(prompt), len(ids)])


def windows(
    mask: Sequence[bool], max_seq_length: int, *, is_text: bool
) -> Iterator[tuple[int, int, np.ndarray]]:
    """Start, end and mask (bool [end - start]) of each example of a sequence.

    A long text has several, which overlap by one token, and another record has one: its
    start. Those without a trained token are left out.
    """
    starts = range(0, max(len(mask) - 1, 1), max_seq_length - 1) if is_text else [0]
    for start in starts:
        trained = np.array(mask[start : start + max_seq_length], bool)
        trained[:1] = False
        if trained.any():
            yield start, start + len(trained), trained

"""Tokenization of preference data: two sequences for each example.

For pairs these are the chosen and the rejected completion of a prompt. For KTO they are
a completion, and the same prompt with the completion of another prompt, which estimates
how far the model has moved from its reference.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from .chat.messages import BadRecord
from .record_formats import DataRecord
from .tokenization import EncodeResult, Example, LossOn, encode_block

# Of `encode_block`: completions are encoded whole, to see which ones are cut.
WHOLE = {"max_seq_length": sys.maxsize, "for_preference": True}


def encode_pairs(
    records: Iterable[DataRecord], tokenizer, *, max_seq_length: int, loss_on: LossOn
) -> EncodeResult:
    """The chosen and the rejected completion of every record, in turns.

    A record is dropped if one of its completions is cut, has no trained token or
    becomes several sequences, or if they are equal.
    """
    result, pairs = EncodeResult(), []
    for record in records:
        if record.rejected is None:
            result.dropped.append((record.where, "it has no rejected completion"))
        else:
            pairs.append((record, record.with_rejected()))
    sides = [
        encode_block(
            [pair[side] for pair in pairs], tokenizer, loss_on=loss_on, **WHOLE
        )
        for side in (0, 1)
    ]
    reasons = dict(place for side in sides for place in side.dropped)
    encoded = [{e.where: e for e in side.examples} for side in sides]
    for where in (record.where for record, _ in pairs):
        if where not in reasons:
            chosen, rejected = (side[where] for side in encoded)
            try:
                size = min(len(chosen.tokens), len(rejected.tokens))
                if (chosen.tokens[:size] == rejected.tokens[:size]).all():
                    raise BadRecord(
                        "chosen and rejected are equal, or one begins with the other"
                    )
                pair = (chosen, rejected)
                result.examples += [_whole(part, max_seq_length) for part in pair]
            except BadRecord as fault:
                reasons[where] = str(fault)
    result.dropped += reasons.items()
    result.ended = max(side.ended for side in sides)
    return result


def encode_unpaired(
    records: Iterable[DataRecord],
    tokenizer,
    *,
    max_seq_length: int,
    loss_on: LossOn,
    lent: Sequence[Example] = (),
) -> EncodeResult:
    """Every labelled record, each followed by its prompt with another's completion.

    A record is dropped if its completion is cut, or if no other has another prompt.

    Args:
        lent: more examples that may be the other one.
    """
    records = list(records)
    labels = {r.where: r.label for r in records if r.label is not None}
    labelled = [record for record in records if record.where in labels]
    result = encode_block(labelled, tokenizer, loss_on=loss_on, **WHOLE)
    result.dropped += [
        (record.where, "it has no label") for record in records if record.label is None
    ]
    examples = []
    for example in result.examples:
        try:
            whole = _whole(example, max_seq_length)
            examples.append(replace(whole, label=labels[example.where]))
        except BadRecord as fault:
            result.dropped.append((example.where, str(fault)))
    result.examples = []
    others = _with_other_prompts([*examples, *lent])
    for example, other in zip(examples, others, strict=False):
        if other:
            # The prompt of the example with the completion of the other one. Its end
            # may be cut: it has no gradient.
            prompt, completion = _last_turn(example)[0], _last_turn(other)[1]
            tokens = np.concatenate([prompt, completion])[:max_seq_length]
            mask = np.arange(len(tokens)) >= len(prompt)
            result.examples += [example, replace(example, tokens=tokens, mask=mask)]
        else:
            reason = "no example beside it has another prompt, which kto compares with"
            result.dropped.append((example.where, reason))
    return result


def _whole(example: Example, max_seq_length: int) -> Example:
    """The example without untrained tokens above `max_seq_length`.

    Raises:
        BadRecord: `max_seq_length` cuts its completion.
    """
    tokens, mask = example.tokens[:max_seq_length], example.mask[:max_seq_length]
    if mask.sum() < example.mask.sum():
        raise BadRecord("max_seq_length cuts off a completion")
    return replace(example, tokens=tokens, mask=mask)


def _with_other_prompts(examples: list[Example]) -> list[Example | None]:
    """For every example one with another prompt; None if all prompts are equal.

    Each is used once, unless most have the same prompt. So the good and the bad
    completions of one prompt count alike.
    """
    prompts = {e.where: _last_turn(e)[0].tobytes() for e in examples}
    groups: dict[bytes, list[int]] = {}
    for number in reversed(range(len(examples))):
        groups.setdefault(prompts[examples[number].where], []).append(number)
    order = [n for g in sorted(groups.values(), key=len, reverse=True) for n in g]
    largest = max(map(len, groups.values()), default=0)
    others: list[Example | None] = [None] * len(order)
    if rest := len(order) - largest:
        # A shift by the size of the largest group leaves every group.
        for place, number in enumerate(order):
            place = place % rest if place < largest else place
            others[number] = examples[order[(place + largest) % len(order)]]
    return others


def _last_turn(example: Example) -> tuple[np.ndarray, np.ndarray]:
    """All tokens before the last run of trained ones, and that run."""
    end = np.flatnonzero(example.mask)[-1] + 1
    start = np.flatnonzero(~example.mask[:end])[-1] + 1
    return example.tokens[:start], example.tokens[start:end]

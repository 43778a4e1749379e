"""Tokenization of preference data: two sequences for each example.

For pairs these are the chosen and the rejected completion of a prompt. For KTO they are
a completion, and the same prompt with the completion of the example before it, which
estimates how far the model has moved from its reference.
"""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from .record_formats import DataRecord
from .tokenization import EncodeResult, Example, LossOn, encode_block


def encode_pairs(
    records: Iterable[DataRecord], tokenizer, *, max_seq_length: int, loss_on: LossOn
) -> EncodeResult:
    """The chosen and the rejected completion of every record, in turns.

    A record is dropped if one of its completions has no trained token, or becomes
    several sequences.
    """
    result, pairs = EncodeResult(), []
    for record in records:
        if record.rejected is None:
            result.dropped.append((record.where, "it has no rejected completion"))
        else:
            pairs.append((record, record.with_rejected()))
    sides = [
        encode_block(
            [pair[side] for pair in pairs],
            tokenizer,
            max_seq_length=max_seq_length,
            loss_on=loss_on,
            for_preference=True,
        )
        for side in (0, 1)
    ]
    reasons = dict(place for side in sides for place in side.dropped)
    encoded = [{e.where: e for e in side.examples} for side in sides]
    for pair in pairs:
        where = pair[0].where
        if where not in reasons:
            result.examples += [side[where] for side in encoded]
    result.dropped += reasons.items()
    result.truncated = max(side.truncated for side in sides)
    result.ended = max(side.ended for side in sides)
    return result


def encode_unpaired(
    records: Iterable[DataRecord], tokenizer, *, max_seq_length: int, loss_on: LossOn
) -> EncodeResult:
    """Every labelled record, each followed by its prompt with another completion."""
    records = list(records)
    labelled = [record for record in records if record.label is not None]
    result = encode_block(
        labelled,
        tokenizer,
        max_seq_length=max_seq_length,
        loss_on=loss_on,
        for_preference=True,
    )
    result.dropped += [
        (record.where, "it has no label") for record in records if record.label is None
    ]
    labels = {record.where: record.label for record in labelled}
    examples = [replace(e, label=labels[e.where]) for e in result.examples]
    # The first one follows the last one.
    others = [examples[number - 1] for number in range(len(examples))]
    result.examples = [
        sequence
        for example, other in zip(examples, others, strict=True)
        for sequence in (example, _mismatched(example, other, max_seq_length))
    ]
    return result


def _mismatched(example: Example, other: Example, max_seq_length: int) -> Example:
    """The prompt of an example with the last completion of another one."""
    prompt = example.tokens[: _last_completion(example).start]
    completion = other.tokens[_last_completion(other)]
    # At least one token of the completion is left.
    prompt = prompt[: max_seq_length - 1]
    tokens = np.concatenate([prompt, completion])[:max_seq_length]
    return replace(
        example, tokens=tokens, mask=np.arange(len(tokens)) >= max(1, len(prompt))
    )


def _last_completion(example: Example) -> slice:
    """The last run of trained tokens."""
    (trained,) = np.nonzero(example.mask)
    breaks = np.flatnonzero(np.diff(trained) > 1)
    first = trained[breaks[-1] + 1] if len(breaks) else trained[0]
    return slice(int(first), int(trained[-1]) + 1)

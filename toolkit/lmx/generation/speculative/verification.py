"""How a guess is judged, so that the text is what the target alone would say.

Every rule takes the target's logits behind each guessed token and behind none of them,
and gives how many guesses stand and the token that follows them.
"""

from typing import Literal

import mlx.core as mx

from .proposer import DraftTokens

Rule = Literal["rejection", "match"]


def greedy(logits: mx.array, proposal: DraftTokens) -> tuple[mx.array, mx.array]:
    """Guesses stand as long as they are the target's most likely tokens.

    Args:
        logits: [k + 1, V], of the target behind 0 ... k guesses.

    Returns:
        How many guesses stand, and the token that follows them; both int [].
    """
    return _as_chosen(mx.argmax(logits, axis=-1), proposal)


def match(
    logits: mx.array, proposal: DraftTokens, key: mx.array
) -> tuple[mx.array, mx.array]:
    """Guesses stand as long as they are what the target itself draws.

    Lossless whatever the guesses were drawn from; mlx-lm's rule.
    """
    return _as_chosen(mx.random.categorical(logits, key=key), proposal)


def rejection(
    logits: mx.array, proposal: DraftTokens, key: mx.array
) -> tuple[mx.array, mx.array]:
    """Speculative sampling (arXiv 2211.17192, 2302.01318).

    A guess x drawn from q stands with probability min(1, p(x) / q(x)); behind the first
    that falls, the token is drawn from what p has more than q. So every token is a draw
    from p, in float32, where q is what the guess was really drawn from.
    """
    count = len(proposal)
    logits = logits.astype(mx.float32)
    target = mx.softmax(logits, axis=-1)
    if not count:
        return mx.array(0), mx.random.categorical(logits[0], key=key)
    draw, again = mx.random.split(key)
    tokens = proposal.tokens[:, None]
    if proposal.logits is None:
        columns = mx.arange(logits.shape[-1])
        guessed = (tokens == columns).astype(mx.float32)
    else:
        guessed = mx.softmax(proposal.logits.astype(mx.float32), axis=-1)
    p = mx.take_along_axis(target[:count], tokens, axis=-1)[:, 0]
    q = mx.take_along_axis(guessed, tokens, axis=-1)[:, 0]
    stands = mx.random.uniform(shape=(count,), key=draw) * q < p
    accepted = mx.cumprod(stands.astype(mx.int32)).sum()
    # Behind all of them nothing was guessed, and p is left whole.
    left = mx.maximum(target - mx.pad(guessed, [(0, 1), (0, 0)]), 0.0)[accepted]
    # Rounding alone can leave nothing of two equal distributions.
    left = mx.where(left.sum() > 0, left, target[accepted])
    return accepted, mx.random.categorical(mx.log(left), key=again)


def _as_chosen(chosen: mx.array, proposal: DraftTokens) -> tuple[mx.array, mx.array]:
    same = chosen[: len(proposal)] == proposal.tokens
    accepted = mx.cumprod(same.astype(mx.int32)).sum() if len(proposal) else mx.array(0)
    return accepted, chosen[accepted]

"""A teacher's predictions: top-k log-probabilities, and the mass of all other tokens.

A position takes the same few bytes for any vocabulary. With the mass of the other
tokens a target is a distribution over the top-k tokens and one more outcome, "any other
token". A loss against it is a lower bound of the loss against the teacher.
"""

from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from ..cpu import unfused
from ..models.cross_entropy import exp_nonpositive
from ..models.top_k import top_k_indices


class TeacherTarget(NamedTuple):
    """A distribution over k tokens and the tail, at every position.

    Attributes:
        indices: the tokens, int [..., k]; None = the full vocabulary, in its order.
        log_probs: float32 [..., k].
        log_tail: of all other tokens together, float32 [...]; -inf if there are none;
            None with the full vocabulary.
    """

    indices: mx.array | None
    log_probs: mx.array
    log_tail: mx.array | None


def full_targets(logits: mx.array, temperature: float = 1.0) -> TeacherTarget:
    """The target of logits [..., V] with the full vocabulary, in its order."""
    logits, _, total = _normalized(logits, temperature)
    return TeacherTarget(None, logits - total, None)


def compress_targets(
    logits: mx.array, top_k: int, temperature: float = 1.0
) -> TeacherTarget:
    """The top-k target of logits [..., V], in float32."""
    logits, exponentials, total = _normalized(logits, temperature)
    top_k = min(top_k, logits.shape[-1])
    indices = top_k_indices(logits, top_k)
    log_probs = mx.take_along_axis(logits, indices, axis=-1) - total
    total = total.squeeze(-1)
    if top_k == logits.shape[-1]:
        return TeacherTarget(indices, log_probs, mx.full(total.shape, -mx.inf))
    # Summed directly: one minus the sum of the top k is noise if the tail is small.
    others = mx.put_along_axis(exponentials, indices, mx.array(0.0), axis=-1)
    return TeacherTarget(indices, log_probs, mx.log(others.sum(axis=-1)) - total)


def _normalized(
    logits: mx.array, temperature: float
) -> tuple[mx.array, mx.array, mx.array]:
    """Logits [..., V] up to zero, their exponentials and the logarithm of the sum
    [..., 1]."""
    logits = logits.astype(mx.float32) / temperature
    logits = unfused(logits - logits.max(axis=-1, keepdims=True))
    exponentials = exp_nonpositive(logits)
    # Fused, the logarithm would be computed for every token.
    total = unfused(mx.log(exponentials.sum(axis=-1, keepdims=True)))
    return logits, exponentials, total


def decompress_targets(
    indices: mx.array, log_probs: mx.array, log_tail: mx.array
) -> TeacherTarget:
    """A target from its arrays in small dtypes; the probabilities sum to one."""
    log_probs = log_probs.astype(mx.float32)
    # The rounding of float16 must not change the total mass.
    total = mx.logaddexp(mx.logsumexp(log_probs, axis=-1), log_tail)
    indices = indices.astype(mx.int32)
    return TeacherTarget(indices, log_probs - total[..., None], log_tail - total)


def index_dtype(vocab_size: int) -> np.dtype:
    """The smallest dtype of token ids."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def bytes_per_token(top_k: int, vocab_size: int) -> int:
    """Bytes of a position on disk."""
    return min(top_k, vocab_size) * (2 + index_dtype(vocab_size).itemsize) + 4


def save_targets(folder: Path, target: TeacherTarget, vocab_size: int) -> None:
    """Write a compressed target: token ids, float16 log-probabilities, float32 tail."""
    dtypes = TeacherTarget(index_dtype(vocab_size), np.float16, np.float32)
    for name, array, dtype in zip(target._fields, target, dtypes, strict=True):
        np.save(folder / f"{name}.npy", np.array(array).astype(dtype, copy=False))


def load_targets(folder: Path) -> TeacherTarget:
    """What `save_targets` wrote, memory-mapped: see `decompress_targets`."""
    names = TeacherTarget._fields
    return TeacherTarget(*(np.load(folder / f"{n}.npy", mmap_mode="r") for n in names))

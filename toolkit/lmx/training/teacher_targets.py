"""A teacher's predictions on disk: its likeliest tokens, and the mass of all others.

A position costs the same few bytes whatever the vocabulary. The mass of the others is
kept too, so what is read back is a distribution over the tokens named and one more
outcome, "any other token": losses against it stay bounds of those against the teacher.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..run.fs import atomic_folder, require_space

TENSORS = "target.safetensors"


class TeacherTarget(NamedTuple):
    """A distribution at every position over k tokens and the rest.

    Attributes:
        indices: the tokens, int [..., k]; None = the whole vocabulary, in its order.
        log_probs: float32 [..., k].
        log_rest: of all other tokens together, float32 [...]; -inf if there are none;
            None with the whole vocabulary.
    """

    indices: mx.array | None
    log_probs: mx.array
    log_rest: mx.array | None


class TeacherTargetFiles(Sequence):
    """What `make_targets` left in a folder, read part by part.

    Attributes:
        tokens: of the parts, int32 [B, L] each.
        counted: bool [B, L] each, True where a position counts.
        key: a hash of the tokens, of those that count, the teacher and what was kept.
    """

    def __init__(
        self,
        folder: Path,
        tokens: Sequence[mx.array],
        counted: Sequence[mx.array],
        key: str,
    ):
        self.tokens = tokens
        self.counted = counted
        self.key = key
        self._folder = folder

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, part: int) -> TeacherTarget:
        """The target of a part, for each of its positions; it sums to one."""
        place = _place(self._folder, range(len(self.tokens))[part])
        found = mx.load(str(place / TENSORS))
        return decompress_targets(
            found["indices"], found["log_probs"], found["log_rest"]
        )


def write_teacher_targets(
    folder: Path,
    parts: Sequence[mx.array],
    teacher: Callable[[mx.array], mx.array],
    *,
    counted: Sequence[mx.array] | None = None,
    digest: str,
    top_k: int,
    temperature: float = 1.0,
    info: Callable[[str], None],
) -> TeacherTargetFiles:
    """Write the teacher's predictions for parts of tokens; go on where that stopped.

    Args:
        folder: of these targets alone; what it has of others is deleted.
        parts: int32 [B, L] each, of any B and L.
        teacher: logits [B, L, V] of such tokens.
        counted: bool [B, L] each; None = every position counts.
        digest: a hash of what the teacher is.
        top_k: tokens kept of a position; all, if the vocabulary is smaller.
        temperature: what the logits are divided by.
        say: told beforehand how large this gets.

    Raises:
        UserError: the disk is too small.
    """
    if counted is None:
        counted = [mx.ones(part.shape, mx.bool_) for part in parts]
    key = _key(parts, counted, digest, top_k, temperature)
    state = folder / "targets.json"
    if not (state.is_file() and json.loads(state.read_text()) == key):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        state.write_text(json.dumps(key))
    missing = [n for n in range(len(parts)) if not _place(folder, n).is_dir()]
    for number in missing:
        logits = teacher(parts[number])
        if number == missing[0]:
            positions = sum(parts[n].size for n in missing)
            size = positions * bytes_per_token(top_k, logits.shape[-1])
            info(f"predictions for {positions:,} tokens: {size / 1e6:,.1f} MB on disk")
            require_space(folder, size)
        target = compress_targets(logits, top_k, temperature)
        _write(_place(folder, number), target, _index_type(logits.shape[-1]))
    return TeacherTargetFiles(folder, parts, counted, key)


def bytes_per_token(top_k: int, vocabulary: int) -> int:
    """What a position takes on disk."""
    return min(top_k, vocabulary) * (2 + _index_type(vocabulary).size) + 4


def full_targets(logits: mx.array, temperature: float = 1.0) -> TeacherTarget:
    """The target of logits [..., V] that names all tokens, in their order."""
    logits = logits.astype(mx.float32) / temperature
    return TeacherTarget(None, nn.log_softmax(logits), None)


def decompress_targets(
    indices: mx.array, log_probs: mx.array, log_rest: mx.array
) -> TeacherTarget:
    """What was `compressed` and kept in small types; it sums to one."""
    log_probs = log_probs.astype(mx.float32)
    # Half a float's rounding is not allowed to make or lose mass.
    total = mx.logaddexp(mx.logsumexp(log_probs, axis=-1), log_rest)
    indices = indices.astype(mx.int32)
    return TeacherTarget(indices, log_probs - total[..., None], log_rest - total)


def compress_targets(
    logits: mx.array, top_k: int, temperature: float = 1.0
) -> TeacherTarget:
    """The target of logits [..., V], in full precision."""
    logits = logits.astype(mx.float32) / temperature
    kept = min(top_k, logits.shape[-1])
    indices = mx.argpartition(-logits, kept - 1, axis=-1)[..., :kept]
    total = mx.logsumexp(logits, axis=-1)
    log_probs = mx.take_along_axis(logits, indices, axis=-1) - total[..., None]
    if kept == logits.shape[-1]:
        return TeacherTarget(indices, log_probs, mx.full(total.shape, -mx.inf))
    # Summed up by themselves: one minus the sum of the kept is noise where it is small.
    others = mx.put_along_axis(logits, indices, mx.array(-mx.inf), axis=-1)
    return TeacherTarget(indices, log_probs, mx.logsumexp(others, axis=-1) - total)


def _write(place: Path, target: TeacherTarget, index_type: mx.Dtype) -> None:
    tensors = {
        "indices": target.indices.astype(index_type),
        "log_probs": target.log_probs.astype(mx.float16),
        "log_rest": target.log_rest,
    }
    mx.eval(tensors)
    with atomic_folder(place) as partial:
        mx.save_safetensors(str(partial / TENSORS), tensors)


def _index_type(vocabulary: int) -> mx.Dtype:
    return mx.uint16 if vocabulary <= 1 << 16 else mx.uint32


def _place(folder: Path, number: int) -> Path:
    return folder / f"{number:05d}"


def _key(parts, counted, digest: str, top_k: int, temperature: float) -> str:
    key = hashlib.sha256(json.dumps([digest, top_k, temperature]).encode())
    for part, counts in zip(parts, counted, strict=True):
        key.update(json.dumps(part.shape).encode())
        key.update(memoryview(part.astype(mx.int32)))
        key.update(memoryview(counts))
    return key.hexdigest()

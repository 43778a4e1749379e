"""Activations on disk, by stream and by shard of the calibration tokens.

The streams are the hidden states of the full-precision model, those of the quantized
model, and the inputs of the layers of the current block.
"""

from pathlib import Path

import mlx.core as mx

FULL, QUANTIZED, INPUTS = "full", "quantized", "inputs"


def save(folder: Path, stream: str, shard: int, arrays: dict[str, mx.array]) -> None:
    """Write the arrays of one shard of a stream."""
    mx.save_safetensors(str(_file(folder, stream, shard)), arrays)


def load(folder: Path, stream: str, shard: int) -> dict[str, mx.array]:
    """The arrays that `save` wrote, lazily."""
    return mx.load(str(_file(folder, stream, shard)))


def drop(folder: Path, streams: str = "", shard: int | None = None) -> None:
    """Delete streams.

    Args:
        streams: the start of their names.
        shard: delete this one only. None = all.
    """
    number = "*" if shard is None else f"{shard:04d}.safetensors"
    for file in folder.glob(f"stream-{streams}*-{number}"):
        # Another machine may list files that are gone.
        file.unlink(missing_ok=True)


def shard_of(name: str) -> int:
    """The shard in a file of this name; 0 if it has no stream."""
    number = name.removesuffix(".safetensors").rpartition("-")[2]
    return int(number) if is_stream(name) else 0


def is_stream(name: str) -> bool:
    """Whether a file of this name has a stream."""
    return name.startswith("stream-")


def _file(folder: Path, stream: str, shard: int) -> Path:
    return folder / f"stream-{stream}-{shard:04d}.safetensors"

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


def drop(folder: Path, streams: str, shard: int) -> None:
    """Delete one shard of the streams whose names begin with this."""
    for file in folder.glob(f"stream-{streams}*-{shard:04d}.safetensors"):
        file.unlink()


def _file(folder: Path, stream: str, shard: int) -> Path:
    return folder / f"stream-{stream}-{shard:04d}.safetensors"

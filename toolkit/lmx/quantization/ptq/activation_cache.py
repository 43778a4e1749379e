"""What passes through a model, on disk by parts of the tokens.

Hidden states of the full-precision model and of the quantized one, and what goes into
the layers of the block at work.
"""

from pathlib import Path

import mlx.core as mx

FULL, ROUNDED, INPUTS = "full", "rounded", "inputs"


def save(folder: Path, stream: str, part: int, arrays: dict[str, mx.array]) -> None:
    """Write what one part of the tokens is in a stream."""
    mx.save_safetensors(str(_file(folder, stream, part)), arrays)


def load(folder: Path, stream: str, part: int) -> dict[str, mx.array]:
    """What `save` wrote, unread."""
    return mx.load(str(_file(folder, stream, part)))


def drop(folder: Path, stream: str = "*") -> None:
    """Delete a stream, or all of them."""
    for file in folder.glob(f"stream-{stream}-*"):
        file.unlink()


def newest(folder: Path) -> Path:
    """Of the folders in this one that hold streams, the last by name."""
    return max(file.parent for file in folder.glob(f"*/stream-{ROUNDED}-0000.*"))


def _file(folder: Path, stream: str, part: int) -> Path:
    return folder / f"stream-{stream}-{part:04d}.safetensors"

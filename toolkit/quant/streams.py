"""Hidden states on disk: of the full-precision model and of the quantized one."""

from pathlib import Path

import mlx.core as mx

NAME = "streams"


def save(folder: Path, part: int, full: mx.array, rounded: mx.array) -> None:
    """Write both states [B, L, width] of one part of the tokens."""
    path = str(folder / f"{NAME}-{part:04d}.safetensors")
    mx.save_safetensors(path, {"full": full, "rounded": rounded})


def load(folder: Path, part: int) -> tuple[mx.array, mx.array]:
    """What `save` wrote, lazy."""
    found = mx.load(str(folder / f"{NAME}-{part:04d}.safetensors"))
    return found["full"], found["rounded"]


def drop(folder: Path) -> None:
    """Delete the states of all parts."""
    for file in folder.glob(f"{NAME}-*"):
        file.unlink()

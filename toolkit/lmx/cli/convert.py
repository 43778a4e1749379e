"""`lmx convert`: what another program quantized or adapted, as a folder of MLX's."""

import argparse
import sys
from pathlib import Path

from ..errors import UserError

TYPES = ("exact", "float16", "bfloat16", "float32")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `lmx convert`."""
    add = parser.add_argument
    add("source", metavar="SOURCE", help="folder, Hub id, GGUF file or peft adapter")
    add("target", metavar="TARGET", help="new folder")
    add(
        "--dtype",
        choices=TYPES,
        default="exact",
        help="type of scales and dense weights; exact (the default) = as published, "
        "float32 where 16 bits would round",
    )


def run(args: argparse.Namespace) -> int:
    """Import; the exit code is 0.

    Raises:
        UserError: there is nothing to import, it cannot be, or the target exists.
    """
    from ..convert.importers import fetch_checkpoint, find, peft
    from ..convert.importers.convert import convert
    from ..models.checkpoint import checkpoint_size
    from ..models.loader import DTYPES
    from ..run.fs import atomic_folder

    target = Path(args.target).expanduser()
    path = fetch_checkpoint(args.source)
    if peft.is_adapter(path):
        return _adapter(path, target)
    source = find(path)
    if source is None:
        raise UserError(
            "this folder names no format that is imported: gptq, awq, pack-quantized "
            "compressed-tensors, GGUF",
            place=args.source,
        )
    _require_new(target)
    with atomic_folder(target) as partial:
        convert(source, partial, DTYPES.get(args.dtype))
    sizes = checkpoint_size(target)
    sys.stdout.write(
        f"{target}: {sizes.parameters:,} parameters, {sizes.bytes / 1e6:,.1f} MB, "
        f"{sizes.bits_per_weight:.2f} bits per weight\n"
    )
    return 0


def _adapter(source: Path, target: Path) -> int:
    from ..convert.importers import peft
    from ..run.fs import atomic_folder

    _require_new(target)
    with atomic_folder(target) as partial:
        peft.convert(source, partial)
    sys.stdout.write(f"{target}: an adapter as mlx-lm's --adapter-path takes it\n")
    return 0


def _require_new(target: Path) -> None:
    if target.exists():
        raise UserError("the target exists", place=str(target))

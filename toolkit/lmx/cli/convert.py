"""`lmx convert`: quantized checkpoints and adapters of other tools, as MLX folders."""

import argparse
import sys
from pathlib import Path

from ..errors import UserError

DTYPES = ("exact", "float16", "bfloat16", "float32")


def add_convert_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `lmx convert`."""
    parser.description = "Convert a GPTQ, AWQ, GGUF or peft checkpoint to MLX."
    add = parser.add_argument
    add("source", metavar="SOURCE", help="folder, Hub id, GGUF file or peft adapter")
    add("target", metavar="TARGET", help="new folder")
    add(
        "--dtype",
        choices=DTYPES,
        default="exact",
        help="dtype of scales and unquantized weights; exact (default) = as published, "
        "float32 where 16 bits would round",
    )


def convert(args: argparse.Namespace) -> int:
    """Convert; the exit code is 0.

    Raises:
        UserError: the source has no supported format, or the target exists.
    """
    from ..convert.importers import fetch_checkpoint, find_importable, peft
    from ..convert.importers.convert import convert_checkpoint
    from ..models.checkpoint import checkpoint_size
    from ..models.loader import DTYPES as MLX_DTYPES
    from ..run.fs import atomic_folder

    target = Path(args.target).expanduser()
    path = fetch_checkpoint(args.source)
    is_adapter = peft.is_adapter(path)
    source = None if is_adapter else find_importable(path)
    if source is None and not is_adapter:
        raise UserError(
            "the folder has no supported format: gptq, awq, compressed-tensors "
            "(pack-quantized) or GGUF",
            place=args.source,
        )
    if target.exists():
        raise UserError("the target exists", place=str(target))
    with atomic_folder(target) as partial:
        if is_adapter:
            peft.convert_adapter(path, partial)
        else:
            convert_checkpoint(source, partial, MLX_DTYPES.get(args.dtype))
    if is_adapter:
        sys.stdout.write(f"{target}: an adapter for mlx-lm's --adapter-path\n")
        return 0
    size = checkpoint_size(target)
    sys.stdout.write(
        f"{target}: {size.parameters:,} parameters, {size.bytes / 1e6:,.1f} MB, "
        f"{size.bits_per_weight:.2f} bits per weight\n"
    )
    return 0

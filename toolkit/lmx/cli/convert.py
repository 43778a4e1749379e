"""`lmx convert`: quantized checkpoints and adapters of other tools, as MLX folders."""

import argparse
import os
from pathlib import Path

from ..errors import UserError
from ..run import terminal

DTYPES = ("exact", "float16", "bfloat16", "float32")


def add_convert_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `lmx convert`."""
    parser.description = (
        "Convert a GPTQ, AWQ, GGUF or peft checkpoint to MLX, expand codes, or store "
        "a dense MLX model in another dtype."
    )
    add = parser.add_argument
    add("source", metavar="SOURCE", help="folder, Hub id, GGUF file or peft adapter")
    add("target", metavar="TARGET", help="new folder")
    about = "dtype of scales and unquantized weights; exact (default) = as published, "
    about += "float32 where 16 bits would round"
    add("--dtype", choices=DTYPES, default="exact", help=about)
    about = "write dense weights, also of a quantized MLX folder"
    add("--dequantize", action="store_true", help=about)


def convert(args: argparse.Namespace) -> int:
    """Convert; the exit code is 0.

    Raises:
        UserError: the source has no supported format, or the target exists.
    """
    from ..convert.exporters.hf import dequantize_checkpoint
    from ..convert.importers import fetch_checkpoint, find_importable, load_model, peft
    from ..convert.importers.convert import convert_checkpoint
    from ..files.atomic import atomic_folder
    from ..files.json_files import object_in
    from ..models.checkpoint import checkpoint_size
    from ..models.dtypes import DTYPES as MLX_DTYPES

    target, dtype = Path(os.path.expanduser(args.target)), MLX_DTYPES.get(args.dtype)
    path = fetch_checkpoint(args.source)
    is_adapter = path.is_dir() and peft.is_adapter(path)
    source = None if is_adapter else find_importable(path)
    if is_adapter and args.dequantize:
        raise UserError("an adapter has no codes to expand", place=args.source)
    is_dense = source is None and "quantization" not in object_in(path / "config.json")
    casts = is_dense and dtype is not None
    if source is None and not (is_adapter or args.dequantize or casts):
        raise UserError(
            "the folder has no supported format: gptq, awq, compressed-tensors "
            "(pack-quantized) or GGUF",
            place=args.source,
            hint="--dequantize expands a quantized MLX folder, and --dtype stores a "
            "dense one in another dtype",
        )
    if target.exists():
        raise UserError("the target exists", place=str(target))
    with atomic_folder(target) as partial:
        if is_adapter:
            peft.convert_adapter(path, partial)
        elif args.dequantize or casts:
            loaded = load_model(path, compute="stored", lazy=True)
            dequantize_checkpoint(loaded, partial, dtype)
        else:
            convert_checkpoint(source, partial, dtype)
    if is_adapter:
        terminal.write_out(f"{target}: an adapter for mlx-lm's --adapter-path\n")
        return 0
    size = checkpoint_size(target)
    terminal.write_out(
        f"{target}: {size.parameters:,} parameters, {size.bytes / 1e6:,.1f} MB, "
        f"{size.bits_per_weight:.2f} bits per weight\n"
    )
    return 0

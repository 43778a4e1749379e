"""llama.cpp's GGUF models, by mlx-lm's names."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import numpy as np

from ...config.quant_spec import QuantSpec
from ...errors import UserError, library_errors
from ...models import gguf_scales, loader
from ...models.checkpoint_writer import quantization_block
from ...models.config_check import check_config, check_sizes
from ..gguf import blocks, config, k_blocks, reader, tokenizer
from ..gguf.architecture import ONE_ROW, Architecture
from ..gguf.architectures import BY_MODEL_TYPE
from ..gguf.blocks import FloatGroups
from ..gguf.reader import GGUFTensor
from ..gguf.tensor_names import mlx_names
from .affine_repack import AffineGroups

# Types that the import keeps in 16 bits. Norms in F32 are few.
HALF = ("F32", "F16", "BF16")


def read(
    path: Path, companions: Path
) -> tuple[dict, dict[str, mx.array], dict[str, AffineGroups | FloatGroups]]:
    """Config, dense tensors and quantized layers of a file, by mlx-lm's names.

    Args:
        companions: an empty folder, into which the tokenizer is written, and the scales
            of blocks that MLX has dense.

    Raises:
        UserError: the file is damaged, or its architecture, a type or the tokenizer is
            not supported.
    """
    metadata, tensors = reader.read(path)
    with _errors(path):
        settings = _config(path, metadata, tensors)
        _write_tokenizer(path, metadata, companions, settings)
        dense, layers, factors = _weights(tensors, settings)
        gguf_scales.write(companions, factors)
        return settings, dense, layers


def outline(path: Path) -> tuple[dict, int]:
    """Config and bytes of the checkpoint that the import of a file would write.

    No weight is read: its bytes are about those of the blocks with scales of 16 bits,
    those of k-quants with scales of 32 bits.

    Raises:
        UserError: the file is damaged, or its architecture or a type is not supported.
    """
    metadata, tensors = reader.read(path)
    specs, kept, size = {}, [], 0.0
    with _errors(path):
        settings = _config(path, metadata, tensors)
        names = mlx_names(settings, BY_MODEL_TYPE[settings["model_type"]])
        for name, tensor in tensors.items():
            if name in config.ROPE_TENSORS:
                continue
            module, _ = _module_path(name, names)
            bits = 16 if tensor.ggml_type in HALF else 32
            if tensor.ggml_type in blocks.GROUPED_TYPES:
                width = blocks.GROUPED_TYPES[tensor.ggml_type]
                specs[module] = QuantSpec(bits=width, group_size=blocks.BLOCK)
                scales = 64 if tensor.ggml_type.endswith("K") else 32
                bits = width + scales / blocks.BLOCK
            elif tensor.ggml_type in blocks.FLOAT_TYPES:
                mode, _ = blocks.FLOAT_TYPES[tensor.ggml_type]
                specs[module] = spec = QuantSpec(mode=mode)
                bits = spec.bits + spec.scale_bits / spec.group_size
            elif len(tensor.shape) > 1:
                kept.append(module)
            size += bits / 8 * math.prod(tensor.shape)
    if specs:
        settings["quantization"] = quantization_block(specs, kept)
    return settings, int(size)


def load_tokenizer(path: Path) -> Any:
    """The tokenizer of a file, as its import would have it.

    Raises:
        UserError: the file is damaged, or its tokenizer is not supported.
    """
    metadata, tensors = reader.read(path)
    with _errors(path), TemporaryDirectory() as scratch:
        settings = _config(path, metadata, tensors)
        _write_tokenizer(path, metadata, Path(scratch), settings)
        (Path(scratch) / "config.json").write_text(json.dumps(settings))
        return loader.load_tokenizer(Path(scratch))


@contextmanager
def _errors(path: Path) -> Iterator[None]:
    """Name the file in errors about its content."""
    try:
        yield
    except KeyError as error:
        message = f"the file has no {error}"
        raise UserError(message, place=str(path), hint=reader.HINT) from error
    except UserError as error:
        hint = error.hint or reader.HINT
        raise UserError(error.message, place=str(path), hint=hint) from error


def _config(
    path: Path, metadata: dict[str, Any], tensors: dict[str, GGUFTensor]
) -> dict:
    """The config.json of a file's model, its sizes compared with the tensors."""
    settings = config.from_metadata(metadata, tensors)
    if integers := [n for n, tensor in tensors.items() if tensor.ggml_type == "I64"]:
        raise UserError(f"{integers[0]} has integers, which no model has as weights")
    check_config(settings, str(path))
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    check_sizes(settings, shapes, str(path))
    return settings


def _write_tokenizer(
    path: Path, metadata: dict[str, Any], folder: Path, settings: dict
) -> None:
    tokens, rows = metadata.get(f"{tokenizer.KEY}tokens", []), settings["vocab_size"]
    if isinstance(tokens, list) and len(tokens) > rows:
        raise UserError(f"the file has {len(tokens):,} tokens and {rows:,} embeddings")
    with library_errors("the tokenizer in this file does not load", place=path):
        try:
            tokenizer.write(metadata, folder, source=path.parent)
        except KeyError as error:
            raise UserError(f"the file has no {error}") from error


def _weights(
    tensors: dict[str, GGUFTensor], settings: dict
) -> tuple[dict, dict[str, AffineGroups | FloatGroups], dict[str, mx.array]]:
    """Dense tensors, quantized layers, and the factors of dense blocks."""
    dense, layers, factors = {}, {}, {}
    architecture = BY_MODEL_TYPE[settings["model_type"]]
    names = mlx_names(settings, architecture)
    for name, tensor in tensors.items():
        if name in config.ROPE_TENSORS:
            continue
        path, leaf = _module_path(name, names)
        head = settings.get("head_dim", 0)
        order = row_order(path, tensor.shape[0], head, architecture)
        is_grouped = tensor.ggml_type in {**blocks.GROUPED_TYPES, **blocks.FLOAT_TYPES}
        if is_grouped and (leaf != "weight" or len(tensor.shape) not in (2, 3)):
            raise UserError(f"{name} is no matrix, but has blocks {tensor.ggml_type}")
        groups = blocks.to_affine_groups(tensor) or blocks.to_float_groups(tensor)
        if groups:
            layers[path] = groups if order is None else groups.permute_rows(order)
            continue
        offset = architecture.norm_offset if is_norm(leaf, tensor.shape) else 0
        value = blocks.to_dense(tensor, offset)
        rows = slice(None) if order is None else mx.array(order)
        value = value[rows]
        for factor, values in k_blocks.stored_factors(tensor).items():
            factors[f"{path}.{factor}"] = mx.array(values)[rows]
        if name.split(".")[-2] in ONE_ROW:
            value = value.reshape(1, -1)
        dense[f"{path}.{leaf}"] = value
    return dense, layers, factors


def is_norm(leaf: str, shape: tuple[int, ...]) -> bool:
    """Whether this is the weight of a norm."""
    return leaf == "weight" and len(shape) == 1


def _module_path(name: str, names: dict[str, str]) -> tuple[str, str]:
    """mlx-lm's path of a module, and the tensor's name in it."""
    if name not in names:
        raise UserError(f"mlx-lm's model has no tensor {name}")
    path, _, leaf = names[name].rpartition(".")
    return path, leaf


def row_order(
    path: str, count: int, head: int, architecture: Architecture
) -> np.ndarray | None:
    """The rows of q and k in Hugging Face's order for Llama models; else None.

    Hugging Face rotates the two halves of a head; llama.cpp rotates adjacent rows.

    Args:
        count: rows of the matrix at this path.
        head: rows of a head.
    """
    is_qk = path.endswith(("self_attn.q_proj", "self_attn.k_proj"))
    if not is_qk or architecture.rope != "permuted":
        return None
    if head % 2 or count % head:
        raise UserError(f"{path} has {count:,} rows, which are no heads of {head:,}")
    rows = np.arange(count).reshape(-1, head // 2, 2)
    return rows.swapaxes(1, 2).reshape(-1)

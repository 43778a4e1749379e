"""Writes a model as a GGUF file, and verifies the file by reading it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from ...errors import FAILED, UserError
from ...models import gguf_scales, quantized_layers
from ...models.loader import LoadedModel
from ..exporters.hf import dequantized_weights
from ..importers import gguf as gguf_importer
from . import blocks, config, k_blocks, tokenizer
from .architecture import ONE_ROW, Architecture
from .architectures import BY_MODEL_TYPE, TEXT_PART
from .tensor_names import stored_name

# llama.cpp's name of a tensor, ggml's type, its values or blocks, and the bits of its
# codes in the model.
StoredTensor = tuple[str, str, np.ndarray, int | None]


def write(
    file: Path, loaded: LoadedModel, *, name: str
) -> list[tuple[str, int | None]]:
    """Write the file of a model.

    Returns:
        For every matrix ggml's type, and the bits of its codes in the model; None if
        the model has it dense.

    Raises:
        UserError: GGUF cannot hold the model or its tokenizer.
    """
    metadata = config.to_metadata(loaded.config)
    metadata |= tokenizer.to_metadata(loaded, embedding_rows(loaded), name=name)
    return write_file(file, metadata, lambda: _tensors(loaded))


def embedding_rows(loaded: LoadedModel) -> int:
    """Rows of the token embedding, which are the tokens of the file."""
    modules = {n.removeprefix(TEXT_PART): m for n, m in loaded.model.named_modules()}
    return quantized_layers.weight_shape(modules["model.embed_tokens"])[0]


def write_file(
    file: Path,
    metadata: dict[str, Any],
    tensors: Callable[[], Iterator[StoredTensor]],
) -> list[tuple[str, int | None]]:
    """Write a file of these tensors; returns what `write` does.

    Args:
        tensors: iterates over them; called twice.
    """
    import gguf

    writer = gguf.GGUFWriter(file, metadata.pop("general.architecture"))
    types: list[tuple[str, int | None]] = []
    # The header needs all sizes first. A second pass writes the values, so that only
    # one tensor is in memory.
    for tensor, ggml_type, value, bits in tensors():
        raw = gguf.GGMLQuantizationType[ggml_type]
        writer.add_tensor_info(tensor, value.shape, value.dtype, value.nbytes, raw)
        is_matrix = value.ndim > 1 and not tensor.endswith(".bias")
        types += [(ggml_type, bits)] if is_matrix else []
    names = [ggml_type for ggml_type, _ in types]
    most = max(sorted(set(names)), key=names.count)
    # MOSTLY_Q4_K_S comes before MOSTLY_Q4_K_M.
    writer.add_file_type(next(kind for kind in gguf.LlamaFileType if most in kind.name))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    by_type = {bool: "bool", int: "uint32", float: "float32", str: "string"}
    for key, value in metadata.items():
        getattr(writer, f"add_{by_type.get(type(value), 'array')}")(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, _, value, _ in tensors():
        writer.write_tensor_data(value)
    writer.close()
    return types


def verify_roundtrip(file: Path, loaded: LoadedModel) -> None:
    """Read a file and compare every weight, and the tokenizer on a test text.

    Raises:
        UserError: names what differs.
    """
    with TemporaryDirectory() as scratch:
        _, weights, layers = gguf_importer.read(file, Path(scratch))
        differing = differing_tokenizer(Path(scratch), loaded.path)
    for path, layer in layers.items():
        weight = quantized_layers.dequantize_groups(layer.tensors(), layer)
        weights[f"{path}.weight"] = weight
    expected = dequantized_weights(loaded.reread(), mx.float32)
    expected = {name.removeprefix(TEXT_PART): v for name, v in expected.items()}
    settings = config.text_config(loaded.config)
    # llama.cpp adds something to norms, with a rounding.
    offset = BY_MODEL_TYPE[settings["model_type"]].norm_offset
    for name, value in expected.items() if offset else ():
        if gguf_importer.is_norm(name.rpartition(".")[2], value.shape):
            expected[name] = value.astype(mx.float32) + offset - offset
    differing += sorted(weights.keys() ^ expected.keys())
    if not differing:
        differing = [n for n in expected if not equals(expected[n], weights[n])]
    require_equal(file, differing)


def differing_tokenizer(folder: Path, other: Path) -> list[str]:
    """What differs if two tokenizers encode the test text differently."""
    from tokenizers import Tokenizer

    first, second = (
        Tokenizer.from_file(str(f / "tokenizer.json")).encode(tokenizer.PROBE).ids
        for f in (folder, other)
    )
    return [] if first == second else ["the tokenizer"]


def require_equal(file: Path, differing: list[str]) -> None:
    """Raise UserError for the first of the differences after reading a file."""
    if differing:
        raise UserError(
            f"{differing[0]} differs after reading the GGUF file; nothing is published",
            place=str(file),
            code=FAILED,
        )


def _tensors(loaded: LoadedModel) -> Iterator[StoredTensor]:
    """All tensors of a model."""
    model, settings = loaded.reread(), config.text_config(loaded.config)
    architecture = BY_MODEL_TYPE[settings["model_type"]]
    head = config.head_size(settings)
    for name, factors in config.rope_tensors(settings).items():
        yield name, "F32", factors, None
    tensors = dict(tree_flatten(model.parameters()))
    factors = gguf_scales.read(loaded.path)
    for path, module in model.named_modules():
        if quantized_layers.is_quantized(module):
            leaves = quantized_layers.TENSORS
            parts = {leaf: tensors.pop(f"{path}.{leaf}", None) for leaf in leaves}
            if module.mode == "affine":
                grouped = blocks.from_affine_groups(
                    parts, module.bits, module.group_size
                )
            else:
                grouped = blocks.from_float_groups(parts, module.mode)
            ggml_type, value = grouped or blocks.from_dense(
                quantized_layers.dequantize(module, parts)
            )
            stored = stored_name(f"{path}.weight", architecture)
            rows = row_order(path, value, head, architecture)
            yield stored, ggml_type, rows, module.bits
    for name in list(tensors):
        value = tensors.pop(name)
        path, _, leaf = name.rpartition(".")
        if gguf_importer.is_norm(leaf, value.shape):
            value = value.astype(mx.float32) + architecture.norm_offset
        stored = stored_name(name, architecture)
        shape = value.shape
        if leaf == "bias" or stored.split(".")[-2] in ONE_ROW:
            value = value.reshape(-1)
        own = k_blocks.layer_factors(factors, path, shape)
        ggml_type, value = blocks.from_dense(value, own)
        if leaf == "bias":
            # Experts have their biases in rows.
            value = value.reshape(shape)
        rows = row_order(path, value, head, architecture)
        yield stored, ggml_type, rows, None


def row_order(
    path: str, value: np.ndarray, head: int, architecture: Architecture
) -> np.ndarray:
    """The rows of q and k in llama.cpp's order, of which the import makes its own."""
    order = gguf_importer.row_order(path, len(value), head, architecture)
    return value if order is None else value[np.argsort(order)]


def equals(expected: mx.array, value: mx.array) -> bool:
    """Whether a weight is the same, or, dequantized, the same in float16."""
    expected, value = expected.astype(mx.float32), value.astype(mx.float32)
    half = expected.astype(mx.float16).astype(mx.float32)
    return mx.array_equal(value, expected).item() or mx.array_equal(value, half).item()

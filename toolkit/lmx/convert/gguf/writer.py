"""Writing a model's GGUF file, and reading it back."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from ...errors import FAILED, UserError
from ...models.loader import LoadedModel
from ...models.lora import base_layer
from ..exporters.hf import dequantized
from ..importers import gguf as foreign
from . import config as gguf_config
from . import export_blocks, export_tokenizer

NAMES = {path: name for name, path in foreign.NAMES.items()}
# What llama.cpp calls a file by most of its matrices.
FILE_TYPES = {
    "F32": 0,
    "F16": 1,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q8_0": 7,
    "Q5_0": 8,
    "Q5_1": 9,
    "BF16": 32,
}
QUANTIZATION_VERSION = 2


def write(file: Path, loaded: LoadedModel, *, name: str) -> list[str]:
    """Write a model's file; gives ggml's types of its matrices.

    Raises:
        UserError: a model or a tokenizer that has no such form.
    """
    import gguf

    metadata = gguf_config.metadata(loaded.config)
    rows, _ = base_layer.weight_shape(loaded.model.model.embed_tokens)
    metadata |= export_tokenizer.metadata(loaded.path, loaded.config, rows)
    writer = gguf.GGUFWriter(file, metadata.pop("general.architecture"))
    kinds = []
    # Twice through all tensors, so that no two of them are in memory.
    for tensor, kind, value in _tensors(loaded):
        raw = gguf.GGMLQuantizationType[kind]
        writer.add_tensor_info(tensor, value.shape, value.dtype, value.nbytes, raw)
        kinds += [kind] if value.ndim > 1 else []
    writer.add_name(name)
    most = max(sorted(set(kinds)), key=kinds.count)
    writer.add_file_type(FILE_TYPES[most])
    writer.add_quantization_version(QUANTIZATION_VERSION)
    for key, value in metadata.items():
        _adder(writer, value)(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, _, value in _tensors(loaded):
        writer.write_tensor_data(value)
    writer.close()
    return kinds


def _adder(writer: Any, value: Any):
    """The writer's method for a value of this kind."""
    by_kind = {bool: "bool", int: "uint32", float: "float32", str: "string"}
    return getattr(writer, f"add_{by_kind.get(type(value), 'array')}")


def _tensors(loaded: LoadedModel) -> Iterator[tuple[str, str, np.ndarray]]:
    """llama.cpp's name of every tensor, ggml's type, and its numbers or bytes."""
    model, config = loaded.reread(), loaded.config
    frequencies = gguf_config.frequencies(config)
    if frequencies is not None:
        yield foreign.FREQUENCIES, "F32", frequencies
    own = dict(tree_flatten(model.parameters()))
    for path, module in model.named_modules():
        if base_layer.is_quantized(module):
            leaves = ("weight", "scales", "biases", "global_scale")
            parts = {leaf: own.pop(f"{path}.{leaf}", None) for leaf in leaves}
            found = None
            if module.mode == "affine":
                found = export_blocks.grouped(parts, module.bits, module.group_size)
            kind, value = found or export_blocks.dense(
                base_layer.dequantize(module, parts)
            )
            yield _name(f"{path}.weight"), kind, _ordered(path, value, config)
    for name in list(own):
        kind, value = export_blocks.dense(own.pop(name))
        yield _name(name), kind, _ordered(name.rpartition(".")[0], value, config)


def _name(name: str) -> str:
    """llama.cpp's name of a tensor."""
    path, _, leaf = name.rpartition(".")
    first, _, inner = path.removeprefix("model.layers.").partition(".")
    if path.startswith("model.layers.") and inner in NAMES:
        return f"blk.{first}.{NAMES[inner]}.{leaf}"
    if path in NAMES:
        return f"{NAMES[path]}.{leaf}"
    raise UserError(f"the tensor {name} has no name in GGUF known here", code=FAILED)


def _ordered(path: str, value: np.ndarray, config: dict) -> np.ndarray:
    """Rows of q and k as llama.cpp has them in Llama models: the two numbers of a
    rotated pair side by side; Hugging Face has the halves of a head."""
    kind = gguf_config.ARCHITECTURES[config["model_type"]]
    if not path.endswith((".q_proj", ".k_proj")) or not foreign.ARCHITECTURES[kind]:
        return value
    head = gguf_config.head_size(config)
    halves = value.reshape(-1, 2, head // 2, *value.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(value.shape)


def verify_roundtrip(file: Path, loaded: LoadedModel) -> None:
    """Read a file back and compare every weight and what the tokenizer makes of a text.

    Raises:
        UserError: naming what came back otherwise.
    """
    from tokenizers import Tokenizer

    with TemporaryDirectory() as scratch:
        _, found, layers = foreign.read(file, Path(scratch))
        made = [
            Tokenizer.from_file(f"{p}/tokenizer.json") for p in (scratch, loaded.path)
        ]
    for path, layer in layers.items():
        parts = layer.tensors()
        scales, biases = (parts[n].astype(mx.float32) for n in ("scales", "biases"))
        grid = {"group_size": layer.size, "bits": layer.bits}
        found[f"{path}.weight"] = mx.dequantize(parts["weight"], scales, biases, **grid)
    wanted = dequantized(loaded.reread(), mx.float32)
    strange = sorted(found.keys() ^ wanted.keys())
    strange += [
        name for name in wanted if not strange and not _same(wanted, found, name)
    ]
    encoded = [tokenizer.encode(export_tokenizer.PROBE).ids for tokenizer in made]
    if encoded[0] != encoded[1]:
        strange.append("the tokenizer")
    if strange:
        raise UserError(
            f"{strange[0]} is read back otherwise than it was; nothing is published",
            place=str(file),
            code=FAILED,
        )


def _same(wanted: dict[str, mx.array], found: dict[str, mx.array], name: str) -> bool:
    """Whether a weight came back, or, expanded, as the nearest of float16."""
    value, back = wanted[name].astype(mx.float32), found[name].astype(mx.float32)
    half = value.astype(mx.float16).astype(mx.float32)
    return mx.array_equal(back, value).item() or mx.array_equal(back, half).item()

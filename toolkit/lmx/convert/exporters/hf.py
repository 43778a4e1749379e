"""Hugging Face's unquantized checkpoint, which transformers and its users load.

The names are mlx-lm's, except where mlx-lm stacks experts or transposes convolutions.
mlx-lm's own `sanitize` must map the written files back to the original tensors.
"""

import re
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ...errors import FAILED, UserError
from ...models import checkpoint_writer, quantized_layers
from ...models.drafters.mtp import copy_mtp
from ...models.loader import LoadedModel, build_model
from ...models.safetensors_io import read_tensors
from .base import ExportContext, FormatCard

FOLDER = "hf"
CARD = FormatCard(
    kind="A model with unquantized weights",
    library="transformers",
    tags=(),
    language="python",
    usage="""\
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(".")
tokenizer = AutoTokenizer.from_pretrained(".")
""",
    is_dequantized=True,
)

# Model types whose exports were loaded in transformers and gave the same logits.
SUPPORTED = """
    llama mistral qwen2 qwen3 gemma gemma2 gemma3_text phi phi3 glm4 cohere cohere2
    olmo2 starcoder2 stablelm granite smollm3 exaone4 ernie4_5 nemotron
    hunyuan_v1_dense qwen3_moe qwen2_moe mixtral phimoe olmoe glm4_moe mamba mamba2
    lfm2
"""
EXPERTS = re.compile(r"(.*)\.switch_mlp\.(\w+)\.weight")
# Mixtral's names of the expert layers, in blocks of this name.
MIXTRAL_LAYERS = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
MIXTRAL_BLOCK = "block_sparse_moe"
# Of a config, as older and newer versions of transformers write it.
DTYPE_KEYS = ("torch_dtype", "dtype")


def check_supported(config: dict) -> None:
    """Refuse a model type whose Hugging Face names may differ from mlx-lm's.

    Raises:
        UserError: it is not one of `SUPPORTED`.
    """
    supported = SUPPORTED.split()
    if config["model_type"] not in supported or "model_file" in config:
        raise UserError(
            f"Hugging Face export of {config['model_type']} models is not supported",
            hint=f"supported model types: {', '.join(sorted(supported))}",
            code=FAILED,
        )


def export(folder: Path, context: ExportContext) -> None:
    """Write the model dequantized, in its stored dtype, and verify it.

    Raises:
        UserError: the model type is not supported, or mlx-lm reads other weights from
            the export.
    """
    loaded = context.load(context.model)
    check_supported(loaded.config)
    weights = dequantized_weights(loaded.model, loaded.dtype)
    write(folder, weights, loaded.config, companions=loaded.path)
    # Read again lazily, so that only a part of the weights is in memory.
    expected = dequantized_weights(loaded.reread(), loaded.dtype)
    verify_roundtrip(folder, expected, loaded.config)


def write(
    folder: Path, weights: dict[str, mx.array], config: dict, *, companions: Path
) -> None:
    """Write a checkpoint into an existing, empty folder.

    Args:
        weights: dense, by mlx-lm's names; the dict is emptied meanwhile.
        config: the model's config; its quantization is left out.
        companions: the folder whose tokenizer and template files are copied.
    """
    renamed = unstack_experts(weights)
    weights.clear()
    checkpoint_writer.write_checkpoint(folder, renamed, config, companions=companions)


def dequantized_weights(model: nn.Module, dtype: mx.Dtype) -> dict[str, mx.array]:
    """All weights of a model by mlx-lm's names, lazy, quantized ones dequantized.

    Args:
        dtype: the dtype of dequantized weights.
    """
    tensors = dict(tree_flatten(model.parameters()))
    for path, module in model.named_modules():
        if quantized_layers.is_quantized(module):
            leaves = quantized_layers.TENSORS
            parts = {leaf: tensors.pop(f"{path}.{leaf}", None) for leaf in leaves}
            weight = quantized_layers.dequantize(module, parts)
            tensors[f"{path}.weight"] = weight.astype(dtype)
    return tensors


def unstack_experts(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    """By Hugging Face's names: single experts, convolutions [channels, 1, width]."""
    renamed = {}
    for name, value in tensors.items():
        if experts := EXPERTS.fullmatch(name):
            block, leaf = experts.groups()
            leaf = MIXTRAL_LAYERS[leaf] if MIXTRAL_BLOCK in block else leaf
            for index in range(len(value)):
                renamed[f"{block}.experts.{index}.{leaf}.weight"] = value[index]
        elif value.ndim == 3:
            renamed[name] = value.swapaxes(1, 2)
        else:
            renamed[name] = value
    return renamed


def verify_roundtrip(folder: Path, expected: dict[str, mx.array], config: dict) -> None:
    """Read a folder through mlx-lm's `sanitize` and compare every tensor.

    Args:
        expected: by mlx-lm's names; the dict is emptied meanwhile.

    Raises:
        UserError: a weight differs, or is missing, or has no counterpart.
    """
    weights: dict[str, mx.array] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= read_tensors(file)
    sanitize = getattr(build_model(config), "sanitize", lambda tensors: tensors)
    weights = sanitize(weights)
    differing = weights.keys() ^ expected.keys()
    for name in list(expected) if not differing else []:
        value, read = expected.pop(name), weights.pop(name)
        if value.dtype != read.dtype or not mx.array_equal(value, read, equal_nan=True):
            differing = {name}
            break
    if differing:
        raise UserError(
            f"{sorted(differing)[0]} differs after reading the export with mlx-lm; "
            "nothing is published",
            place=str(folder),
            code=FAILED,
        )


def dequantize_checkpoint(
    loaded: LoadedModel, target: Path, dtype: mx.Dtype | None = None
) -> None:
    """Write a model as an MLX checkpoint of dense weights.

    Args:
        loaded: the model, its weights unread, in the dtype they are stored in.
        target: an existing, empty folder.
        dtype: of all floating-point weights; None = as stored, that of the scales for
            the weights that were quantized.

    Raises:
        UserError: the model is not quantized, and there is no dtype.
    """
    if dtype is None and not any(
        map(quantized_layers.is_quantized, loaded.model.modules())
    ):
        raise UserError("this model is not quantized", place=str(loaded.path))
    weights = dequantized_weights(loaded.model, dtype or loaded.dtype)
    config = loaded.config
    if dtype:
        # Other tools load the weights in this one.
        name = str(dtype).rpartition(".")[2]
        config = {k: name if k in DTYPE_KEYS else v for k, v in config.items()}
        is_float = {n: mx.issubdtype(v.dtype, mx.floating) for n, v in weights.items()}
        weights = {n: v.astype(dtype) if is_float[n] else v for n, v in weights.items()}
    checkpoint_writer.write_checkpoint(target, weights, config, companions=loaded.path)
    copy_mtp(loaded.path, target, loaded.config)

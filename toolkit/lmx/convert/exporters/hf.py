"""Hugging Face's checkpoint, unquantized, as transformers and what builds on it load.

Its names are those of mlx-lm but where mlx-lm joins experts or turns convolutions; the
written files are given to mlx-lm's own renaming and must come back as they were.
"""

import re
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ...errors import FAILED, UserError
from ...models import checkpoint_writer
from ...models.loader import build_model
from ...models.lora import base_layer
from .base import ExportContext

FOLDER = "hf"

# Model types whose files were loaded in transformers and gave the same logits.
FAMILIES = """
    llama mistral qwen2 qwen3 gemma gemma2 gemma3_text phi phi3 glm4 cohere cohere2
    olmo2 starcoder2 stablelm granite smollm3 exaone4 ernie4_5 nemotron
    hunyuan_v1_dense qwen3_moe qwen2_moe mixtral phimoe olmoe glm4_moe mamba mamba2
    lfm2
"""
EXPERTS = re.compile(r"(.*)\.switch_mlp\.(\w+)\.weight")
# Mixtral's names, and those of its kin: known by the block they are in.
NUMBERED = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
MIXTRAL = "block_sparse_moe"


def publish(folder: Path, published: ExportContext) -> None:
    """Write the model with its codes expanded, in the type it stores; prove it.

    Raises:
        UserError: a family whose names are not known here, or mlx-lm reads other
            weights from what was written.
    """
    loaded = published.load(published.model)
    require(loaded.config)
    dense = dequantized(loaded.model, loaded.dtype)
    write(folder, dense, loaded.config, companions=loaded.path)
    # Unread once more, so that of what is large little is in memory.
    verify_roundtrip(folder, dequantized(loaded.reread(), loaded.dtype), loaded.config)


def write(
    folder: Path, weights: dict[str, mx.array], config: dict, *, companions: Path
) -> None:
    """Write a checkpoint into an existing, empty folder.

    Args:
        weights: dense, by mlx-lm's names; emptied on the way.
        config: the model's config; its quantization is left out.
        companions: the folder whose tokenizer and template files go along.
    """
    named = rename_experts(weights)
    weights.clear()
    checkpoint_writer.write_checkpoint(folder, named, config, companions=companions)


def require(config: dict) -> None:
    """Refuse a model whose names Hugging Face may have otherwise.

    Raises:
        UserError: it is none of `FAMILIES`.
    """
    known = FAMILIES.split()
    if config["model_type"] not in known or "model_file" in config:
        raise UserError(
            f"Hugging Face's names for {config['model_type']} models are not known "
            "here",
            hint=f"families that are: {', '.join(sorted(known))}",
            code=FAILED,
        )


def dequantized(model: nn.Module, dtype: mx.Dtype) -> dict[str, mx.array]:
    """All weights of a model by mlx-lm's names, unread; codes as what they stand for.

    Args:
        dtype: of the weights that were codes.
    """
    tensors = dict(tree_flatten(model.parameters()))
    for path, module in model.named_modules():
        if base_layer.is_quantized(module):
            names = ("weight", "scales", "biases", "global_scale")
            own = {name: tensors.pop(f"{path}.{name}", None) for name in names}
            tensors[f"{path}.weight"] = base_layer.dequantize(module, own).astype(dtype)
    return tensors


def rename_experts(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    """By Hugging Face's names: experts apart, convolutions [channels, 1, width]."""
    found = {}
    for name, value in tensors.items():
        if experts := EXPERTS.fullmatch(name):
            block, leaf = experts.groups()
            leaf = NUMBERED[leaf] if MIXTRAL in block else leaf
            for number in range(len(value)):
                found[f"{block}.experts.{number}.{leaf}.weight"] = value[number]
        elif value.ndim == 3:
            found[name] = value.swapaxes(1, 2)
        else:
            found[name] = value
    return found


def verify_roundtrip(folder: Path, wanted: dict[str, mx.array], config: dict) -> None:
    """Read a folder back through mlx-lm's own renaming, tensor by tensor.

    Args:
        wanted: by mlx-lm's names; emptied on the way.

    Raises:
        UserError: another weight came back, one is missing or there is one more.
    """
    found: dict[str, mx.array] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= mx.load(str(file))
    sanitize = getattr(build_model(config), "sanitize", lambda tensors: tensors)
    found = sanitize(found)
    strange = found.keys() ^ wanted.keys()
    for name in list(wanted) if not strange else []:
        value, back = wanted.pop(name), found.pop(name)
        if value.dtype != back.dtype or not mx.array_equal(value, back, equal_nan=True):
            strange = {name}
            break
    if strange:
        raise UserError(
            f"mlx-lm reads {sorted(strange)[0]} otherwise than it was; "
            "nothing is published",
            place=str(folder),
            code=FAILED,
        )

"""GPTQ, AWQ and llm-compressor checkpoints, packed in NumPy as the formats specify.

The expected weights are in float64.
"""

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from lmx.models.loader import build_model
from mlx.utils import tree_flatten
from safetensors.numpy import load_file, save_file

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass
class Codes:
    """A matrix: codes [N, K], scales and zeros [N, G], `group_index` [K]."""

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    group_index: np.ndarray

    @property
    def weight(self) -> np.ndarray:
        centered_codes = self.codes - self.zeros[:, self.group_index].astype(np.float64)
        return centered_codes * self.scales.astype(np.float64)[:, self.group_index]


@dataclass
class PackedCheckpoint:
    """A checkpoint: its folder, the codes of its layers, and its dense baseline."""

    folder: Path
    layers: dict[str, Codes] = field(default_factory=dict)
    dense: Path | None = None


def random_codes(rng, outputs, inputs, *, bits, size, symmetric) -> Codes:
    group_index = np.arange(inputs) // (size if size > 0 else inputs)
    shape = (outputs, group_index.max() + 1)
    midpoint = np.full(shape, 2 ** (bits - 1))
    # Version 1 of GPTQ's format cannot store a zero point of 0.
    zeros = midpoint if symmetric else rng.integers(1, 2**bits, shape)
    scales = (0.1 * (1 + rng.random(shape)) / 2**bits).astype(np.float16)
    return Codes(
        rng.integers(0, 2**bits, (outputs, inputs)), scales, zeros, group_index
    )


def pack_bits(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack codes [..., K] into int32 [..., K * bits / 32] without gaps."""
    code_bits = (codes[..., None] >> np.arange(bits)) & 1
    flat = code_bits.reshape(*codes.shape[:-1], -1).astype(np.uint8)
    return np.packbits(flat, axis=-1, bitorder="little").view("<i4")


def gptq(
    layer: Codes, bits: int, *, offset: int = 1, store_group_index: bool = True
) -> dict:
    tensors = {
        "qweight": pack_bits(layer.codes, bits).T,
        "qzeros": pack_bits(layer.zeros.T - offset, bits),
        "scales": layer.scales.T,
        # AutoGPTQ gives every layer a bias.
        "bias": np.zeros(len(layer.codes), np.float16),
    }
    return tensors | (
        {"g_idx": layer.group_index.astype(np.int32)} if store_group_index else {}
    )


def awq(layer: Codes, bits: int) -> dict:
    def pack_awq(codes):
        groups_of_8 = codes.reshape(*codes.shape[:-1], -1, 8)[..., AWQ_ORDER]
        return pack_bits(groups_of_8.reshape(codes.shape), bits)

    return {
        "qweight": pack_awq(layer.codes.T),
        "qzeros": pack_awq(layer.zeros.T),
        "scales": layer.scales.T,
    }


def compressed(layer: Codes, bits: int, *, symmetric: bool) -> dict:
    tensors = {
        "weight_packed": pack_bits(layer.codes, bits),
        "weight_scale": layer.scales,
        "weight_shape": np.array(layer.codes.shape),
    }
    zeros = {"weight_zero_point": pack_bits(layer.zeros.T, bits).T}
    return tensors | ({} if symmetric else zeros)


def write_checkpoint(
    base: Path, folder: Path, make_codes, packed, settings: dict
) -> PackedCheckpoint:
    """Write a packed checkpoint with the shapes of `base` and its float32 baseline.

    Args:
        make_codes: (name, outputs, inputs) -> codes of a layer.
        packed: codes -> tensors of the format.
    """
    config = json.loads((base / "config.json").read_text())
    tensors = load_file(base / "model.safetensors")
    packed_checkpoint = PackedCheckpoint(folder)
    expanded = dict(tensors)
    for name, value in tree_flatten(build_model(config).parameters()):
        path = name.removesuffix(".weight")
        if not path.endswith(LAYERS):
            continue
        del tensors[name]
        paths = [path]
        if value.ndim == 3:
            paths = [
                path.replace("switch_mlp", f"experts.{n}") for n in range(len(value))
            ]
        for expert_path in paths:
            codes = make_codes(expert_path, *value.shape[-2:])
            for leaf, tensor in packed(codes).items():
                tensors[f"{expert_path}.{leaf}"] = np.ascontiguousarray(tensor)
            packed_checkpoint.layers[expert_path] = codes
        weights = [
            packed_checkpoint.layers[expert_path].weight for expert_path in paths
        ]
        expanded[name] = np.stack(weights).reshape(value.shape).astype(np.float32)
    shutil.copytree(base, folder)
    save_file(tensors, folder / "model.safetensors")
    packed_config = config | {"quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(packed_config))
    packed_checkpoint.dense = folder.with_name(f"{folder.name}-dense")
    shutil.copytree(base, packed_checkpoint.dense)
    floats = {name: value.astype(np.float32) for name, value in expanded.items()}
    save_file(floats, packed_checkpoint.dense / "model.safetensors")
    return packed_checkpoint

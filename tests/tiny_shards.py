"""What the ranks of a divided model compute, beside the whole model."""

from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from lmx import cpu
from lmx.generation.kv_cache.sequence import CacheState
from lmx.interfaces import Communicator
from lmx.models import tensor_parallel
from lmx.models.loader import build_model, model_classes
from lmx.models.pipeline_parallel import is_divided_by_layers
from mlx.utils import tree_flatten, tree_map
from tiny_families import (
    DEEPSEEK_EXPERTS,
    EXPERTS,
    FAMILIES,
    LATENT_ATTENTION,
    LOCAL_AND_GLOBAL,
    SHAPE,
    VOCABULARY,
    changed,
    config,
)

# Counts that four processes divide, and widths of four groups of 32.
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "expert_ffn_hidden_size": 128,
    "ffn_hidden_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "index_n_heads": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
# Families that are divided by layers. Ranks have unequal numbers of them.
LAYERED = {"qwen3_next": 7, "bailing_hybrid": 7}
TOKENS = 24
LATENT = {"num_key_value_heads": 8}
# Families that are tested only here.
MORE = {
    "exaone_moe": EXPERTS
    | LOCAL_AND_GLOBAL
    | {"num_shared_experts": 1, "is_moe_layer": [False, True]},
    "glm4_moe_lite": DEEPSEEK_EXPERTS | LATENT_ATTENTION,
    "mistral4": DEEPSEEK_EXPERTS
    | LATENT_ATTENTION
    | {
        "rope_parameters": {
            "rope_theta": 1e4,
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "llama_4_scaling_beta": 0.1,
        }
    },
    "step3p5": {
        "num_attention_groups": 4,
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 8,
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "moe_intermediate_size": 128,
        "share_expert_dim": 128,
        "moe_layers_enum": "1",
    },
    "iquestloopcoder": {"loop_window_size": 8},
    "longcat_flash_ngram": FAMILIES["longcat_flash"]
    | {"ngram_vocab_size_ratio": 4, "emb_neighbor_num": 2, "emb_split_num": 2},
}


class Group(Communicator):
    """A rank of some size without processes, for what divides but does not compute."""

    def __init__(self, rank: int, size: int):
        self.group, self.rank, self.size = tensor_parallel.Place(rank, size), rank, size


def model_of(family: str, mode: str | None = None, **changes) -> nn.Module:
    """A random model, whose layers are quantized in a mode, such as "affine"."""
    settings = changed(configuration(family), SIZES)
    if "kv_lora_rank" in str(settings):
        settings = changed(settings, LATENT)
    mx.random.seed(3)
    model = build_model(changed(settings, changes)).eval()

    def noisy(weight):
        return weight + 0.05 * mx.random.normal(weight.shape, weight.dtype)

    model.update(tree_map(noisy, model.parameters()))
    if mode:
        bits = {"mxfp8": 8}.get(mode, 4)
        nn.quantize(
            model, 16 if mode == "nvfp4" else 32, bits, mode=mode, class_predicate=_can
        )
    mx.eval(model.parameters())
    cpu.enable(model)
    return model


def _can(path: str, layer: nn.Module) -> bool:
    if not hasattr(layer, "to_quantized") or path.endswith("gate"):
        return False
    return layer.weight.shape[-1] % 32 == 0


def logits(model: nn.Module) -> mx.array:
    """Of a prompt, and of tokens decoded after it, [TOKENS, V]."""
    tokens = np.random.default_rng(0).integers(1, VOCABULARY, (1, TOKENS))
    cache = CacheState(model)
    parts = [cache.forward(mx.array(tokens[:, : TOKENS - 4]))]
    for position in range(TOKENS - 4, TOKENS):
        parts.append(cache.forward(mx.array(tokens[:, position : position + 1])))
    return mx.concatenate(parts, axis=1)[0]


def errors(ranks: Communicator, target: Path, *cases: str) -> None:
    """Save the largest relative error of the logits, and the share of the bytes that
    this rank holds, for every `family:mode`; "wrong" = see `hold_wrong_part`."""
    found = {}
    for case in cases:
        family, mode, wrong = [*case.split(":"), "", ""][:3]
        make = partial(model_of, family, mode or None)
        whole = make()
        expected = logits(whole)
        model = make()
        tensor_parallel.shard(model, ranks, make)
        if wrong:
            hold_wrong_part(model, make(), ranks.size)
        ours = logits(model)
        scale = mx.abs(expected).max()
        error = (mx.abs(ours - expected).max() / scale).item()
        share = _nbytes(model) / _nbytes(whole)
        found[case] = np.array([error, share, ours.std().item()])
    np.savez(target / f"{ranks.rank}.npz", **found)


def hold_wrong_part(model: nn.Module, whole: nn.Module, size: int) -> None:
    """Let the blocks of a divided model hold the part of rank 0. If it is divided by
    layers, let ranks have two of them in the wrong order."""
    if is_divided_by_layers(model):
        by_kind: dict[str, nn.Module] = {}
        for layer in model.layers:
            weights = layer.parameters()
            kind = str(tree_map(lambda weight: weight.shape, weights))
            if other := by_kind.setdefault(kind, layer):
                layer.update(other.parameters())
                other.update(weights)
        return
    tensor_parallel._divide(whole, tensor_parallel.Place(0, size))
    part = tree_flatten(whole.parameters())
    model.load_weights([each for each in part if ".layers." in each[0]], strict=False)


def _nbytes(model: nn.Module) -> int:
    return sum(value.nbytes for _, value in tree_flatten(model.parameters()))


def configuration(family: str) -> dict:
    """A config whose counts four processes divide."""
    if family in MORE:
        return SHAPE | {"rope_scaling": None} | MORE[family] | {"model_type": family}
    if family in LAYERED:
        return config(family) | {"num_hidden_layers": LAYERED[family]}
    return config(family)


def read_keys(family: str) -> dict:
    """A config for a checkpoint: without keys that the architecture does not read."""
    settings = configuration(family)
    _, arguments = model_classes(settings)
    known = arguments.__dataclass_fields__.keys() & settings.keys()
    return {key: settings[key] for key in known}


SHARDED = [name for name in FAMILIES if hasattr(build_model(config(name)), "shard")]
SHARDED += MORE


def weights(model: nn.Module) -> dict[str, np.ndarray]:
    """The parameters of a model."""
    return {name: np.array(value) for name, value in tree_flatten(model.parameters())}

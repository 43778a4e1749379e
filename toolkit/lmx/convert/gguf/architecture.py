"""What the entries of `architectures` are made of: keys and fixed values."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

Keys = dict[str, tuple[str, type]]
RMS_EPSILON = "attention.layer_norm_rms_epsilon"
LAYER_EPSILON = "attention.layer_norm_epsilon"
FEED_FORWARD: Keys = {"feed_forward_length": ("intermediate_size", int)}
SIZES: Keys = {
    "context_length": ("max_position_embeddings", int),
    "embedding_length": ("hidden_size", int),
    "block_count": ("num_hidden_layers", int),
    "attention.head_count": ("num_attention_heads", int),
    "attention.head_count_kv": ("num_key_value_heads", int),
}
ROPE_BASE: Keys = {"rope.freq_base": ("rope_theta", float)}
BIASES = {"attention_bias": "attn_q.bias", "mlp_bias": "ffn_up.bias"}
WINDOW: Keys = {"attention.sliding_window": ("sliding_window", int)}
GRANITE: Keys = {
    "attention.scale": ("attention_multiplier", float),
    "embedding_scale": ("embedding_multiplier", float),
    "residual_scale": ("residual_multiplier", float),
    "logit_scale": ("logits_scaling", float),
}
EXPERTS: Keys = {
    "expert_count": ("num_experts", int),
    "expert_used_count": ("num_experts_per_tok", int),
}
DEEPSEEK_EXPERTS: Keys = {
    "expert_count": ("n_routed_experts", int),
    "expert_used_count": ("num_experts_per_tok", int),
    "expert_shared_count": ("n_shared_experts", int),
    "expert_feed_forward_length": ("moe_intermediate_size", int),
    "expert_weights_scale": ("routed_scaling_factor", float),
    "expert_weights_norm": ("norm_topk_prob", bool),
    "leading_dense_block_count": ("first_k_dense_replace", int),
}
SIGMOID_ROUTER = {"expert_gating_func": 2}
# A router that does not choose groups of experts first.
ONE_GROUP = {
    "n_group": 1,
    "topk_group": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
YARN = ("linear", "yarn")
# Every layer has experts.
ALL_SPARSE: dict[str, Any] = {"decoder_sparse_step": 1, "mlp_only_layers": []}
# Matrices of one row, which llama.cpp stores as vectors.
ONE_ROW = ("ffn_gate_inp_shexp",)


@dataclass(frozen=True)
class Architecture:
    """How llama.cpp stores and computes an architecture of mlx-lm.

    Attributes:
        name: llama.cpp's name, and the prefix of the metadata keys.
        hf_class: transformers' class, which a config.json names.
        model_type: mlx-lm's name; "" = the same as llama.cpp's.
        keys: the config key and its type by metadata key, with those of all models.
        epsilon: metadata key and config key of the norms' epsilon.
        rope: the pairs that llama.cpp rotates. `halves`: as Hugging Face. `permuted`:
            adjacent rows, so that the rows of q and k are reordered. `adjacent`:
            adjacent rows, as the model itself does.
        norm_offset: what llama.cpp's norm weights have added to mlx-lm's.
        switches: the tensor whose presence tells the value of a config key.
        rope_scalings: the types of RoPE scaling that both compute.
        mscale_all_dim: YaRN's parameter of this name, as llama.cpp computes.
        has_rope_parameters: whether the config has all values of RoPE in
            `rope_parameters`, as transformers 5 writes them.
        optional: keys that a model may have no value for, and files may leave out.
        marker: the metadata key of files of this entry, if another one has its name.
        has_partial_rope: whether a part of a head may be left unrotated.
        has_latent_attention: whether keys and values come from a latent vector.
        constants: metadata of all models.
        own_names: llama.cpp's names of modules that the package `gguf` does not know.
        fixed: config keys that llama.cpp does not read, and the values that it assumes,
            computed from the other keys.
    """

    name: str
    hf_class: str
    model_type: str = ""
    keys: Keys = field(default_factory=dict)
    epsilon: tuple[str, str] = (RMS_EPSILON, "rms_norm_eps")
    rope: Literal["halves", "permuted", "adjacent"] = "halves"
    norm_offset: int = 0
    switches: dict[str, str] = field(default_factory=lambda: BIASES)
    rope_scalings: tuple[str, ...] = ("linear",)
    mscale_all_dim: int = 0
    has_rope_parameters: bool = False
    optional: tuple[str, ...] = ()
    marker: str | None = None
    has_partial_rope: bool = False
    has_latent_attention: bool = False
    constants: dict[str, Any] = field(default_factory=dict)
    own_names: dict[str, str] = field(default_factory=dict)
    fixed: Callable[[dict[str, Any]], dict[str, Any]] = lambda _: {}

    def __post_init__(self):
        object.__setattr__(self, "model_type", self.model_type or self.name)
        epsilon, key = self.epsilon
        common = SIZES | {epsilon: (key, float)} | ROPE_BASE
        object.__setattr__(self, "keys", FEED_FORWARD | self.keys | common)


def gemma_scale(largest: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Gemma's scale of attention: llama.cpp knows the largest model by its layers."""

    def fixed(config: dict[str, Any]) -> dict[str, Any]:
        by_width = config["hidden_size"] // config["num_attention_heads"]
        is_largest = config["num_hidden_layers"] == largest
        return {"query_pre_attn_scalar": by_width if is_largest else config["head_dim"]}

    return fixed


def gemma3(config: dict[str, Any]) -> dict[str, Any]:
    return gemma_scale(62)(config) | {"sliding_window_pattern": 6}


def smollm3(config: dict[str, Any]) -> dict[str, Any]:
    layers = range(1, config["num_hidden_layers"] + 1)
    return {"no_rope_layers": [int(layer % 4 != 0) for layer in layers]}


def layer_types(period: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Every layer has a window, except each one that ends a period."""

    def fixed(config: dict[str, Any]) -> dict[str, Any]:
        layers = range(1, config["num_hidden_layers"] + 1)
        kinds = ("sliding_attention", "full_attention")
        return {"layer_types": [kinds[layer % period == 0] for layer in layers]}

    return fixed


def exaone4(config: dict[str, Any]) -> dict[str, Any]:
    """llama.cpp knows the model with windows by its layers."""
    if config["num_hidden_layers"] != 64:
        windows = {"sliding_window_pattern": None, "sliding_window": None}
        return windows | layer_types(1)(config)
    window = config.get("sliding_window", 4096)
    windows = {"sliding_window_pattern": "LLLG", "sliding_window": window}
    return windows | layer_types(4)(config)

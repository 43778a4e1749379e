"""llama.cpp's architectures: tensor names, metadata keys, and what its code fixes.

Both directions use one entry per architecture. Every entry was run in llama.cpp with
random weights and gave MLX's logits; see tests/convert/test_gguf_llama_cpp.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

# mlx-lm's module paths by llama.cpp's names; those of a block are relative to it.
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
OUTER |= {"output": "lm_head"}
ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
# The same under the names of norms after attention.
NORMS_OF_INPUTS = {"attn_norm": "input_layernorm"}
NORMS_OF_INPUTS |= {"post_attention_norm": "post_attention_layernorm"}
PROJECTIONS = ("gate", "up", "down")
MLP = {f"ffn_{name}": f"mlp.{name}_proj" for name in PROJECTIONS}
GATE_UP = {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}
# Norms before and after attention and MLP.
FOUR_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
AFTER_NORMS = {name: FOUR_NORMS[name] for name in FOUR_NORMS if "post" in name}

Keys = dict[str, tuple[str, type]]
RMS_EPSILON = "attention.layer_norm_rms_epsilon"
LAYER_EPSILON = "attention.layer_norm_epsilon"
FEED_FORWARD: Keys = {"feed_forward_length": ("intermediate_size", int)}
BIASES = {"attention_bias": "attn_q.bias", "mlp_bias": "ffn_up.bias"}
WINDOW: Keys = {"attention.sliding_window": ("sliding_window", int)}
GRANITE: Keys = FEED_FORWARD | {
    "attention.scale": ("attention_multiplier", float),
    "embedding_scale": ("embedding_multiplier", float),
    "residual_scale": ("residual_multiplier", float),
    "logit_scale": ("logits_scaling", float),
}
EXPERTS: Keys = {
    "expert_count": ("num_experts", int),
    "expert_used_count": ("num_experts_per_tok", int),
}
YARN = ("linear", "yarn")
# Every layer has experts.
ALL_SPARSE: dict[str, Any] = {"decoder_sparse_step": 1, "mlp_only_layers": []}
# Parameters that are no weight or bias of a layer, and what llama.cpp calls them.
PARAMETERS = {"attn_sinks": "weight", "exp_probs_b": "bias"}
# Matrices of one row, which llama.cpp stores as vectors.
ONE_ROW = ("ffn_gate_inp_shexp",)


@dataclass(frozen=True)
class Architecture:
    """How llama.cpp stores and computes an architecture of mlx-lm.

    Attributes:
        name: llama.cpp's name, and the prefix of the metadata keys.
        model_type: mlx-lm's.
        hf_class: transformers' class, which a config.json names.
        modules: mlx-lm's paths by llama.cpp's names.
        keys: the config key and its type by metadata key, beside those of all models.
        epsilon: metadata key and config key of the norms' epsilon.
        rope: the pairs that llama.cpp rotates. `halves`: as Hugging Face. `permuted`:
            adjacent rows, so that the rows of q and k are reordered. `adjacent`:
            adjacent rows, as the model itself does.
        norm_offset: what llama.cpp's norm weights have added to mlx-lm's.
        switches: the tensor whose presence tells the value of a config key.
        rope_scalings: the types of RoPE scaling that both compute.
        optional: keys that a model may have no value for, and files may leave out.
        marker: the metadata key of files of this entry, if another one has its name.
        has_partial_rope: whether a part of a head may be left unrotated.
        constants: metadata of all models.
        fixed: config keys that llama.cpp does not read, and the values that it assumes,
            computed from the other keys.
    """

    name: str
    model_type: str
    hf_class: str
    modules: dict[str, str]
    keys: Keys = field(default_factory=lambda: FEED_FORWARD)
    epsilon: tuple[str, str] = (RMS_EPSILON, "rms_norm_eps")
    rope: Literal["halves", "permuted", "adjacent"] = "halves"
    norm_offset: int = 0
    switches: dict[str, str] = field(default_factory=lambda: BIASES)
    rope_scalings: tuple[str, ...] = ("linear",)
    optional: tuple[str, ...] = ()
    marker: str | None = None
    has_partial_rope: bool = False
    constants: dict[str, Any] = field(default_factory=dict)
    fixed: Callable[[dict[str, Any]], dict[str, Any]] = lambda _: {}

    @property
    def paths(self) -> dict[str, str]:
        """llama.cpp's names by mlx-lm's paths."""
        return {path: name for name, path in self.modules.items()}


def _gemma_scale(largest: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Gemma's scale of attention: llama.cpp knows the largest model by its layers."""

    def fixed(config: dict[str, Any]) -> dict[str, Any]:
        by_width = config["hidden_size"] // config["num_attention_heads"]
        is_largest = config["num_hidden_layers"] == largest
        return {"query_pre_attn_scalar": by_width if is_largest else config["head_dim"]}

    return fixed


def _gemma3(config: dict[str, Any]) -> dict[str, Any]:
    return _gemma_scale(62)(config) | {"sliding_window_pattern": 6}


def _smollm3(config: dict[str, Any]) -> dict[str, Any]:
    layers = range(1, config["num_hidden_layers"] + 1)
    return {"no_rope_layers": [int(layer % 4 != 0) for layer in layers]}


def _layer_types(period: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Every layer has a window, except each one that ends a period."""

    def fixed(config: dict[str, Any]) -> dict[str, Any]:
        layers = range(1, config["num_hidden_layers"] + 1)
        kinds = ("sliding_attention", "full_attention")
        return {"layer_types": [kinds[layer % period == 0] for layer in layers]}

    return fixed


def _exaone4(config: dict[str, Any]) -> dict[str, Any]:
    """llama.cpp knows the model with windows by its layers."""
    if config["num_hidden_layers"] != 64:
        windows = {"sliding_window_pattern": None, "sliding_window": None}
        return windows | _layer_types(1)(config)
    window = config.get("sliding_window", 4096)
    windows = {"sliding_window_pattern": "LLLG", "sliding_window": window}
    return windows | _layer_types(4)(config)


def _experts(
    block: str, router: str = "gate", experts: str = "switch_mlp"
) -> dict[str, str]:
    """The router and the stacked experts of a block."""
    layers = {f"ffn_{n}_exps": f"{block}.{experts}.{n}_proj" for n in PROJECTIONS}
    return {"ffn_gate_inp": f"{block}.{router}"} | layers


_LLAMA = OUTER | NORMS | ATTENTION | MLP
_OLMO2 = OUTER | AFTER_NORMS | ATTENTION | QK_NORMS | MLP
_NO_MLP = OUTER | NORMS | ATTENTION
_ALL = (
    Architecture(
        "llama",
        "llama",
        "LlamaForCausalLM",
        _LLAMA,
        rope="permuted",
        rope_scalings=("linear", "llama3"),
    ),
    Architecture(
        "llama",
        "mixtral",
        "MixtralForCausalLM",
        _NO_MLP | _experts("block_sparse_moe"),
        keys=FEED_FORWARD | EXPERTS | {"expert_count": ("num_local_experts", int)},
        rope="permuted",
        rope_scalings=(),
        marker="expert_count",
    ),
    Architecture("qwen2", "qwen2", "Qwen2ForCausalLM", _LLAMA, rope_scalings=YARN),
    Architecture(
        "qwen3",
        "qwen3",
        "Qwen3ForCausalLM",
        _LLAMA | QK_NORMS,
        rope_scalings=YARN,
    ),
    Architecture(
        "qwen3moe",
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        _NO_MLP | QK_NORMS | _experts("mlp"),
        keys=FEED_FORWARD
        | EXPERTS
        | {"expert_feed_forward_length": ("moe_intermediate_size", int)},
        rope_scalings=(),
        fixed=lambda _: {"norm_topk_prob": True} | ALL_SPARSE,
    ),
    Architecture(
        "qwen2moe",
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        _NO_MLP
        | _experts("mlp")
        | {f"ffn_{n}_shexp": f"mlp.shared_expert.{n}_proj" for n in PROJECTIONS}
        | {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"},
        keys=FEED_FORWARD
        | EXPERTS
        | {
            "expert_feed_forward_length": ("moe_intermediate_size", int),
            "expert_shared_feed_forward_length": (
                "shared_expert_intermediate_size",
                int,
            ),
        },
        rope_scalings=(),
        fixed=lambda _: {"norm_topk_prob": False} | ALL_SPARSE,
    ),
    Architecture("gemma", "gemma", "GemmaForCausalLM", _LLAMA, norm_offset=1),
    Architecture(
        "gemma2",
        "gemma2",
        "Gemma2ForCausalLM",
        OUTER | FOUR_NORMS | ATTENTION | MLP,
        keys=FEED_FORWARD
        | WINDOW
        | {
            "attn_logit_softcapping": ("attn_logit_softcapping", float),
            "final_logit_softcapping": ("final_logit_softcapping", float),
        },
        norm_offset=1,
        fixed=_gemma_scale(46),
    ),
    Architecture(
        "gemma3",
        "gemma3_text",
        "Gemma3ForCausalLM",
        OUTER | FOUR_NORMS | ATTENTION | QK_NORMS | MLP,
        keys=FEED_FORWARD
        | WINDOW
        | {"rope.freq_base_swa": ("rope_local_base_freq", float)},
        norm_offset=1,
        # mlx-lm's default is that of older files.
        optional=("rope.freq_base_swa",),
        fixed=_gemma3,
    ),
    Architecture(
        "phi3",
        "phi3",
        "Phi3ForCausalLM",
        OUTER
        | NORMS
        | GATE_UP
        | {"attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj"},
        has_partial_rope=True,
        rope_scalings=("longrope",),
    ),
    Architecture(
        "granite",
        "granite",
        "GraniteForCausalLM",
        _LLAMA,
        keys=GRANITE,
        rope="permuted",
    ),
    Architecture(
        "granitemoe",
        "granitemoe",
        "GraniteMoeForCausalLM",
        _NO_MLP | _experts("block_sparse_moe", "router.layer"),
        keys=GRANITE | EXPERTS | {"expert_count": ("num_local_experts", int)},
        rope="permuted",
    ),
    Architecture(
        "smollm3",
        "smollm3",
        "SmolLM3ForCausalLM",
        _LLAMA,
        rope="permuted",
        fixed=_smollm3,
    ),
    Architecture("olmo2", "olmo2", "Olmo2ForCausalLM", _OLMO2),
    Architecture(
        "olmo2",
        "olmo3",
        "Olmo3ForCausalLM",
        _OLMO2,
        keys=FEED_FORWARD | WINDOW,
        rope_scalings=(),
        fixed=_layer_types(4),
        marker="attention.sliding_window",
    ),
    Architecture(
        "olmoe",
        "olmoe",
        "OlmoeForCausalLM",
        _NO_MLP | QK_NORMS | _experts("mlp"),
        keys=FEED_FORWARD | EXPERTS,
        fixed=lambda config: {
            "norm_topk_prob": False,
            "num_key_value_heads": config["num_attention_heads"],
        },
    ),
    Architecture(
        "glm4",
        "glm4",
        "Glm4ForCausalLM",
        OUTER
        | ATTENTION
        | GATE_UP
        | {
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_self_attn_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
        rope="adjacent",
        has_partial_rope=True,
    ),
    Architecture(
        "ernie4_5",
        "ernie4_5",
        "Ernie4_5ForCausalLM",
        _LLAMA,
        rope="adjacent",
        switches={"use_bias": "attn_q.bias"},
    ),
    Architecture(
        "seed_oss",
        "seed_oss",
        "SeedOssForCausalLM",
        OUTER | ATTENTION | MLP | NORMS_OF_INPUTS,
        switches={
            "attention_bias": "attn_q.bias",
            "attention_out_bias": "attn_output.bias",
        },
    ),
    Architecture(
        "starcoder2",
        "starcoder2",
        "Starcoder2ForCausalLM",
        OUTER | NORMS | ATTENTION | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        epsilon=(LAYER_EPSILON, "norm_epsilon"),
    ),
    Architecture(
        "cohere2",
        "cohere2",
        "Cohere2ForCausalLM",
        OUTER | {"attn_norm": "input_layernorm"} | ATTENTION | MLP,
        keys=FEED_FORWARD | WINDOW | {"logit_scale": ("logit_scale", float)},
        epsilon=(LAYER_EPSILON, "layer_norm_eps"),
        rope="adjacent",
        fixed=lambda _: {"sliding_window_pattern": 4},
    ),
    Architecture(
        "command-r",
        "cohere",
        "CohereForCausalLM",
        OUTER | {"attn_norm": "input_layernorm"} | ATTENTION | MLP,
        keys=FEED_FORWARD | {"logit_scale": ("logit_scale", float)},
        epsilon=(LAYER_EPSILON, "layer_norm_eps"),
        rope="adjacent",
        # Command R+ has norms of queries and keys.
        fixed=lambda _: {"use_qk_norm": False, "layer_norm_bias": False},
    ),
    Architecture(
        "phi2",
        "phi",
        "PhiForCausalLM",
        OUTER
        | ATTENTION
        | {
            "output_norm": "model.final_layernorm",
            "attn_norm": "input_layernorm",
            "attn_output": "self_attn.dense",
            "ffn_up": "mlp.fc1",
            "ffn_down": "mlp.fc2",
        },
        epsilon=(LAYER_EPSILON, "layer_norm_eps"),
        has_partial_rope=True,
    ),
    Architecture(
        "nemotron",
        "nemotron",
        "NemotronForCausalLM",
        OUTER
        | NORMS
        | ATTENTION
        | {"ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"},
        epsilon=(LAYER_EPSILON, "norm_eps"),
        norm_offset=1,
        has_partial_rope=True,
        fixed=lambda _: {"hidden_act": "relu2"},
    ),
    Architecture(
        "exaone4",
        "exaone4",
        "Exaone4ForCausalLM",
        _OLMO2,
        keys=FEED_FORWARD | WINDOW,
        rope_scalings=("linear", "llama3"),
        optional=("attention.sliding_window",),
        fixed=_exaone4,
    ),
    Architecture(
        "stablelm",
        "stablelm",
        "StableLmForCausalLM",
        _LLAMA,
        epsilon=(LAYER_EPSILON, "layer_norm_eps"),
        switches={"use_qkv_bias": "attn_q.bias"},
        has_partial_rope=True,
        # StableLM 2 12B has other values.
        fixed=lambda _: {"use_parallel_residual": False, "qk_layernorm": False},
    ),
    Architecture(
        "hunyuan-dense",
        "hunyuan_v1_dense",
        "HunYuanDenseV1ForCausalLM",
        _LLAMA
        | {
            "attn_q_norm": "self_attn.query_layernorm",
            "attn_k_norm": "self_attn.key_layernorm",
        },
        # mlx-lm computes only the factor of the base.
        rope_scalings=("dynamic",),
        fixed=lambda _: {"use_qk_norm": True, "attention_bias": False},
    ),
    Architecture(
        "gpt-oss",
        "gpt_oss",
        "GptOssForCausalLM",
        OUTER
        | ATTENTION
        | _experts("mlp", "router", "experts")
        | NORMS_OF_INPUTS
        | {"attn_sinks": "self_attn.sinks"},
        keys=FEED_FORWARD
        | EXPERTS
        | WINDOW
        | {
            "expert_count": ("num_local_experts", int),
            "expert_feed_forward_length": ("intermediate_size", int),
        },
        rope_scalings=YARN,
        fixed=_layer_types(2),
    ),
    Architecture(
        "glm4moe",
        "glm4_moe",
        "Glm4MoeForCausalLM",
        OUTER
        | ATTENTION
        | QK_NORMS
        | MLP
        | _experts("mlp")
        | {f"ffn_{n}_shexp": f"mlp.shared_experts.{n}_proj" for n in PROJECTIONS}
        | NORMS_OF_INPUTS
        | {"exp_probs_b": "mlp.gate.e_score_correction_bias"},
        keys=FEED_FORWARD
        | {
            "expert_count": ("n_routed_experts", int),
            "expert_used_count": ("num_experts_per_tok", int),
            "expert_shared_count": ("n_shared_experts", int),
            "expert_feed_forward_length": ("moe_intermediate_size", int),
            "expert_weights_scale": ("routed_scaling_factor", float),
            "expert_weights_norm": ("norm_topk_prob", bool),
            "leading_dense_block_count": ("first_k_dense_replace", int),
        },
        rope_scalings=(),
        switches={"attention_bias": "attn_q.bias", "use_qk_norm": "attn_q_norm.weight"},
        has_partial_rope=True,
        # Sigmoid.
        constants={"expert_gating_func": 2},
        fixed=lambda _: {
            "n_group": 1,
            "topk_group": 1,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
        },
    ),
)
BY_MODEL_TYPE = {entry.model_type: entry for entry in _ALL}
# llama.cpp computes Mistral models as Llama models, and MiMo as Qwen2.
BY_MODEL_TYPE |= {"mistral": BY_MODEL_TYPE["llama"], "mimo": BY_MODEL_TYPE["qwen2"]}


def of_file(name: str, metadata: dict[str, Any]) -> Architecture | None:
    """The entry of a file with llama.cpp's name of its architecture, if known."""
    entries = [entry for entry in _ALL if entry.name == name]
    for entry in entries:
        if entry.marker and metadata.get(f"{name}.{entry.marker}"):
            return entry
    return next((entry for entry in entries if not entry.marker), None)


# Models with images, of which mlx-lm computes the text part: its default model type.
WITH_IMAGES = {"gemma3": "gemma3_text", "mistral3": "mistral"}
TEXT_PART = "language_model."

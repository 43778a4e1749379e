"""Repairs of mlx-lm's architectures, whose training, caches and batches disagree.

A repair replaces a method of a class of mlx-lm when the first such model is built.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import mlx.core as mx
import mlx.nn as nn

# What is called in place of a method, with the method as its first argument: by module
# and class, the name of the method and the function.
REPAIRS: dict[tuple[str, str], tuple[str, Callable]] = {}


def _repairs(
    module: str, name: str, method: str = "__call__"
) -> Callable[[Callable], Callable]:
    """Register a function as the repair of a method of a class of mlx-lm."""

    def register(function: Callable) -> Callable:
        REPAIRS[module, name] = method, function
        return function

    return register


@_repairs("gemma2", "Attention")
def _add_axis_of_groups(attention, self, x, mask=None, cache=None):
    """Gemma 2 groups its heads on an axis that masks of a batch [B, 1, L, S] lack."""
    lacks_axis = mask is not None and mask.ndim == 4 and self.repeats > 1
    return attention(self, x, mask[:, :, None] if lacks_axis else mask, cache)


@_repairs("gemma3n", "LanguageModel")
def _share_keys(trunk, self, inputs=None, cache=None, input_embeddings=None):
    """The last layers of Gemma 3n take keys and values from caches, and need some."""
    cache = self.make_cache() if cache is None else cache
    return trunk(self, inputs, cache, input_embeddings)


@_repairs("plamo3", "Model", "make_cache")
def _keep_whole_windows(make_cache, self):
    """The masks of PLaMo 3 see one position more than its caches keep."""
    caches = make_cache(self)
    for cache in caches:
        if hasattr(cache, "max_size"):
            cache.max_size += 1
    return caches


@_repairs("jamba", "JambaSparseMoeBlock")
def _use_all_scores(experts, self, x):
    """Jamba's weights of the chosen experts are not normalized to 1."""
    scores = mx.softmax(self.router(x), axis=-1, precise=True)
    chosen = mx.sort(scores, axis=-1)[..., -self.num_experts_per_tok :]
    return experts(self, x) * chosen.sum(axis=-1, keepdims=True)


@_repairs("mamba2", "MambaRMSNormGated")
@_repairs("granitemoehybrid", "GraniteMoeHybridRMSNormGated")
def _normalize_by_group(_, self, x, gate=None):
    """Mamba 2 normalizes each group of its heads."""
    x = x if gate is None else nn.silu(gate) * x
    groups = x.reshape(*x.shape[:-1], self.groups, -1)
    return self.weight * mx.fast.rms_norm(groups, None, self.eps).reshape(x.shape)


@_repairs("minicpm3", "Model")
def _scale_logits(model, self, *inputs, **options):
    """MiniCPM 3 scales its logits with a tied head too."""
    args, logits = self.args, model(self, *inputs, **options)
    is_tied = args.tie_word_embeddings
    return logits * (args.dim_model_base / args.hidden_size if is_tied else 1)


@_repairs("falcon_h1", "Model", "sanitize")
def _multiply_once(sanitize, self, weights):
    """The input of attention is multiplied, and then the keys."""
    new, args = sanitize(self, weights), self.args
    factors = {"k": args.key_multiplier, "v": args.attention_in_multiplier}
    # A checkpoint that mlx-lm has written holds the products.
    for name in new if new is not weights else ():
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            new[name] *= factors[name[-len("k_proj.weight")]]
    return new


@_repairs("ernie4_5_moe", "Model", "sanitize")
def _keep_score_biases(sanitize, self, weights):
    end = "e_score_correction_bias"
    return sanitize(self, weights) | {
        name.replace("moe_statics", "gate_act"): value.reshape(-1)
        for name, value in weights.items()
        if name.endswith(end) and "mtp" not in name
    }


@_repairs("gpt_oss", "Model", "sanitize")
def _turn_experts(sanitize, self, weights):
    """Experts in 16 bits are [inputs, outputs], and have no suffix."""
    turned = {}
    for name, value in weights.items():
        if name.endswith(("gate_up_proj", "experts.down_proj")):
            name, value = f"{name}.weight", value.swapaxes(-1, -2)
        turned[name] = value
    return sanitize(self, turned)


@_repairs("gpt2", "Model", "sanitize")
def _drop_prefix(sanitize, self, weights):
    """transformers writes names with a prefix that the authors omit."""
    names = {k.removeprefix("transformer."): v for k, v in weights.items()}
    return sanitize(self, names)


class BiasedScores(nn.Module):
    """The scores of the experts that are chosen with a bias, zeros for the others."""

    def __init__(self, act: Callable, num_experts: int, k: int) -> None:
        super().__init__()
        self.act, self.k = act, k
        self.e_score_correction_bias = mx.zeros(num_experts)

    def __call__(self, gates: mx.array) -> mx.array:
        scores = self.act(gates)
        biased = mx.stop_gradient(scores + self.e_score_correction_bias)
        return mx.where(biased >= mx.sort(biased)[..., -self.k, None], scores, 0)


# Attributes of modules to set from the config, by module and class.
VALUES = {
    ("ernie4_5_moe", "Ernie4_5_MoeMLP"): lambda module, config: {
        "gate_act": BiasedScores(module.gate_act, config["moe_num_experts"], module.k)
    },
    ("mamba2", "MambaRMSNormGated"): lambda _, config: {"groups": config["n_groups"]},
    ("granitemoehybrid", "GraniteMoeHybridRMSNormGated"): lambda _, config: {
        "groups": config["mamba_n_groups"]
    },
    ("llama4_text", "Attention"): lambda module, _: {
        "use_qk_norm": module.use_qk_norm and module.use_rope
    },
    # The norms of latents have an epsilon of their own.
    ("glm4_moe_lite", "Glm4MoeLiteAttention"): lambda _, config: {
        f"{name}_a_layernorm": nn.RMSNorm(config[f"{name}_lora_rank"], eps=1e-6)
        for name in ("q", "kv")
        if config[f"{name}_lora_rank"]
    },
    ("glm", "GLMAttention"): lambda module, config: {
        "rope": nn.RoPE(
            int(module.head_dim * config.get("partial_rotary_factor", 0.5)),
            traditional=True,
            base=config["rope_theta"],
        )
    },
}


def repair(model: nn.Module, config: dict) -> None:
    """Repair a model, and the classes of its modules once in a process."""
    # mlx-lm's recurrent_gemma skips nn.Module.__init__, so it could not be frozen.
    if not hasattr(model, "_no_grad"):
        nn.Module.__init__(model)
    for module in model.modules():
        kind = type(module)
        key = kind.__module__.removeprefix("mlx_lm.models."), kind.__name__
        for name, value in VALUES.get(key, lambda *_: {})(module, config).items():
            setattr(module, name, value)
        method, fixed = REPAIRS.get(key, ("", None))
        original = getattr(kind, method, None)
        if fixed and not hasattr(original, "__wrapped__"):
            setattr(kind, method, _replacement(original, fixed))


def _replacement(original: Callable, fixed: Callable) -> Callable:
    """A method that calls `fixed` with the original one."""

    @wraps(original)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return fixed(original, self, *args, **kwargs)

    return call

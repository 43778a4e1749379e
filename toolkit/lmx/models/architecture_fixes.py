"""Repairs of mlx-lm's architectures, whose training, caches and batches disagree.

A repair replaces a method of a class of mlx-lm when the first such model is built.
"""

from collections.abc import Callable
from functools import partial, wraps

import mlx.core as mx
import mlx.nn as nn


def _with_axis_of_groups(attention: Callable) -> Callable:
    """Gemma 2 groups its heads on an axis that masks of a batch [B, 1, L, S] lack."""

    def call(self, x, mask=None, cache=None):
        is_batch = mask is not None and mask.ndim == 4
        lacks_axis = is_batch and self.repeats > 1
        return attention(self, x, mask[:, :, None] if lacks_axis else mask, cache)

    return call


def _with_shared_keys(trunk: Callable) -> Callable:
    """The last layers of Gemma 3n take keys and values from caches, and need some."""

    def call(self, inputs=None, cache=None, input_embeddings=None):
        cache = self.make_cache() if cache is None else cache
        return trunk(self, inputs, cache, input_embeddings)

    return call


def _with_whole_windows(make_cache: Callable) -> Callable:
    """The masks of PLaMo 3 see one position more than its caches keep."""

    def call(self):
        caches = make_cache(self)
        for cache in caches:
            if hasattr(cache, "max_size"):
                cache.max_size += 1
        return caches

    return call


def _with_all_scores(experts: Callable) -> Callable:
    """Jamba's weights of the chosen experts are not normalized to 1."""

    def call(self, x):
        scores = mx.softmax(self.router(x), axis=-1, precise=True)
        chosen = mx.sort(scores, axis=-1)[..., -self.num_experts_per_tok :]
        return experts(self, x) * chosen.sum(axis=-1, keepdims=True)

    return call


def _by_group(_: Callable) -> Callable:
    """Mamba 2 normalizes each group of its heads."""

    def call(self, x, gate=None):
        x = x if gate is None else nn.silu(gate) * x
        groups = x.reshape(*x.shape[:-1], self.groups, -1)
        return self.weight * mx.fast.rms_norm(groups, None, self.eps).reshape(x.shape)

    return call


def _with_scaled_logits(model: Callable) -> Callable:
    """MiniCPM 3 scales its logits with a tied head too."""

    def call(self, *inputs, **options):
        args, logits = self.args, model(self, *inputs, **options)
        is_tied = args.tie_word_embeddings
        return logits * (args.dim_model_base / args.hidden_size if is_tied else 1)

    return call


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


def _tensors(change: Callable) -> tuple[str, Callable]:
    """A replacement of `sanitize` by a function of it, of the model and the tensors."""
    return (
        "sanitize",
        lambda original: (
            lambda self, weights: change(partial(original, self), self, weights)
        ),
    )


def _falcon_h1(sanitize: Callable, model: nn.Module, weights: dict) -> dict:
    """The input of attention is multiplied, and then the keys."""
    new, args = sanitize(weights), model.args
    factors = {"k": args.key_multiplier, "v": args.attention_in_multiplier}
    # A checkpoint that mlx-lm has written holds the products.
    for name in new if new is not weights else ():
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            new[name] *= factors[name[-len("k_proj.weight")]]
    return new


def _ernie4_5_moe(sanitize: Callable, _: nn.Module, weights: dict) -> dict:
    end = "e_score_correction_bias"
    return sanitize(weights) | {
        name.replace("moe_statics", "gate_act"): value.reshape(-1)
        for name, value in weights.items()
        if name.endswith(end) and "mtp" not in name
    }


def _gpt_oss(sanitize: Callable, _: nn.Module, weights: dict) -> dict:
    """Experts in 16 bits are [inputs, outputs], and have no suffix."""
    ends = ("gate_up_proj", "experts.down_proj")
    return sanitize(
        {
            f"{name}.weight" if name.endswith(ends) else name: (
                value.swapaxes(-1, -2) if name.endswith(ends) else value
            )
            for name, value in weights.items()
        }
    )


def _gpt2(sanitize: Callable, _: nn.Module, weights: dict) -> dict:
    """transformers writes names with a prefix that the authors omit."""
    return sanitize({k.removeprefix("transformer."): v for k, v in weights.items()})


# The method to replace, by module and class.
REPAIRS = {
    ("gemma2", "Attention"): ("__call__", _with_axis_of_groups),
    ("gemma3n", "LanguageModel"): ("__call__", _with_shared_keys),
    ("plamo3", "Model"): ("make_cache", _with_whole_windows),
    ("jamba", "JambaSparseMoeBlock"): ("__call__", _with_all_scores),
    ("mamba2", "MambaRMSNormGated"): ("__call__", _by_group),
    ("granitemoehybrid", "GraniteMoeHybridRMSNormGated"): ("__call__", _by_group),
    ("minicpm3", "Model"): ("__call__", _with_scaled_logits),
    ("falcon_h1", "Model"): _tensors(_falcon_h1),
    ("ernie4_5_moe", "Model"): _tensors(_ernie4_5_moe),
    ("gpt_oss", "Model"): _tensors(_gpt_oss),
    ("gpt2", "Model"): _tensors(_gpt2),
}
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
            setattr(kind, method, wraps(original)(fixed(original)))

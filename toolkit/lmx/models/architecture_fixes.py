"""Repairs of mlx-lm's architectures, whose training, caches and batches disagree.

A repair replaces a method of a class of mlx-lm when the first such model is built.
"""

from collections.abc import Callable
from functools import wraps

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


def _with_all_multipliers(sanitize: Callable) -> Callable:
    """Falcon H1 multiplies the input of attention, which keys and values share."""

    def call(self, weights):
        new = sanitize(self, weights)
        # A checkpoint that mlx-lm has written holds the products.
        for name in new if new is not weights else ():
            if name.endswith("k_proj.weight"):
                new[name] *= self.args.key_multiplier
            elif name.endswith("v_proj.weight"):
                new[name] *= self.args.attention_in_multiplier
        return new

    return call


def _with_softmax_of_all(_: Callable) -> Callable:
    """Jamba's weights of experts are not normalized among the chosen ones."""

    def call(self, x):
        scores = mx.softmax(self.router(x), axis=-1, precise=True)
        k = self.num_experts_per_tok
        chosen = mx.stop_gradient(mx.argpartition(-scores, kth=k - 1, axis=-1)[..., :k])
        weights = mx.take_along_axis(scores, chosen, axis=-1)
        return (self.switch_mlp(x, chosen) * weights[..., None]).sum(axis=-2)

    return call


def _with_selection_bias(_: Callable) -> Callable:
    """ERNIE chooses its experts with a bias, as DeepSeek does."""

    def call(self, x):
        scores = self.gate_act(self.gate(x).astype(mx.float32))
        biased = -scores - self.e_score_correction_bias
        chosen = mx.stop_gradient(mx.argpartition(biased, kth=self.k - 1, axis=-1))
        chosen = chosen[..., : self.k]
        weights = mx.take_along_axis(scores, chosen, axis=-1)
        weights /= mx.maximum(weights.sum(axis=-1, keepdims=True), self.norm_min)
        y = self.switch_mlp(x, chosen)
        y = (y * weights[..., None]).sum(axis=-2).astype(y.dtype)
        return y if self.shared_experts is None else y + self.shared_experts(x)

    return call


def _keeping_selection_bias(sanitize: Callable) -> Callable:
    def call(self, weights):
        biases = {
            name.replace(".moe_statics", ""): weights[name].reshape(-1)
            for name in weights
            if name.endswith("e_score_correction_bias") and "mtp" not in name
        }
        return sanitize(self, weights) | biases

    return call


def _with_groups(_: Callable) -> Callable:
    """Mamba 2 normalizes each group of its heads."""

    def call(self, hidden_states, gate=None):
        if gate is not None:
            hidden_states = nn.silu(gate) * hidden_states
        groups = mx.unflatten(hidden_states, -1, (self.groups, -1))
        return self.weight * mx.flatten(mx.fast.rms_norm(groups, None, self.eps), -2)

    return call


def _without_prefix(sanitize: Callable) -> Callable:
    """transformers writes the names of GPT-2 with a prefix that its authors omit."""

    def call(self, weights):
        names = {name: name.removeprefix("transformer.") for name in weights}
        return sanitize(self, {names[name]: w for name, w in weights.items()})

    return call


def _with_dense_experts(sanitize: Callable) -> Callable:
    """The experts of gpt-oss in 16 bits are [inputs, outputs], without a suffix."""

    def call(self, weights):
        dense = [n for n in weights if n.endswith(("gate_up_proj", "experts.down_proj"))]
        renamed = {f"{n}.weight": weights[n].swapaxes(-1, -2) for n in dense}
        kept = {n: w for n, w in weights.items() if n not in dense}
        return sanitize(self, kept | renamed)

    return call


# The method to replace, by module and class.
REPAIRS = {
    ("mlx_lm.models.gemma2", "Attention"): ("__call__", _with_axis_of_groups),
    ("mlx_lm.models.gemma3n", "LanguageModel"): ("__call__", _with_shared_keys),
    ("mlx_lm.models.plamo3", "Model"): ("make_cache", _with_whole_windows),
    ("mlx_lm.models.falcon_h1", "Model"): ("sanitize", _with_all_multipliers),
    ("mlx_lm.models.jamba", "JambaSparseMoeBlock"): ("__call__", _with_softmax_of_all),
    ("mlx_lm.models.ernie4_5_moe", "Ernie4_5_MoeMLP"): (
        "__call__",
        _with_selection_bias,
    ),
    ("mlx_lm.models.ernie4_5_moe", "Model"): ("sanitize", _keeping_selection_bias),
    ("mlx_lm.models.mamba2", "MambaRMSNormGated"): ("__call__", _with_groups),
    ("mlx_lm.models.granitemoehybrid", "GraniteMoeHybridRMSNormGated"): (
        "__call__",
        _with_groups,
    ),
    ("mlx_lm.models.gpt2", "Model"): ("sanitize", _without_prefix),
    ("mlx_lm.models.gpt_oss", "Model"): ("sanitize", _with_dense_experts),
}
# Values to set in the modules of a class, from the config.
VALUES = {
    ("mlx_lm.models.ernie4_5_moe", "Ernie4_5_MoeMLP"): lambda config: {
        "e_score_correction_bias": mx.zeros(config["moe_num_experts"]),
        "norm_min": config.get("moe_norm_min", 1e-12),
    },
    ("mlx_lm.models.mamba2", "MambaRMSNormGated"): lambda config: {
        "groups": config["n_groups"]
    },
    ("mlx_lm.models.granitemoehybrid", "GraniteMoeHybridRMSNormGated"): lambda config: {
        "groups": config["mamba_n_groups"]
    },
    ("mlx_lm.models.glm", "GLMAttention"): lambda config: {
        "rope": nn.RoPE(
            int(config["head_dim"] * config.get("partial_rotary_factor", 0.5)),
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
        if values := VALUES.get((kind.__module__, kind.__name__)):
            for name, value in values(config).items():
                setattr(module, name, value)
    for kind in {type(module) for module in model.modules()}:
        method, fixed = REPAIRS.get((kind.__module__, kind.__name__), ("", None))
        original = getattr(kind, method, None)
        if fixed and not hasattr(original, "__wrapped__"):
            setattr(kind, method, wraps(original)(fixed(original)))

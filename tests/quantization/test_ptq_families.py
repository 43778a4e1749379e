"""GPTQ and AWQ of every architecture family: done, or refused with the reason.

Layers of latent attention with a matrix for each head are rounded to nearest.
"""

import mlx.core as mx
import pytest
from lmx.config.quantize import AWQConfig, GPTQConfig
from lmx.errors import UserError
from lmx.interfaces import Logger
from lmx.models.loader import build_model
from lmx.quantization.ptq.methods import METHODS
from lmx.quantization.target_layers import select_layers
from quantization_samples import context_of, windows_of
from tiny_families import FAMILIES, VOCABULARY, changed, config

# Widths of a latent attention that a group of 32 divides, all unlike each other.
WIDE = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "v_head_dim": 96}
ABSORBED = {"deepseek_v3", "deepseek_v32", "kimi_k25", "kimi_linear", "longcat_flash"}
# What their blocks exchange is more than hidden states.
NOT_SEQUENTIAL = {"gemma3n", "gemma4_text", "gemma4", "rwkv7", "hunyuan", "nanbeige"}
CONFIGS = {"gptq": GPTQConfig, "awq": AWQConfig}
SHOWN = {"deepseek_v3", "kimi_linear", "gpt2"}
CASES = [
    pytest.param(family, marks=() if family in SHOWN else pytest.mark.slow)
    for family in FAMILIES
]


@pytest.mark.parametrize("method", CONFIGS)
@pytest.mark.parametrize("family", CASES)
def test_families_are_quantized_or_refused(family, method, tmp_path):
    def build():
        mx.random.seed(0)
        return build_model(changed(config(family), WIDE)).eval()

    model, settings = build(), CONFIGS[method](bits=4, group_size=32)
    specs, lines = select_layers(model, settings).specs, []
    logger = Logger()
    logger.info = lines.append
    windows = windows_of(mx.random.randint(0, VOCABULARY, (16, 24)))
    context = context_of(model, specs, windows, tmp_path, logger=logger, reread=build)
    weights = {p: m.weight for p, m in model.named_modules() if p in specs}
    quantize = METHODS[method](settings, context).quantize
    if family in NOT_SEQUENTIAL:
        with pytest.raises(UserError, match="cannot be run one by one"):
            quantize()
        return
    tensors = quantize()
    assert {f"{path}.weight" for path in specs} <= tensors.keys()
    heads = [p for p in specs if p.endswith(("embed_q", "unembed_out"))]
    assert bool(heads) == (family in ABSORBED)
    for path in heads:
        rounded = context.rtn(path, weights[path]).tensors
        assert f"{path} quantized with RTN" in lines
        assert all(
            mx.array_equal(tensors[f"{path}.{k}"], v) for k, v in rounded.items()
        )

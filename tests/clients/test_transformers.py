"""transformers and peft compute the same float32 logits from the exports."""

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from lmx.convert.exporters import hf
from lmx.models.loader import build_model
from mlx.utils import tree_map
from tiny_families import DEEPSEEK_EXPERTS, EXPERTS, SHAPE, SHORT_CONVOLUTIONS

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

VOCABULARY = SHAPE["vocab_size"]
TOKENS = np.random.default_rng(0).integers(3, VOCABULARY, (2, 12))
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
TIED = {"tie_word_embeddings": True}
ALTERNATING = {
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}
MIXTURE = EXPERTS | {"decoder_sparse_step": 1, "mlp_only_layers": []}
MAMBA = {"state_size": 8, "conv_kernel": 3, "use_conv_bias": True, "time_step_rank": 4}
# Config keys that the tiny models need in both libraries.
FAMILIES = {
    "llama": {"attention_bias": True},
    "mistral": ALTERNATING,
    "qwen2": {},
    "qwen3": {},
    "gemma": TIED,
    "gemma2": TIED | {"query_pre_attn_scalar": 16, "final_logit_softcapping": 2.0},
    "gemma3_text": ALTERNATING
    | {
        "query_pre_attn_scalar": 16,
        "rope_local_base_freq": 1e4,
        "sliding_window_pattern": 2,
    },
    "phi": {},
    "phi3": {"partial_rotary_factor": 1.0},
    "glm4": {},
    "cohere": TIED | {"logit_scale": 1.0},
    "cohere2": TIED | ALTERNATING | {"logit_scale": 1.0, "sliding_window_pattern": 2},
    "olmo2": {},
    "starcoder2": {"use_bias": True},
    "stablelm": {"use_qkv_bias": True},
    "granite": {
        "logits_scaling": 2.0,
        "attention_multiplier": 0.25,
        "embedding_multiplier": 1.5,
        "residual_multiplier": 0.5,
    },
    "smollm3": {},
    "exaone4": ALTERNATING | {"rope_scaling": None, "sliding_window_pattern": "LG"},
    "ernie4_5": {},
    "nemotron": {"hidden_act": "relu2"},
    "hunyuan_v1_dense": {},
    "qwen3_moe": MIXTURE,
    "qwen2_moe": MIXTURE
    | {"shared_expert_intermediate_size": 16, "norm_topk_prob": False},
    "mixtral": {"num_local_experts": 4},
    "phimoe": {
        "num_local_experts": 4,
        "attention_bias": True,
        "lm_head_bias": True,
    },
    "olmoe": EXPERTS,
    "glm4_moe": DEEPSEEK_EXPERTS | {"use_qk_norm": True, "rope_scaling": None},
    "mamba": MAMBA,
    "mamba2": MAMBA
    | {
        "ssm_state_size": 8,
        "n_groups": 1,
        "time_step_limit": [0.001, 100.0],
        "num_heads": 4,
    },
    "lfm2": TIED | SHORT_CONVOLUTIONS | {"layer_types": ["conv", "full_attention"]},
}


def test_families_cover_all_supported_ones():
    assert FAMILIES.keys() == set(hf.SUPPORTED.split())


def logits(model, tokens=TOKENS):
    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.numpy()


def load_transformers(folder):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_dense_export_has_the_same_logits(tmp_path, family):
    config = SHAPE | ENDS | FAMILIES[family]
    config |= {"model_type": family, "torch_dtype": "float32"}
    mx.random.seed(1)
    model = build_model(config)
    keys = iter(mx.random.split(mx.random.key(2), 4096))

    def perturb(value):
        return value + 0.05 * mx.random.normal(value.shape, key=next(keys))

    model.update(tree_map(perturb, model.parameters()))
    weights = hf.dequantized_weights(model, mx.float32)
    hf.write(tmp_path, weights, config, companions=tmp_path)
    hf.verify_roundtrip(tmp_path, hf.dequantized_weights(model, mx.float32), config)
    expected = np.array(model(mx.array(TOKENS)))
    np.testing.assert_allclose(
        logits(load_transformers(tmp_path)), expected, rtol=1e-3, atol=1e-3
    )
    assert np.abs(expected).max() > 0.5


def mlx_logits(folder, **settings):
    model, _ = mlx_lm.load(str(folder), **settings)
    model.set_dtype(mx.float32)
    return np.array(model(mx.array(TOKENS)))


def test_dense_export_of_a_run_loads_in_transformers(run):
    actual = logits(load_transformers(run / "hf"))
    np.testing.assert_allclose(actual, mlx_logits(run / "hf"), atol=1e-3)
    # The weights are the dequantized codes in the 16-bit dtype of the model.
    np.testing.assert_allclose(actual, mlx_logits(run / "model"), atol=2e-2)
    tokenizer = transformers.AutoTokenizer.from_pretrained(run / "hf")
    assert tokenizer.decode(tokenizer.encode("Count to 3.")) == "Count to 3."


def test_peft_loads_the_adapter_of_a_run(run, base):
    peft = pytest.importorskip("peft")
    model = load_transformers(base)
    base_logits = logits(model)
    adapted = peft.PeftModel.from_pretrained(model, run / "peft")
    expected = mlx_logits(base, adapter_path=str(run / "adapters"))
    np.testing.assert_allclose(logits(adapted), expected, atol=1e-3)
    assert np.abs(base_logits - expected).max() > 0.05


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_rslora": True},
        {"use_dora": True},
        {"rank_pattern": {"mlp.up_proj": 2}, "alpha_pattern": {"q_proj": 7}},
        {"layers_to_transform": [1], "init_lora_weights": "gaussian"},
    ],
    ids=["lora", "rslora", "dora", "patterns", "layers"],
)
def test_adapter_from_peft_has_the_same_logits(base, tmp_path, settings):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=["q_proj", "v_proj", "up_proj"], **settings
    )
    model = peft.get_peft_model(load_transformers(base), config)
    for name, value in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(value, std=0.1)
        if "magnitude" in name:
            value.data *= 1 + 0.1 * torch.rand_like(value)
    model.save_pretrained(tmp_path)
    from lmx.convert.importers.peft import resolve_adapter

    actual = mlx_logits(base, adapter_path=str(resolve_adapter(tmp_path)))
    np.testing.assert_allclose(actual, logits(model), atol=1e-3)
    assert np.abs(actual - mlx_logits(base)).max() > 0.05

"""Configs as transformers 5 and earlier versions write them give the same logits."""

import json
import shutil

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from lmx.convert.exporters import hf
from lmx.models.loader import load
from tiny_families import DEEPSEEK_EXPERTS, EXPERTS, LATENT_ATTENTION

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
# These configs leave nothing out, and mlx-lm reads all that matters.
pytestmark = pytest.mark.filterwarnings("ignore", "error:.*config.json")

VOCABULARY = 320
TOKENS = np.random.default_rng(0).integers(3, VOCABULARY, (2, 40))
THETA = 7e4
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
HEAD = {"head_dim": 16}
PARTIAL = {"partial_rotary_factor": 0.5}
ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
NEXT = EXPERTS | {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 3,
    "full_attention_interval": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "shared_expert_intermediate_size": 16,
    "head_dim": 16,
}
FALCON = {
    "mamba_d_ssm": 32,
    "mamba_d_state": 8,
    "mamba_n_heads": 2,
    "mamba_d_head": 16,
    "mamba_chunk_size": 8,
    "mamba_norm_before_gate": False,
}
ALTERNATING = {
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}
FAMILIES = {
    "llama": {},
    "mistral": HEAD,
    "mixtral": {"num_local_experts": 4},
    "qwen2": {},
    "qwen2_moe": EXPERTS
    | {"shared_expert_intermediate_size": 16, "norm_topk_prob": False},
    "qwen3": HEAD,
    "gemma": HEAD,
    "gemma2": HEAD | {"query_pre_attn_scalar": 16},
    "phi": PARTIAL | {"num_key_value_heads": 2},
    "phi3": PARTIAL,
    "olmo2": {},
    "olmoe": ROUTED | {"num_key_value_heads": 2},
    "starcoder2": {},
    "cohere": {"logit_scale": 1.0},
    "deepseek_v3": DEEPSEEK_EXPERTS | LATENT_ATTENTION,
    "nemotron": PARTIAL,
    "seed_oss": HEAD,
    "smollm3": {"no_rope_layers": [1, 0]},
    "hunyuan_v1_dense": HEAD,
    "falcon_h1": FALCON | HEAD,
    "qwen3_moe": EXPERTS | HEAD,
    "qwen3_next": NEXT,
    "granite": {},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "glm4": HEAD | PARTIAL,
    "glm4_moe": DEEPSEEK_EXPERTS | HEAD | PARTIAL | {"use_qk_norm": True},
    "olmo3": {"layer_types": ["sliding_attention", "full_attention"]},
    "ernie4_5": HEAD,
    "helium": HEAD,
    "stablelm": PARTIAL,
    "dots1": DEEPSEEK_EXPERTS | HEAD,
    "apertus": {},
    "minimax_m2": HEAD | PARTIAL | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_neox": {
        "intermediate_size": 128,
        "rope_parameters": {"partial_rotary_factor": 0.5},
    },
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.2, 1.5, 2.0],
    "long_factor": [1.0, 3.0, 9.0, 20.0],
    "original_max_position_embeddings": 48,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LOCAL = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 3e3},
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": THETA},
}
SCALINGS = {
    "llama-linear": ("llama", {"rope_type": "linear", "factor": 4.0}),
    "llama-yarn": ("llama", YARN),
    "llama-llama3": ("llama", LLAMA3),
    "llama-dynamic": ("llama", {"rope_type": "dynamic", "factor": 4.0}),
    "qwen2-yarn": ("qwen2", YARN),
    "qwen3-yarn": ("qwen3", YARN),
    "deepseek_v3-yarn": (
        "deepseek_v3",
        YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "smollm3-yarn": ("smollm3", YARN),
    "apertus-llama3": ("apertus", LLAMA3),
    "hunyuan-dynamic": (
        "hunyuan_v1_dense",
        {"rope_type": "dynamic", "factor": 1.0, "alpha": 50.0},
    ),
    "phi3-longrope": ("phi3", LONGROPE),
    "gemma3_text": ("gemma3_text", LOCAL),
}
OTHERS = {
    "gemma3_text": HEAD
    | ALTERNATING
    | {"query_pre_attn_scalar": 16, "sliding_window_pattern": 2}
}
CASES = {name: (name, {}) for name in FAMILIES} | SCALINGS


def earlier_spelling(config):
    """As transformers 4 wrote it."""
    parameters = config.pop("rope_parameters")
    if "full_attention" in parameters:
        if "rope_local_base_freq" not in config:
            config["rope_local_base_freq"] = parameters["sliding_attention"][
                "rope_theta"
            ]
        parameters = parameters["full_attention"]
    theta = parameters.pop("rope_theta")
    rotated = parameters.pop("partial_rotary_factor", None)
    if config["model_type"] == "gpt_neox":
        config |= {"rotary_emb_base": theta, "rotary_pct": rotated}
        return config
    config["rope_theta"] = theta
    if config["model_type"] == "minimax_m2":
        config["rotary_dim"] = int(config["head_dim"] * rotated)
    elif rotated is not None:
        config["partial_rotary_factor"] = rotated
    is_scaled = parameters.get("rope_type", "default") != "default"
    config["rope_scaling"] = parameters if is_scaled else None
    if is_scaled:
        parameters["type"] = parameters["rope_type"]
    return config


@pytest.fixture(scope="module")
def published(tmp_path_factory, tokenizer_folder):
    """A function from a case to a folder that transformers wrote, and its logits."""
    folders = {}

    def publish(case):
        if case not in folders:
            folder = tmp_path_factory.mktemp("published") / case
            family, scaling = CASES[case]
            settings = SHAPE | (FAMILIES | OTHERS)[family]
            parameters = settings.pop("rope_parameters", {}) | scaling
            if not any(isinstance(value, dict) for value in parameters.values()):
                parameters = {"rope_type": "default", "rope_theta": THETA} | parameters
                if "partial_rotary_factor" in settings:
                    parameters |= {
                        "partial_rotary_factor": settings["partial_rotary_factor"]
                    }
            settings["rope_parameters"] = parameters
            config = transformers.AutoConfig.for_model(family, **settings)
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(config).eval()
            with torch.no_grad():
                for value in model.parameters():
                    value += (0.15 if value.ndim > 1 else 0.05) * torch.randn_like(
                        value
                    )
                expected = model(torch.tensor(TOKENS)).logits.numpy()
            model.save_pretrained(folder)
            shutil.copytree(tokenizer_folder, folder, dirs_exist_ok=True)
            folders[case] = folder, expected
        return folders[case]

    return publish


@pytest.mark.parametrize("spelling", ["new", "old"])
@pytest.mark.parametrize("case", CASES)
def test_load_has_the_logits_of_transformers(published, case, spelling, tmp_path):
    folder, expected = published(case)
    text = (folder / "config.json").read_text()
    assert "rope_parameters" in text
    if spelling == "old":
        folder = shutil.copytree(folder, tmp_path / "old")
        config = earlier_spelling(json.loads(text))
        (folder / "config.json").write_text(json.dumps(config))
    actual = np.array(load(folder).model(mx.array(TOKENS)))
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-3)
    if spelling == "old":
        theta = "rotary_emb_base" if "rotary_emb_base" in config else "rope_theta"
        # mlx-lm's OLMo 3 has one base for both kinds of layers.
        names = {theta, "rope_local_base_freq"} & config.keys()
        wrong = config | dict.fromkeys(names, 1e4)
        (folder / "config.json").write_text(json.dumps(wrong))
        actual = np.array(load(folder).model(mx.array(TOKENS)))
        assert np.abs(actual - expected).max() > 0.01


@pytest.mark.parametrize(
    "case", ["llama", "qwen2-yarn", "gemma3_text", "glm4", "phi3-longrope"]
)
def test_dense_export_is_read_by_both(published, case, tmp_path):
    folder, expected = published(case)
    loaded = load(folder)
    weights = hf.dequantized_weights(loaded.model, mx.float32)
    hf.write(tmp_path, weights, loaded.config, companions=folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        actual = model(torch.tensor(TOKENS)).logits.numpy()
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-3)
    # mlx-lm takes the factors of long sequences for all.
    if "longrope" not in case:
        model, _ = mlx_lm.load(str(tmp_path))
        actual = np.array(model(mx.array(TOKENS)))
        np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-3)

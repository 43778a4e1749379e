"""Configs as transformers 5 writes them load as what they mean."""

import json
import math
import shutil

import lmx
import mlx.core as mx
import pytest
from lmx.cli import main
from lmx.errors import UserError
from lmx.generation.generator import Generator
from lmx.models.checkpoint import read_config
from lmx.models.loader import complete_config, load, make_rope
from tiny_checkpoints import LLAMA, QWEN3_MOE
from tiny_families import DEEPSEEK_EXPERTS as EXPERTS
from tiny_families import config as family_config

TOKENS = mx.random.randint(0, 320, (2, 24), key=mx.random.key(0))
THETA = 5e5
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
    "vocab_size": 320,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.2, 1.5, 2.0, 2.0, 2.0, 3.0, 3.0],
    "long_factor": [1.0, 3.0, 9.0, 9.0, 9.0, 9.0, 20.0, 20.0],
    "original_max_position_embeddings": 32,
}
NOT_IN_NEOX = ("num_key_value_heads", "rms_norm_eps")
WITHOUT_THETA = {key: value for key, value in LLAMA.items() if key != "rope_theta"}

ROPE, DEFAULT = {"rope_theta": THETA}, {"rope_type": "default"}
HALF = {"partial_rotary_factor": 0.5}
DYNAMIC, LINEAR = ({"rope_type": kind, "factor": 2.0} for kind in ("dynamic", "linear"))
# The rest of a config, the earlier keys, and `rope_parameters`.
SPELLINGS = {
    "theta": (WITHOUT_THETA, ROPE, DEFAULT | ROPE),
    "yarn": (WITHOUT_THETA, ROPE | {"rope_scaling": YARN}, YARN | ROPE),
    "llama3": (WITHOUT_THETA, ROPE | {"rope_scaling": LLAMA3}, LLAMA3 | ROPE),
    "dynamic": (
        WITHOUT_THETA,
        ROPE | {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        DYNAMIC | ROPE,
    ),
    "longrope": (
        SMALL | {"model_type": "phi3"},
        ROPE
        | {"partial_rotary_factor": 1.0, "original_max_position_embeddings": 32}
        | {"rope_scaling": LONGROPE | {"type": "longrope"}},
        LONGROPE | ROPE | {"partial_rotary_factor": 1.0},
    ),
    "by layer type": (
        SMALL
        | {"model_type": "gemma3_text", "head_dim": 16, "query_pre_attn_scalar": 16}
        | {"sliding_window": 8, "sliding_window_pattern": 2}
        | {"layer_types": ["sliding_attention", "full_attention"]},
        ROPE | {"rope_local_base_freq": 3e3, "rope_scaling": LINEAR},
        {
            "sliding_attention": DEFAULT | {"rope_theta": 3e3},
            "full_attention": LINEAR | ROPE,
        },
    ),
    "other names": (
        {key: value for key, value in SMALL.items() if key not in NOT_IN_NEOX}
        | {"model_type": "gpt_neox", "intermediate_size": 128, "layer_norm_eps": 1e-5}
        | {"use_parallel_residual": True},
        {"rotary_emb_base": THETA, "rotary_pct": 0.5},
        DEFAULT | ROPE | HALF,
    ),
    "required keys": (
        SMALL
        | EXPERTS
        | {"model_type": "glm4_moe", "head_dim": 16, "use_qk_norm": True}
        | {"attention_bias": False},
        ROPE | HALF | {"rope_scaling": None},
        DEFAULT | ROPE | HALF,
    ),
}


def with_config(source, folder, config):
    shutil.copytree(source, folder)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def logits(folder):
    return load(folder).model(TOKENS)


@pytest.mark.parametrize("case", SPELLINGS)
def test_both_spellings_give_the_same_logits(make_checkpoint, tmp_path, case):
    rest, earlier, parameters = SPELLINGS[case]
    source = make_checkpoint(rest | earlier, dtype="float32")
    config = rest | {"rope_parameters": parameters}
    folder = with_config(source, tmp_path / "new", config)
    both = with_config(source, tmp_path / "both", config | earlier)
    expected = logits(source)
    assert mx.array_equal(logits(folder), expected)
    assert mx.array_equal(logits(both), expected)
    assert read_config(folder).items() >= {"rope_parameters": parameters}.items()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_theta": 1e4}, "rope_theta is 10000.0, but rope_parameters says 500000"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling is"),
        ({"rope_scaling": YARN | {"factor": 2.0}}, "rope_scaling is"),
        ({"rope_parameters": YARN | {"rope_theta": "x"}}, "rope_theta is 'x'"),
        ({"rope_parameters": {"rope_theta": [1]}}, r"rope_theta is \[1\]"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0, "factor": 2}},
            "yarn has no original_max_position_embeddings",
        ),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "y"}}, "RoPE type y"),
        ({"rope_parameters": {"rope_theta": 1e4, "factor": 2.0}}, "has factor, but no"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "low_freq_factor": 2.0}},
            "has low_freq_factor, but no rope_type",
        ),
    ],
)
def test_a_contradiction_is_named(make_checkpoint, tmp_path, changes, message):
    config = WITHOUT_THETA | {"rope_parameters": YARN | {"rope_theta": THETA}}
    source = make_checkpoint(dtype="float32")
    folder = with_config(source, tmp_path / "model", config | changes)
    with pytest.raises(UserError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("base", "removed", "added", "message"),
    [
        (LLAMA, "rope_theta", {}, "transformers' defaults: rope_theta 10000.0"),
        (QWEN3_MOE, "norm_topk_prob", {}, "norm_topk_prob False"),
        (LLAMA, "max_position_embeddings", {}, "max_position_embeddings 2048"),
        (
            *(LLAMA | {"model_type": "mistral"}, None, {"sliding_window": 16}),
            "mistral does not read sliding_window",
        ),
        (LLAMA, None, {"qk_norm_": 1, "softcap": 3.0}, "read qk_norm_, softcap"),
        (LLAMA, None, {"partial_rotary_factor": 0.5}, "read partial_rotary_factor"),
        (
            LLAMA,
            None,
            {"rope_scaling": YARN | {"warp_factor": 2.0, "attention_factor": 2.0}},
            "read rope_scaling.warp_factor$",
        ),
    ],
)
def test_keys_that_are_left_out_or_not_read_are_named(
    make_checkpoint, tmp_path, base, removed, added, message
):
    source = make_checkpoint(base, dtype="float32")
    config = {key: value for key, value in base.items() if key != removed} | added
    folder = with_config(source, tmp_path / "model", config)
    with pytest.warns(UserWarning, match=message) as caught:
        load(folder)
    assert len(caught) == 1


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (LLAMA, {"hidden_act": "gelu"}, "llama does not read hidden_act, and"),
        (QWEN3_MOE, {"hidden_act": "gelu"}, "qwen3_moe does not read hidden_act, and"),
        (
            family_config("nemotron"),
            {"hidden_act": "silu"},
            "nemotron does not read hidden_act, and",
        ),
        (
            family_config("glm4_moe"),
            {"num_experts_per_tok": 1},
            "glm4_moe does not read num_experts_per_tok, and",
        ),
    ],
)
def test_keys_that_only_transformers_reads_are_refused(
    make_checkpoint, tmp_path, base, changes, message
):
    source = make_checkpoint(base, dtype="float32")
    with pytest.raises(UserError, match=message):
        load(with_config(source, tmp_path / "model", base | changes))


@pytest.mark.parametrize("change", [{}, {"attention_factor": 2.0}, {"truncate": False}])
def test_yarn_is_the_same_in_models_that_read_it_in_part_or_not(
    make_checkpoint, tmp_path, change
):
    """mlx-lm's Qwen3 MoE declares `rope_scaling`, and does not read it."""
    plain = QWEN3_MOE | {"head_dim": 32}
    source = make_checkpoint(plain, dtype="float32")
    scaled = plain | {"rope_scaling": YARN | change}
    model = load(with_config(source, tmp_path / "scaled", scaled)).model
    rope = model.layers[0].self_attn.rope
    expected = make_rope(32, scaled | {"max_position_embeddings": 64})
    assert rope.mscale == change.get("attention_factor", expected.mscale)
    is_equal = mx.array_equal(rope._freqs, expected._freqs).item()
    assert is_equal is ("truncate" not in change)
    assert mx.abs(model(TOKENS) - logits(source)).max() > 1e-3


@pytest.mark.filterwarnings("ignore:.*does not read")
def test_a_model_that_reads_one_spelling_gets_it():
    config = family_config("qwen3_5")
    config["text_config"]["model_type"] = "qwen3_5_text"
    assert "rope_parameters" not in config["text_config"]
    text = complete_config(config, place="config.json")["text_config"]
    expected = {"rope_theta": 1e4, "partial_rotary_factor": 0.5}
    assert text["rope_parameters"].items() >= expected.items()


def test_published_configs_give_no_warning(make_checkpoint, tmp_path):
    """Keys of SmolLM2, Llama 3.1 and Qwen2.5 that change nothing."""
    added = {
        "architectures": ["LlamaForCausalLM"],
        "attention_dropout": 0.0,
        "initializer_range": 0.04,
        "is_llama_config": True,
        "pretraining_tp": 1,
        "rope_interleaved": False,
        "transformers.js_config": {"dtype": "q4"},
        "transformers_version": "4.42.3",
        "use_cache": True,
        "hidden_act": "silu",
        "_name_or_path": "x",
    }
    source = make_checkpoint(dtype="float32")
    load(with_config(source, tmp_path / "smollm", LLAMA | added))
    qwen = {"use_sliding_window": False, "sliding_window": 131072}
    base = SMALL | {"rope_theta": THETA, "model_type": "qwen2"}
    folder = make_checkpoint(base | qwen | {"max_window_layers": 7}, dtype="float32")
    load(folder)


@pytest.mark.filterwarnings("default:.*config.json")
def test_a_command_warns_in_one_line(make_checkpoint, tmp_path, capfd):
    source = make_checkpoint(dtype="float32")
    folder = with_config(source, tmp_path / "model", LLAMA | {"soft\x1b[31mcap": 3.0})
    options = ["generate", str(folder), "--prompt", "one", "--max-tokens", "1"]
    assert main.main(options) == 0
    line, _ = capfd.readouterr().err.splitlines()
    assert line.startswith("warning: ")
    assert line.endswith("mlx-lm's llama does not read softcap")


def test_a_value_that_nobody_knows_is_an_error(make_checkpoint, tmp_path):
    """transformers has no class for InternLM2: mlx-lm's default is a guess."""
    base = SMALL | {"model_type": "internlm2", "bias": False, "rope_theta": THETA}
    source = make_checkpoint(base, dtype="float32")
    del base["rope_theta"]
    with pytest.raises(UserError, match=r"no rope_theta.*has no default for it"):
        load(with_config(source, tmp_path / "model", base))


def test_defaults_are_those_of_transformers(make_checkpoint, tmp_path):
    """mlx-lm's default of the scale of Gemma 2 is 144, that of its 27B model."""
    base = SMALL | {
        "model_type": "gemma2",
        "head_dim": 16,
        "rope_theta": 1e4,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    }
    source = make_checkpoint(base, dtype="float32")
    expected = logits(source)
    del base["query_pre_attn_scalar"]
    folder = with_config(source, tmp_path / "model", base)
    with pytest.warns(UserWarning, match="query_pre_attn_scalar 256"):
        actual = logits(folder)
    assert mx.array_equal(actual, expected)


def longrope(make_checkpoint, **changes):
    rest, earlier, _ = SPELLINGS["longrope"]
    scaling = earlier["rope_scaling"] | changes
    return make_checkpoint(rest | earlier | {"rope_scaling": scaling}, dtype="float32")


def test_longrope_uses_the_short_factors(make_checkpoint):
    expected = logits(longrope(make_checkpoint))
    long = logits(longrope(make_checkpoint, long_factor=[5.0] * 8))
    short = logits(longrope(make_checkpoint, short_factor=[5.0] * 8))
    assert mx.array_equal(long, expected)
    assert mx.abs(short - expected).max() > 1e-3


@pytest.mark.parametrize(
    ("changes", "scale"),
    [
        ({}, math.sqrt(1 + math.log(64 / 32) / math.log(32))),
        ({"factor": 8.0}, math.sqrt(1 + math.log(8) / math.log(32))),
        ({"attention_factor": 1.25}, 1.25),
        ({"attention_factor": 1.25, "short_mscale": 1.5}, 1.5),
    ],
)
def test_longrope_scales_its_inputs_as_transformers(make_checkpoint, changes, scale):
    modules = load(longrope(make_checkpoint, **changes)).model.modules()
    scales = {m._scale for m in modules if type(m).__name__ == "ShortRoPE"}
    assert [*scales] == [pytest.approx(scale)]


def test_longrope_beyond_the_original_length_is_refused(make_checkpoint, tmp_path):
    source = longrope(make_checkpoint)
    loaded = load(source)
    with pytest.raises(UserError, match="33 tokens needs this model's factors of long"):
        loaded.model(mx.zeros((1, 33), mx.int32))
    generator = Generator(loaded.model, loaded.tokenizer)
    with pytest.raises(UserError, match="supports 32 positions"):
        generator.generate([5] * 33, max_tokens=1)
    result = generator.generate([5] * 30, max_tokens=10, stop_tokens=[])
    assert len(result.tokens) == 3
    assert result.finish_reason == "length"
    row = {"prompt": "one", "completion": 40 * "two "}
    (tmp_path / "rows.jsonl").write_text(2 * (json.dumps(row) + "\n"))
    data = {"train": str(tmp_path / "rows.jsonl"), "max_seq_length": 64}
    stages = [{"train": {"steps": 1, "batch_size": 2}}]
    recipe = {"model": str(source), "data": data, "stages": stages}
    with pytest.raises(UserError, match="lmx computes up to 32"):
        lmx.check(recipe)

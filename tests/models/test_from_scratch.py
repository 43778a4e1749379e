"""Models from scratch: configuration, initial weights and tokenizer."""

import json
import random

import mlx.core as mx
import mlx_lm
import pytest
from lmx.config.model import ScratchModelConfig
from lmx.models import checkpoint_writer, from_scratch
from lmx.models.loader import build_model, load
from mlx.utils import tree_flatten
from tiny_checkpoints import TEXTS
from transformers import AutoTokenizer

SMALL = ScratchModelConfig(
    vocab_size=320,
    hidden_size=128,
    intermediate_size=192,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=False,
)
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4, naïve 🙂"},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes."},
]


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder):
    return AutoTokenizer.from_pretrained(tokenizer_folder)


def test_llama_config_builds_the_configured_shape():
    model = build_model(from_scratch.llama_config(SMALL))
    shapes = {name: v.shape for name, v in tree_flatten(model.parameters())}
    assert shapes["model.embed_tokens.weight"] == (320, 128)
    assert shapes["lm_head.weight"] == (320, 128)
    assert shapes["model.layers.2.self_attn.k_proj.weight"] == (64, 128)
    assert shapes["model.layers.2.mlp.down_proj.weight"] == (128, 192)
    assert not any(name.startswith("model.layers.3") for name in shapes)
    tied = from_scratch.llama_config(
        SMALL.model_copy(update={"tie_word_embeddings": True})
    )
    assert "lm_head" not in build_model(tied)


def test_initial_weights_have_gpt2_deviations():
    weights = from_scratch.initial_weights(from_scratch.llama_config(SMALL), 0)
    for name, value in weights.items():
        assert value.dtype == mx.float16
        value = value.astype(mx.float32)
        if value.ndim == 1:
            assert mx.array_equal(value, mx.ones_like(value))
            continue
        into_residual = "o_proj" in name or "down_proj" in name
        deviation = 0.02 / 6**0.5 if into_residual else 0.02
        assert value.std().item() == pytest.approx(deviation, rel=0.05)
        assert abs(value.mean().item()) < 4 * deviation / value.size**0.5


def test_initial_weights_depend_on_the_seed():
    config = from_scratch.llama_config(SMALL)
    first, repeated, other_seed = (
        from_scratch.initial_weights(config, seed) for seed in (1, 1, 2)
    )
    assert all(mx.array_equal(first[name], repeated[name]) for name in first)
    matrices = [name for name in first if first[name].ndim > 1]
    assert not any(mx.array_equal(first[name], other_seed[name]) for name in matrices)
    layers = [first[f"model.layers.{n}.mlp.up_proj.weight"] for n in (0, 1)]
    assert not mx.array_equal(*layers)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scratch_checkpoint_loads_with_both_end_tokens(
    tmp_path, tokenizer_folder, dtype
):
    config = from_scratch.llama_config(SMALL.model_copy(update={"dtype": dtype}))
    weights = from_scratch.initial_weights(config, 0)
    checkpoint_writer.write_checkpoint(
        tmp_path, weights, config, companions=tokenizer_folder
    )
    loaded = load(tmp_path)
    assert loaded.dtype == getattr(mx, dtype)
    end_tokens = loaded.tokenizer.convert_ids_to_tokens(
        sorted(loaded.tokenizer.eos_token_ids)
    )
    assert end_tokens == ["<|endoftext|>", "<|im_end|>"]
    _, stock = mlx_lm.load(str(tmp_path))
    assert stock.eos_token_ids == loaded.tokenizer.eos_token_ids
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation == {"eos_token_id": [2, 0], "pad_token_id": 0}
    assert loaded.config["eos_token_id"] == [2, 0]


def test_tokenizer_has_the_special_tokens(tokenizer):
    names = [from_scratch.END_OF_TEXT, from_scratch.START, from_scratch.END]
    assert tokenizer.convert_tokens_to_ids(names) == [0, 1, 2]
    assert tokenizer.eos_token == from_scratch.END
    assert tokenizer.pad_token == from_scratch.END_OF_TEXT
    assert tokenizer.encode("a<|im_end|>")[-1] == 2
    assert tokenizer.decode([1, 2, 0], skip_special_tokens=True) == ""
    assert len(tokenizer) == 320


def characters(seed):
    """Random characters, with control characters and single spaces."""
    rng = random.Random(seed)
    planes = [(0, 0x80), (0x80, 0x800), (0x800, 0xD800), (0xE000, 0x110000)]
    return "".join(chr(rng.randrange(*rng.choice(planes))) for _ in range(300))


@pytest.mark.parametrize(
    "text",
    [
        *map(characters, range(5)),
        "  two  spaces \r\n\t\n",
        " 'tis , a . b !",
        "",
        "é é",
    ],
)
def test_tokenizer_roundtrips_any_text(tokenizer, text):
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(tokens) == text


def test_tokenizer_splits_digits(tokenizer):
    for text in ("1234567890", "x=2026-11", " 42", "9" * 30):
        tokens = [tokenizer.decode(token) for token in tokenizer.encode(text)]
        digits = [token for token in tokens if any(c.isdigit() for c in token)]
        assert digits == [c for c in text if c.isdigit()]


def test_chat_template_marks_assistant_tokens(tokenizer):
    text = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert text == "".join(
        f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in CHAT
    )
    encoded = tokenizer.apply_chat_template(
        CHAT, return_dict=True, return_assistant_tokens_mask=True
    )
    trained = [
        token
        for token, mask in zip(
            encoded["input_ids"], encoded["assistant_masks"], strict=True
        )
        if mask
    ]
    assert tokenizer.decode(trained) == "4, naïve 🙂<|im_end|>Yes.<|im_end|>"


def test_generation_prompt_is_a_prefix_of_the_chat(tokenizer):
    prompt = tokenizer.apply_chat_template(
        CHAT[:2], tokenize=False, add_generation_prompt=True
    )
    chat = tokenizer.apply_chat_template(CHAT[:3], tokenize=False)
    assert chat.startswith(prompt)
    assert prompt.endswith("<|im_start|>assistant\n")


def test_train_tokenizer_is_deterministic(tmp_path, tokenizer_folder):
    from_scratch.train_tokenizer(iter(TEXTS), 320, tmp_path)
    files = sorted(file.name for file in tokenizer_folder.iterdir())
    assert files == sorted(file.name for file in tmp_path.iterdir())
    for name in files:
        assert (tmp_path / name).read_bytes() == (tokenizer_folder / name).read_bytes()

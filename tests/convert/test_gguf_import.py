"""Import of files from llama.cpp's GGUF writer: weights, config and tokenizer."""

import json
import re
from itertools import pairwise

import gguf
import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from gguf_models import interleave_rows
from lmx.cli import main
from lmx.convert.gguf import reader
from lmx.convert.gguf import tokenizer as gguf_tokenizer
from lmx.convert.gguf.writer import write
from lmx.convert.importers import load_model, resolve_checkpoint
from lmx.convert.importers.convert import convert_checkpoint
from lmx.errors import UserError
from lmx.models.loader import load, load_tokenizer
from mlx.utils import tree_flatten
from safetensors.numpy import load_file

TOKENS = mx.random.randint(0, 320, (2, 9), key=mx.random.key(0))
TEXT = "Straße, naïve: 東京 🙂 1234\n\tdef add(left, right):  return left"
ROUNDED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4")
# Types that the package cannot quantize, and the bytes of their float16 steps.
STEPS = {
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "IQ2_XXS": [0],
    "IQ4_XS": [0],
    "TQ2_0": [64],
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name):
    path, _, leaf = name.rpartition(".")
    parts = path.split(".")
    if parts[:2] == ["model", "layers"]:
        return f"blk.{parts[2]}.{NAMES['.'.join(parts[3:])]}.{leaf}"
    return f"{NAMES[path]}.{leaf}"


def random_blocks(rng, shape, kind):
    """Random blocks of 256 weights with small scales."""
    values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    count = shape[-1] // values
    data = rng.integers(0, 256, (shape[0], count, size), dtype=np.uint8)
    for place in STEPS[kind]:
        steps = (rng.random((shape[0], count, 1)) * 2e-4).astype(np.float16)
        data[..., place : place + 2] = steps.view(np.uint8)
    return data.reshape(shape[0], -1)


def writer_of(path, config, architecture):
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    return writer


def add_tokenizer(writer, folder):
    """Add a byte-level BPE tokenizer: tokens, token types and merges."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    special = {token["content"] for token in tokenizer["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.get)
    tokens += [f"[PAD{n}]" for n in range(320 - len(tokens))]
    kinds = [3 if t in special else 5 if t.startswith("[PAD") else 1 for t in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(vocabulary["<|im_end|>"])
    writer.add_chat_template("{{ messages[0]['content'] }}")


@pytest.fixture
def make_gguf(make_checkpoint, tmp_path):
    """A function that writes a GGUF file and returns its expected weights."""

    def make_file(
        kind, *, architecture="llama", change=lambda writer: None, **settings
    ):
        settings = {"tie_word_embeddings": False, "hidden_size": 256, **settings}
        settings |= {"head_dim": 128, "num_key_value_heads": 1}
        base = make_checkpoint(model_type=architecture, dtype="float32", **settings)
        config = json.loads((base / "config.json").read_text())
        writer = writer_of(tmp_path / "model.gguf", config, architecture)
        expected, rng = {}, np.random.default_rng(0)
        ggml = gguf.GGMLQuantizationType[kind]
        for name, value in load_file(base / "model.safetensors").items():
            # Index of each row of the file in the Hugging Face order.
            heads = {"q_proj": 2, "k_proj": 1}.get(name.split(".")[-2])
            order = np.arange(len(value))
            if heads and architecture == "llama":
                order = interleave_rows(order, heads)
            if value.ndim < 2:
                expected[name] = value
                writer.add_tensor(gguf_name(name), value[order])
                continue
            if kind in STEPS:
                raw = random_blocks(rng, value.shape, kind)
            else:
                raw = gguf.quants.quantize(value[order], ggml)
            expected[name] = gguf.quants.dequantize(raw, ggml)[np.argsort(order)]
            writer.add_tensor(gguf_name(name), raw, raw_dtype=ggml)
        add_tokenizer(writer, base)
        change(writer)
        for finish in ("header", "kv_data", "tensors"):
            getattr(writer, f"write_{finish}_to_file")()
        writer.close()
        return tmp_path / "model.gguf", expected, base

    return make_file


def dequantized_weights(folder):
    """Return all dequantized weights of an MLX checkpoint in float32, by name."""
    model = load(folder, compute="float32").model
    weights = {}
    for path, module in model.named_modules():
        if hasattr(module, "bits"):
            parts = module.weight, module.scales, module.get("biases")
            grid = {k: getattr(module, k) for k in ("group_size", "bits", "mode")}
            value = mx.dequantize(*parts, **grid, dtype=mx.float32)
            weights[f"{path}.weight"] = np.array(value)
        elif "weight" in module:
            weights[f"{path}.weight"] = np.array(module.weight)
    return weights


@pytest.mark.parametrize("kind", [*ROUNDED, *STEPS, "F16", "F32", "BF16"])
def test_weights_equal_those_of_the_gguf_package(make_gguf, kind):
    path, expected, _ = make_gguf(kind)
    weights = dequantized_weights(resolve_checkpoint(path))
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        assert np.array_equal(weights[name], value), name


@pytest.mark.parametrize("kind", ["Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_the_export_of_an_import_has_the_same_blocks(make_gguf, tmp_path, kind):
    path, expected, _ = make_gguf(kind)
    write(tmp_path / "again.gguf", load_model(path, compute="stored"), name="again")
    for file in (path, tmp_path / "again.gguf"):
        _, tensors = reader.read(file)
        kinds = {t.ggml_type for t in tensors.values() if len(t.shape) > 1}
        assert kinds == {kind}
    weights = dequantized_weights(resolve_checkpoint(tmp_path / "again.gguf"))
    for name, value in expected.items():
        assert np.array_equal(weights[name], value), name


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("Q4_0", {}),
        ("Q5_K", {"attention_bias": True, "mlp_bias": True}),
        ("Q8_0", {"architecture": "qwen2"}),
        ("Q4_K", {"architecture": "qwen3"}),
    ],
)
def test_logits_equal_those_of_the_dense_model(make_gguf, kind, settings):
    path, expected, base = make_gguf(kind, **settings)
    logits = load_model(path).model(TOKENS)
    dense = load(base).model
    dense.load_weights([(name, mx.array(value)) for name, value in expected.items()])
    assert mx.allclose(logits, dense(TOKENS), rtol=1e-4, atol=1e-4)
    assert mx.abs(logits).max().item() > 0.1


def test_stock_mlx_lm_loads_the_same_model(make_gguf, tmp_path):
    path, _, _ = make_gguf("Q8_0", tie_word_embeddings=True)
    (tmp_path / "target").mkdir()
    convert_checkpoint(path, tmp_path / "target")
    stock, tokenizer = mlx_lm.load(str(tmp_path / "target"))
    weights = dict(tree_flatten(stock.parameters()))
    for name, value in tree_flatten(
        load_model(path, compute="stored").model.parameters()
    ):
        assert mx.array_equal(value, weights[name]), name
    assert "lm_head.weight" not in weights
    assert {value.dtype for value in weights.values()} <= {
        mx.uint32,
        mx.float16,
        mx.float32,
    }
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def test_config_and_tokenizer_come_from_the_file(make_gguf):
    path, _, base = make_gguf("Q4_0")
    folder = resolve_checkpoint(path)
    config = json.loads((folder / "config.json").read_text())
    expected = json.loads((base / "config.json").read_text())
    for key in ("hidden_size", "head_dim", "rope_theta", "vocab_size", "model_type"):
        assert config[key] == expected[key]
    assert config["eos_token_id"] == [2]
    assert config["quantization"]["bits"] == 4
    tokenizer = load_tokenizer(folder)
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    token_ids = tokenizer.encode("<|im_start|>")
    assert token_ids == load_tokenizer(base).encode("<|im_start|>")
    message = [{"role": "user", "content": "hello"}]
    assert tokenizer.apply_chat_template(message, tokenize=False) == "hello"


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rope_scaling_is_detected_from_its_factors(make_gguf, factor):
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    from mlx_lm.models.rope_utils import Llama3RoPE

    scaled = np.array(Llama3RoPE(128, base=5e5, scaling_config=scaling)._freqs)
    unscaled = 5e5 ** (np.arange(0, 128, 2) / 128)

    def change(writer):
        writer.add_tensor("rope_freqs.weight", (scaled / unscaled).astype(np.float32))

    path, _, _ = make_gguf("Q8_0", change=change, rope_theta=5e5)
    config = json.loads((resolve_checkpoint(path) / "config.json").read_text())
    assert config["rope_scaling"] == scaling
    assert load_model(path).tokenizer.encode(TEXT)


def test_unknown_rope_scaling_is_refused(make_gguf):
    def change(writer):
        writer.add_tensor("rope_freqs.weight", np.linspace(1, 7, 64, dtype=np.float32))

    path, _, _ = make_gguf("F16", change=change)
    with pytest.raises(UserError, match="unknown RoPE scaling"):
        resolve_checkpoint(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[: len(data) // 2], "is incomplete"),
        (lambda data: data[:300], "truncated"),
        (lambda data: b"GGML" + data[4:], "not a GGUF file"),
        (lambda data: b"", "not a GGUF file"),
        (
            lambda data: data.replace(b"blk.0.attn_q.", b"blk.0.attn_z."),
            "has no tensor",
        ),
        (
            lambda data: data.replace(b"blk.0.attn_q.", b"blk.1.attn_q."),
            "has no tensor",
        ),
        (lambda data: data.replace(b"llama", b"lamas"), "lamas models are not sup"),
        (lambda data: data.replace(b"gpt2", b"bert"), "beside it"),
    ],
)
def test_damaged_file_is_refused(make_gguf, change, message):
    path, _, _ = make_gguf("Q4_0")
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(UserError, match=message) as caught:
        resolve_checkpoint(path)
    assert str(path) in caught.value.place


def test_unsupported_type_names_the_tensor(make_gguf):
    path, _, _ = make_gguf("Q4_0")
    name = b"blk.0.attn_q.weight"
    data = bytearray(path.read_bytes())
    at = data.index(name) + len(name) + 4 + 2 * 8
    data[at] = 9  # Q8_1
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"blk.0.attn_q.weight has ggml's type Q8_1"):
        reader.read(path)


def test_tokenizer_files_beside_the_gguf_are_used(make_gguf, tokenizer_folder):
    path, _, _ = make_gguf("Q4_0")
    path.write_bytes(path.read_bytes().replace(b"gpt2", b"bert"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path.parent / name).write_bytes((tokenizer_folder / name).read_bytes())
    tokenizer = load_tokenizer(resolve_checkpoint(path))
    assert tokenizer.encode(TEXT) == load_tokenizer(tokenizer_folder).encode(TEXT)


def sentencepiece_file(path):
    """Write a SentencePiece tokenizer and return the score of each token."""
    words = ["▁th", "▁the", "he", "the", "▁t", "re", "her", "▁there", "ere", "er"]
    letters = sorted(set("▁abcdefghijklmnopqrstuvwxyz"))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256))]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(words + letters)]
    rng = np.random.default_rng(1)
    scores = [0.0] * len(tokens) + list(-rng.permutation(len(words)) - 1.0)
    scores += list(-100.0 - np.arange(len(letters)))
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens + words + letters,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    gguf_tokenizer.write(metadata, path, source=path)
    return dict(zip(metadata["tokenizer.ggml.tokens"], scores, strict=True))


def merge_by_score(text, scores):
    """Merge the adjacent pair with the highest score until none is left."""
    pieces = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [a + b for a, b in pairwise(pieces)]
        mergeable = [pair for pair in pairs if pair in scores]
        if not mergeable:
            return pieces
        at = pairs.index(max(mergeable, key=scores.get))
        pieces[at : at + 2] = [pairs[at]]


def test_sentencepiece_merges_follow_scores(tmp_path):
    from tokenizers import Tokenizer

    scores = sentencepiece_file(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in ("there the here", "the other  weather", "tethered"):
        expected = merge_by_score(text, scores)
        assert tokenizer.encode(text).tokens == ["<s>", *expected]
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    # Characters without a token become bytes.
    assert tokenizer.encode("é").tokens == ["<s>", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("é 東").ids) == "é 東"


@pytest.mark.parametrize(
    ("pre_tokenizer", "digits"),
    [("llama-bpe", ["123", "45"]), ("qwen2", ["1", "2", "3", "4", "5"])],
)
def test_pre_tokenizer_follows_the_file(tmp_path, pre_tokenizer, digits):
    from tokenizers import Tokenizer, pre_tokenizers

    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre_tokenizer,
        "tokenizer.ggml.tokens": sorted(pre_tokenizers.ByteLevel.alphabet()),
        "tokenizer.ggml.merges": [],
    }
    gguf_tokenizer.write(metadata, tmp_path, source=tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "It's 12345 (really)!\n\n  ok"
    pre_tokens = tokenizer.pre_tokenizer.pre_tokenize_str(text)
    other_pieces = [" (", "really", ")!\n\n", " ", " ok"]
    assert [text[a:b] for _, (a, b) in pre_tokens] == [
        "It",
        "'s",
        " ",
        *digits,
        *other_pieces,
    ]


def write_recipe(folder, model, stages):
    rows = [{"text": "one two three"}] * 3
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "rows.jsonl").write_text(text)
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        f"model: {model}\ndata: {{train: {folder}/rows.jsonl, max_seq_length: 64}}\n"
        f"stages:\n{stages}"
    )
    return str(recipe)


def test_recipe_check_detects_quantized_gguf(make_gguf, tmp_path, capsys):
    codes = {}
    for kind in ("Q8_0", "F16"):
        path, _, _ = make_gguf(kind)
        recipe = write_recipe(tmp_path, path, "  - quantize: {bits: 4}\n")
        codes[kind] = main.train([recipe, "--dry-run"])
    assert codes == {"Q8_0": 2, "F16": 0}
    error = capsys.readouterr().err
    assert "recipe.yaml:4:5: the model is already quantized here" in error
    assert f"lmx convert {path} TARGET --dequantize" in error


@pytest.mark.parametrize("kind", ["Q4_K", "F16"])
def test_dry_run_of_a_gguf_equals_that_of_its_import(
    make_gguf, tmp_path, capsys, kind, monkeypatch
):
    from lmx.pipeline import work

    monkeypatch.setattr(work, "rates", lambda _: work.Work(1, 1, 1, 1, 1))
    path, _, _ = make_gguf(kind)
    stage = "  - train: {adapter: {rank: 4}, steps: 2, batch_size: 2}\n"
    outputs = []
    for model in (path, resolve_checkpoint(path)):
        recipe = write_recipe(tmp_path, model, stage)
        assert main.train([recipe, "--dry-run"]) == 0
        lines = capsys.readouterr().out.splitlines()
        skipped = ("output", "disk", "plan")
        outputs.append(
            [
                # Norms with values of 32 bits make the import 2 kB larger.
                re.sub(r"\d+ [kM]B", "SIZE", line.replace(str(model), "MODEL"))
                for line in lines
                if not line.startswith(skipped)
            ]
        )
    assert outputs[0] == outputs[1]
    text = "\n".join(outputs[0])
    for part in (
        "vocabulary 320",
        "are trained",
        "two three<|im_end|>⟧",
        "memory",
        "time",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("general.alignment", 0, "general.alignment is 0"),
        ("llama.block_count", 10**7, "tensors for 10,000,000 blocks"),
        ("llama.block_count", 0, "llama.block_count is 0; it must be a whole number"),
        ("llama.attention.head_count", 0, "llama.attention.head_count is 0; it must"),
        ("llama.rope.freq_base", 0.0, "llama.rope.freq_base is 0.0; it must be a"),
        ("tokenizer.ggml.eos_token_id", 9999, "eos_token_id is 9999, and the file has"),
        ("tokenizer.ggml.tokens", [1, 2], "tokenizer.ggml.tokens is not a list of str"),
        ("tokenizer.ggml.tokens", ["a"] * 400, "the file has 400 tokens and 320 embe"),
        ("tokenizer.ggml.merges", ["x y"], "the tokenizer in this file does not load"),
    ],
)
def test_damaged_metadata_is_named(
    make_gguf, tmp_path, monkeypatch, key, value, message
):
    path, _, _ = make_gguf("Q4_0")
    metadata, tensors = reader.read(path)
    if key == "general.alignment":
        data = path.read_bytes().replace(b"llama.block_count", b"general.alignment")
        at = data.index(b"general.alignment") + len("general.alignment") + 4
        path.write_bytes(data[:at] + bytes(4) + data[at + 4 :])
    else:
        changed = metadata | {key: value}
        monkeypatch.setattr(reader, "read", lambda _: (changed, tensors))
    (tmp_path / "target").mkdir()
    with pytest.raises(UserError) as caught:
        convert_checkpoint(path, tmp_path / "target")
    assert message in caught.value.message
    assert caught.value.place == str(path)
    assert caught.value.hint


@pytest.mark.parametrize("count", [2**64 - 1, 2**63, 2**40, 10**6])
@pytest.mark.parametrize("at", [8, 16, 24])
def test_absurd_lengths_are_refused_before_they_are_read(make_gguf, count, at):
    """The numbers of tensors and of values, and the length of the first key."""
    path, _, _ = make_gguf("Q4_0")
    data = path.read_bytes()
    path.write_bytes(data[:at] + count.to_bytes(8, "little") + data[at + 8 :])
    with pytest.raises(UserError, match=r"announces|not UTF-8") as caught:
        resolve_checkpoint(path)
    assert caught.value.place == str(path)


def test_a_file_of_a_terabyte_without_a_header_is_not_hashed(tmp_path):
    file = tmp_path / "model.gguf"
    with file.open("wb") as stream:
        stream.truncate(1 << 40)
    with pytest.raises(UserError, match="this is not a GGUF file"):
        resolve_checkpoint(file)

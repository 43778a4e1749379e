"""GGUF exports in llama.cpp's reader: names, types, values and tokenizer."""

import json
import shutil
from types import SimpleNamespace

import gguf
import mlx.core as mx
import numpy as np
import pytest
from exporting import export, quantized_checkpoint
from gguf_models import LINEAR, LLAMA3_SCALING, NAMES, YARN, config_of, interleave_rows
from lmx.config.quant_spec import QuantSpec
from lmx.convert.exporters import gguf as gguf_exporter
from lmx.convert.exporters import hf as hf_exporter
from lmx.convert.exporters import mlx as mlx_exporter
from lmx.convert.gguf import blocks
from lmx.convert.gguf import config as gguf_config
from lmx.convert.gguf import tokenizer as gguf_tokenizer
from lmx.convert.importers import load_model
from lmx.errors import UserError
from lmx.models.loader import load, load_tokenizer
from lmx.quantization.bit_packing import pack_codes
from lmx.quantization.packing import pack
from tiny_checkpoints import LLAMA, QWEN3_MOE
from tiny_global_scale import write_checkpoints

# The tiny configs have keys of several families, and leave some of their own out.
pytestmark = pytest.mark.filterwarnings("ignore:.*config.json")

TOKENS = mx.random.randint(0, 320, (2, 9), key=mx.random.key(0))
Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"
EMBEDDING = "model.embed_tokens"


def test_a_value_that_the_config_leaves_out_is_that_of_transformers():
    config = {k: v for k, v in config_of("llama").items() if k != "rms_norm_eps"}
    metadata = gguf_config.to_metadata(config)
    assert metadata["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-6)


def read_gguf(folder):
    [file] = folder.glob("*.gguf")
    reader = gguf.GGUFReader(file)
    return reader, {tensor.name: tensor for tensor in reader.tensors}


def dequantized(tensor):
    """Dequantize a tensor with llama.cpp's package."""
    return gguf.quants.dequantize(tensor.data, tensor.tensor_type)


def random_layer(num_rows, width, bits, *, symmetric, size=32, dtype=mx.float16):
    """Random codes with scales that `dtype` represents, and their float64 weights."""
    rng = np.random.default_rng(bits)
    codes = rng.integers(0, 2**bits, (num_rows, width))
    scales = rng.uniform(0.005, 0.02, (num_rows, width // size))
    scales = np.array(mx.array(scales).astype(dtype).astype(mx.float32))
    biases = rng.uniform(-0.2, -0.1, scales.shape)
    biases = np.array(mx.array(biases).astype(dtype).astype(mx.float32))
    if symmetric:
        biases = -(2 ** (bits - 1)) * scales
    tensors = {
        "weight": pack_codes(mx.array(codes), bits),
        "scales": mx.array(scales).astype(dtype),
        "biases": mx.array(biases).astype(dtype),
    }
    expanded = (
        np.repeat(scales, size, -1).astype(np.float64),
        np.repeat(biases, size, -1),
    )
    spec = QuantSpec(bits=bits, group_size=size)
    return (tensors, spec), expanded[0] * codes + expanded[1]


CASES = [
    (2, False, 32, "Q4_1", "float16"),
    (3, False, 64, "Q4_1", "bfloat16"),
    (4, True, 64, "Q4_0", "float16"),
    (4, True, 64, "Q4_0", "bfloat16"),
    (4, False, 32, "Q4_1", "float16"),
    (5, True, 128, "Q5_0", "bfloat16"),
    (5, False, 32, "Q5_1", "float16"),
    (6, False, 32, "F16", "bfloat16"),
    (8, True, 32, "Q8_0", "bfloat16"),
    (8, False, 64, "F16", "float16"),
]


@pytest.mark.parametrize(("bits", "symmetric", "size", "kind", "dtype"), CASES)
def test_quantized_matrices_keep_their_codes(
    make_checkpoint, tmp_path, bits, symmetric, size, kind, dtype
):
    source = make_checkpoint(dtype=dtype)
    settings = {"symmetric": symmetric, "size": size, "dtype": getattr(mx, dtype)}
    grids = {
        Q: random_layer(128, 128, bits, **settings),
        DOWN: random_layer(128, 256, bits, **settings),
    }
    codes = {path: layer for path, (layer, _) in grids.items()}
    model = quantized_checkpoint(source, tmp_path / "codes", codes)
    lines = export(gguf_exporter, model, tmp_path / "out")
    _, tensors = read_gguf(tmp_path / "out")
    pairs = {
        "blk.0.attn_q.weight": interleave_rows(grids[Q][1], 2),
        "blk.0.ffn_down.weight": grids[DOWN][1],
    }
    for name, expected in pairs.items():
        assert tensors[name].tensor_type.name == kind
        tolerance = 1e-3 if kind == "F16" else 1e-7
        np.testing.assert_allclose(
            dequantized(tensors[name]), expected, rtol=tolerance, atol=tolerance
        )
    assert ("2 of 2 quantized matrices are dequantized" in lines[-1]) == (kind == "F16")
    assert f"2 {kind}" in lines[0] or kind == "F16"
    wider = f"2 matrices of {bits} bits are stored as {kind}: ggml has no codes of"
    assert (wider in "".join(lines)) == (bits in (2, 3))


@pytest.mark.parametrize(
    ("dtype", "kind"), [("float16", "F16"), ("bfloat16", "BF16"), ("float32", "F16")]
)
def test_dense_weights_have_the_expected_ggml_type(
    make_checkpoint, tmp_path, dtype, kind
):
    source = make_checkpoint(dtype=dtype, tie_word_embeddings=False)
    export(gguf_exporter, source, tmp_path / "out")
    reader, tensors = read_gguf(tmp_path / "out")
    weights = {
        k: np.array(v.astype(mx.float32))
        for k, v in mx.load(str(source / "model.safetensors")).items()
    }
    names = {
        "token_embd.weight": weights[f"{EMBEDDING}.weight"],
        "output.weight": weights["lm_head.weight"],
        "blk.0.attn_k.weight": interleave_rows(weights[f"{Q[:-6]}k_proj.weight"], 2),
        "blk.0.attn_v.weight": weights[f"{Q[:-6]}v_proj.weight"],
        "blk.0.ffn_gate.weight": weights["model.layers.0.mlp.gate_proj.weight"],
    }
    # float16 can represent some small bfloat16 matrices exactly.
    types = [tensors[name].tensor_type.name for name in names]
    assert kind in types
    assert {*types} <= {kind, "F16"}
    for name, value in names.items():
        rtol = 1e-3 if dtype == "float32" else 0
        np.testing.assert_allclose(
            dequantized(tensors[name]), value, rtol=rtol, atol=1e-7
        )
    assert tensors["output_norm.weight"].tensor_type.name == "F32"
    file_type = reader.get_field("general.file_type").contents()
    assert file_type == gguf.LlamaFileType[f"MOSTLY_{max({*types}, key=types.count)}"]


@pytest.mark.parametrize("name", NAMES)
def test_import_of_the_export_gives_the_same_logits(make_checkpoint, tmp_path, name):
    source = make_checkpoint(config_of(name), dtype="float16")
    export(gguf_exporter, source, tmp_path / "out")
    [file] = (tmp_path / "out").glob("*.gguf")
    expected = load(source).model(TOKENS)
    assert mx.allclose(load_model(file).model(TOKENS), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("bits", "kind"), [(4, "Q4_1"), (6, "F16")])
def test_quantized_experts_keep_their_codes(make_checkpoint, tmp_path, bits, kind):
    source = make_checkpoint(config_of("qwen3_moe"), dtype="float16")
    layer, expected = random_layer(4 * 128, 64, bits, symmetric=False)
    tensors = {k: v.reshape(4, 128, -1) for k, v in layer[0].items()}
    path = "model.layers.0.mlp.switch_mlp.down_proj"
    codes = {path: (tensors, layer[1])}
    model = quantized_checkpoint(source, tmp_path / "codes", codes)
    export(gguf_exporter, model, tmp_path / "out")
    _, written = read_gguf(tmp_path / "out")
    assert written["blk.0.ffn_down_exps.weight"].tensor_type.name == kind
    values = dequantized(written["blk.0.ffn_down_exps.weight"])
    tolerance = 1e-3 if kind == "F16" else 1e-7
    np.testing.assert_allclose(
        values, expected.reshape(4, 128, 64), rtol=tolerance, atol=tolerance
    )
    [file] = (tmp_path / "out").glob("*.gguf")
    logits = load(model).model(TOKENS)
    assert mx.allclose(load_model(file).model(TOKENS), logits, rtol=1e-2, atol=1e-2)


def test_experts_with_a_global_scale_are_written_dequantized(make_checkpoint, tmp_path):
    _, dense, codes = write_checkpoints(make_checkpoint, tmp_path)
    export(gguf_exporter, codes, tmp_path / "out")
    [file] = (tmp_path / "out").glob("*.gguf")
    expected = load(dense).model(TOKENS)
    # The weights are in float16 there.
    assert mx.allclose(load_model(file).model(TOKENS), expected, rtol=1e-2, atol=1e-3)


def test_metadata_describes_model_and_tokenizer(make_checkpoint, tmp_path):
    source = make_checkpoint(num_key_value_heads=1)
    export(gguf_exporter, source, tmp_path / "out")
    reader, _ = read_gguf(tmp_path / "out")
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    assert metadata["general.architecture"] == "llama"
    assert metadata["general.name"] == "name"
    assert metadata["llama.attention.head_count_kv"] == 1
    assert metadata["llama.attention.key_length"] == 64
    assert metadata["llama.rope.freq_base"] == 10000
    assert metadata["llama.vocab_size"] == 320
    tokens = metadata["tokenizer.ggml.tokens"]
    tokenizer = load_tokenizer(source)
    assert tokens[: len(tokenizer.vocab)] == sorted(
        tokenizer.vocab, key=tokenizer.vocab.get
    )
    assert len(tokens) == 320
    assert metadata["tokenizer.ggml.model"] == "gpt2"
    assert metadata["tokenizer.ggml.pre"] == "smollm"
    assert metadata["tokenizer.ggml.eos_token_id"] == tokenizer.eos_token_id
    assert metadata["tokenizer.ggml.eot_token_id"] == 0
    assert metadata["tokenizer.ggml.add_bos_token"] is False
    assert metadata["tokenizer.ggml.token_type"][:4] == [3, 3, 3, 1]
    assert metadata["tokenizer.chat_template"] == tokenizer.chat_template


@pytest.mark.parametrize(
    ("model_type", "key", "value", "message"),
    [
        ("qwen2", "qwen2.rope.scaling.attn_factor", 1.2, "is 1.2; it must be 1"),
        ("ministral3", "mistral3.rope.scaling.type", "none", "need the RoPE scaling"),
        ("qwen3_moe", "qwen3moe.rope.scaling.type", "linear", "'linear' is not"),
        ("qwen2", "qwen2.rope.scaling.type", [1], "is not supported in qwen2"),
        ("glm4_moe", "glm4moe.expert_gating_func", 1, "not 2, as mlx-lm assumes"),
        ("glm4_moe", "glm4moe.expert_weights_norm", 1, "must be true or false"),
    ],
)
def test_what_mlx_lm_does_not_compute_is_refused(model_type, key, value, message):
    given = config_of(model_type)
    metadata = gguf_config.to_metadata(given)
    shapes = {f"blk.{n}.attn_q.bias": (64,) for n in range(4)}
    shapes |= {"token_embd.weight": (320, 64)}
    tensors = {name: SimpleNamespace(shape=shape) for name, shape in shapes.items()}
    config = gguf_config.from_metadata(metadata, tensors)
    for name in ("rope_scaling", "rope_parameters"):
        assert config.get(name) == given.get(name)
    with pytest.raises(UserError, match=message):
        gguf_config.from_metadata(metadata | {key: value}, tensors)


def test_files_of_mistral_models_have_two_names():
    written = gguf_config.to_metadata(config_of("mistral") | {"rope_scaling": None})
    metadata = {
        key.replace("llama.", "mistral3."): "mistral3" if value == "llama" else value
        for key, value in written.items()
    }
    shapes = {f"blk.{n}.attn_q.weight": (128, 64) for n in range(4)}
    shapes |= {"token_embd.weight": (320, 64)}
    tensors = {name: SimpleNamespace(shape=shape) for name, shape in shapes.items()}
    assert gguf_config.from_metadata(metadata, tensors)["model_type"] == "mistral"


def write_sentencepiece(folder):
    """Write a Llama 2 tokenizer: merges of ▁ pieces with a byte fallback."""
    from tokenizers import (
        AddedToken,
        Tokenizer,
        decoders,
        models,
        normalizers,
        processors,
    )

    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz"]
    merges = [("t", "h"), ("▁", "th"), ("▁th", "e"), ("r", "e"), ("th", "e")]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256))]
    pieces += [*letters, "th", "▁th", "▁the", "re", "the"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(
        [AddedToken(text, normalized=False) for text in pieces[:3]]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=["<s>", "$A"], special_tokens=[("<s>", 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def tokenizer_metadata(folder, config):
    tokenizer = SimpleNamespace(chat_template=None)
    loaded = SimpleNamespace(path=folder, config=config, tokenizer=tokenizer)
    return gguf_tokenizer.to_metadata(loaded, 320, name="name")


def test_sentencepiece_tokenizer_roundtrip(tmp_path):
    from tokenizers import Tokenizer

    write_sentencepiece(tmp_path)
    metadata = tokenizer_metadata(tmp_path, {"eos_token_id": 2})
    assert metadata["tokenizer.ggml.model"] == "llama"
    assert metadata["tokenizer.ggml.token_type"][:4] == [2, 3, 3, 6]
    assert metadata["tokenizer.ggml.token_type"][-1] == 5
    assert metadata["tokenizer.ggml.add_bos_token"] is True
    assert metadata["tokenizer.ggml.add_space_prefix"] is True
    (tmp_path / "imported").mkdir()
    gguf_tokenizer.write(metadata, tmp_path / "imported", source=tmp_path)
    tokenizers = [
        Tokenizer.from_file(f"{p}/tokenizer.json")
        for p in (tmp_path, tmp_path / "imported")
    ]
    for text in ("there the here", "then  é 東 weather"):
        original, imported = (tokenizer.encode(text) for tokenizer in tokenizers)
        assert imported.tokens == original.tokens
        assert imported.tokens[0] == "<s>"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (config_of("granite") | {"rope_scaling": YARN}, "RoPE scaling 'yarn'"),
        (
            {
                "layer_types": ["full_attention", "sliding_attention"],
                "num_hidden_layers": 2,
                "sliding_window": 8,
            },
            "sliding-window layers",
        ),
        (
            {"model_type": "helium", "tie_word_embeddings": False},
            "export of helium models is not supported",
        ),
        (QWEN3_MOE | {"norm_topk_prob": False}, "norm_topk_prob: False: llama.cpp"),
        (config_of("qwen3_moe") | LINEAR, "'linear' in qwen3moe"),
        (config_of("gemma2") | {"query_pre_attn_scalar": 16}, "scalar: 16: llama.cpp"),
        (
            config_of("gpt_oss") | {"rope_scaling": YARN | {"beta_fast": 16}},
            "beta_fast of YaRN that is not 32",
        ),
        (config_of("stablelm") | {"qk_layernorm": True}, "qk_layernorm: True"),
        (config_of("qwen2_moe") | LINEAR, "'linear' in qwen2moe"),
        (config_of("afmoe") | {"mup_enabled": False}, "mup_enabled: False"),
        (config_of("cohere") | {"use_qk_norm": True}, "use_qk_norm: True"),
        (config_of("glm4_moe") | {"n_group": 2}, "n_group: 2: llama.cpp"),
        (config_of("glm4_moe_lite") | {"q_lora_rank": None}, "attention.q_lora_rank"),
        (config_of("glm4") | {"rope_traditional": False}, "rope_traditional"),
        (config_of("qwen2") | {"rope_scaling": LLAMA3_SCALING}, "'llama3' in qwen2"),
    ],
)
def test_unsupported_models_are_refused(make_checkpoint, tmp_path, settings, message):
    with pytest.raises(UserError, match=message):
        export(gguf_exporter, make_checkpoint(**settings), tmp_path / "out")


def test_model_without_tokenizer_json_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"it has no tokenizer\.json"):
        tokenizer_metadata(tmp_path, {})


def test_unknown_pre_tokenizer_is_refused(make_checkpoint, tmp_path):
    source = make_checkpoint()
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    tokenizer["pre_tokenizer"] = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match="no name for its pre-tokenizer"):
        tokenizer_metadata(tmp_path, {})


@pytest.mark.parametrize("part", ["blocks", "dense", "tokenizer"])
def test_changed_export_is_refused(make_checkpoint, tmp_path, monkeypatch, part):
    source = make_checkpoint()
    spec = QuantSpec(bits=4, group_size=32)
    weight = load(source, compute="stored").model.layers[0].mlp.down_proj.weight
    packed = pack(weight, spec, mx.float16)
    codes = quantized_checkpoint(source, tmp_path / "codes", {DOWN: (packed, spec)})
    if part == "tokenizer":
        original = gguf_tokenizer.to_metadata

        def corrupted(*arguments, **options):
            metadata = original(*arguments, **options)
            return metadata | {
                "tokenizer.ggml.merges": metadata["tokenizer.ggml.merges"][:3]
            }

        monkeypatch.setattr(gguf_tokenizer, "to_metadata", corrupted)
    else:
        name = "from_affine_groups" if part == "blocks" else "from_dense"
        original = getattr(blocks, name)

        def corrupted(*arguments):
            kind, value = original(*arguments)
            return kind, value[::-1] if value.ndim > 1 else value

        monkeypatch.setattr(blocks, name, corrupted)
    with pytest.raises(UserError, match="differs after reading"):
        export(gguf_exporter, codes, tmp_path / "out")


@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta"])
def test_a_config_without_a_number_is_refused(key):
    with pytest.raises(UserError, match="the config has no value for"):
        gguf_config.to_metadata(LLAMA | {key: None})


def test_exports_carry_the_theta_of_rope_parameters(make_checkpoint, tmp_path):
    source = shutil.copytree(make_checkpoint(), tmp_path / "source")
    parameters = {"rope_type": "default", "rope_theta": 5e5}
    config = LLAMA | {"rope_parameters": parameters}
    del config["rope_theta"]
    (source / "config.json").write_text(json.dumps(config))
    for exporter in (mlx_exporter, hf_exporter, gguf_exporter):
        export(exporter, source, tmp_path / exporter.FOLDER)
    for exporter in (mlx_exporter, hf_exporter):
        written = json.loads((tmp_path / exporter.FOLDER / "config.json").read_text())
        assert written["rope_theta"] == 5e5
        assert written["rope_parameters"] == parameters
    reader, _ = read_gguf(tmp_path / gguf_exporter.FOLDER)
    assert reader.fields["llama.rope.freq_base"].parts[-1][0] == 5e5

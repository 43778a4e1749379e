"""llama.cpp's logits and tokens of exported models, against MLX's and tokenizers'."""

import json
import shutil
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from exporting import float_codes, quantized_checkpoint
from gguf_models import NAMES, config_of
from lmx.convert.gguf import architectures, blocks, writer
from lmx.convert.gguf import tokenizer as gguf_tokenizer
from lmx.models.loader import load
from test_gguf_export import write_sentencepiece
from tiny_checkpoints import TEXTS
from tokenizers import Tokenizer

llama_cpp = pytest.importorskip("llama_cpp")
# The tiny configs have keys of several families, and leave some of their own out.
QUIET = pytest.mark.filterwarnings("ignore:.*config.json")
pytestmark = [pytest.mark.slow, QUIET]

LENGTH = 24
PROBES = (
    *TEXTS[:3],
    gguf_tokenizer.PROBE,
    "HelloWorld XMLHttp I'm WE'VE path/to//file; 3.14159, 123456789 ١٢٣ ½",
    "  leading\t\ttab \n \n\nx 東京タワー 한국어 DON'T you'Re\r\n\r\nb   c",
)
GELU = ("gemma", "gemma2", "gemma3", "gemma3_text", "starcoder2", "phi")
EXACT_GELU = nn.gelu_approx


def table_gelu(x):
    """ggml's GELU on CPUs: a table from float16 to float16."""
    values = EXACT_GELU(x.astype(mx.float16).astype(mx.float32))
    return values.astype(mx.float16).astype(mx.float32)


def relative_error(source, file):
    """Root mean square of the difference of the logits, by their deviation.

    All weights, and llama.cpp's cache, have 32 bits: only the order of sums differs.
    """
    loaded = load(source)
    writer.write(file, load(source, compute="stored", lazy=True), name="name")
    tokens = np.random.default_rng(0).integers(3, 320, LENGTH).tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn, "gelu_approx", table_gelu)
        patch.setattr(nn, "gelu", table_gelu)
        expected = np.array(loaded.model(mx.array([tokens]))[0]).astype(np.float64)
    model = llama_cpp.Llama(
        str(file),
        n_ctx=64,
        n_threads=1,
        type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
        flash_attn=False,
        logits_all=True,
        verbose=False,
    )
    model.eval(tokens)
    actual = np.array(model.scores[:LENGTH, :320]).astype(np.float64)
    error = np.sqrt(np.mean((actual - expected) ** 2))
    return error / expected.std(axis=-1).mean()


@pytest.fixture
def dense_float32(monkeypatch):
    monkeypatch.setattr(
        blocks, "from_dense", lambda v, *_: ("F32", np.array(v.astype(mx.float32)))
    )


@pytest.mark.usefixtures("dense_float32")
@pytest.mark.parametrize("name", NAMES)
def test_llama_cpp_computes_the_same_logits(make_checkpoint, tmp_path, name):
    source = make_checkpoint(config_of(name), dtype="float32")
    # Steps of the table of GELU make small differences of the sums larger.
    limit = 1e-3 if name in GELU else 1e-5
    assert relative_error(source, tmp_path / "file.gguf") < limit


@pytest.mark.usefixtures("dense_float32")
@pytest.mark.parametrize(
    ("model_type", "change"),
    [
        ("llama", {"rope": "halves"}),
        ("qwen2", {"rope": "permuted"}),
        ("gemma3_text", {"norm_offset": 0}),
    ],
)
def test_a_wrong_entry_changes_the_logits(
    make_checkpoint, tmp_path, monkeypatch, model_type, change
):
    source = make_checkpoint(config_of(model_type), dtype="float32")
    changed = replace(architectures.BY_MODEL_TYPE[model_type], **change)
    monkeypatch.setitem(architectures.BY_MODEL_TYPE, model_type, changed)
    assert relative_error(source, tmp_path / "file.gguf") > 0.01


# A router that takes all experts does not turn rounding into other experts.
@pytest.mark.parametrize(("name", "mode"), [("gpt_oss", "mxfp4"), ("llama", "nvfp4")])
def test_llama_cpp_computes_with_the_codes(
    make_checkpoint, tmp_path, monkeypatch, name, mode
):
    config = config_of(name) | {"intermediate_size": 128, "num_experts_per_tok": 4}
    source = make_checkpoint(config, dtype="float32")
    codes = float_codes(load(source, compute="stored").model, mode)
    model = quantized_checkpoint(source, tmp_path / "codes", codes)
    # llama.cpp rounds the inputs to 8 bits; the same model in Q4_0 has 0.02.
    assert relative_error(model, tmp_path / "file.gguf") < 0.05
    original = blocks.from_float_groups

    def reversed_bits(*arguments):
        ggml_type, value = original(*arguments)
        return ggml_type, value[..., ::-1].copy()

    monkeypatch.setattr(blocks, "from_float_groups", reversed_bits)
    assert not relative_error(model, tmp_path / "file.gguf") < 0.5


def assert_same_tokens(folder, file):
    writer.write(file, load(folder, compute="stored", lazy=True), name="name")
    model = llama_cpp.Llama(str(file), vocab_only=True, verbose=False)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in PROBES:
        expected = tokenizer.encode(text, add_special_tokens=False).ids
        assert model.tokenize(text.encode(), add_bos=False) == expected, text
    return model.metadata


@pytest.mark.parametrize("name", gguf_tokenizer.PRE_TOKENIZERS)
def test_llama_cpp_makes_the_same_tokens(make_checkpoint, tmp_path, monkeypatch, name):
    folder = shutil.copytree(make_checkpoint(), tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.pre_tokenizer = gguf_tokenizer.byte_level_pre_tokenizer(name)
    tokenizer.save(str(folder / "tokenizer.json"))
    original = gguf_tokenizer._model_metadata

    def with_name(*arguments):
        # Several names have the same patterns; an export has the first of them.
        return original(*arguments) | {"tokenizer.ggml.pre": name}

    monkeypatch.setattr(gguf_tokenizer, "_model_metadata", with_name)
    metadata = assert_same_tokens(folder, tmp_path / "file.gguf")
    assert metadata["tokenizer.ggml.pre"] == name


def test_llama_cpp_makes_the_same_tokens_with_sentencepiece(make_checkpoint, tmp_path):
    folder = shutil.copytree(make_checkpoint(), tmp_path / "model")
    for file in folder.glob("*token*"):
        file.unlink()
    write_sentencepiece(folder)
    settings = {"bos_token": "<s>", "eos_token": "</s>"}
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 2}))
    assert_same_tokens(folder, tmp_path / "file.gguf")

"""llama.cpp's logits of exported models of every architecture, against MLX's."""

from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from gguf_models import MODELS, config_of
from lmx.convert.gguf import architectures, blocks, writer
from lmx.models.loader import load

llama_cpp = pytest.importorskip("llama_cpp")
pytestmark = pytest.mark.slow

LENGTH = 24
GELU = ("gemma2", "gemma3_text", "starcoder2")
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
        blocks, "from_dense", lambda v: ("F32", np.array(v.astype(mx.float32)))
    )


@pytest.mark.usefixtures("dense_float32")
@pytest.mark.parametrize("model_type", MODELS)
def test_llama_cpp_computes_the_same_logits(make_checkpoint, tmp_path, model_type):
    source = make_checkpoint(config_of(model_type), dtype="float32")
    # Steps of the table of GELU make small differences of the sums larger.
    limit = 1e-3 if model_type in GELU else 1e-5
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

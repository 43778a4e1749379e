"""Codes of mxfp4 and nvfp4 as ggml's blocks, against llama.cpp's package."""

import gguf
import mlx.core as mx
import numpy as np
import pytest
from exporting import export, float_codes, quantized_checkpoint
from gguf_models import config_of
from lmx.config.quant_spec import FLOAT_MODES
from lmx.convert.exporters import gguf as gguf_exporter
from lmx.convert.gguf import blocks
from lmx.convert.gguf.reader import GGUFTensor
from lmx.convert.importers import gguf as gguf_importer
from lmx.convert.importers import load_model
from lmx.errors import UserError
from lmx.models.loader import load

# The tiny configs have keys of several families.
pytestmark = pytest.mark.filterwarnings("ignore:.*config.json")

TOKENS = mx.random.randint(0, 320, (2, 9), key=mx.random.key(0))
# E8M0 of about 1, and all positive numbers of E4M3.
SCALES = {"mxfp4": (110, 140), "nvfp4": (0, 127)}


def random_codes(mode, shape):
    """Codes and scales of a matrix, each of all values."""
    rng = np.random.default_rng(0)
    scales = (*shape[:-1], shape[-1] // FLOAT_MODES[mode][0])
    codes = rng.integers(0, 2**32, (*shape[:-1], shape[-1] // 8), dtype=np.uint32)
    steps = rng.integers(*SCALES[mode], scales, dtype=np.uint8)
    return {"weight": mx.array(codes), "scales": mx.array(steps)}


@pytest.mark.parametrize("shape", [(24, 192), (3, 8, 64)])
@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4"])
def test_blocks_hold_the_codes(mode, shape):
    parts = random_codes(mode, shape)
    kind, stored = blocks.from_float_groups(parts, mode)
    assert kind == mode.upper()
    expected = mx.dequantize(*parts.values(), mode=mode, dtype=mx.float32)
    values = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[kind])
    assert np.array_equal(values, np.array(expected))
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    tensor = GGUFTensor(kind, shape, stored.reshape(*shape[:-1], -1, size))
    read = blocks.to_float_groups(tensor).tensors()
    for leaf, value in parts.items():
        assert mx.array_equal(read[leaf], value)


def test_what_has_no_blocks_is_dequantized():
    narrow = random_codes("nvfp4", (4, 32))
    assert blocks.from_float_groups(narrow, "nvfp4") is None
    scaled = random_codes("mxfp4", (4, 32)) | {"global_scale": mx.array(2.0)}
    assert blocks.from_float_groups(scaled, "mxfp4") is None
    assert blocks.from_float_groups(random_codes("mxfp4", (4, 32)), "mxfp8") is None


@pytest.mark.parametrize(("name", "mode"), [("gpt_oss", "mxfp4"), ("mixtral", "nvfp4")])
def test_a_model_keeps_its_codes(make_checkpoint, tmp_path, name, mode):
    config = config_of(name) | {"intermediate_size": 128, "num_hidden_layers": 2}
    config.pop("layer_types", None)
    source = make_checkpoint(config, dtype="float16")
    codes = float_codes(load(source, compute="stored").model, mode)
    model = quantized_checkpoint(source, tmp_path / "codes", codes)
    lines = export(gguf_exporter, model, tmp_path / "out")
    [file] = (tmp_path / "out").glob("*.gguf")
    assert f"{len(codes)} {mode.upper()}" in lines[0]
    assert not any("dequantized" in line for line in lines)
    expected = load(model).model(TOKENS)
    assert mx.array_equal(load_model(file).model(TOKENS), expected)
    config, size = gguf_importer.outline(file)
    assert config["quantization"]["mode"] == mode
    weights = sum(sum(p.nbytes for p in parts.values()) for parts, _ in codes.values())
    assert weights < size < 1.3 * weights


def test_a_wider_matrix_than_that_of_the_config_is_refused(make_checkpoint, tmp_path):
    source = make_checkpoint(config_of("llama"), dtype="float16")
    codes = float_codes(load(source, compute="stored").model, "mxfp4")
    model = quantized_checkpoint(source, tmp_path / "codes", codes)
    export(gguf_exporter, model, tmp_path / "out")
    [file] = (tmp_path / "out").glob("*.gguf")
    key = b"llama.feed_forward_length"
    data = bytearray(file.read_bytes())
    data[data.index(key) + len(key) + 4] = 192
    file.write_bytes(data)
    with pytest.raises(UserError, match="the config requires a matrix"):
        load_model(file)

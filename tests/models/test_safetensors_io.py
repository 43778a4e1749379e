"""The safetensors writer, read back by MLX and Hugging Face."""

import json

import mlx.core as mx
import numpy as np
import pytest
from damaged_safetensors import DAMAGES, damage
from lmx.errors import UserError
from lmx.models import safetensors_io
from safetensors.numpy import load_file

TENSORS = {
    "b": mx.random.normal((3, 5)).astype(mx.bfloat16),
    "transposed": mx.arange(12, dtype=mx.uint32).reshape(3, 4).T,
    "a": mx.arange(5, dtype=mx.uint8),
    "scalar": mx.array(2.5),
    "none": mx.zeros((0, 4), mx.float16),
    "strided": mx.arange(10, dtype=mx.int64)[::2],
    "flags": mx.array([True, False, True]),
}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "x.safetensors"
    safetensors_io.write_safetensors(path, dict(TENSORS))
    return path


def test_write_safetensors_equals_mlx_file_content(file, tmp_path):
    mlx_file = tmp_path / "mlx.safetensors"
    mx.save_safetensors(str(mlx_file), TENSORS, metadata={"format": "mlx"})
    (written, written_metadata), (reference, metadata) = (
        mx.load(str(f), return_metadata=True) for f in (file, mlx_file)
    )
    assert written_metadata == metadata == {"format": "mlx"}
    assert written.keys() == reference.keys()
    for name, value in reference.items():
        assert written[name].dtype == value.dtype
        assert written[name].shape == value.shape
        assert mx.array_equal(written[name], value)


def test_write_safetensors_is_readable_by_hugging_face(tmp_path):
    path = tmp_path / "x.safetensors"
    safetensors_io.write_safetensors(
        path, {k: v for k, v in TENSORS.items() if k != "b"}
    )
    actual = load_file(path)
    for name, value in actual.items():
        np.testing.assert_array_equal(value, np.array(TENSORS[name]))


def test_write_safetensors_aligns_tensors(file):
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert length % 8 == 0
    header = json.loads(data[8 : 8 + length])
    for name, value in TENSORS.items():
        assert header[name]["data_offsets"][0] % value.dtype.size == 0


def test_write_safetensors_holds_few_tensors_in_memory(tmp_path):
    """Write ten tensors of 1 MB. Few are in memory at the same time."""
    size = 1 << 20
    tensors = {str(n): mx.random.normal((size // 4,)) for n in range(10)}
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    safetensors_io.write_safetensors(tmp_path / "x.safetensors", tensors)
    assert not tensors
    assert mx.get_peak_memory() - before < 4 * size
    all_tensors = [mx.random.normal((size // 4,)) for _ in range(10)]
    mx.eval(all_tensors)
    assert mx.get_peak_memory() - before >= 10 * size


@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_files_are_explained(tmp_path, kind):
    file = tmp_path / "x.safetensors"
    mx.save_safetensors(str(file), {n: mx.ones((4, 8)) for n in "abc"})
    damage(file, kind)
    with pytest.raises(UserError) as caught:
        safetensors_io.read_tensors(file)
    assert "damaged" in caught.value.message + caught.value.hint
    assert "\n" not in caught.value.message
    assert caught.value.place == str(file)


def test_sound_files_are_read(file):
    tensors = safetensors_io.read_tensors(file)
    names = safetensors_io.DTYPE_NAMES
    expected = {n: (names[t.dtype], t.shape) for n, t in tensors.items()}
    assert safetensors_io.read_header(file) == expected

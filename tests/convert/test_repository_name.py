"""Names of published models."""

import json

import pytest
from lmx.convert.exporters.hub import repository_name, stored_as

AFFINE = {"group_size": 64, "bits": 4, "mode": "affine"}
EIGHT = {"group_size": 64, "bits": 8}
MXFP4 = {"group_size": 32, "bits": 4, "mode": "mxfp4"}


@pytest.fixture
def checkpoint(make_checkpoint, tmp_path):
    """Gives a checkpoint's config this quantization."""
    folder = tmp_path / "stored"
    folder.mkdir()
    source = make_checkpoint()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())

    def with_quantization(quantization):
        changed = config | ({"quantization": quantization} if quantization else {})
        (folder / "config.json").write_text(json.dumps(changed))
        return folder

    return with_quantization


CASES = [
    ("Qwen/Qwen3-0.6B", AFFINE, {"is_trained": True, "is_qat": True}, "-4bit-qat"),
    ("Qwen/Qwen3-0.6B", AFFINE, {}, "-4bit"),
    ("Qwen/Qwen3-0.6B", AFFINE, {"is_trained": True}, "-finetuned-4bit"),
    ("Qwen/Qwen3-0.6B", None, {"is_trained": True}, "-finetuned"),
    ("Qwen/Qwen3-0.6B", MXFP4, {}, "-mxfp4"),
    # The base model's own endings are not true of the result.
    ("mlx-community/Qwen3-0.6B-bf16", AFFINE, {}, "-4bit"),
    ("mlx-community/Qwen3-0.6B-8bit", AFFINE, {}, "-4bit"),
    ("models/Qwen3-0.6B-Q4_1.gguf", None, {"is_trained": True}, "-finetuned"),
    ("/models/Qwen3-0.6B-qat-4bit/", AFFINE, {}, "-4bit"),
]


@pytest.mark.parametrize(("base", "quantization", "facts", "ending"), CASES)
def test_repository_name_says_what_was_done(
    checkpoint, base, quantization, facts, ending
):
    name = repository_name(base, checkpoint(quantization), **facts)
    assert name == f"Qwen3-0.6B{ending}"


def test_repository_name_is_valid_on_the_hub(checkpoint):
    assert repository_name("my model (2)", checkpoint(None)) == "my-model-2"


def test_few_layers_of_another_width_do_not_change_the_name(checkpoint):
    assert stored_as(checkpoint(AFFINE | {"lm_head": EIGHT})) == "4bit"
    assert stored_as(checkpoint(AFFINE | {"lm_head": False})) == "4bit"
    three = {"group_size": 64, "bits": 3}
    mixed = stored_as(checkpoint(AFFINE | {"lm_head": EIGHT, "a": three}))
    assert mixed.endswith("bpw")
    assert float(mixed.removesuffix("bpw")) > 2
    assert stored_as(checkpoint(None)) is None

"""LoRA on a model that several processes hold together trains as on a whole one."""

import json

import mlx.core as mx
import pytest
from lmx.config.lora import LoRAConfig
from lmx.errors import UserError
from lmx.models import tensor_parallel
from lmx.models.lora import lora_model
from mlx.utils import tree_flatten
from processes import in_ring
from tiny_shards import SHARDED, Group, model_of

PROGRAM = """
import sys
import divided_lora
from lmx.run import distributed
divided_lora.compare(distributed.join(), *sys.argv[1:])
"""
FAMILIES = [
    family
    for family in SHARDED
    if tensor_parallel.architecture(model_of(family)) in tensor_parallel.TRAINED
]
EVERYTHING = {"dropout": 0.2, "chunk": 7, "gradient_checkpointing": True}


def case_of(family: str = "llama", mode: str = "-", **settings) -> str:
    return f"{family} {mode} {json.dumps(settings)}"


def compare(folder, *cases: str, count: int = 2) -> list[float]:
    """The error of every case; where all is right, the ranks have the same bits."""
    results = in_ring(PROGRAM, str(folder), *cases, folder=folder, count=count)
    assert not any(r.returncode for r in results), results[0].stderr
    first, *others = (
        json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)
    )
    right = [case for case in cases if "wrong" not in case]
    assert all(other[case] == first[case] for other in others for case in right)
    return [error for error, _ in first.values()]


def test_ranks_train_what_one_process_does(tmp_path):
    *right, gradients, norms = compare(
        tmp_path,
        case_of(),
        case_of(mode="affine", **EVERYTHING),
        case_of(wrong="gradients"),
        case_of(wrong="norms"),
    )
    assert max(right) <= 1e-5
    assert min(gradients, norms) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_families_dense_and_quantized(tmp_path, family):
    modes = ["-", "affine"] + ["mxfp4", "mxfp8", "nvfp4"] * (family == "llama")
    cases = [case_of(family, mode, **EVERYTHING) for mode in modes]
    assert max(compare(tmp_path, *cases)) <= 1e-5


@pytest.mark.slow
def test_four_ranks(tmp_path):
    cases = case_of(dropout=0.2), case_of(mode="affine", chunk=7)
    assert max(compare(tmp_path, *cases, count=4)) <= 1e-5


def test_other_architectures_are_refused():
    assert {*tensor_parallel.TRAINED} == {
        tensor_parallel.architecture(model_of(family)) for family in FAMILIES
    }
    with pytest.raises(UserError, match="of qwen3_moe cannot be trained in parts"):
        tensor_parallel.require_gradients(model_of("qwen3_moe"))


@pytest.mark.parametrize(
    ("mode", "pattern", "message"),
    [
        (None, "model.embed_tokens", "matches 'model.embed_tokens'"),
        ("affine", "lm_head", "matches 'lm_head'"),
    ],
)
def test_a_divided_vocabulary_has_no_adapter(mode, pattern, message):
    model = model_of("llama", mode)
    tensor_parallel.shard(model, Group(0, 2), lambda: model)
    adapter = LoRAConfig(rank=2, target_modules=["*q_proj", pattern])
    with pytest.raises(UserError, match=message):
        lora_model.attach(model, adapter, seed=0)


def test_layers_are_chosen_and_drawn_as_in_one_process():
    whole, part = model_of("llama"), model_of("llama")
    tensor_parallel.shard(part, Group(1, 2), lambda: part)
    # An adapter of q_proj and o_proj is smaller than the whole layer, not than a half.
    adapter = LoRAConfig(rank=60)
    keys = [lora_model.attach(model, adapter, seed=3) for model in (whole, part)]
    assert keys[0] == keys[1]
    assert "self_attn.q_proj" in keys[0]
    axes = lora_model.divided_axes(part)
    parts = dict(tree_flatten(part.trainable_parameters()))
    for name, value in tree_flatten(whole.trainable_parameters()):
        if name in axes:
            value = mx.split(value, 2, axis=axes[name])[1]
        assert mx.array_equal(parts[name], value), name
    assert len(axes) == len(parts) / 2

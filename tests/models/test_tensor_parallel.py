"""Models divided among processes compute what whole ones do."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import tiny_shards
from lmx.errors import UserError
from lmx.models import loader, tensor_parallel
from lmx.models.loader import build_model, load
from processes import in_ring
from tiny_checkpoints import LLAMA, QWEN3_MOE
from tiny_shards import SHARDED, Group, model_of

PROGRAM = """
import sys
from pathlib import Path
import tiny_shards
from lmx.run import distributed
tiny_shards.{name}(distributed.join(), Path(sys.argv[1]), *sys.argv[2:])
"""
# Latent attention has parameters of which every rank needs all.
LATENT = {
    *("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k25", "longcat_flash"),
    *("glm4_moe_lite", "mistral4", "longcat_flash_ngram"),
}
MODES = "mxfp4", "mxfp8", "nvfp4"


def in_ranks(name: str, folder, *arguments, count: int = 2) -> list[dict]:
    """What every rank saved."""
    program = PROGRAM.format(name=name)
    results = in_ring(program, str(folder), *arguments, folder=folder, count=count)
    assert not any(result.returncode for result in results), results[0].stderr
    return [dict(np.load(folder / f"{rank}.npz")) for rank in range(count)]


def assert_equal(ranks: list[dict], count: int) -> None:
    for case, (error, share, deviation) in ranks[0].items():
        assert error <= 1e-5, case
        assert deviation > 0.1, case
        # All ranks have the same logits, bit for bit.
        assert all(rank[case][0] == error for rank in ranks), case
        is_latent = case.split(":")[0] in LATENT
        assert share <= (1.3 if is_latent else 1.08) / count, case


def test_two_ranks_compute_what_one_does(tmp_path):
    ranks = in_ranks("errors", tmp_path, "llama", "llama::wrong")
    # Negative control: rank 1 has the blocks of rank 0.
    assert ranks[0].pop("llama::wrong")[0] > 0.01
    assert_equal(ranks, 2)


@pytest.mark.slow
@pytest.mark.parametrize("family", SHARDED)
def test_families_dense_and_quantized(tmp_path, family):
    cases = [family, f"{family}:affine", f"{family}:affine:wrong"]
    if family in ("llama", "qwen3_moe", "gpt_oss"):
        cases += [f"{family}:{mode}" for mode in MODES]
    ranks = in_ranks("errors", tmp_path, *cases)
    assert ranks[0].pop(cases[2])[0] > 0.01
    assert_equal(ranks, 2)


@pytest.mark.slow
def test_four_ranks(tmp_path):
    families = "llama", "qwen3_moe", "gpt_oss", "deepseek_v3"
    cases = [f"{family}:{mode}" for family in families for mode in ("", "affine")]
    ranks = in_ranks("errors", tmp_path, *cases, count=4)
    assert_equal(ranks, 4)


def test_parts_make_the_whole(make_checkpoint, monkeypatch):
    monkeypatch.setattr(loader, "_check_forward_pass", lambda *_: None)
    folder = make_checkpoint(QWEN3_MOE, num_key_value_heads=2)
    whole = tiny_shards.weights(load(folder).model)
    parts = [
        tiny_shards.weights(load(folder, group=Group(rank, 2)).model)
        for rank in range(2)
    ]
    shapes = {name: value.shape for name, value in parts[0].items()}
    divided = [name for name in whole if whole[name].shape != shapes[name]]
    assert len(divided) == 7 * 2 + 2
    held, size = (sum(v.size for v in each.values()) for each in (parts[0], whole))
    assert tensor_parallel.shard_share(load(folder).model, 2) == held / size
    for name in divided:
        [axis] = np.flatnonzero(np.subtract(whole[name].shape, shapes[name]))
        joined = np.concatenate([part[name] for part in parts], axis=axis)
        assert np.array_equal(joined, whole[name]), name


@pytest.mark.parametrize(
    ("mode", "changes", "size", "message", "hint"),
    [
        (None, {"num_key_value_heads": 1}, 2, "n_kv_heads is 1", "use one process"),
        (None, {}, 8, "model.layers.0.self_attn.n_kv_heads is 4", "possible are 2, 4"),
        ("affine", {"intermediate_size": 160}, 2, "0.mlp.down_proj: ", "use one"),
        (None, {"intermediate_size": 96}, 3, "0.self_attn.", "possible are 2, 4"),
    ],
)
def test_counts_that_cannot_be_divided(mode, changes, size, message, hint):
    with pytest.raises(UserError) as caught:
        tensor_parallel.shard(
            model_of("llama", mode, **changes),
            Group(0, size),
            lambda: model_of("llama", mode, **changes),
        )
    assert message in str(caught.value)
    assert hint in caught.value.hint


def test_architectures_without_a_comparison_are_named(monkeypatch):
    models = Path(find_spec("mlx_lm").origin).parent / "models"
    have_shard = {
        path.stem for path in models.glob("*.py") if "def shard(" in path.read_text()
    }
    compared = {
        tensor_parallel.architecture(build_model(tiny_shards.configuration(family)))
        for family in SHARDED
    }
    # That of qwen3_5_moe has the method of another module.
    assert have_shard - compared == set(tensor_parallel.UNCHECKED)
    monkeypatch.setattr(tensor_parallel, "UNCHECKED", ["llama"])
    with pytest.warns(UserWarning, match="compares llama in several"):
        tensor_parallel.shard(model_of("llama"), Group(0, 2), lambda: None)


def test_models_that_cannot_be_divided(make_checkpoint):
    gpt2 = model_of("gpt2")
    with pytest.raises(UserError, match="of type gpt2"):
        tensor_parallel.shard(gpt2, Group(0, 2), lambda: gpt2)
    folder = make_checkpoint(LLAMA)
    with pytest.raises(UserError, match="with an adapter cannot"):
        load(folder, adapter=folder, group=Group(0, 2))

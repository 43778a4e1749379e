"""FSDP ranks train like one process, and checkpoints resume in both setups."""

import json

import mlx.core as mx
import numpy as np
import pytest
from lmx.data.batching import Batch
from lmx.files.artifacts import ArtifactStore
from lmx.models.safetensors_io import stream_safetensors
from lmx.training import checkpoint
from lmx.training.checkpoint import TrainingProgress
from lmx.training.chunked_loss import ChunkedLossModel
from lmx.training.fsdp import ShardedParameters
from lmx.training.step import TrainStep
from memory_at_rest import active_memory
from mlx.utils import tree_flatten
from processes import cases_of
from test_checkpoint import bits
from test_data_parallel import (
    ALLOWED,
    SGD,
    assert_same_training,
    outcome,
    run_on_two_ranks,
    windows,
)
from tiny_families import VOCABULARY as FAMILY_VOCABULARY
from tiny_families import member
from tiny_llamas import llama, tokens_of
from tiny_steps import Rank, Tiny, make_step, random_batch

ADAMW = {"weight_decay": 0.1, "max_grad_norm": 1.0}
CASES = {
    "tied": ({}, SGD),
    "adamw": ({}, {"weight_decay": 0.1}),
    "8-bit moments": ({}, {"name": "adamw_8bit", "weight_decay": 0.1}),
    # The vocabulary and half of the matrices have odd sizes and are not sharded.
    "odd": ({"vocab_size": 321, "intermediate_size": 97}, SGD),
    "untied, all at once": (
        {"tie_word_embeddings": False},
        SGD | {"gradient_checkpointing": True, "chunked": 5},
    ),
    "without blocks": (None, SGD),
}
# AdamW makes a full step even from a gradient that is only rounding error.
# A value between two codes may get either.
LIMITS = ALLOWED | {"8-bit moments": ALLOWED["adamw"]}
RATES = {"adamw": 1e-3, "8-bit moments": 1e-3}
BFLOAT = {"name": "sgd", "compute_dtype": mx.bfloat16}


def new_step(case: str, **more) -> TrainStep:
    shape, settings = CASES[case]
    model = Tiny() if shape is None else llama("full", **shape)[0]
    settings = settings | more
    if chunk := settings.pop("chunked", None):
        settings["loss_model"] = ChunkedLossModel(model, chunk)
    return make_step(model, **settings)


def steps_of(case: str):
    if CASES[case][0] is None:
        return [[random_batch(batch_size, seed=batch_size)] for batch_size in (5, 4, 1)]
    return windows()


def state_bytes(step: TrainStep) -> int:
    """Bytes of parameters and optimizer state."""
    parts = [step.parameters, step.optimizer.state]
    return sum(value.nbytes for _, value in tree_flatten(parts))


def train_everything(ranks, folder) -> None:
    result = {}
    for case in CASES:
        step = new_step(case, ranks=ranks, fsdp=True)
        trained = outcome(step, steps_of(case), RATES.get(case, 1e-2))
        result[case] = trained | {"state_bytes": np.array(state_bytes(step))}
    for name, fsdp in (("shards", True), ("no shards", False)):
        model, _ = llama("full")
        step = make_step(model, ranks=ranks, fsdp=fsdp, **BFLOAT)
        result[name] = outcome(step, windows()[:1])
    step = new_step("tied", ranks=ranks, fsdp=True)
    ranks.reduce_scatter = lambda values: mx.split(values, ranks.size)[ranks.rank]
    result["local gradients only"] = outcome(step, windows())
    flat = {f"{c}|{k}": v for c, values in result.items() for k, v in values.items()}
    np.savez(folder / f"{ranks.rank}.npz", **flat)


@pytest.fixture(scope="module")
def single_process():
    """The results of one process; it fills the compilation cache for the two."""
    return {
        case: outcome(new_step(case), steps_of(case), RATES.get(case, 1e-2))
        for case in CASES
    }


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory, single_process):
    """The results of two FSDP processes, by case."""
    folder = tmp_path_factory.mktemp("pair")
    run_on_two_ranks("test_fsdp.train_everything", folder)
    return [cases_of(folder / f"{rank}.npz") for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_fsdp_trains_like_one_process(two_processes, single_process, case):
    expected = single_process[case]
    result = {
        key: value
        for key, value in two_processes[0][case].items()
        if key != "state_bytes"
    }
    assert_same_training(result, expected, LIMITS.get(case, 1e-5))
    if case != "without blocks":
        # The norm exceeds the limit, so the gradient is clipped.
        assert expected["steps"][0, 2] > 1
    assert np.array_equal(two_processes[1][case]["steps"], result["steps"])


@pytest.mark.slow
def test_fsdp_without_reduce_scatter_differs(two_processes, single_process):
    """Negative control: the comparison detects the missing reduction."""
    with pytest.raises(AssertionError):
        assert_same_training(
            two_processes[0]["local gradients only"], single_process["tied"]
        )


@pytest.mark.slow
def test_fsdp_sums_bfloat16_gradients_in_float32(two_processes):
    result, expected = two_processes[0]["shards"], two_processes[0]["no shards"]
    assert_same_training(result, expected, 1e-6)
    model, _ = llama("full")
    exact = outcome(
        make_step(model, **BFLOAT | {"compute_dtype": mx.float32}), windows()[:1]
    )
    with pytest.raises(AssertionError):
        assert_same_training(exact, expected)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "limit"), [("tied", 0.51), ("odd", 0.9)])
def test_fsdp_rank_holds_only_its_shard(two_processes, case, limit):
    whole = state_bytes(new_step(case))
    for rank in range(2):
        assert 0.5 <= two_processes[rank][case]["state_bytes"] / whole <= limit


FLOAT32 = {"stored_dtypes": {}}


@pytest.mark.parametrize("size", [2, 3, 4])
def test_shards_of_all_ranks_are_the_full_parameter(size):
    named = {
        "cut": mx.random.normal((12, 5)),
        "odd": mx.random.normal((7, 12)),
        "vector": mx.arange(24),
        "number": mx.array(1.0),
    }
    shards = [
        ShardedParameters(named, Rank(rank, size), **FLOAT32, blocks=None)
        for rank in range(size)
    ]
    assert [name for name in named if name in shards[0]] == ["cut", "vector"]
    for name, value in named.items():
        parts = [one.shard(name, value) for one in shards]
        for one, part in zip(shards, parts, strict=True):
            assert one.full_shape(name, part) == value.shape
        joined = mx.concatenate(parts) if name in shards[0] else parts[0]
        assert mx.array_equal(joined, value)


def test_shard_frees_the_full_parameter():
    whole = mx.ones((1024, 1024))
    shards = ShardedParameters({"a": whole}, Rank(1, 2), **FLOAT32, blocks=None)
    mx.eval(whole)
    before = active_memory()
    shard = shards.shard("a", whole)
    mx.eval(shard)
    del whole
    mx.clear_cache()
    assert mx.get_active_memory() < before - (1 << 20)


def train(step: TrainStep, first: int, last: int) -> None:
    for number in range(first, last):
        output = step([tokens_of(5, seed=number)], RATES["adamw"], number)
        mx.eval(output, step.parameters)


def resume_and_save(ranks, folder) -> None:
    """Train from the start, then from a checkpoint of one process; save both."""
    step = new_step("odd", ranks=ranks, fsdp=True, **ADAMW, name="adamw")
    train(step, 0, 2)
    progress = TrainingProgress(2, 70, 1.5, best_step=2, best_loss=0.1 + 0.2)
    path = checkpoint.save(folder / "two", step, progress)
    assert (path is None) == (ranks.rank == 1)
    train(step, 2, 4)
    checkpoint.save(folder / "two", step, TrainingProgress(4, best_step=2), best_step=2)
    expected = bits(step)
    other = new_step("odd", ranks=ranks, fsdp=True, **ADAMW, name="adamw")
    train(other, 7, 8)
    assert checkpoint.restore(folder / "two", other, print).step == 4
    assert bits(other) == expected
    assert checkpoint.load_weights(folder / "two", other, 2)
    assert not checkpoint.load_weights(folder / "two", other, 3)
    checkpoint.save(folder / "recalled", other, TrainingProgress(2))
    assert checkpoint.restore(folder / "one", other, print).step == 4
    train(other, 4, 6)
    checkpoint.save(folder / "from one", other, TrainingProgress(6))
    assert checkpoint.restore(folder / "none", other, print) == TrainingProgress()


def loaded(folder, number):
    """The tensors and facts of a checkpoint."""
    saved = ArtifactStore(folder).find(checkpoint.KIND, f"{number:07d}")
    return mx.load(str(saved.folder / "state.safetensors")), saved.facts


def assert_equal(result: dict, expected: dict) -> None:
    assert result.keys() == expected.keys()
    for name, value in expected.items():
        assert result[name].dtype == value.dtype
        assert mx.array_equal(result[name], value), name


def assert_close(result: dict, expected: dict) -> None:
    """Compare means: AdamW makes a full step from rounding error."""
    assert result.keys() == expected.keys()
    for name, value in expected.items():
        off = mx.abs(result[name] - value).astype(mx.float32).mean().item()
        assert off < 1e-5 * max(1.0, mx.abs(value).max().item()), name


def fresh() -> TrainStep:
    return new_step("odd", **ADAMW, name="adamw")


def run_everything(ranks, folder) -> None:
    """What takes two ranks only seconds."""
    resume_and_save(ranks, folder)
    count_messages(ranks, folder)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A step after four steps, and the folder of two ranks that go on from it."""
    whole, folder = fresh(), tmp_path_factory.mktemp("saved")
    train(whole, 0, 4)
    checkpoint.save(folder / "one", whole, TrainingProgress(4))
    run_on_two_ranks("test_fsdp.run_everything", folder)
    return whole, folder


def test_fsdp_checkpoints_equal_those_of_one_process(saved, tmp_path):
    whole, folder = saved
    # One process restores the checkpoint of two ranks bit-exactly.
    step = fresh()
    progress = checkpoint.restore(folder / "two", step, pytest.fail)
    assert progress.step == 4
    checkpoint.save(tmp_path / "again", step, progress)
    tensors, facts = loaded(folder / "two", 4)
    same, same_facts = loaded(tmp_path / "again", 4)
    assert_equal(same, tensors)
    assert same_facts == facts
    assert facts["progress"]["best_step"] == 2
    assert_close(tensors, loaded(folder / "one", 4)[0])
    # Two ranks that resume from one process train like one process.
    train(whole, 4, 6)
    checkpoint.save(tmp_path / "one", whole, TrainingProgress(6))
    paths = (folder / "from one", tmp_path / "one")
    assert_close(*(loaded(path, 6)[0] for path in paths))
    # The best weights belong to their step.
    paths = (folder / "two", folder / "recalled")
    best, recalled = (loaded(path, 2)[0] for path in paths)
    parameters = {k: v for k, v in best.items() if k.startswith("parameters:")}
    assert_equal({k: recalled[k] for k in parameters}, parameters)


def count_messages(ranks, folder) -> None:
    """Count collectives of a step, with and without gradient checkpointing."""
    output = {}
    for again in (False, True):
        sent = []
        for method in ("all_gather", "reduce_scatter"):
            setattr(
                ranks,
                method,
                counted(method, getattr(type(ranks), method), ranks, sent),
            )
        step = new_step("tied", ranks=ranks, fsdp=True, gradient_checkpointing=again)
        mx.eval(step([tokens_of(4)], 1e-2, 0))
        output[str(again)] = sent
    (folder / f"{ranks.rank}.json").write_text(json.dumps(output))


def counted(name, method, ranks, sent):
    def call(value):
        sent.append(name)
        return method(ranks, value)

    return call


def test_fsdp_gathers_blocks_per_forward_pass(saved):
    first, second = (json.loads((saved[1] / f"{r}.json").read_text()) for r in (0, 1))
    assert first == second
    # Everything outside the blocks, then two blocks.
    assert first["False"] == ["all_gather"] * 3 + ["reduce_scatter"] * 3
    again = ["all_gather", "reduce_scatter"] * 2
    assert first["True"] == ["all_gather"] * 3 + again + ["reduce_scatter"]


# Tied and untied, experts, shared keys, states, convolutions, parts per head.
UNLIKE = (
    "gemma3n",
    "qwen3_next",
    "gpt_oss",
    "deepseek_v3",
    "gpt2",
    "falcon_h1",
    "jamba",
    "rwkv7",
    "longcat_flash",
)


def train_families(ranks, folder) -> None:
    result = {}
    for family in UNLIKE:
        step = make_step(member(family), ranks=ranks, fsdp=True, **SGD)
        for key, value in outcome(step, [[family_batch()]] * 2).items():
            result[f"{family}|{key}"] = value
    np.savez(folder / f"{ranks.rank}.npz", **result)


def family_batch() -> Batch:
    batch = tokens_of(4, 20)
    return Batch(batch.tokens % FAMILY_VOCABULARY, batch.mask, batch.where)


@pytest.mark.slow
def test_fsdp_trains_families_like_one_process(tmp_path):
    run_on_two_ranks("test_fsdp.train_families", tmp_path)
    output = dict(np.load(tmp_path / "0.npz"))
    for family in UNLIKE:
        expected = outcome(make_step(member(family), **SGD), [[family_batch()]] * 2)
        result = {key: output[f"{family}|{key}"] for key in expected}
        assert_same_training(result, expected, 1e-4)


@pytest.mark.parametrize("count", [0, 2])
def test_stream_safetensors_checks_the_layout(tmp_path, count):
    layout = {"a": (mx.float32, (2,))}
    with pytest.raises(ValueError, match="zip"):
        stream_safetensors(tmp_path / "a", layout, [mx.zeros(2)] * count, {})
    with pytest.raises(ValueError, match="announced"):
        stream_safetensors(tmp_path / "a", layout, [mx.zeros(3)], {})

"""Processes that keep shares train as one does, and go on from its checkpoints."""

import errno
import json

import mlx.core as mx
import numpy as np
import pytest
from lmx.data.batching import Batch
from lmx.errors import UserError
from lmx.models.safetensors_io import stream_safetensors
from lmx.run.distributed import SINGLE_PROCESS
from lmx.training import checkpoint
from lmx.training.checkpoint import TrainingProgress
from lmx.training.chunked_loss import ChunkedLoss
from lmx.training.fsdp import ShardedParameters
from lmx.training.step import TrainStep
from mlx.utils import tree_flatten
from processes import SCATTER, cases_of, in_ring
from test_checkpoint import bits
from test_data_parallel import ALLOWED, SGD, assert_same_training, windows
from tiny_families import VOCABULARY as FAMILY_VOCABULARY
from tiny_families import member
from tiny_llamas import llama, tokens_of
from tiny_steps import Tiny, make_step, random_batch

PROGRAM = (
    SCATTER
    + """
import sys
from pathlib import Path
import test_fsdp
from lmx.run import distributed as ranks
test_fsdp.{name}(ranks.join(), Path(sys.argv[1]))
"""
)
ADAMW = {"weight_decay": 0.1, "max_grad_norm": 1.0}
CASES = {
    "tied": ({}, SGD),
    "untied": ({"tie_word_embeddings": False}, SGD),
    "adamw": ({}, {"weight_decay": 0.1}),
    # Neither the vocabulary nor half of the matrices can be cut in two.
    "odd": ({"vocab_size": 321, "intermediate_size": 97}, SGD),
    "checkpointed": ({}, SGD | {"gradient_checkpointing": True}),
    "chunked": ({}, SGD | {"chunked": 5}),
    "untied, all at once": (
        {"tie_word_embeddings": False},
        SGD | {"gradient_checkpointing": True, "chunked": 5},
    ),
    "without blocks": (None, SGD),
}
# A step of AdamW is as long as its rate, even where a gradient is all rounding.
RATES = {"adamw": 1e-3}
BFLOAT = {"name": "sgd", "compute_dtype": mx.bfloat16}


def begun(case: str, **more) -> TrainStep:
    shape, settings = CASES[case]
    model = Tiny() if shape is None else llama("full", **shape)[0]
    settings = settings | more
    if chunk := settings.pop("chunked", None):
        settings["chunked_loss"] = ChunkedLoss(model, chunk)
    return make_step(model, **settings)


def steps_of(case: str):
    if CASES[case][0] is None:
        return [[random_batch(rows, seed=rows)] for rows in (5, 4, 1)]
    return windows()


def outcome(step: TrainStep, windows, rate: float = 1e-2) -> dict[str, np.ndarray]:
    """Losses, tokens, norms, validation and whole weights of a training."""
    numbers = []
    for number, window in enumerate(windows):
        told = step(window, rate, number)
        numbers.append([value.item() for value in told[:3]])
    valid = [batch for window in windows for batch in window]
    found = {"steps": np.array(numbers), "valid": np.array(step.evaluate(valid))}
    weights = step.gather_parameters(dict.fromkeys(step.parameters, mx.float32))
    return found | {f"weight {k}": np.array(v) for k, v in weights.items()}


def held(step: TrainStep) -> int:
    """Bytes of parameters and moments."""
    parts = [step.parameters, step.optimizer.state]
    return sum(value.nbytes for _, value in tree_flatten(parts))


def train_everything(ranks, folder) -> None:
    found = {}
    for case in CASES:
        step = begun(case, ranks=ranks, fsdp=True)
        trained = outcome(step, steps_of(case), RATES.get(case, 1e-2))
        found[case] = trained | {"held": np.array(held(step))}
    for name, fsdp in (("shares", True), ("no shares", False)):
        model, _ = llama("full")
        step = make_step(model, ranks=ranks, fsdp=fsdp, **BFLOAT)
        found[name] = outcome(step, windows()[:1])
    step = begun("tied", ranks=ranks, fsdp=True)
    ranks.reduce_scatter = lambda values: mx.split(values, ranks.size)[ranks.rank]
    found["own gradients alone"] = outcome(step, windows())
    flat = {f"{c}|{k}": v for c, values in found.items() for k, v in values.items()}
    np.savez(folder / f"{ranks.rank}.npz", **flat)


def in_two(name: str, folder) -> None:
    ended = in_ring(PROGRAM.format(name=name), str(folder), folder=folder)
    assert [done.returncode for done in ended] == [0, 0], ended


@pytest.fixture(scope="module")
def alone():
    """What one process makes of every case; two find what it has compiled."""
    return {
        case: outcome(begun(case), steps_of(case), RATES.get(case, 1e-2))
        for case in CASES
    }


@pytest.fixture(scope="module")
def pair(tmp_path_factory, alone):
    """What two processes with shares made of every case."""
    folder = tmp_path_factory.mktemp("pair")
    in_two("train_everything", folder)
    return [cases_of(folder / f"{rank}.npz") for rank in range(2)]


@pytest.mark.parametrize("case", CASES)
def test_fsdp_trains_like_one_process(pair, alone, case):
    expected = alone[case]
    found = {key: value for key, value in pair[0][case].items() if key != "held"}
    assert_same_training(found, expected, ALLOWED.get(case, 1e-5))
    if case != "without blocks":
        # The gradient is clipped.
        assert expected["steps"][0, 2] > 1
    assert np.array_equal(pair[1][case]["steps"], found["steps"])


def test_fsdp_without_reduce_scatter_differs(pair, alone):
    """Negative control: the comparison sees the fault it is there for."""
    with pytest.raises(AssertionError):
        assert_same_training(pair[0]["own gradients alone"], alone["tied"])


def test_fsdp_sums_bfloat16_gradients_in_float32(pair):
    found, expected = pair[0]["shares"], pair[0]["no shares"]
    assert_same_training(found, expected, 1e-6)
    model, _ = llama("full")
    exact = outcome(
        make_step(model, **BFLOAT | {"compute_dtype": mx.float32}), windows()[:1]
    )
    with pytest.raises(AssertionError):
        assert_same_training(exact, expected)


@pytest.mark.parametrize(("case", "most"), [("tied", 0.51), ("odd", 0.9)])
def test_fsdp_rank_holds_only_its_shard(pair, case, most):
    whole = held(begun(case))
    for rank in range(2):
        assert 0.5 <= pair[rank][case]["held"] / whole <= most


class Rank:
    """One of several, for what needs no others."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size


@pytest.mark.parametrize("size", [2, 3, 4])
def test_shards_of_all_ranks_are_the_full_parameter(size):
    named = {
        "cut": mx.random.normal((12, 5)),
        "odd": mx.random.normal((7, 12)),
        "vector": mx.arange(24),
        "number": mx.array(1.0),
    }
    shards = [
        ShardedParameters(
            named, Rank(rank, size), compute_dtype=mx.float32, blocks=None
        )
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
    shards = ShardedParameters(
        {"a": whole}, Rank(1, 2), compute_dtype=mx.float32, blocks=None
    )
    mx.eval(whole)
    before = mx.get_active_memory()
    own = shards.shard("a", whole)
    mx.eval(own)
    del whole
    mx.clear_cache()
    assert mx.get_active_memory() < before - (1 << 20)


def train(step: TrainStep, first: int, last: int) -> None:
    for number in range(first, last):
        output = step([tokens_of(5, seed=number)], RATES["adamw"], number)
        mx.eval(output, step.parameters)


def go_on(ranks, folder) -> None:
    """From the beginning, then from a file of one process, saving both."""
    step = begun("odd", ranks=ranks, fsdp=True, **ADAMW, name="adamw")
    train(step, 0, 2)
    progress = TrainingProgress(2, 70, 1.5, best_step=2, best_loss=0.1 + 0.2)
    path = checkpoint.save(folder / "two", step, progress)
    assert (path is None) == (ranks.rank == 1)
    train(step, 2, 4)
    checkpoint.save(folder / "two", step, TrainingProgress(4, best_step=2), best_step=2)
    own = bits(step)
    other = begun("odd", ranks=ranks, fsdp=True, **ADAMW, name="adamw")
    train(other, 7, 8)
    assert checkpoint.restore(folder / "two", other, print).step == 4
    assert bits(other) == own
    assert checkpoint.load_weights(folder / "two", other, 2)
    assert not checkpoint.load_weights(folder / "two", other, 3)
    checkpoint.save(folder / "recalled", other, TrainingProgress(2))
    assert checkpoint.restore(folder / "one", other, print).step == 4
    train(other, 4, 6)
    checkpoint.save(folder / "from one", other, TrainingProgress(6))
    assert checkpoint.restore(folder / "none", other, print) == TrainingProgress()


def loaded(folder):
    return mx.load(str(folder / "state.safetensors"), return_metadata=True)


def assert_equal(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert mx.array_equal(found[name], value), name


def assert_close(found: dict, expected: dict) -> None:
    """On the whole: AdamW makes a step of what is rounding alone."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        off = mx.abs(found[name] - value).astype(mx.float32).mean().item()
        assert off < 1e-5 * max(1.0, mx.abs(value).max().item()), name


def test_fsdp_checkpoints_equal_those_of_one_process(tmp_path):
    def fresh():
        return begun("odd", **ADAMW, name="adamw")

    whole = fresh()
    train(whole, 0, 4)
    checkpoint.save(tmp_path / "one", whole, TrainingProgress(4))
    in_two("go_on", tmp_path)
    # Of one process that goes on from two: what is in the file, bit for bit.
    step = fresh()
    progress = checkpoint.restore(tmp_path / "two", step, pytest.fail)
    assert progress.step == 4
    checkpoint.save(tmp_path / "again", step, progress)
    tensors, metadata = loaded(tmp_path / "two/0000004")
    same, same_metadata = loaded(tmp_path / "again/0000004")
    assert_equal(same, tensors)
    assert same_metadata == metadata
    assert json.loads(metadata["progress"])["best_step"] == 2
    assert_close(tensors, loaded(tmp_path / "one/0000004")[0])
    # Two that went on from one did what one does.
    train(whole, 4, 6)
    checkpoint.save(tmp_path / "one", whole, TrainingProgress(6))
    paths = ("from one/0000006", "one/0000006")
    assert_close(*(loaded(tmp_path / path)[0] for path in paths))
    # And the best weights are those of the step they are of.
    paths = ("two/0000002", "recalled/0000002")
    best, recalled = (loaded(tmp_path / path)[0] for path in paths)
    parameters = {k: v for k, v in best.items() if k.startswith("parameters:")}
    assert_equal({k: recalled[k] for k in parameters}, parameters)


def count_messages(ranks, folder) -> None:
    """How often a step gathers and scatters, with and without checkpointed blocks."""
    told = {}
    for again in (False, True):
        sent = []
        for way in ("all_gather", "reduce_scatter"):
            setattr(ranks, way, counted(way, getattr(type(ranks), way), ranks, sent))
        step = begun("tied", ranks=ranks, fsdp=True, gradient_checkpointing=again)
        mx.eval(step([tokens_of(4)], 1e-2, 0))
        told[str(again)] = sent
    (folder / f"{ranks.rank}.json").write_text(json.dumps(told))


def counted(name, way, ranks, sent):
    def call(value):
        sent.append(name)
        return way(ranks, value)

    return call


def test_fsdp_gathers_blocks_per_forward_pass(tmp_path):
    in_two("count_messages", tmp_path)
    first, second = (json.loads((tmp_path / f"{r}.json").read_text()) for r in (0, 1))
    assert first == second
    # All outside of the blocks, then two blocks.
    assert first["False"] == ["all_gather"] * 3 + ["reduce_scatter"] * 3
    again = ["all_gather", "reduce_scatter"] * 2
    assert first["True"] == ["all_gather"] * 3 + again + ["reduce_scatter"]


# Tied and not, with experts, shared keys, states, convolutions, and parts per head.
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
    mx.disable_compile()
    found = {}
    for family in UNLIKE:
        step = make_step(member(family), ranks=ranks, fsdp=True, **SGD)
        for key, value in outcome(step, [[family_batch()]] * 2).items():
            found[f"{family}|{key}"] = value
    np.savez(folder / f"{ranks.rank}.npz", **found)


def family_batch() -> Batch:
    batch = tokens_of(4, 20)
    return Batch(batch.tokens % FAMILY_VOCABULARY, batch.mask, batch.where)


def test_fsdp_trains_families_like_one_process(tmp_path):
    in_two("train_families", tmp_path)
    told = dict(np.load(tmp_path / "0.npz"))
    mx.disable_compile()
    try:
        for family in UNLIKE:
            expected = outcome(make_step(member(family), **SGD), [[family_batch()]] * 2)
            found = {key: told[f"{family}|{key}"] for key in expected}
            assert_same_training(found, expected, 1e-4)
    finally:
        mx.enable_compile()


def fail_in_the_middle(ranks, folder) -> None:
    step = begun("tied", ranks=ranks, fsdp=True)

    def fail(path, layout, values, metadata):
        next(values)
        next(values)
        raise OSError(errno.ENOSPC, "full")

    write, checkpoint.stream_safetensors = checkpoint.stream_safetensors, fail
    with pytest.raises(UserError) as caught:
        checkpoint.save(folder / "it", step, TrainingProgress(1))
    assert ("no space" in str(caught.value)) == ranks.is_first
    assert caught.value.code == 1
    checkpoint.stream_safetensors = write
    checkpoint.save(folder / "it", step, TrainingProgress(2))


def test_full_disk_stops_all_ranks(tmp_path):
    in_two("fail_in_the_middle", tmp_path)
    assert [path.name for path in (tmp_path / "it").iterdir()] == ["0000002"]


VALUES = {
    "matrix": mx.array([[-0.0, float("nan"), 1e-45], [1.5, float("-inf"), 3.0]]),
    "slice": mx.arange(12, dtype=mx.int32).reshape(3, 4)[:, 1:3],
    "short": mx.array([1.5, 2.5, -0.0], mx.bfloat16),
    "half": mx.array([1.5], mx.float16),
    "scalar": mx.array(7, mx.uint64),
    "empty": mx.zeros((0, 3)),
}


def test_streamed_safetensors_equal_those_of_mlx(tmp_path):
    layout = {name: (value.dtype, value.shape) for name, value in VALUES.items()}
    found, expected = tmp_path / "found", tmp_path / "expected.safetensors"
    metadata = {"progress": '{"step": 1, "é": "\\""}'}
    stream_safetensors(found, layout, iter(VALUES.values()), metadata)
    mx.save_safetensors(str(expected), VALUES, metadata=metadata)
    tensors, told = mx.load(str(found), format="safetensors", return_metadata=True)
    others, same = mx.load(str(expected), return_metadata=True)
    assert told == same == metadata
    assert tensors.keys() == others.keys()
    for name, value in others.items():
        assert tensors[name].dtype == value.dtype
        assert tensors[name].shape == value.shape
        assert bytes(memoryview(tensors[name].reshape(-1).view(mx.uint8))) == bytes(
            memoryview(value.reshape(-1).view(mx.uint8))
        )


@pytest.mark.parametrize("count", [0, 2])
def test_stream_safetensors_checks_the_layout(tmp_path, count):
    layout = {"a": (mx.float32, (2,))}
    with pytest.raises(ValueError, match="zip"):
        stream_safetensors(tmp_path / "a", layout, [mx.zeros(2)] * count, {})
    with pytest.raises(ValueError, match="announced"):
        stream_safetensors(tmp_path / "a", layout, [mx.zeros(3)], {})


def test_one_process_shards_nothing():
    step = begun("tied")
    assert not step.sharding
    assert step.ranks is SINGLE_PROCESS

"""Two processes train as one does, and what they tell each other arrives as it was."""

import json
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from lmx.data.batching import Batch
from lmx.run.distributed import SINGLE_PROCESS
from lmx.training.document_mask import DocumentCaches
from lmx.training.step import TrainStep, shard_batch
from lmx.training.teacher_targets import compress_targets
from processes import cases_of, in_ring
from test_document_mask import documents_of, packed
from test_gradient_accumulation import ragged
from tiny_llamas import llama, tokens_of
from tiny_steps import make_step

# A process's part of what is compared here.
PROGRAM = """
import sys
from pathlib import Path
import test_data_parallel
from lmx.run import distributed as ranks
test_data_parallel.{name}(ranks.join(), Path(sys.argv[1]))
"""
SGD = {"name": "sgd", "momentum": 0.9, "max_grad_norm": 1.0}


def without_last_row(batch: Batch) -> Batch:
    """The last row has nothing to train on, as one that fills up a batch."""
    keep = mx.arange(len(batch.mask))[:, None] < len(batch.mask) - 1
    return Batch(batch.tokens, batch.mask & keep, batch.where, batch.documents)


def windows() -> list[list[Batch]]:
    """Steps of odd and even row counts, of one row, and of several batches."""
    return [
        [tokens_of(5, 12)],
        [without_last_row(tokens_of(4, 7, seed=1))],
        [tokens_of(1, 9, seed=2)],
        ragged((3, 14)),
        [without_last_row(tokens_of(2, 8, seed=3)), tokens_of(3, 11, seed=4)],
    ]


CASES = {
    "full": ("full", SGD),
    "lora": ("lora", SGD),
    "qat": ("lora-qat", SGD),
    "lsq": ("lsq-lora-qat", SGD),
    "adamw": ("full", {"weight_decay": 0.1}),
}


def trained(ranks, case: str) -> dict[str, np.ndarray]:
    """Losses, tokens, norms, validation and weights of a short training."""
    way, settings = CASES[case]
    model, rounding = llama(way)
    step = make_step(model, fake_quant=rounding, ranks=ranks, **settings)
    return outcome(step, windows())


def trained_on_documents(ranks) -> dict[str, np.ndarray]:
    model, _ = llama("full")
    step = make_step(model, document_caches=DocumentCaches(model), ranks=ranks, **SGD)
    rows = [[9, 15, 4], [21, 6], [30]]
    batches = [packed(documents_of(rows, seed=seed), rows) for seed in range(3)]
    return outcome(step, [[batch] for batch in batches])


def outcome(step: TrainStep, windows) -> dict[str, np.ndarray]:
    numbers = []
    for number, window in enumerate(windows):
        told = step(window, 1e-2, number)
        numbers.append([value.item() for value in told[:3]])
    valid = [batch for window in windows for batch in window]
    weights = {f"weight {k}": np.array(v) for k, v in step.parameters.items()}
    return weights | {"steps": np.array(numbers), "valid": step.evaluate(valid)}


def train_everything(ranks, folder) -> None:
    found = {case: trained(ranks, case) for case in CASES}
    found["documents"] = trained_on_documents(ranks)
    ranks.all_sum = lambda values: mean_of_means(ranks, values)
    found["mean of means"] = trained(ranks, "full")
    np.savez(
        folder / f"{ranks.rank}.npz",
        **{
            f"{case}|{k}": v
            for case, values in found.items()
            for k, v in values.items()
        },
    )


def mean_of_means(ranks, values):
    """Every process divides by its own tokens: wrong, and common."""
    sums = type(ranks).all_sum(ranks, values[:3])
    own = mx.maximum(values[1], 1)
    means = [gradient / own * sums[1] / ranks.size for gradient in values[3:]]
    return sums + type(ranks).all_sum(ranks, means)


@pytest.fixture(scope="module")
def alone():
    """What one process makes of every case; two find what it has compiled."""
    found = {case: trained(SINGLE_PROCESS, case) for case in CASES}
    return found | {"documents": trained_on_documents(SINGLE_PROCESS)}


@pytest.fixture(scope="module")
def pair(tmp_path_factory, alone):
    """What two processes made of every case."""
    folder = tmp_path_factory.mktemp("pair")
    ended = in_ring(PROGRAM.format(name="train_everything"), str(folder), folder=folder)
    assert [done.returncode for done in ended] == [0, 0], ended[0].stderr
    return [cases_of(folder / f"{rank}.npz") for rank in range(2)]


# Adam divides by the root of squares: where a gradient is nearly nothing, its rounding
# moves a weight by a share of the learning rate.
ALLOWED = {"adamw": 3e-4}


def assert_same_training(found, expected, allowed=1e-5):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        atol = allowed if key.startswith("weight") else 1e-5
        np.testing.assert_allclose(found[key], value, rtol=1e-5, atol=atol, err_msg=key)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_like_one_process(pair, alone, case):
    expected = alone[case]
    assert len({tokens for _, tokens, _ in expected["steps"]}) == len(windows())
    # Where a gradient is all rounding, AdamW makes a whole step of it.
    assert_same_training(pair[0][case], expected, ALLOWED.get(case, 1e-5))


def test_two_ranks_train_on_packed_sequences_like_one_process(pair, alone):
    assert_same_training(pair[0]["documents"], alone["documents"])


def test_mean_of_means_differs(pair, alone):
    """Negative control: the comparison sees the fault it is there for."""
    with pytest.raises(AssertionError):
        assert_same_training(pair[0]["mean of means"], alone["full"])


@pytest.mark.parametrize("case", [*CASES, "documents"])
def test_ranks_have_equal_weights(pair, case):
    first, second = pair[0][case], pair[1][case]
    for key, value in first.items():
        assert value.tobytes() == second[key].tobytes(), key


class Rank:
    """One of several, for what needs no others."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size
        self.shard = lambda items: list(items)[rank::size]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_shard_batch_assigns_every_sequence_once(size):
    rows = [[9, 15, 4], [21, 6], [30], [5, 5], [12]]
    batch = packed(documents_of(rows), rows)
    batch = Batch(batch.tokens, batch.mask, tuple("abcde"), batch.documents)
    shares = [shard_batch(batch, Rank(rank, size)) for rank in range(size)]
    assert len({one.tokens.shape for one in shares}) == 1
    assert sorted("".join("".join(one.where) for one in shares)) == list("abcde")
    for kind in range(3):
        for row in range(5):
            mine = shares[row % size].arrays[kind][row // size]
            assert mx.array_equal(mine, batch.arrays[kind][row])
    masks = sum(one.mask.sum().item() for one in shares)
    assert masks == batch.mask.sum().item()


def test_shard_batch_keeps_targets_with_their_sequences():
    batch = tokens_of(5)
    target = compress_targets(mx.random.normal((5, 11, 320)), 3)
    shares = [
        shard_batch(replace(batch, target=tuple(target)), Rank(n, 2)) for n in (0, 1)
    ]
    for row in range(5):
        own = shares[row % 2].target
        assert all(
            mx.array_equal(mine[row // 2], value[row])
            for mine, value in zip(own, target, strict=True)
        )
    assert {len(value) for one in shares for value in one.target} == {3}


def test_shard_batch_of_one_process_is_the_batch():
    batch = tokens_of()
    assert shard_batch(batch, SINGLE_PROCESS) is batch


VALUES = [
    mx.array([-0.0, 0.0, float("nan"), 1e-45, float("-inf")]),
    mx.array(0x7FC01234, mx.uint32).view(mx.float32),  # a NaN of its own kind
    mx.array([[1.5, -0.0]], mx.bfloat16),
    mx.array(np.array([(1 << 64) - 1, 1 << 53], np.uint64)),
    mx.array(-7, mx.int32),
    mx.array([True, False, True]),
    mx.arange(12, dtype=mx.int16).reshape(3, 4)[:, 1:3],
]
FACTS = {"path": "stages/é", "loss": 0.1 + 0.2, "best": float("inf"), "none": None}


def bits(value: mx.array) -> list[int]:
    return mx.contiguous(value).reshape(-1).view(mx.uint8).tolist()


def speak(ranks, folder) -> None:
    """Everything but training that processes do together."""
    from lmx.errors import Interrupted, UserError
    from lmx.run import distributed as module

    other = [value if ranks.is_first else mx.ones_like(value) for value in VALUES]
    told = {
        "spread": [bits(value) for value in ranks.broadcast(other)],
        "shared": ranks.broadcast_object(FACTS if ranks.is_first else "mine"),
        "totals": ranks.all_reduce_scalars(0.1 + ranks.rank, 3, 1e12 + 1),
    }
    big = [mx.full((count,), ranks.rank + 1.0) for count in (3, 1, 4, 1, 5)]
    sums = []
    for module.BUCKET in (32 << 20, 16, 1):
        sums.append([v.tolist() for v in ranks.all_sum([*big, mx.array(2.0)])])
    told["sums"] = sums[0]
    assert sums[0] == sums[1] == sums[2]
    fates = []
    faults = (None, UserError("x", code=3), KeyboardInterrupt(), Interrupted("x"))
    for fault in faults:
        try:
            with ranks.collective_errors():
                if ranks.rank == 1 and fault:
                    raise fault
            fates.append("well")
        except (UserError, KeyboardInterrupt, Interrupted) as met:
            fates.append([type(met).__name__, str(met), getattr(met, "code", None)])
    told["fates"] = fates
    (folder / f"{ranks.rank}.json").write_text(json.dumps(told))


def test_collectives_and_errors_across_ranks(tmp_path):
    ended = in_ring(PROGRAM.format(name="speak"), str(tmp_path), folder=tmp_path)
    assert [done.returncode for done in ended] == [0, 0], ended[0].stderr
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for found in told:
        assert found["spread"] == [bits(value) for value in VALUES]
        assert found["shared"] == FACTS
        assert found["totals"] == pytest.approx([1.2, 6, 2e12 + 2], rel=1e-12)
        assert found["sums"] == [[3.0] * count for count in (3, 1, 4, 1, 5)] + [4.0]
    heard = [
        ["RemoteError", "", 3],
        ["Interrupted", "", None],
        ["Interrupted", "", None],
    ]
    assert told[0]["fates"] == ["well", *heard]
    own = [["UserError", "x", 3], ["KeyboardInterrupt", "", None]]
    assert told[1]["fates"] == ["well", *own, ["Interrupted", "x", None]]

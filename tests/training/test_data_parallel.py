"""Two processes train like one, and collectives transfer values unchanged."""

import json
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from lmx.data.batching import Batch, shard_batch
from lmx.interfaces import SINGLE_PROCESS
from lmx.training.document_mask import DocumentCaches
from lmx.training.step import TrainStep
from lmx.training.teacher_targets import compress_targets
from processes import SCATTER, cases_of, in_ring
from test_document_mask import documents_of, packed
from test_gradient_accumulation import ragged
from tiny_llamas import llama, tokens_of
from tiny_steps import Rank, make_step

# The program of every rank.
PROGRAM = (
    SCATTER
    + """
import sys
from pathlib import Path
import {module} as module
from lmx.run import distributed as ranks
module.{name}(ranks.join(), Path(sys.argv[1]))
"""
)
SGD = {"name": "sgd", "momentum": 0.9, "max_grad_norm": 1.0}


def mask_last_sequence(batch: Batch) -> Batch:
    """Masks the last sequence, like one that fills up a batch."""
    keep = mx.arange(len(batch.mask))[:, None] < len(batch.mask) - 1
    return Batch(batch.tokens, batch.mask & keep, batch.where, batch.documents)


def windows() -> list[list[Batch]]:
    """Steps with odd and even batch sizes, one sequence, and several batches."""
    return [
        [tokens_of(5, 12)],
        [mask_last_sequence(tokens_of(4, 7, seed=1))],
        [tokens_of(1, 9, seed=2)],
        ragged((3, 14)),
        [mask_last_sequence(tokens_of(2, 8, seed=3)), tokens_of(3, 11, seed=4)],
    ]


CASES = {
    "full": ("full", SGD),
    "lora": ("lora", SGD),
    "lsq": ("lsq-lora-qat", SGD),
    "adamw": ("full", {"weight_decay": 0.1}),
}


def trained(ranks, case: str) -> dict[str, np.ndarray]:
    """Losses, token counts, norms, evaluation and weights of a short training."""
    mode, settings = CASES[case]
    model, fake_quant = llama(mode)
    step = make_step(model, weight_transform=fake_quant, ranks=ranks, **settings)
    return outcome(step, windows())


def trained_on_documents(ranks) -> dict[str, np.ndarray]:
    model, _ = llama("full")
    step = make_step(model, document_caches=DocumentCaches(model), ranks=ranks, **SGD)
    lengths = [[9, 15, 4], [21, 6], [30]]
    batches = [packed(documents_of(lengths, seed=seed), lengths) for seed in range(3)]
    return outcome(step, [[batch] for batch in batches])


def outcome(step: TrainStep, windows, rate: float = 1e-2) -> dict[str, np.ndarray]:
    """Losses, token counts, norms, evaluation and full weights of a training."""
    metrics = []
    for number, window in enumerate(windows):
        output = step(window, rate, number)
        metrics.append([value.item() for value in output[:3]])
    valid = [batch for window in windows for batch in window]
    result = {"steps": np.array(metrics), "valid": np.array(step.evaluate(valid)[:2])}
    weights = step.parameters
    if step.sharding:
        weights = step.gather_parameters()
    return result | {f"weight {k}": np.array(v) for k, v in weights.items()}


def train_everything(ranks, folder) -> None:
    run_collectives(ranks, folder)
    result = {case: trained(ranks, case) for case in CASES}
    result["documents"] = trained_on_documents(ranks)
    ranks.all_sum = lambda values: mean_of_means(ranks, values)
    result["mean of means"] = trained(ranks, "full")
    np.savez(
        folder / f"{ranks.rank}.npz",
        **{
            f"{case}|{k}": v
            for case, values in result.items()
            for k, v in values.items()
        },
    )


def run_on_two_ranks(function: str, folder) -> None:
    """Call a function of a test module with the ranks and a folder."""
    module, name = function.split(".")
    program = PROGRAM.format(module=module, name=name)
    processes = in_ring(program, str(folder), folder=folder)
    assert [done.returncode for done in processes] == [0, 0], processes


def mean_of_means(ranks, values):
    """Wrong, and common: every rank divides by its local number of tokens."""
    sums = type(ranks).all_sum(ranks, values[:3])
    local_tokens = mx.maximum(values[1], 1)
    means = [gradient / local_tokens * sums[1] / ranks.size for gradient in values[3:]]
    return sums + type(ranks).all_sum(ranks, means)


@pytest.fixture(scope="module")
def single_process():
    """The results of one process; it fills the compilation cache for the two."""
    result = {case: trained(SINGLE_PROCESS, case) for case in CASES}
    return result | {"documents": trained_on_documents(SINGLE_PROCESS)}


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory, single_process):
    """The results of two processes, by case, and what their collectives did."""
    folder = tmp_path_factory.mktemp("pair")
    run_on_two_ranks("test_data_parallel.train_everything", folder)
    return [
        cases_of(folder / f"{rank}.npz")
        | {"collectives": json.loads((folder / f"{rank}.json").read_text())}
        for rank in range(2)
    ]


# Adam divides by the root of the second moment. If a gradient is nearly zero, its
# rounding error changes a weight by a fraction of the learning rate.
ALLOWED = {"adamw": 3e-4}


def assert_same_training(result, expected, allowed=1e-5):
    assert result.keys() == expected.keys()
    for key, value in expected.items():
        atol = allowed if key.startswith("weight") else 1e-5
        np.testing.assert_allclose(
            result[key], value, rtol=1e-5, atol=atol, err_msg=key
        )


def assert_same_bytes(ranks, case):
    first, second = (rank[case] for rank in ranks)
    for key, value in first.items():
        assert value.tobytes() == second[key].tobytes(), key


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_like_one_process(two_processes, single_process, case):
    expected = single_process[case]
    assert len({tokens for _, tokens, _ in expected["steps"]}) == len(windows())
    # AdamW makes a full step even from a gradient that is only rounding error.
    assert_same_training(two_processes[0][case], expected, ALLOWED.get(case, 1e-5))
    assert_same_bytes(two_processes, case)


def test_two_ranks_train_on_packed_sequences_like_one_process(
    two_processes, single_process
):
    assert_same_training(two_processes[0]["documents"], single_process["documents"])
    assert_same_bytes(two_processes, "documents")


def test_mean_of_means_differs(two_processes, single_process):
    """Negative control: the comparison detects the wrong mean."""
    with pytest.raises(AssertionError):
        assert_same_training(two_processes[0]["mean of means"], single_process["full"])


@pytest.mark.parametrize("size", [2, 3, 4])
def test_shard_batch_assigns_every_sequence_once(size):
    lengths = [[9, 15, 4], [21, 6], [30], [5, 5], [12]]
    batch = packed(documents_of(lengths), lengths)
    batch = Batch(batch.tokens, batch.mask, tuple("abcde"), batch.documents)
    shards = [shard_batch(batch, Rank(rank, size)) for rank in range(size)]
    assert len({one.tokens.shape for one in shards}) == 1
    assert sorted("".join("".join(one.where) for one in shards)) == list("abcde")
    for kind in range(3):
        for index in range(5):
            mine = shards[index % size].arrays()[kind][index // size]
            assert mx.array_equal(mine, batch.arrays()[kind][index])
    masks = sum(one.mask.sum().item() for one in shards)
    assert masks == batch.mask.sum().item()


def test_shard_batch_keeps_targets_with_their_sequences():
    batch = tokens_of(5)
    target = compress_targets(mx.random.normal((5, 11, 320)), 3)
    shards = [
        shard_batch(replace(batch, target=tuple(target)), Rank(n, 2)) for n in (0, 1)
    ]
    for index in range(5):
        expected = shards[index % 2].target
        assert all(
            mx.array_equal(mine[index // 2], value[index])
            for mine, value in zip(expected, target, strict=True)
        )
    assert {len(value) for one in shards for value in one.target} == {3}


VALUES = [
    mx.array([-0.0, 0.0, float("nan"), 1e-45, float("-inf")]),
    mx.array(0x7FC01234, mx.uint32).view(mx.float32),  # a NaN with another payload
    mx.array([[1.5, -0.0]], mx.bfloat16),
    mx.array(np.array([(1 << 64) - 1, 1 << 53], np.uint64)),
    mx.array(-7, mx.int32),
    mx.array([True, False, True]),
    mx.arange(12, dtype=mx.int16).reshape(3, 4)[:, 1:3],
]
FACTS = {"path": "stages/é", "loss": 0.1 + 0.2, "best": float("inf"), "none": None}


def bits(value: mx.array) -> list[int]:
    return mx.contiguous(value).reshape(-1).view(mx.uint8).tolist()


def run_collectives(ranks, folder) -> None:
    """All collectives."""
    from lmx.run import distributed as module

    other = [value if ranks.is_first else mx.ones_like(value) for value in VALUES]
    output = {
        "spread": [bits(value) for value in ranks.broadcast(other)],
        "shared": ranks.broadcast_object(FACTS if ranks.is_first else "mine"),
        "totals": ranks.all_reduce_scalars(0.1 + ranks.rank, 3, 1e12 + 1),
    }
    big = [mx.full((count,), ranks.rank + 1.0) for count in (3, 1, 4, 1, 5)]
    sums = []
    for module.BUCKET in (32 << 20, 16, 1):
        sums.append([v.tolist() for v in ranks.all_sum([*big, mx.array(2.0)])])
    output["sums"] = sums[0]
    assert sums[0] == sums[1] == sums[2]
    module.BUCKET = 32 << 20
    (folder / f"{ranks.rank}.json").write_text(json.dumps(output))


def test_collectives_across_ranks(two_processes):
    output = [result["collectives"] for result in two_processes]
    for result in output:
        assert result["spread"] == [bits(value) for value in VALUES]
        assert result["shared"] == FACTS
        assert result["totals"] == pytest.approx([1.2, 6, 2e12 + 2], rel=1e-12)
        assert result["sums"] == [[3.0] * count for count in (3, 1, 4, 1, 5)] + [4.0]

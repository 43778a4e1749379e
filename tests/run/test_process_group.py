"""Work that the processes of a run divide."""

import json
import sys

import mlx.core as mx
import pytest
from lmx.run.distributed import ProcessGroup
from processes import in_ring

PROGRAM = """
import json, time
import numpy as np
from lmx.errors import UserError
from lmx.run.distributed import alone, join

ranks = join()

def work(items):
    for item in items:
        yield item, np.float32(item) / 3, np.arange(item)

def refusal(value):
    try:
        ranks.require_same(value, "reads other data", hint="give it the same")
    except UserError as error:
        return error.message

ranks.wait_for_all()
start = time.process_time()
if ranks.is_first:
    time.sleep(2)
ranks.wait_for_all()
waited = time.process_time() - start
start = time.process_time()
slept = alone(ranks, lambda: time.sleep(1) or 7, is_worker=ranks.is_first)
seconds = time.process_time() - start
print(json.dumps([
    ranks.divide(range(5), work),
    ranks.gather_bytes(b"ab" * ranks.rank) == [b"", b"ab"],
    ranks.gather_objects({"rank": ranks.rank}),
    [refusal("same"), refusal(ranks.rank)],
    slept,
    seconds,
    waited,
]))
"""
ITEMS = [[n, pytest.approx(n / 3), [*range(n)]] for n in range(5)]


def test_ranks_divide_gather_compare_and_sleep_while_one_works(tmp_path):
    """A wait in a collective takes seconds of processor time where MLX polls."""
    processes = in_ring(PROGRAM, folder=tmp_path)
    assert [p.returncode for p in processes] == [0, 0], processes[0].stderr
    for rank, process in enumerate(processes):
        items, has_bytes, objects, refusals, *alone = json.loads(process.stdout)
        slept, seconds, waited = alone
        assert items == ITEMS
        assert has_bytes
        assert objects == [{"rank": 0}, {"rank": 1}]
        assert refusals == [None, "process 1 reads other data than the first one"]
        assert slept == (None if rank else 7)
        assert seconds < 0.5
        assert waited < 0.05 or sys.platform != "linux"


def test_sums_of_float64_keep_its_digits():
    with mx.stream(mx.cpu):
        value = mx.array([1, 1 + 2.0**-40], mx.float64)
        halves = [value, value.astype(mx.float32)]
        totals = [ProcessGroup(mx.distributed.init()).all_sum([h])[0] for h in halves]
    assert [mx.array_equal(t, value).item() for t in totals] == [True, False]

"""Work that the processes of a run divide, and errors that all of them see."""

import json

import pytest
from processes import in_ring

PROGRAM = """
import json, sys, time
import numpy as np
from lmx.run.distributed import join

ranks = join()

def work(items, case):
    for item in items:
        if case == "inner" and ranks.rank == 1:
            raise ValueError
        yield item, np.float32(item) / 3, np.arange(item)

def divided(case):
    with ranks.collective_errors():
        if case == "outer" and ranks.rank == 1:
            raise ValueError
        return ranks.divide(range(5), lambda items: work(items, case))

errors = {}
for case in ("no", "outer", "inner"):
    try:
        divided(case)
    except Exception as raised:
        errors[case] = type(raised).__name__
start = time.process_time()
alone = ranks.alone(lambda: time.sleep(1) or 7, is_worker=ranks.is_first)
seconds = time.process_time() - start
print(json.dumps([errors, divided("no"), ranks.gather_bytes(b"ab" * ranks.rank) ==
                  [b"", b"ab"], ranks.gather_objects({"rank": ranks.rank}), alone,
                  seconds]))
"""
ITEMS = [[n, pytest.approx(n / 3), [*range(n)]] for n in range(5)]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Of each rank: errors by case, then what it does after them."""
    processes = in_ring(PROGRAM, folder=tmp_path_factory.mktemp("ring"))
    assert [p.returncode for p in processes] == [0, 0], processes[0].stderr
    return [json.loads(process.stdout) for process in processes]


def test_ranks_gather_and_sleep_while_one_works(results):
    """A wait in a collective would take a second of processor time."""
    for rank, (*_, has_bytes, objects, alone, seconds) in enumerate(results):
        assert has_bytes
        assert objects == [{"rank": 0}, {"rank": 1}]
        assert alone == (None if rank else 7)
        assert seconds < 0.5


def test_all_ranks_see_an_error_and_go_on(results):
    """The error is in the work that ranks divide, or where others divide work."""
    for name, (errors, items, *_) in zip(
        ("RemoteError", "ValueError"), results, strict=True
    ):
        assert errors == {"outer": name, "inner": name}
        assert items == ITEMS

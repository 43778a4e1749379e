"""Work that the processes of a run divide, and errors that all of them see."""

import json

import pytest
from processes import in_ring

PROGRAM = """
import json, sys, time
import numpy as np
from lmx.run.distributed import join

ranks, case = join(), sys.argv[1]

def work(items):
    for item in items:
        if case == "inner" and ranks.rank == 1:
            raise ValueError
        yield item, np.float32(item) / 3, np.arange(item)

def divided():
    with ranks.collective_errors():
        if case == "outer" and ranks.rank == 1:
            raise ValueError
        return ranks.divide(range(5), work)

if case:
    error = None
    try:
        divided()
    except Exception as raised:
        error = type(raised).__name__
    case = ""
    print(json.dumps([error, divided()]))
else:
    start = time.process_time()
    alone = ranks.alone(lambda: time.sleep(1) or 7, is_worker=ranks.is_first)
    seconds = time.process_time() - start
    print(json.dumps([ranks.gather_bytes(b"ab" * ranks.rank) == [b"", b"ab"],
                      ranks.gather_objects({"rank": ranks.rank}), alone, seconds]))
"""
ITEMS = [[n, pytest.approx(n / 3), [*range(n)]] for n in range(5)]


def results(case, folder):
    processes = in_ring(PROGRAM, case, folder=folder)
    assert [p.returncode for p in processes] == [0, 0], processes[0].stderr
    return [json.loads(process.stdout) for process in processes]


def test_ranks_gather_and_sleep_while_one_works(tmp_path):
    """A wait in a collective would take a second of processor time."""
    for rank, (has_bytes, objects, alone, seconds) in enumerate(results("", tmp_path)):
        assert has_bytes
        assert objects == [{"rank": 0}, {"rank": 1}]
        assert alone == (None if rank else 7)
        assert seconds < 0.5


@pytest.mark.parametrize("case", ["no", "outer", "inner"])
def test_all_ranks_see_an_error_and_go_on(tmp_path, case):
    """The error is in the work that ranks divide, or where others divide work."""
    errors = {"no": (None, None)}.get(case, ("RemoteError", "ValueError"))
    for error, (raised, items) in zip(errors, results(case, tmp_path), strict=True):
        assert raised == error
        assert items == ITEMS

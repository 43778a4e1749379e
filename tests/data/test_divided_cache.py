"""Cache entries that processes create together, on one disk and on several."""

import json

import pytest
from lmx.files.hashes import hash_file
from processes import WRONG_SHARD, in_ring

PROGRAM = """
import json, os, sys
from lmx.run.distributed import join

case, folder = sys.argv[1:]
ranks = join()
os.environ["LMX_CACHE"] = folder + (str(ranks.rank) if case == "disks" else "")
from lmx.data import cache
from lmx.data.divided_cache import get_or_create_all

filled, told = [], {}

def fill(number, folder):
    filled.append(number)
    (folder / "in").mkdir()
    (folder / "in" / "row").write_bytes(bytes([number]) * number)
    return {"number": number}

def entries(keys, ranks):
    return get_or_create_all("kind", keys, fill, ranks=ranks, warning=print,
                             on_entry=lambda n, origin: told.setdefault(n, origin))

keys = [str(number) for number in range(7)]
if ranks.is_first:
    # Of an earlier run, on one disk.
    cache.get_or_create("kind", "1", lambda f: fill(1, f), warning=print)
ranks.wait_for_all()
filled.clear()
error = None
try:
    found = entries(keys[1:2] if case == "keys" and ranks.rank else keys, ranks)
    assert [entry.facts["number"] for entry in found] == list(range(7))
    with cache.locked_folder("kind", "locked", ranks) as locked:
        assert len({*ranks.gather_objects(str(locked))}) == (
            ranks.size if case == "disks" else 1
        )
except Exception as raised:
    error = f"{type(raised).__name__}: {raised}"
print(json.dumps([error, filled, told]))
"""


def run(case, folder, program="", count=2):
    processes = in_ring(
        program + PROGRAM, case, str(folder / "cache"), folder=folder, count=count
    )
    assert [p.returncode for p in processes] == [0] * count, processes[0].stderr
    return [json.loads(process.stdout.splitlines()[-1]) for process in processes]


def contents(cache):
    files = (p for p in cache.rglob("*") if p.is_file() and p.name != "lock")
    return {str(p.relative_to(cache)): hash_file(p) for p in files}


@pytest.mark.parametrize(
    ("case", "count"),
    [
        ("disks", 2),
        pytest.param("disk", 2, marks=pytest.mark.slow),
        pytest.param("disk", 3, marks=pytest.mark.slow),
        pytest.param("disks", 3, marks=pytest.mark.slow),
    ],
)
def test_each_entry_is_filled_once_and_reaches_every_disk(tmp_path, case, count):
    ranks = run(case, tmp_path, count=count)
    assert [error for error, _, _ in ranks] == [None] * count
    missing = [0, 2, 3, 4, 5, 6]
    assert [filled for _, filled, _ in ranks] == [
        missing[rank::count] for rank in range(count)
    ]
    origins = ranks[0][2]
    assert [n for n in origins if origins[n] == "found"] == ["1"]
    assert [int(n) for n in origins if origins[n] == "made"] == missing[::count]
    caches = [contents(path) for path in tmp_path.glob("cache*")]
    assert len(caches) == (count if case == "disks" else 1)
    assert len(caches[0]) == 2 * 7
    assert caches == [caches[0]] * len(caches)


@pytest.mark.parametrize(
    ("case", "program", "errors"),
    [
        pytest.param(
            "keys",
            "",
            ["UserError: process 1 prepares other data"] * 2,
            marks=pytest.mark.slow,
        ),
        # Negative control: no rank makes the entries of the second share.
        ("disk", WRONG_SHARD, ["ValueError: "] * 2),
    ],
)
def test_all_ranks_see_an_error(tmp_path, case, program, errors):
    ranks = run(case, tmp_path, program)
    for (error, _, _), expected in zip(ranks, errors, strict=True):
        assert error.startswith(expected)

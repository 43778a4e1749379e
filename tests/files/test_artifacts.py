"""Artifacts are whole or absent, made once, and made again after damage."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from folder_damages import DAMAGES
from lmx.errors import UserError
from lmx.files.artifacts import INDEX, ArtifactStore
from lmx.files.atomic import remove
from lmx.files.hashes import hash_file, key_of
from processes import WRONG_SHARD, in_ring

# Makes an artifact slowly. With "die", it kills itself before the artifact is whole.
WORKER = """
import os, sys, time
from pathlib import Path
from lmx.files.artifacts import INDEX, ArtifactStore

def make(folder):
    print("making", flush=True)
    (folder / "first").write_text("a")
    time.sleep(float(sys.argv[2]))
    if sys.argv[3] == "die":
        os.kill(os.getpid(), 9)
    (folder / "second").write_text("b")
    return {"by": os.getpid()}

artifact = ArtifactStore(Path(sys.argv[1]), print).get_or_make("kind", "key", make)
print(artifact.facts["by"], sorted(os.listdir(artifact.folder)))
"""


def start_worker(root, seconds, end="live"):
    command = [sys.executable, "-c", WORKER, str(root), str(seconds), end]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def make(folder):
    for name in ("first", "second"):
        (folder / name).write_bytes(name.encode() * 10)
    return {"pair": (1, 2)}


@pytest.fixture
def store(tmp_path):
    """With the list of its warnings."""
    warnings = []
    store = ArtifactStore(tmp_path / "store", warnings.append)
    store.warnings = warnings
    return store


def test_artifact_is_made_once(store):
    assert store.find("kind", "key") is None
    first = store.get_or_make("kind", "key", make)
    second = store.get_or_make("kind", "key", None)
    assert (first.made, second.made) == (True, False)
    assert first.folder == second.folder
    # A new artifact and a found one have the same facts.
    assert first.facts == second.facts == {"pair": [1, 2]}
    assert store.find("kind", "key") == store.find_on_first("kind", "key") == second
    assert store.get_or_make("kind", "other", make).made
    # One that makes no facts.
    assert store.get_or_make("other", "key", lambda _: None).facts == {}


def edit_index(change):
    def edit(folder):
        index = json.loads((folder / INDEX).read_text())
        (folder / INDEX).write_text(json.dumps(index | change))

    return edit


def write_index(value):
    return lambda folder: (folder / INDEX).write_text(json.dumps(value))


def rehash(folder):
    """JSON that is no index, with a right hash."""
    content = {"anything": 3}
    write_index(content | {"sha256": key_of(content)})(folder)


def be_another(folder):
    """An artifact of another key, copied here."""
    other = ArtifactStore(folder.parents[2], print).get_or_make("kind", "other", make)
    shutil.rmtree(folder)
    shutil.copytree(other.folder, folder)


MORE_DAMAGES = {
    "new file": lambda folder: (folder / "third").write_text("new"),
    "key": edit_index({"key": "kind other"}),
    "facts": edit_index({"facts": {"pair": [1, 3]}}),
    "files": edit_index({"files": {}}),
    "more": edit_index({"more": 1}),
    "rehash": rehash,
    "another": be_another,
} | {f"index {v}": write_index(v) for v in (None, 3, "a", [], {}, [[]], {"sha256": 3})}


@pytest.mark.parametrize("damage", [*DAMAGES, *MORE_DAMAGES])
def test_damaged_artifact_is_made_again_with_a_warning(store, damage):
    folder = store.get_or_make("kind", "key", make).folder
    (DAMAGES | MORE_DAMAGES)[damage](folder)
    assert store.find("kind", "key") is None
    again = store.get_or_make("kind", "key", make)
    assert again.made
    assert again.facts == {"pair": [1, 2]}
    assert store.warnings == [f"{folder}: damaged, made again"]
    assert (folder / "first").read_text() == "first" * 10
    assert not folder.is_symlink()
    assert store.find("kind", "key")


def test_moved_store_keeps_its_artifacts(store, tmp_path):
    made = store.get_or_make("kind", "key", make)
    shutil.move(store.root, tmp_path / "moved")
    moved = ArtifactStore(tmp_path / "moved", print).find("kind", "key")
    assert moved.facts == made.facts


@pytest.mark.parametrize("place", ["content", "lock", ".", ".."])
@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_other_things_in_place_of_an_artifact_are_replaced(
    store, tmp_path, place, kind
):
    entry = store.get_or_make("kind", "key", make).folder.parent
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine").write_text("mine")
    path = Path(os.path.normpath(entry / place))
    remove(path)
    if kind == "file":
        path.write_text("file")
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(other)
    again = store.get_or_make("kind", "key", make)
    assert (again.folder / "first").read_text() == "first" * 10
    assert [p.name for p in other.iterdir()] == ["mine"]


def test_failed_make_leaves_no_artifact(store):
    def fail(folder):
        make(folder)
        raise UserError("bad row")

    with pytest.raises(UserError, match="bad row"):
        store.get_or_make("kind", "key", fail)
    assert [p.name for p in store.root.rglob("*") if p.is_file()] == ["lock"]
    assert store.get_or_make("kind", "key", make).made
    # An older artifact stays.
    with pytest.raises(UserError, match="bad row"):
        store.put("kind", "key", fail)
    assert store.find("kind", "key").facts == {"pair": [1, 2]}


def test_killed_process_leaves_no_artifact(store):
    killed = start_worker(store.root, 0, "die")
    assert killed.wait(30) == -signal.SIGKILL
    killed.stdout.close()
    assert [*store.root.rglob("first")]
    assert store.get_or_make("kind", "key", lambda _: None).made
    assert store.warnings == []
    assert not [*store.root.rglob("first")]


def test_two_processes_make_one_artifact(store):
    processes = [start_worker(store.root, 1.0), start_worker(store.root, 1.0)]
    lines = [p.communicate(timeout=30)[0].splitlines() for p in processes]
    assert sorted(map(len, lines)) == [1, 2]
    assert lines[0][-1] == lines[1][-1]
    assert lines[0][-1].endswith("['first', 'index.json', 'second']")


def test_put_replaces_and_remove_others_deletes(store):
    store.put("kind", "a", lambda _: {"number": 1})
    store.put("kind", "a", lambda _: {"number": 2})
    assert store.find("kind", "a").facts == {"number": 2}
    store.put("kind", "b", make)
    store.put("other", "b", make)
    store.remove_others("kind", ["a"])
    assert store.find("kind", "a")
    assert not (store.root / "kind/b").exists()
    assert store.find("other", "b")
    store.remove_others("kind")
    store.remove_others("none")
    assert not [*store.root.rglob("kind/*")]


def test_all_artifacts_are_made_in_order_and_once_per_key(store):
    store.put("kind", "b", lambda _: {"number": 1})
    reported = []
    artifacts = store.get_or_make_all(
        "kind",
        ["a", "b", "c", "a"],
        lambda number, _: {"number": number},
        on_entry=lambda *entry: reported.append(entry),
    )
    assert [artifact.facts["number"] for artifact in artifacts] == [0, 1, 2, 0]
    assert reported == [(1, "found"), (0, "made"), (2, "made"), (3, "found")]
    with pytest.raises(UserError, match="this needs 100,000,000,000 MB"):
        store.get_or_make_all(
            "kind",
            ["a", "d"],
            lambda number, _: pytest.fail("is made"),
            space=lambda number: number * 10**17,
        )


PROGRAM = """
import json, sys
from pathlib import Path
from lmx.files.artifacts import INDEX, ArtifactStore
from lmx.run.distributed import join

case, folder = sys.argv[1:]
ranks = join()
root = Path(folder + (str(ranks.rank) if case == "disks" else ""))
store = ArtifactStore(root, print, ranks)
made, reported = [], {}

def make(number, folder):
    made.append(number)
    (folder / "in").mkdir()
    (folder / "in" / "row").write_bytes(bytes([number]) * number)
    return {"number": number}

keys = [str(number) for number in range(7)]
if ranks.is_first:
    # Of an earlier run, on one disk.
    store.put("kind", "1", lambda folder: make(1, folder))
ranks.wait_for_all()
made.clear()
error = None
try:
    found = store.get_or_make_all(
        "kind",
        keys[1:2] if case == "keys" and ranks.rank else keys,
        make,
        on_entry=lambda n, origin: reported.setdefault(n, origin),
    )
    assert [artifact.facts["number"] for artifact in found] == list(range(7))
    assert store.find_on_first("kind", "7") is None
    if ranks.is_first:
        store.put("first", "a", lambda _: {"rank": 0})
    assert store.find_on_first("first", "a").facts == {"rank": 0}
    if case == "disk":
        with store.together("common", "a") as common:
            assert store.find("common", "a") is None
            (common / f"of-{ranks.rank}").write_text("text")
        assert sorted(p.name for p in store.find("common", "a").folder.iterdir()) == [
            "index.json", *(f"of-{rank}" for rank in range(ranks.size))
        ]
except Exception as raised:
    error = f"{type(raised).__name__}: {raised}"
print(json.dumps([error, made, reported]))
"""


def run(case, folder, program="", count=2):
    processes = in_ring(
        program + PROGRAM, case, str(folder / "store"), folder=folder, count=count
    )
    assert [p.returncode for p in processes] == [0] * count, processes[0].stderr
    return [json.loads(process.stdout.splitlines()[-1]) for process in processes]


def contents(place):
    files = (p for p in (place / "kind").rglob("*") if p.is_file() and p.name != "lock")
    return {str(p.relative_to(place)): hash_file(p) for p in files}


@pytest.mark.parametrize(
    ("case", "count"),
    [
        ("disks", 2),
        ("disk", 2),
        pytest.param("disk", 3, marks=pytest.mark.slow),
        pytest.param("disks", 3, marks=pytest.mark.slow),
    ],
)
def test_each_artifact_is_made_once_and_reaches_every_disk(tmp_path, case, count):
    ranks = run(case, tmp_path, count=count)
    assert [error for error, _, _ in ranks] == [None] * count
    missing = [0, 2, 3, 4, 5, 6]
    assert [made for _, made, _ in ranks] == [
        missing[rank::count] for rank in range(count)
    ]
    origins = ranks[0][2]
    assert [n for n in origins if origins[n] == "found"] == ["1"]
    assert [int(n) for n in origins if origins[n] == "made"] == missing[::count]
    stores = [contents(path) for path in tmp_path.glob("store*")]
    assert len(stores) == (count if case == "disks" else 1)
    assert len(stores[0]) == 2 * 7
    assert stores == [stores[0]] * len(stores)


@pytest.mark.parametrize(
    ("case", "program", "errors"),
    [
        pytest.param(
            "keys",
            "",
            ["UserError: process 1 prepares other data"] * 2,
            marks=pytest.mark.slow,
        ),
        # Negative control: no rank makes the artifacts of the second share.
        ("disk", WRONG_SHARD, ["ValueError: "] * 2),
    ],
)
def test_all_ranks_see_an_error(tmp_path, case, program, errors):
    ranks = run(case, tmp_path, program)
    for (error, _, _), expected in zip(ranks, errors, strict=True):
        assert error.startswith(expected)

"""Cache entries are complete, created once, and created again after damage."""

import ast
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from lmx.data import cache, fingerprint
from lmx.errors import UserError
from lmx.files.atomic import remove
from lmx.files.hashes import INDEX

# Fills an entry slowly. With "die", it kills itself before the entry is complete.
WORKER = """
import os, sys, time
from lmx.data import cache

def fill(folder):
    print("filling", flush=True)
    (folder / "first").write_text("a")
    time.sleep(float(sys.argv[1]))
    if sys.argv[2] == "die":
        os.kill(os.getpid(), 9)
    (folder / "second").write_text("b")
    return {"by": os.getpid()}

entry = cache.get_or_create("test", "key", fill, warning=print)
print(entry.facts["by"], sorted(os.listdir(entry.folder)))
"""


def start_worker(seconds, end="live"):
    command = [sys.executable, "-c", WORKER, str(seconds), end]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def fill(folder):
    (folder / "rows").write_text("content")
    return {"pair": (1, 2)}


def test_root_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("LMX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.root() == tmp_path / "lmx"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.root().parts[-2:] == (".cache", "lmx")
    monkeypatch.setenv("LMX_CACHE", "~/other")
    assert cache.root().name == "other"
    assert cache.root().is_absolute()
    # As in a container whose user has no entry in /etc/passwd.
    monkeypatch.delenv("LMX_CACHE")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(UserError, match="no home folder") as caught:
        cache.root()
    assert "LMX_CACHE" in caught.value.hint


def test_entry_is_created_once(cache_folder):
    assert cache.size() == 0
    first = cache.get_or_create("test", "key", fill, warning=print)
    second = cache.get_or_create("test", "key", None, warning=print)
    assert (first.made, second.made) == (True, False)
    assert first.folder == second.folder
    # A new entry and a cached entry have the same facts.
    assert first.facts == second.facts == {"pair": [1, 2]}
    assert cache.size() > len("content")
    assert cache.get_or_create("test", "other", fill, warning=print).made


INDEXES = ['{"sha256"', "[1, 2]", "{}", '{"facts": {"pair": [3, 4]}}', "null"]


@pytest.mark.parametrize(
    "damage", ["shorten", "change", "remove", "folder", "facts", *INDEXES]
)
def test_damaged_entry_is_created_again_with_a_warning(cache_folder, damage):
    folder = cache.get_or_create("test", "key", fill, warning=print).folder
    if damage == "shorten":
        (folder / "rows").write_text("cont")
    elif damage == "change":
        (folder / "rows").write_text("CONTENT")
    elif damage == "remove":
        (folder / "rows").unlink()
    elif damage == "facts":
        # The hash of an index covers all of it.
        index = folder / INDEX
        index.write_text(index.read_text().replace("[1, 2]", "[1, 3]"))
    elif damage == "folder":
        (folder / INDEX).unlink()
        (folder / INDEX).mkdir()
    else:
        (folder / INDEX).write_text(damage)
    messages = []
    again = cache.get_or_create("test", "key", fill, warning=messages.append)
    assert again.made
    assert again.facts == {"pair": [1, 2]}
    assert messages == [f"{folder}: damaged, created again"]
    assert (folder / "rows").read_text() == "content"


def test_failed_fill_leaves_no_entry(cache_folder):
    def fail(folder):
        fill(folder)
        raise UserError("bad row")

    with pytest.raises(UserError, match="bad row"):
        cache.get_or_create("test", "key", fail, warning=print)
    assert [p.name for p in cache_folder.rglob("*") if p.is_file()] == ["lock"]
    assert cache.get_or_create("test", "key", fill, warning=print).made


def test_killed_process_leaves_no_entry(cache_folder):
    killed = start_worker(0, "die")
    assert killed.wait(30) == -9
    killed.stdout.close()
    assert [*cache_folder.rglob("first")]
    entry = cache.get_or_create("test", "key", fill, warning=pytest.fail)
    assert entry.made
    assert not [*cache_folder.rglob("first")]


def test_two_processes_create_one_entry(cache_folder):
    processes = [start_worker(1.0), start_worker(1.0)]
    lines = [p.communicate(timeout=30)[0].splitlines() for p in processes]
    assert sorted(map(len, lines)) == [1, 2]
    assert lines[0][-1] == lines[1][-1]
    assert lines[0][-1].endswith("['first', 'index.json', 'second']")


@pytest.mark.parametrize(
    "home",
    [
        "/dev/null",
        pytest.param(
            "/proc/none",
            marks=pytest.mark.skipif(sys.platform != "linux", reason="has no /proc"),
        ),
    ],
)
def test_unwritable_home_is_refused(monkeypatch, tmp_path, home):
    monkeypatch.delenv("LMX_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", home)
    monkeypatch.setattr(cache, "MIN_NOTED_BYTES", 1)
    file = tmp_path / "rows.jsonl"
    file.write_text("row")
    os.utime(file, (1e9, 1e9))
    with pytest.raises(UserError, match="cannot write") as caught:
        cache.get_or_create("test", "key", fill, warning=print)
    assert caught.value.hint == "set LMX_CACHE to another folder"
    assert home in caught.value.place
    assert caught.value.code == 1
    # A hash without a note is right.
    monkeypatch.setattr(cache, "SETTLED", 0)
    assert cache.file_hash(file) == cache.hash_file(file)


def test_unwritable_cache_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LMX_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="cannot write") as error:
        cache.get_or_create("test", "key", fill, warning=print)
    assert "LMX_CACHE" in error.value.hint


def test_missing_disk_space_is_refused(cache_folder):
    with pytest.raises(UserError, match="this needs") as error:
        cache.get_or_create("test", "key", fill, warning=print, space=10**18)
    expected = "free some space, or set LMX_CACHE to another folder"
    assert error.value.hint == expected


def test_file_hash_is_cached_until_the_file_changes(
    cache_folder, tmp_path, monkeypatch
):
    """Size and times identify a version, unless they are too recent to be safe."""
    monkeypatch.setattr(cache, "MIN_NOTED_BYTES", 5)
    now = time.time_ns()
    hashed = []
    hash_file = cache.hash_file
    monkeypatch.setattr(
        cache, "hash_file", lambda path: hashed.append(path) or hash_file(path)
    )
    path = tmp_path / "rows.jsonl"
    path.write_text("first")
    first_hash = cache.file_hash(path)
    assert cache.file_hash(path) == first_hash == hash_file(path)
    assert len(hashed) == 2
    monkeypatch.setattr(cache.time, "time_ns", lambda: now + 3600 * 10**9)
    assert cache.file_hash(path) == cache.file_hash(path) == first_hash
    assert len(hashed) == 3
    # As from an archive: the same size and mtime.
    before = path.stat()
    path.write_text("other")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert cache.file_hash(path) == hash_file(path) != first_hash


def test_small_files_have_no_notes(cache_folder, tmp_path):
    """A dataset of 3,000 files took 40 s: notes reach the disk one by one."""
    for number in range(5):
        path = tmp_path / f"{number}.jsonl"
        path.write_text("row")
        os.utime(path, (1, 1))
        assert cache.file_hash(path) == cache.hash_file(path)
    assert not (cache.root() / "hashes").exists()


def test_tokenizer_fingerprint_changes_with_its_files(tokenizer_folder, tmp_path):
    before = fingerprint.tokenizer(tokenizer_folder)
    for name, old in (
        ("tokenizer.json", '"Ġthe"'),
        ("tokenizer_config.json", "im_start"),
        ("generation_config.json", "2"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        for file in tokenizer_folder.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        assert fingerprint.tokenizer(folder) == before
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, "7"))
        assert fingerprint.tokenizer(folder) != before
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert "chat_template.jinja" in str(fingerprint.tokenizer(folder))
    (folder / "model.safetensors.index.json").write_text("{}")
    assert "safetensors" not in str(fingerprint.tokenizer(folder))


def test_message_shows_a_part_of_a_long_path(monkeypatch):
    monkeypatch.setenv("LMX_CACHE", f"/tmp/{'x' * 5000}")
    with pytest.raises(UserError) as error:
        cache.get_or_create("tokens", cache.key_of([1]), dict, warning=print)
    assert "LMX_CACHE" in str(error.value)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("note", ["[]", "{}", "3", '{"stamp": 3}', "{", b"\xff", None])
def test_damaged_note_of_a_hash_is_written_again(
    cache_folder, tmp_path, note, monkeypatch
):
    monkeypatch.setattr(cache, "MIN_NOTED_BYTES", 7)
    monkeypatch.setattr(cache, "SETTLED", 0)
    file = tmp_path / "weights"
    file.write_text("content")
    os.utime(file, (1, 1))
    digest = cache.file_hash(file)
    [path] = (cache.root() / "hashes").iterdir()
    before = path.read_bytes()
    path.unlink()
    if note is None:
        path.mkdir()
    else:
        path.write_bytes(note if isinstance(note, bytes) else note.encode())
    assert cache.file_hash(file) == digest
    assert path.read_bytes() == before


@pytest.mark.parametrize("place", ["content", "lock", ".", ".."])
@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_other_entries_in_place_of_the_cache_are_replaced(
    cache_folder, tmp_path, place, kind
):
    entry = cache.get_or_create("test", "key", fill, warning=print).folder.parent
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
    again = cache.get_or_create("test", "key", fill, warning=print)
    assert (again.folder / "rows").read_text() == "content"
    assert [p.name for p in other.iterdir()] == ["mine"]


def test_code_covers_every_module_that_decides_on_tokens():
    """Else a new release would train on the tokens of an older one."""
    folder, waiting = Path(fingerprint.__file__).parent, ["token_store", "preference"]
    waiting, reached = [*waiting, "splits"], set()
    while waiting:
        name = waiting.pop()
        if name in reached:
            continue
        reached.add(name)
        file = folder / f"{name}.py"
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level == 1:
                names = [node.module] if node.module else [a.name for a in node.names]
                package = "chat/" if file.parent.name == "chat" else ""
                waiting += [package + name.replace(".", "/") for name in names]
    # They store tokens, or name the files of a tokenizer, which have their own hashes.
    assert reached - {"cache", "fingerprint", "tokenizer_files"} == {*fingerprint.CODE}

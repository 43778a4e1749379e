"""The place of the cache, errors of its disk, and hashes of files in it."""

import ast
import os
import sys
import time
from pathlib import Path

import pytest
from lmx.data import cache, fingerprint
from lmx.errors import UserError


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


def test_size_is_that_of_the_artifacts(cache_folder):
    assert cache.size() == 0
    cache.store(print).get_or_make("test", "key", fill)
    assert cache.size() > len("content")


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
        cache.store(print).get_or_make("test", "key", fill)
    assert caught.value.hint == "set LMX_CACHE to another folder"
    assert home in caught.value.place
    assert caught.value.code == 1
    # A hash without a note is right.
    monkeypatch.setattr(cache, "SETTLED", 0)
    assert cache.file_hash(file) == cache.hash_file(file)


def test_missing_disk_space_is_refused(cache_folder):
    with pytest.raises(UserError, match="this needs") as error:
        cache.store(print).get_or_make("test", "key", fill, space=10**18)
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
    [path] = (cache.root() / "hashes").glob("*/content/index.json")
    before = path.read_bytes()
    path.unlink()
    if note is None:
        path.mkdir()
    else:
        path.write_bytes(note if isinstance(note, bytes) else note.encode())
    assert cache.file_hash(file) == digest
    assert path.read_bytes() == before


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

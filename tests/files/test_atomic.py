"""Files and folders are complete or absent, whatever interrupts the write."""

import errno
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys

import pytest
from lmx.errors import UserError
from lmx.files.atomic import (
    LOCK,
    MANIFEST,
    MIN_LINKED_BYTES,
    atomic_folder,
    copy_file,
    copy_folder,
    disk_errors,
    remove,
    remove_partial_files,
    require_space,
    write_atomic,
)
from lmx.files.hashes import hash_folder


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def test_write_atomic_writes_and_replaces_text_and_bytes(tmp_path):
    path = tmp_path / "new" / "a.txt"
    for content, written in (("Grüße\n", "Grüße\n".encode()), (b"\0\1", b"\0\1")):
        write_atomic(path, content)
        assert path.read_bytes() == written
    assert names(path.parent) == ["a.txt"]
    with pytest.raises(UserError, match="file"):
        write_atomic(path / "b.txt", "")


def test_atomic_writes_keep_default_permissions(tmp_path):
    before = os.umask(0o027)
    try:
        write_atomic(tmp_path / "file", "")
        with atomic_folder(tmp_path / "folder"):
            pass
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "folder").stat().st_mode & 0o777 == 0o750


@pytest.mark.parametrize(
    ("number", "words", "hint"),
    [
        (errno.ENOSPC, "no space left", "free some space, or use another folder"),
        (errno.EROFS, "read-only", "use another folder"),
        (errno.EACCES, "no write permission", "use another folder"),
    ],
)
def test_write_atomic_keeps_the_old_file_on_disk_errors(
    tmp_path, monkeypatch, number, words, hint
):
    path = tmp_path / "a.txt"
    write_atomic(path, "old")

    def refuse(_):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        with pytest.raises(UserError, match=words) as caught:
            write_atomic(path, "new")
    assert caught.value.code == 1
    assert caught.value.place == str(path)
    assert caught.value.hint.startswith(hint)
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("refused", [False, True])
def test_the_drive_of_a_mac_writes_before_a_file_is_renamed(
    tmp_path, monkeypatch, refused
):
    """`fsync` leaves the data in the memory of the drive there."""
    synced, full = [], 51

    def fcntl_call(handle, operation):
        assert operation == full
        if refused:
            raise OSError(errno.ENOTSUP, "a network disk")
        synced.append(os.fstat(handle).st_ino)

    monkeypatch.setattr(fcntl, "F_FULLFSYNC", full, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", fcntl_call)
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(-handle))
    write_atomic(tmp_path / "a", "x")
    with atomic_folder(tmp_path / "folder") as folder:
        (folder / "b").write_text("y")
        (folder / "c").write_text("z")
    file, new, parent = (
        path.stat().st_ino for path in (tmp_path / "a", tmp_path / "folder", tmp_path)
    )
    # The files of a folder reach the drive, which then writes all at once.
    kinds = [number if number > 0 else "fsync" for number in synced]
    expected = [file, parent, "fsync", "fsync", new, parent]
    assert kinds == ["fsync"] * 6 if refused else expected


def test_disk_errors_passes_other_exceptions(tmp_path):
    with pytest.raises(BlockingIOError), atomic_folder(tmp_path / "a"):
        raise BlockingIOError(errno.EAGAIN, "busy")
    missing = pytest.raises(UserError, match="does not exist, or was deleted")
    with missing, atomic_folder(tmp_path / "a"):
        (tmp_path / "nowhere" / "x").write_text("")
    with pytest.raises(RuntimeError, match="shape"), disk_errors(tmp_path):
        raise RuntimeError("[matmul] shape")
    assert names(tmp_path) == []


def test_write_atomic_reports_a_full_disk(tmp_path):
    """A file size limit replaces a full disk: both fail in a write."""
    program = """
import resource, signal, sys
from pathlib import Path
import mlx.core as mx
from lmx.errors import UserError
from lmx.files.atomic import atomic_folder, write_atomic

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
root = Path(sys.argv[1])

def tensors():
    with atomic_folder(root / "folder") as partial:
        mx.save_safetensors(str(partial / "a.safetensors"), {"a": mx.zeros(10_000)})

def text():
    write_atomic(root / "file", "x" * 10_000)

for work in (tensors, text):
    try:
        work()
    except UserError as error:
        print(error.code, error)
write_atomic(root / "small", "x")
"""
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("cannot write") == 2
    assert f"1 {tmp_path}/folder: " in done.stdout
    assert names(tmp_path) == ["small"]


def test_atomic_folder_is_complete_or_unchanged(tmp_path):
    target = tmp_path / "model"
    with atomic_folder(target) as partial:
        (partial / "inner").mkdir()
        (partial / "inner" / "a").write_text("1")
        assert not target.exists()
    with pytest.raises(ZeroDivisionError), atomic_folder(target) as partial:
        (partial / "b").write_text(str(1 / 0))
    assert (target / "inner" / "a").read_text() == "1"
    with atomic_folder(target) as partial:
        (partial / "b").write_text("2")
        assert (target / "inner" / "a").exists()
    assert names(target) == ["b"]
    assert names(tmp_path) == ["model"]


LARGE = b"x" * MIN_LINKED_BYTES


@pytest.fixture
def run_dir(tmp_path):
    """A run directory with a stage's model of a large and a small file."""
    run_dir = tmp_path / "run"
    stage = run_dir / "stages" / "1-train" / "model"
    stage.mkdir(parents=True)
    (run_dir / MANIFEST).write_text("{}")
    (run_dir / LOCK).write_text("")
    (stage / "large").write_bytes(LARGE)
    (stage / "small").write_bytes(b"{}")
    return run_dir


def inodes(folder):
    return {path.name: path.stat().st_ino for path in folder.iterdir()}


def test_large_files_of_one_run_directory_are_links(run_dir, tmp_path):
    stage, target = run_dir / "stages/1-train/model", run_dir / "model"
    with atomic_folder(target) as partial:
        copy_folder(stage, partial)
    assert inodes(target)["large"] == inodes(stage)["large"]
    # An editor may write to it in place.
    assert inodes(target)["small"] != inodes(stage)["small"]
    assert hash_folder(target) == hash_folder(stage)
    # The user's own models are elsewhere.
    (tmp_path / "other").mkdir()
    copy_folder(stage, tmp_path / "other")
    copy_file(tmp_path / "other" / "large", stage / "foreign")
    assert (tmp_path / "other" / "large").stat().st_nlink == 1
    assert (stage / "foreign").stat().st_nlink == 1


def test_change_of_a_link_keeps_the_other_file(run_dir):
    stage, target = run_dir / "stages/1-train/model", run_dir / "model"
    target.mkdir()
    changes = (
        lambda path: write_atomic(path, b"other"),
        lambda path: copy_file(stage / "small", path),
        lambda path: remove(path.parent),
    )
    for change in changes:
        copy_file(stage / "large", target / "large")
        assert (stage / "large").stat().st_nlink == 2
        change(target / "large")
        assert (stage / "large").read_bytes() == LARGE
        assert (stage / "large").stat().st_nlink == 1


def test_files_are_copied_where_links_are_impossible(run_dir, monkeypatch):
    stage = run_dir / "stages/1-train/model"

    def refuse(*_):
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    copy_file(stage / "large", run_dir / "large")
    assert (run_dir / "large").read_bytes() == LARGE
    assert (stage / "large").stat().st_nlink == 1


def test_disk_error_of_a_copy_is_one_error(run_dir, monkeypatch):
    """An export to a full disk ended in a traceback."""
    stage, target = run_dir / "stages/1-train/model", run_dir / "model"
    (stage / "inner").mkdir()
    (stage / "inner/file").write_text("text")

    def refuse(*_):
        raise OSError(errno.ENOSPC, "no space")

    def copy():
        with atomic_folder(target) as partial:
            copy_folder(stage, partial)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", refuse)
        with pytest.raises(UserError, match="no space left on the disk"):
            copy()
    assert not target.exists()
    copy()
    assert hash_folder(target) == hash_folder(stage)


def test_remove_partial_files_after_killed_writers(tmp_path):
    program = """
import os, sys
from pathlib import Path
from lmx.files.atomic import atomic_folder
with atomic_folder(Path(sys.argv[1]) / "model") as partial:
    (partial / "a").write_text("1")
    os._exit(9)
"""
    (tmp_path / "kept.partial.txt").write_text("")
    subprocess.run([sys.executable, "-c", program, tmp_path], check=False)
    assert len(names(tmp_path)) == 2
    remove_partial_files(tmp_path)
    assert names(tmp_path) == ["kept.partial.txt"]


def test_hash_folder_is_sha256_by_relative_name(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c").write_bytes(b"two")
    (tmp_path / "a").write_bytes(b"one")
    assert hash_folder(tmp_path) == {
        "a": hashlib.sha256(b"one").hexdigest(),
        "b/c": hashlib.sha256(b"two").hexdigest(),
    }


def test_require_space_raises_if_the_disk_is_too_small(tmp_path):
    there = tmp_path / "not" / "yet"
    require_space(there, 1)
    assert not there.exists()
    with pytest.raises(UserError, match="are free") as caught:
        require_space(there, 1 << 60)
    assert caught.value.code == 1

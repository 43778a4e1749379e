"""The run directory: one owner at a time, a manifest, completed stages."""

import fcntl
import json
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from ..errors import UserError
from . import manifest
from .fs import (
    LOCK,
    MANIFEST,
    disk_errors,
    hash_file,
    hash_folder,
    remove_partial_files,
    write_atomic,
)
from .html.page import write_page

RECIPE, RESOLVED = "recipe.yaml", "resolved.yaml"
LOCK_ATTEMPTS = 10


class RunDir:
    """An open run directory, locked until it is closed. Use `open` to make one.

    Attributes:
        path: the folder.
        crash_note: where the previous run crashed or was killed; None = it did not.
    """

    def __init__(self, path: Path, lock: int, content: dict, crash_note: str | None):
        self.path = path
        self.crash_note = crash_note
        self._lock = lock
        self._manifest = content

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        name: str,
        command: str,
        recipe_text: str,
        resolved: str,
        recipe_hash: str,
        difference: Callable[[str, str], str],
        restart: bool = False,
    ) -> "RunDir":
        """Create or reopen a run directory.

        Args:
            command: the command line of the user.
            difference: a readable diff of two resolved recipes.
            restart: rename an earlier run to `<path>.old-N` and start over.

        Raises:
            UserError: another process uses the folder, it has the run of another
                recipe or other files, or the disk reports an error.
        """
        if restart:
            _move_aside(path)
        with disk_errors(path), ExitStack() as undo:
            lock = _lock(path)
            undo.callback(os.close, lock)
            old = manifest.read(path)
            if old is None:
                _refuse_foreign(path)
            elif old["recipe_hash"] != recipe_hash:
                _refuse_changed(path, resolved, difference)
            remove_partial_files(path)
            new = manifest.new(name, command, recipe_hash, old["stages"] if old else {})
            folder = cls(path, lock, new, manifest.crash_note(path, old))
            write_atomic(path / RECIPE, recipe_text)
            write_atomic(path / RESOLVED, resolved)
            folder.set_status("running")
            undo.pop_all()
        return folder

    def __enter__(self) -> "RunDir":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_) -> None:
        if kind and self._manifest["status"] == "running":
            # Report the error that ended the run, not a full disk.
            with suppress(UserError):
                self.set_status("failed")
        os.close(self._lock)

    def set_status(self, status: str) -> None:
        """Record running, done, failed or interrupted, also in report.html."""
        self._manifest["status"] = status
        self._manifest["ended"] = None if status == "running" else manifest.now()
        self._save()
        self._write_page()

    def stage_folder(self, stage: str) -> Path:
        """The folder of a stage, created if necessary."""
        folder = self.path / "stages" / stage
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        return folder

    def start_stage(self, stage: str) -> None:
        """Record the current stage, for the crash note of the next run."""
        self._manifest["current_stage"] = stage
        self._save()

    def complete_stage(self, stage: str, facts: dict, artifacts: list[Path]) -> None:
        """Record a stage as complete, with the hashes of its artifacts.

        Args:
            facts: the result of `completed_stage`, valid as JSON.
            artifacts: folders in the run directory, not empty.
        """
        hashes = {str(p.relative_to(self.path)): hash_folder(p) for p in artifacts}
        assert all(hashes.values()), f"stage {stage} has an empty artifact"
        self._manifest["stages"][stage] = {"facts": facts, "artifacts": hashes}
        self._save()
        self._write_page()

    def completed_stage(
        self, stage: str, warning: Callable[[str], None]
    ) -> dict | None:
        """The facts of a complete stage; None if an artifact is missing or changed."""
        record = self._manifest["stages"].get(stage)
        if record is None:
            return None
        for artifact, hashes in record["artifacts"].items():
            if not _is_unchanged(self.path / artifact, hashes):
                warning(f"{artifact} is damaged or missing: stage {stage} runs again")
                return None
        return record["facts"]

    def discard_stages(self, stages: list[str]) -> None:
        """Delete the records and folders of stages whose input will change."""
        for stage in stages:
            self._manifest["stages"].pop(stage, None)
            shutil.rmtree(self.path / "stages" / stage, ignore_errors=True)
        self._save()

    def _write_page(self) -> None:
        # An error here must not end the run: `lmx report` can write the page again.
        with suppress(UserError):
            write_page(self.path)

    def _save(self) -> None:
        text = json.dumps(self._manifest, indent=2) + "\n"
        write_atomic(self.path / MANIFEST, text)


def _lock(path: Path) -> int:
    """Lock a folder, created if necessary; returns the open file.

    Another process may move or replace the folder before the lock is taken. The lock
    then belongs to another folder, and is taken again.
    """
    for _ in range(LOCK_ATTEMPTS):
        with suppress(FileNotFoundError):
            path.mkdir(parents=True, exist_ok=True)
            handle = _lock_file(path)
            if _is_open_at(handle, path / LOCK):
                os.ftruncate(handle, 0)
                os.write(handle, str(os.getpid()).encode())
                return handle
            os.close(handle)
    raise UserError("other programs move or delete this folder", place=str(path))


def _lock_file(path: Path) -> int:
    handle = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        owner = os.read(handle, 32).decode(errors="replace").strip() or "unknown"
        os.close(handle)
        raise UserError(
            f"another process uses this folder (process {owner})",
            place=str(path),
            hint="wait until it ends, or use another folder with output=...",
        ) from error
    return handle


def _is_open_at(handle: int, path: Path) -> bool:
    """Whether a path leads to an open file."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(handle), os.stat(path))
    return False


def _refuse_foreign(path: Path) -> None:
    # Hidden files are the lock, or belong to a file browser or a synchronizer.
    names = (p.name for p in path.iterdir() if not p.name.startswith("."))
    unknown = sorted(set(names) - {RECIPE, RESOLVED})
    if unknown:
        (path / LOCK).unlink()
        raise UserError(
            f"not a run directory of lmx: it has {', '.join(unknown[:3])}",
            place=str(path),
            hint="use an empty or new folder with output=...",
        )


def _refuse_changed(
    path: Path, resolved: str, difference: Callable[[str, str], str]
) -> None:
    before = (path / RESOLVED).read_text()
    lines = difference(before, resolved).replace("\n", "\n    ")
    raise UserError(
        f"this folder has the run of another recipe:\n    {lines}",
        place=str(path),
        hint=f"use --restart to start over (the old run moves to {_aside(path).name}), "
        "or output=... for another folder",
    )


def _move_aside(path: Path) -> None:
    """Rename the folder of an earlier run, if there is one, even an unreadable one."""
    with suppress(UserError):
        if manifest.read(path) is None:
            return
    with disk_errors(path):
        lock = _lock(path)
        if (path / MANIFEST).exists():
            os.rename(path, _aside(path))
        os.close(lock)


def _aside(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.name}.old-{number}")).exists():
        number += 1
    return aside


def _is_unchanged(path: Path, hashes: dict[str, str]) -> bool:
    return all(
        (path / name).is_file() and hash_file(path / name) == digest
        for name, digest in hashes.items()
    )


class NullRunDir:
    """No-op run directory for ranks other than 0."""

    crash_note = None

    def __init__(self, path: Path):
        self.path = path

    def __enter__(self) -> "NullRunDir":
        return self

    def __exit__(self, *_) -> None:
        pass

    def stage_folder(self, stage: str) -> Path:
        """The folder of a stage; it may exist only on another machine."""
        return self.path / "stages" / stage

    def completed_stage(self, stage: str, warning) -> None:
        """Rank 0 alone reads the manifest."""

    def set_status(self, status: str) -> None:
        """Rank 0 alone writes the manifest."""

    start_stage = set_status

    def complete_stage(self, stage: str, facts: dict, artifacts: list[Path]) -> None:
        """Rank 0 alone writes the manifest."""

    def discard_stages(self, stages: list[str]) -> None:
        """Rank 0 alone writes the manifest."""

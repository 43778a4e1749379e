"""The run folder: one owner at a time, a manifest, stages that are done or not."""

import fcntl
import json
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from ..errors import UserError
from . import manifest
from .fs import explained, hash_file, hash_folder, sweep, write_atomic
from .html.page import write_page

RECIPE, RESOLVED = "recipe.yaml", "resolved.yaml"


class RunDir:
    """An open run folder, locked until closed. Made by `open`.

    Attributes:
        path: the folder.
        died: what is known of a last run that ended without a goodbye, or None.
    """

    def __init__(self, path: Path, lock: int, facts: dict, died: str | None):
        self.path = path
        self.died = died
        self._lock = lock
        self._manifest = facts

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
        """Create or reopen a run folder.

        Args:
            command: what the user typed.
            difference: a readable diff of two resolved recipes.
            restart: set an earlier run aside, as `<path>.old-N`, and start over.

        Raises:
            UserError: another process works there, the folder holds another recipe's
                run or something else, or the disk refuses.
        """
        if restart:
            _set_aside(path)
        with explained(path), ExitStack() as undo:
            path.mkdir(parents=True, exist_ok=True)
            lock = _lock(path)
            undo.callback(os.close, lock)
            old = manifest.read(path)
            if old is None:
                _refuse_foreign(path)
            elif old["recipe_hash"] != recipe_hash:
                _refuse_changed(path, resolved, difference)
            sweep(path)
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
            # The fault that ends the run is the one to tell, not a full disk.
            with suppress(UserError):
                self.set_status("failed")
        os.close(self._lock)

    def set_status(self, status: str) -> None:
        """Record running, done, failed or interrupted; tell it in report.html."""
        self._manifest["status"] = status
        self._manifest["ended"] = None if status == "running" else manifest.now()
        self._save()
        self._tell()

    def stage_folder(self, stage: str) -> Path:
        """The folder of a stage, made when missing."""
        folder = self.path / "stages" / stage
        with explained(folder):
            folder.mkdir(parents=True, exist_ok=True)
        return folder

    def enter(self, stage: str) -> None:
        """Record which stage is at work, to name it after a sudden death."""
        self._manifest["at"] = stage
        self._save()

    def finish(self, stage: str, facts: dict, artefacts: list[Path]) -> None:
        """Record a stage as done, with the hashes of the folders it left.

        Args:
            facts: what `finished` gives back, as JSON can hold it.
            artefacts: folders in the run folder, not empty.
        """
        hashes = {str(p.relative_to(self.path)): hash_folder(p) for p in artefacts}
        assert all(hashes.values()), f"stage {stage} left an empty folder"
        self._manifest["stages"][stage] = {"facts": facts, "artefacts": hashes}
        self._save()
        self._tell()

    def finished(self, stage: str, warning: Callable[[str], None]) -> dict | None:
        """The facts of a stage that is done and whose artefacts are as it left them."""
        record = self._manifest["stages"].get(stage)
        if record is None:
            return None
        for artefact, hashes in record["artefacts"].items():
            if not _is_whole(self.path / artefact, hashes):
                warning(f"{artefact} is damaged or gone: stage {stage} runs again")
                return None
        return record["facts"]

    def forget(self, stages: list[str]) -> None:
        """Take stages back, with all they left: what they began from is made anew."""
        for stage in stages:
            self._manifest["stages"].pop(stage, None)
            shutil.rmtree(self.path / "stages" / stage, ignore_errors=True)
        self._save()

    def _tell(self) -> None:
        # `lmx report` can make it again; a run must not end for it.
        with suppress(UserError):
            write_page(self.path)

    def _save(self) -> None:
        text = json.dumps(self._manifest, indent=2) + "\n"
        write_atomic(self.path / manifest.NAME, text)


def _lock(path: Path) -> int:
    handle = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        owner = os.read(handle, 32).decode(errors="replace").strip() or "unknown"
        os.close(handle)
        raise UserError(
            f"another process works in this folder (process {owner})",
            place=str(path),
            hint="wait for it, or choose another folder with output=...",
        ) from error
    os.ftruncate(handle, 0)
    os.write(handle, str(os.getpid()).encode())
    return handle


def _refuse_foreign(path: Path) -> None:
    # Hidden names are our lock and those of a file browser or a synchronizer.
    names = (p.name for p in path.iterdir() if not p.name.startswith("."))
    strange = sorted(set(names) - {RECIPE, RESOLVED})
    if strange:
        (path / ".lock").unlink()
        raise UserError(
            f"this folder is not a run of lmx; it holds {', '.join(strange[:3])}",
            place=str(path),
            hint="choose an empty or new folder with output=...",
        )


def _refuse_changed(
    path: Path, resolved: str, difference: Callable[[str, str], str]
) -> None:
    before = (path / RESOLVED).read_text()
    lines = difference(before, resolved).replace("\n", "\n    ")
    raise UserError(
        f"this folder holds a run of another recipe:\n    {lines}",
        place=str(path),
        hint=f"use --restart to start over (the old run is kept as {_aside(path).name}), "
        "or output=... for another folder",
    )


def _set_aside(path: Path) -> None:
    """Move the run in a folder, readable or not, out of the way, if there is one."""
    with suppress(UserError):
        if manifest.read(path) is None:
            return
    with explained(path):
        lock = _lock(path)
        os.rename(path, _aside(path))
        os.close(lock)


def _aside(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.name}.old-{number}")).exists():
        number += 1
    return aside


def _is_whole(path: Path, hashes: dict[str, str]) -> bool:
    return all(
        (path / name).is_file() and hash_file(path / name) == digest
        for name, digest in hashes.items()
    )


# --- from run.guest: In the place of run folder and report where a process neither writes nor tells.


class NullRunDir:
    """The run folder as a place alone, which only the first process writes to."""

    died = None

    def __init__(self, path: Path):
        self.path = path

    def __enter__(self) -> "NullRunDir":
        return self

    def __exit__(self, *_) -> None:
        pass

    def stage_folder(self, stage: str) -> Path:
        """The folder of a stage, seen from here or not."""
        return self.path / "stages" / stage

    def finished(self, stage: str, warning) -> None:
        """Nothing is known here."""

    def set_status(self, status: str) -> None:
        """The first process records it, as all else."""

    enter = set_status

    def finish(self, stage: str, facts: dict, artefacts: list[Path]) -> None:
        """See `set_status`."""

    def forget(self, stages: list[str]) -> None:
        """See `set_status`."""

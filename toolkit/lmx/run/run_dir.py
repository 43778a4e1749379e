"""The run directory: one owner at a time, a manifest, completed stages."""

import fcntl
import json
import os
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from ..config.bundled import without_schema_line
from ..config.loader import LoadedRecipe
from ..config.text_files import require_regular
from ..errors import FAILED, INTERRUPTED, Interrupted, UserError
from ..files.atomic import (
    LOCK,
    MANIFEST,
    OTHER_FOLDER,
    disk_errors,
    hold,
    make_folder,
    old_name,
    release,
    remove,
    remove_partial_files,
    require_own_entries,
    write_atomic,
)
from ..files.hashes import hash_file, hash_folder
from ..files.json_files import filter_jsonl, read_text
from . import manifest
from .compare import difference
from .earlier_run import EarlierRun
from .html.page import write_page
from .logger import RECORD_FILES
from .manifest import STAGES, StageInputs
from .report import RECIPE, REPORT, RESOLVED
from .signals import before_exit

LOCK_ATTEMPTS = 10
Warn = Callable[[str], None]


class RunDir:
    """An open run directory, locked until it is closed. Use `open` to make one.

    Attributes:
        path: the folder.
        crash_note: where the previous run crashed or was killed; None = it did not.
        change_note: what a changed recipe keeps of it; None = it is the same recipe.
    """

    def __init__(self, path: Path, lock: int, content: dict):
        self.path = path
        self.crash_note: str | None = None
        self.change_note: str | None = None
        self._lock = lock
        # The heartbeat writes the page in its own thread.
        self._page_lock = threading.Lock()
        self._manifest = content

    @classmethod
    def open(
        cls,
        path: Path,
        recipe: LoadedRecipe,
        plan: dict[str, str],
        inputs: Callable[[str], StageInputs],
        *,
        recipe_hash: str,
        command: str,
        restart: bool = False,
    ) -> "RunDir":
        """Create or reopen the run directory of a recipe.

        Args:
            plan: the identities of the stages by name, in order.
            inputs: returns the `StageInputs` of a stage as they are now.
            recipe_hash: of all values that affect the result.
            command: the command line of the user.
            restart: rename an earlier run to `<path>.old-N` and start over.

        Raises:
            UserError: another process uses the folder, it has finished stages of
                another recipe or other files, or the disk reports an error.
        """
        if restart:
            _move_aside(path)
        with disk_errors(path), ExitStack() as undo:
            lock = _lock(path)
            undo.callback(os.close, lock)
            hold(path)
            undo.callback(release, path)
            require_own_entries(path)
            old = manifest.read(path)
            new = manifest.new(recipe.name, command, recipe_hash, plan)
            folder = cls(path, lock, new)
            if old is None:
                try:
                    _refuse_foreign(path)
                except UserError:
                    # Leave no file in a folder of another program.
                    (path / LOCK).unlink()
                    raise
            else:
                changes = difference(read_text(path / RESOLVED), recipe.resolved)
                folder._continue(old, EarlierRun(path, old, plan, changes, inputs))
            remove_partial_files(path)
            write_atomic(path / RECIPE, without_schema_line(recipe.text))
            write_atomic(path / RESOLVED, recipe.resolved)
            folder._restore_report()
            undo.push(folder._record_end)
            before_exit.append(folder._record_exit)
            undo.callback(before_exit.remove, folder._record_exit)
            folder.set_status("running")
            undo.pop_all()
        return folder

    def _continue(self, old: dict, earlier: EarlierRun) -> None:
        """Keep the stages of an earlier run that are the same."""
        earlier.require_same_inputs()
        earlier.require_kept_results()
        self.crash_note = manifest.crash_note(self.path, old)
        self._manifest["stages"] = earlier.records
        started = {k: v for k, v in old["inputs"].items() if k in earlier.kept}
        self._manifest["inputs"] = started
        if earlier.is_changed:
            set_aside = earlier.discard()
            self._drop_records(earlier.discarded)
            self.change_note = earlier.change_note(set_aside)

    def __enter__(self) -> "RunDir":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None = None, *_
    ) -> None:
        before_exit.remove(self._record_exit)
        self._record_end(kind)
        os.close(self._lock)
        _release(self.path, error)

    def _record_end(self, kind: type[BaseException] | None, *_) -> None:
        """Record how an exception ended the run."""
        if kind:
            is_stop = issubclass(kind, KeyboardInterrupt | Interrupted)
            # Report the error that ended the run, not a full disk.
            with suppress(UserError):
                self.set_status("interrupted" if is_stop else "failed")

    def _record_exit(self, code: int) -> None:
        """Record the end of a process that is blocked; see `exit_at_once`."""
        self.set_status("interrupted" if code == INTERRUPTED else "failed")

    def set_status(self, status: str) -> None:
        """Record running, done, failed or interrupted, also in report.html."""
        self._manifest["status"] = status
        self._manifest["ended"] = None if status == "running" else manifest.now()
        self._save()
        self.write_page()

    def stage_folder(self, stage: str) -> Path:
        """The folder of a stage, created if necessary."""
        folder = self.path / STAGES / stage
        with disk_errors(folder):
            make_folder(folder)
        return folder

    def start_stage(self, stage: str, inputs: StageInputs) -> None:
        """Record the current stage and its `StageInputs`, for the next run."""
        self._manifest["current_stage"] = stage
        self._manifest["inputs"][stage] = inputs
        self._save()

    def complete_stage(self, stage: str, result: dict, artifacts: list[Path]) -> None:
        """Record a stage as complete, with the hashes of its artifacts and its report.

        Args:
            result: a `StageResult`.
            artifacts: folders in the run directory, not empty.
        """
        hashes = {str(p.relative_to(self.path)): hash_folder(p) for p in artifacts}
        assert all(hashes.values()), f"stage {stage} has an empty artifact"
        folder = self.path / STAGES / stage
        if (folder / REPORT).exists():
            digest = hash_file(folder / REPORT)
            hashes[f"{STAGES}/{stage}"] = {REPORT: digest}
        record = {"result": result, "artifacts": hashes}
        record["sha256"] = manifest.digest_of(record)
        self._manifest["stages"][stage] = record
        self._save()
        self.write_page()

    def completed_stage(self, stage: str, warning: Warn) -> dict | None:
        """The result of a complete stage; None if an artifact is missing or changed."""
        record = self._manifest["stages"].get(stage)
        if record is None:
            return None
        if record["sha256"] != manifest.digest_of(record):
            warning(f"the record of stage {stage} is damaged: it runs again")
            return None
        for artifact, hashes in record["artifacts"].items():
            if not _is_unchanged(self.path / artifact, hashes):
                warning(f"{artifact} is damaged or missing: stage {stage} runs again")
                return None
        return record["result"]

    def discard_stages(self, stages: list[str]) -> None:
        """Delete the records and folders of stages whose input will change."""
        with disk_errors(self.path):
            for stage in stages:
                for records in (self._manifest["stages"], self._manifest["inputs"]):
                    records.pop(stage, None)
                remove(self.path / STAGES / stage)
            self._drop_records(stages)
            self._restore_report()
        self._save()

    def _drop_records(self, stages: list[str]) -> None:
        """Delete the lines of stages in metrics.jsonl and samples.jsonl."""
        for name in RECORD_FILES:
            if (path := self.path / name).is_file():
                filter_jsonl(path, lambda record: record["stage"] not in stages)

    def _restore_report(self) -> None:
        """Leave the report of the last finished stage that wrote one, or none."""
        report = self.path / REPORT
        for stage in reversed(self._manifest["stages"]):
            file = self.path / STAGES / stage / REPORT
            if file.is_file():
                if not report.is_file() or report.read_bytes() != file.read_bytes():
                    write_atomic(report, file.read_bytes())
                return
        remove(report)

    def write_page(self) -> None:
        """Write report.html. The heartbeat of the logger does so, too."""
        # An error here must not end the run: `lmx report` can write the page again.
        with self._page_lock, suppress(UserError):
            write_page(self.path)

    def _save(self) -> None:
        text = json.dumps(self._manifest, indent=2) + "\n"
        write_atomic(self.path / MANIFEST, text)


def _release(path: Path, error: BaseException | None) -> None:
    """Hold a run directory no longer.

    Raises:
        UserError: it is gone, which is the reason of `error`.
    """
    is_there = release(path)
    # An error without a message is that of another process, which prints it.
    if error and not is_there and getattr(error, "message", True):
        raise UserError(
            "the run directory was deleted or renamed during the run",
            place=str(path),
            hint="the same command starts a new run",
            code=FAILED,
        ) from error


def _lock(path: Path) -> int:
    """Lock a folder, created if necessary; returns the open file.

    Another process may move or replace the folder before the lock is taken. The lock
    then belongs to another folder, and is taken again.
    """
    for _ in range(LOCK_ATTEMPTS):
        with suppress(FileNotFoundError):
            path.mkdir(parents=True, exist_ok=True)
            handle = _lock_file(path)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), os.stat(path / LOCK)):
                    os.ftruncate(handle, 0)
                    os.write(handle, str(os.getpid()).encode())
                    return handle
            os.close(handle)
    raise UserError("other programs move or delete this folder", place=str(path))


def _lock_file(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    handle = os.open(path / LOCK, flags, 0o666)
    try:
        require_regular(path / LOCK)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        owner = os.read(handle, 32).decode(errors="replace").strip() or "unknown"
        os.close(handle)
        raise UserError(
            f"another process uses this folder (process {owner})",
            place=str(path),
            hint="wait until it ends, or use another folder with output=...",
        ) from error
    except (UserError, OSError):
        os.close(handle)
        raise
    return handle


def check_output(path: Path) -> None:
    """Refuse a folder that a run could not use. Nothing changes on the disk.

    Raises:
        UserError: it cannot be created or written, another process uses it, or it has
            other files.
    """
    try:
        with disk_errors(path):
            _check_output(path)
    except UserError as error:
        raise UserError(error.message, place=str(path), hint=error.hint) from error


def _check_output(path: Path) -> None:
    folder = path.absolute()
    while not os.path.lexists(folder):
        folder = folder.parent
    if not folder.is_dir():
        kind = "a link that leads nowhere" if folder.is_symlink() else "a file"
        raise UserError(f"cannot write: {folder} is {kind}", hint=OTHER_FOLDER)
    try:
        # Permissions do not tell: a disk can be read-only, and /proc takes no folder.
        os.rmdir(tempfile.mkdtemp(prefix=".lmx-", dir=folder))
    except FileNotFoundError:
        message = f"cannot write: no folder can be made in {folder}"
        raise UserError(message, hint=OTHER_FOLDER) from None
    if folder == path.absolute():
        if os.path.lexists(path / LOCK):
            os.close(_lock_file(path))
        require_own_entries(path)
        if manifest.read(path) is None:
            _refuse_foreign(path)


def _refuse_foreign(path: Path) -> None:
    # Hidden files are the lock, or belong to a file browser or a synchronizer.
    names = (p.name for p in path.iterdir() if not p.name.startswith("."))
    unknown = sorted(set(names) - {RECIPE, RESOLVED})
    if unknown:
        raise UserError(
            f"not a run directory of lmx: it has {', '.join(unknown[:3])}",
            place=str(path),
            hint="use an empty or new folder with output=...",
        )


def _move_aside(path: Path) -> None:
    """Rename the folder of an earlier run, if there is one, even an unreadable one."""
    with suppress(UserError):
        if manifest.read(path) is None:
            return
    with disk_errors(path):
        lock = _lock(path)
        if (path / MANIFEST).exists():
            os.rename(path, old_name(path))
        os.close(lock)


def _is_unchanged(path: Path, hashes: dict[str, str]) -> bool:
    try:
        return all(
            (path / name).is_file() and hash_file(path / name) == digest
            for name, digest in hashes.items()
        )
    except OSError:
        return False


class NullRunDir:
    """No-op run directory for ranks other than 0, which alone reads and writes it."""

    crash_note = change_note = None

    def __init__(self, path: Path):
        self.path = path

    def __enter__(self) -> "NullRunDir":
        if self.path.exists():
            hold(self.path)
        return self

    def __exit__(self, kind, error: BaseException | None, trace) -> None:
        _release(self.path, error)

    def stage_folder(self, stage: str) -> Path:
        """The folder of a stage; it may exist only on another machine."""
        return self.path / STAGES / stage

    def _nothing(self, *_) -> None:
        pass

    set_status = start_stage = write_page = _nothing
    complete_stage = completed_stage = discard_stages = _nothing

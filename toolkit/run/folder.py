"""The run folder: one owner at a time, a manifest, stages that are done or not."""

import fcntl
import json
import os
import platform
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ..errors import UserError
from .files import explained, hash_file, hash_folder, write_atomic

MANIFEST = "manifest.json"
PACKAGES = ("lmx-toolkit", "mlx", "mlx-lm", "numpy")


class RunFolder:
    """An open run folder, locked until closed. Made by `open`.

    Attributes:
        path: the folder.
        died: what is known of a last run that ended without a goodbye, or None.
    """

    def __init__(self, path: Path, lock: int, manifest: dict, died: str | None):
        self.path = path
        self.died = died
        self._lock = lock
        self._manifest = manifest

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        name: str,
        recipe_text: str,
        resolved: str,
        recipe_hash: str,
        difference: Callable[[str, str], str],
        fresh: bool = False,
    ) -> "RunFolder":
        """Create or reopen a run folder.

        Args:
            difference: a readable diff of two resolved recipes.
            fresh: set an earlier run aside, as `<path>.old-N`, and start over.

        Raises:
            UserError: another process works there, the folder holds another recipe's
                run or something else, or the disk refuses.
        """
        with explained(path):
            path.mkdir(parents=True, exist_ok=True)
            lock = _lock(path)
            if fresh and (path / MANIFEST).exists():
                _set_aside(path)
                path.mkdir()
                os.close(lock)
                lock = _lock(path)
        old = _read_manifest(path)
        if old is None:
            _refuse_foreign(path)
        elif old["recipe_hash"] != recipe_hash:
            before = (path / "resolved.yaml").read_text()
            raise UserError(
                "this folder holds a run of another recipe:\n    "
                + difference(before, resolved).replace("\n", "\n    "),
                place=str(path),
                hint="use --fresh to start over (the old run is kept aside), or "
                "output=... for another folder",
            )
        died = _last_words(path, old) if old and old["status"] == "running" else None
        manifest = _manifest(name, recipe_hash, (old or {}).get("stages", {}))
        folder = cls(path, lock, manifest, died)
        write_atomic(path / "recipe.yaml", recipe_text)
        write_atomic(path / "resolved.yaml", resolved)
        folder.set_status("running")
        return folder

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *_) -> None:
        os.close(self._lock)

    def set_status(self, status: str) -> None:
        """Record running, done, failed or interrupted."""
        self._manifest["status"] = status
        self._manifest["updated"] = _now()
        self._save()

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
        """Record a stage as done, with the hashes of what it left."""
        hashes = {str(p.relative_to(self.path)): hash_folder(p) for p in artefacts}
        self._manifest["stages"][stage] = {"facts": facts, "artefacts": hashes}
        self._save()

    def finished(self, stage: str, warn: Callable[[str], None]) -> dict | None:
        """The facts of a stage that is done and whose artefacts are as it left them."""
        record = self._manifest["stages"].get(stage)
        if record is None:
            return None
        for artefact, hashes in record["artefacts"].items():
            if not _is_whole(self.path / artefact, hashes):
                warn(f"{artefact} is damaged or gone: stage {stage} runs again")
                return None
        return record["facts"]

    def forget(self, stages: list[str]) -> None:
        """Take stages back: what they were made from is made anew."""
        for stage in stages:
            self._manifest["stages"].pop(stage, None)
        self._save()

    def _save(self) -> None:
        write_atomic(self.path / MANIFEST, json.dumps(self._manifest, indent=2) + "\n")


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


def _read_manifest(path: Path) -> dict | None:
    file = path / MANIFEST
    if not file.exists():
        return None
    try:
        manifest = json.loads(file.read_text())
        return manifest if "recipe_hash" in manifest else None
    except ValueError as error:
        raise UserError(
            "the manifest cannot be read",
            place=str(file),
            hint="use another folder with output=..., or delete this one",
        ) from error


def _refuse_foreign(path: Path) -> None:
    strange = sorted(p.name for p in path.iterdir() if p.name != ".lock")
    if strange:
        (path / ".lock").unlink()
        raise UserError(
            f"this folder is not a run of lmx; it holds {', '.join(strange[:3])}",
            place=str(path),
            hint="choose an empty or new folder with output=...",
        )


def _set_aside(path: Path) -> None:
    number = 1
    while (aside := path.with_name(f"{path.name}.old-{number}")).exists():
        number += 1
    os.rename(path, aside)


def _manifest(name: str, recipe_hash: str, stages: dict) -> dict:
    return {
        "name": name,
        "status": "running",
        "recipe_hash": recipe_hash,
        "versions": {"python": platform.python_version()}
        | {package: _version(package) for package in PACKAGES},
        "machine": {
            "system": platform.platform(),
            "processor": platform.machine(),
            "cores": os.cpu_count(),
        },
        "started": _now(),
        "at": None,
        "stages": stages,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def _is_whole(path: Path, hashes: dict[str, str]) -> bool:
    return all(
        (path / name).is_file() and hash_file(path / name) == digest
        for name, digest in hashes.items()
    )


def _last_words(path: Path, manifest: dict) -> str:
    """Where a run stopped that could not say so itself."""
    text = f"the last run ended without a goodbye in stage {manifest['at']}"
    metrics = path / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    trained = [row for row in rows if "peak_memory_gb" in row]
    if not trained:
        return text
    row = trained[-1]
    return f"{text}, after step {row['step']}, peak {row['peak_memory_gb']:.2f} GB"

"""manifest.json: command, versions, machine, status and stages of a run."""

import json
import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ..errors import UserError
from .fs import MANIFEST, stage_metrics

PACKAGES = ("lmx-toolkit", "mlx", "mlx-lm", "numpy")


def read(path: Path) -> dict | None:
    """The manifest of a run directory; None if the folder has no run.

    Raises:
        UserError: the file is damaged.
    """
    file = path / MANIFEST
    if not file.exists():
        return None
    try:
        manifest = json.loads(file.read_text())
    except ValueError as error:
        raise UserError(
            "cannot read the manifest",
            place=str(file),
            hint="use --restart to start over, or output=... for another folder",
        ) from error
    return manifest if "recipe_hash" in manifest else None


def new(name: str, command: str, recipe_hash: str, stages: dict) -> dict:
    """The manifest of a run that starts now, with its completed stages."""
    return {
        "name": name,
        "command": command,
        "status": "running",
        "recipe_hash": recipe_hash,
        "versions": {"python": platform.python_version()}
        | {package: _version(package) for package in PACKAGES},
        "machine": {
            "system": platform.platform(),
            "processor": platform.machine(),
            "cores": os.cpu_count(),
        },
        "started": now(),
        "ended": None,
        "current_stage": None,
        "stages": stages,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def now() -> str:
    """The local time with its UTC offset."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def crash_note(path: Path, manifest: dict | None) -> str | None:
    """Where the previous run stopped, if it crashed or was killed; else None."""
    if manifest is None or manifest["status"] != "running":
        return None
    stage = manifest["current_stage"]
    text = "the previous run crashed or was killed"
    if stage is None:
        return f"{text}, before its first stage"
    text += f" in stage {stage}"
    records = [r for r in stage_metrics(path, stage) if "peak_memory_gb" in r]
    if not records:
        return text
    step, peak = records[-1]["step"], records[-1]["peak_memory_gb"]
    return f"{text}, after step {step}, peak memory {peak:.2f} GB"

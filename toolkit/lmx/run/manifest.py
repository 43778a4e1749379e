"""What a run says about itself in manifest.json, and what can be told of a dead one."""

import json
import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ..errors import UserError
from .fs import stage_metrics

NAME = "manifest.json"
PACKAGES = ("lmx-toolkit", "mlx", "mlx-lm", "numpy")


def read(path: Path) -> dict | None:
    """The manifest of the run in a folder; None where there is no run."""
    file = path / NAME
    if not file.exists():
        return None
    try:
        manifest = json.loads(file.read_text())
    except ValueError as error:
        raise UserError(
            "the manifest cannot be read",
            place=str(file),
            hint="use --restart to start over, or output=... for another folder",
        ) from error
    return manifest if "recipe_hash" in manifest else None


def new(name: str, command: str, recipe_hash: str, stages: dict) -> dict:
    """The manifest of a run that starts now, with the stages done before."""
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
        "at": None,
        "stages": stages,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def now() -> str:
    """The time with its distance from UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def crash_note(path: Path, manifest: dict | None) -> str | None:
    """Where the last run stopped, if it could not say so itself."""
    if manifest is None or manifest["status"] != "running":
        return None
    stage = manifest["at"]
    text = "the last run ended without a goodbye"
    if stage is None:
        return f"{text}, before its first stage"
    text += f" in stage {stage}"
    trained = [row for row in stage_metrics(path, stage) if "peak_memory_gb" in row]
    if not trained:
        return text
    row = trained[-1]
    return f"{text}, after step {row['step']}, peak {row['peak_memory_gb']:.2f} GB"

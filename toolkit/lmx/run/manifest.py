"""manifest.json: command, versions, machine, status and stages of a run."""

import hashlib
import json
import os
import platform
import time
from collections.abc import Sequence
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, ValidationError

from ..errors import UserError
from ..files.atomic import MANIFEST
from ..files.json_files import read_json
from .logger import read_metrics

# The folder of the folders of the stages.
STAGES = "stages"
# By kind, hashes of what a stage reads by key of the recipe; see `RunPlan.inputs`. An
# unfinished stage goes on only with the same models. With other data, adapters and
# programs, it says itself whether it goes on.
StageInputs = dict[Literal["models", "files"], dict[str, str]]
INPUTS = "models", "files"
TIME_FORMAT = "%Y-%m-%dT%H:%M:%S%z"
PACKAGES = ("lmx-toolkit", "mlx", "mlx-lm", "numpy")


def _relative(path: str) -> str:
    if Path(path).is_absolute() or ".." in Path(path).parts:
        raise ValueError("a path that leaves the run directory")
    return path


def _timestamp(text: str) -> str:
    datetime.strptime(text, TIME_FORMAT)
    return text


# Of a stage's folder.
StageName = Annotated[str, Field(pattern=r"^[0-9]+-[a-z]+$")]
RelativePath = Annotated[str, AfterValidator(_relative)]
Timestamp = Annotated[str, AfterValidator(_timestamp)]


class StageResult(BaseModel):
    """What a stage left, as `ModelArtifact.to_json` writes it.

    Attributes:
        model, reference: None = the recipe's own model.
    """

    model: RelativePath | None
    reference: RelativePath | None
    adapters: RelativePath | None
    draft: RelativePath | None
    rounded: RelativePath | None
    facts: dict[str, Any]
    published: list[RelativePath]


class StageRecord(BaseModel):
    """A finished stage.

    Attributes:
        artifacts: by folder, the SHA-256 of its files.
        sha256: of the other values; see `digest_of`.
    """

    result: StageResult
    artifacts: dict[RelativePath, dict[RelativePath, str]]
    sha256: str


def changed_inputs(
    before: StageInputs, now: StageInputs, kinds: Sequence[str] = INPUTS
) -> list[str]:
    """The keys in `before` whose content is another one now, and not unknown."""
    return [
        name
        for kind in kinds
        for name, value in before[kind].items()
        if now[kind].get(name, value) != value
    ]


def digest_of(record: dict) -> str:
    """SHA-256 of the result and the artifacts of a stage's record."""
    values = [record["result"], record["artifacts"]]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


class Manifest(BaseModel):
    """The content of the file.

    Attributes:
        plan: the identities of the recipe's stages by name, in order; see
            `PlannedStage.identity`.
        current_stage: the stage that was started last.
        inputs: of the stages that were started.
        stages: the finished stages.
    """

    name: str
    command: str
    status: str
    recipe_hash: str
    plan: dict[StageName, str]
    versions: dict[str, str | None]
    machine: dict[str, str | int | None]
    started: Timestamp
    ended: Timestamp | None
    current_stage: StageName | None
    inputs: dict[StageName, StageInputs]
    stages: dict[StageName, StageRecord]


def read(path: Path) -> dict | None:
    """The manifest of a run directory, as `Manifest`; None if the folder has no run.

    Raises:
        UserError: the file is damaged, or is not that of this version of lmx.
    """
    file = path / MANIFEST
    if not os.path.lexists(file):
        return None
    try:
        content = read_json(file)
        if "recipe_hash" not in content:
            # Many programs have a manifest.json.
            return None
        return Manifest.model_validate(content, strict=True).model_dump()
    except UserError as error:
        reason = error.message
    except ValidationError as error:
        first = error.errors()[0]
        reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    raise UserError(
        f"this manifest is damaged, or of another version of lmx: {reason}",
        place=str(file),
        hint="use --restart to start over, or output=... for another folder",
    )


def new(name: str, command: str, recipe_hash: str, plan: dict[str, str]) -> dict:
    """The manifest of a run that starts now, without finished stages."""
    return {
        "name": name,
        "command": command,
        "status": "running",
        "recipe_hash": recipe_hash,
        "plan": plan,
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
        "inputs": {},
        "stages": {},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def now() -> str:
    """The local time with its UTC offset."""
    return time.strftime(TIME_FORMAT)


def crash_note(path: Path, manifest: dict | None) -> str | None:
    """Where the previous run stopped, if it crashed or was killed; else None."""
    if manifest is None or manifest["status"] != "running":
        return None
    stage = manifest["current_stage"]
    text = "the previous run crashed or was killed"
    if stage is None:
        return f"{text}, before its first stage"
    text += f" in stage {stage}"
    for record in reversed(read_metrics(path, stage)):
        if isinstance(peak := record.get("peak_memory_gb"), float):
            return f"{text}, after step {record['step']}, peak memory {peak:.2f} GB"
    return text

"""The content of a run directory, as far as its files exist."""

import json
from dataclasses import dataclass
from pathlib import Path

import yaml

from ...errors import UserError
from .. import manifest
from ..fs import read_jsonl

# Final lines of log.txt that the page shows.
LAST_LINES = 6


@dataclass(frozen=True)
class Record:
    """The files of a run.

    Attributes:
        report: empty before the first evaluation.
        resolved: all values of the recipe, including defaults and overrides.
        log: the last lines of log.txt.
        folders: the published folders that exist.
    """

    path: Path
    manifest: dict
    report: dict
    metrics: list[dict]
    samples: list[dict]
    recipe: str
    resolved_text: str
    resolved: dict
    log: list[str]
    folders: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> "Record":
        """Read a run directory.

        Raises:
            UserError: it is not a run directory, or one of its files is damaged.
        """
        content = manifest.read(path)
        if content is None:
            raise UserError(
                "not a run directory: it has no manifest.json",
                place=str(path),
                hint="give the output folder of lmx-train, e.g. exports/<recipe>",
            )
        resolved = _text(path / "resolved.yaml")
        return cls(
            path=path,
            manifest=content,
            report=read_report(path / "report.json"),
            metrics=read_jsonl(path / "metrics.jsonl"),
            samples=read_jsonl(path / "samples.jsonl"),
            recipe=_text(path / "recipe.yaml"),
            resolved_text=resolved,
            resolved=_resolved(path, resolved),
            log=_text(path / "log.txt").splitlines()[-LAST_LINES:],
            folders=tuple(
                name
                for name in ("model", "draft", "adapters")
                if (path / name).is_dir()
            ),
        )

    @property
    def output(self) -> str:
        """The run directory, relative to where the run was started."""
        return self.resolved.get("output") or f"exports/{self.manifest['name']}"

    @property
    def models(self) -> dict[str, dict]:
        """Metrics by model."""
        return self.report.get("models", {})


def read_report(file: Path) -> dict:
    """A report.json; empty if the file does not exist.

    Raises:
        UserError: the file is not a report.
    """
    try:
        report = json.loads(_text(file) or "{}")
    except ValueError as error:
        raise UserError("not a report of lmx", place=str(file)) from error
    if not isinstance(report, dict) or not isinstance(report.get("models", {}), dict):
        raise UserError("not a report of lmx", place=str(file))
    return report


def _resolved(path: Path, text: str) -> dict:
    try:
        return yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        place = str(path / "resolved.yaml")
        raise UserError("not the recipe of a run", place=place) from error


def _text(file: Path) -> str:
    return file.read_text("utf-8", errors="replace") if file.is_file() else ""

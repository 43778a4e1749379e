"""All that the files of a run folder say, as far as they are there."""

import json
from dataclasses import dataclass
from pathlib import Path

import yaml

from ...errors import UserError
from .. import manifest
from ..metrics_file import read_rows

# Lines of log.txt that tell how a run ended.
LAST_LINES = 6


@dataclass(frozen=True)
class Record:
    """A run read back.

    Attributes:
        report: empty when nothing has been measured yet.
        resolved: every value of the recipe, defaults and arguments among them.
        log: the last lines.
        folders: which of the published folders are there.
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
        """Read a run folder.

        Raises:
            UserError: it is none, or one of its files is damaged.
        """
        facts = manifest.read(path)
        if facts is None:
            raise UserError(
                "this is no run folder: it has no manifest.json",
                place=str(path),
                hint="name a folder that lmx-train has left, as exports/<recipe>",
            )
        resolved = _text(path / "resolved.yaml")
        return cls(
            path=path,
            manifest=facts,
            report=read_report(path / "report.json"),
            metrics=read_rows(path / "metrics.jsonl"),
            samples=read_rows(path / "samples.jsonl"),
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
        """The run folder, from where the run was started."""
        return self.resolved.get("output") or f"exports/{self.manifest['name']}"

    @property
    def models(self) -> dict[str, dict]:
        """What was measured of every model, by name."""
        return self.report.get("models", {})


def read_report(file: Path) -> dict:
    """A report.json; empty if there is none.

    Raises:
        UserError: it is something else.
    """
    try:
        report = json.loads(_text(file) or "{}")
    except ValueError as error:
        raise UserError("this is no report of lmx", place=str(file)) from error
    if not isinstance(report, dict) or not isinstance(report.get("models", {}), dict):
        raise UserError("this is no report of lmx", place=str(file))
    return report


def _resolved(path: Path, text: str) -> dict:
    try:
        return yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        place = str(path / "resolved.yaml")
        raise UserError("this is no recipe of a run", place=place) from error


def _text(file: Path) -> str:
    return file.read_text("utf-8", errors="replace") if file.is_file() else ""

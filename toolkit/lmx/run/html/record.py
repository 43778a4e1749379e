"""The content of a run directory, as far as its files exist."""

from dataclasses import dataclass
from pathlib import Path

from ...config import yaml_io
from ...errors import UserError
from .. import manifest
from ..fs import read_jsonl, read_metrics, read_text
from ..report import REPORT, read_report

# Final lines of log.txt that the page shows.
LAST_LINES = 6
PUBLISHED = ("model", "draft", "adapters")
RESOLVED = "resolved.yaml"


@dataclass(frozen=True)
class Record:
    """The files of a run.

    Attributes:
        report: empty before the first evaluation.
        resolved: all values of the recipe, including defaults and overrides.
        log: the last lines of log.txt.
        folders: the published folders that exist and are of this run, not of an
            earlier recipe.
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
        finished = content["stages"].values()
        written = {folder for record in finished for folder in record["artifacts"]}
        samples = path / "samples.jsonl"
        return cls(
            path=path,
            manifest=content,
            report=read_report(path / REPORT),
            metrics=read_metrics(path),
            samples=read_jsonl(samples, stage=str, step=int, prompt=str, answer=str),
            recipe=read_text(path / "recipe.yaml"),
            resolved_text=read_text(path / RESOLVED),
            resolved=read_resolved(path),
            log=read_text(path / "log.txt").splitlines()[-LAST_LINES:],
            folders=tuple(
                name for name in PUBLISHED if name in written and (path / name).is_dir()
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


def read_resolved(path: Path) -> dict:
    """The values of resolved.yaml in a run directory; empty if there is no such file.

    Later calls may return the same object.

    Raises:
        UserError: it is damaged.
    """
    file = path / RESOLVED
    if not (text := read_text(file)):
        return {}
    document = yaml_io.read_shared(text)
    data = document.data
    is_recipe = isinstance(data, dict) and not document.errors
    if (
        not is_recipe
        or not isinstance(data.get("model"), dict)
        or not isinstance(data.get("output"), str | None)
    ):
        raise UserError("not the recipe of a run", place=str(file))
    return data

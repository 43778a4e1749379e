"""The results of a run: report.json, and the other files of its directory.

report.json has the measured models, as far as tables and pages show them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from ..config import yaml_io
from ..errors import UserError
from ..files.json_files import parse_json, read_jsonl, read_text
from . import manifest
from .logger import read_metrics
from .tables import METRICS

REPORT, RECIPE, RESOLVED = "report.json", "recipe.yaml", "resolved.yaml"
LARGEST = 2**63 - 1
# Final lines of log.txt that the page shows.
LAST_LINES = 6

# NaN and infinity are results too.
Number = Annotated[int, Field(ge=-LARGEST, le=LARGEST)] | float
Measured = Number | None


class _Entry(BaseModel):
    """A block of the report; values that are not shown are kept as they are."""

    model_config = ConfigDict(extra="allow", strict=True)


class Layer(_Entry):
    """A layer of a quantized model, with its squared error relative to its weights."""

    bits: Measured = None
    group_size: Measured = None
    error: Measured = None


class Speculation(_Entry):
    """How a proposer speeds up decoding."""

    acceptance_rate: Measured = None
    accepted_length: Measured = None
    speedup: Measured = None


class _Model(_Entry):
    generation: dict[str, dict[str, Measured]] | None = None
    tasks: dict[str, dict[str, Measured]] = {}
    custom: dict[str, Number] = {}
    layers: dict[str, Layer] | None = None
    speculation: dict[str, Speculation] | None = None


# The figures of a model at its top level, and their standard errors.
_FIGURES = {
    keys[0]: (Measured, None)
    for metric in METRICS
    for keys in (metric.path, metric.error)
    if len(keys) == 1
}
ModelReport = create_model("ModelReport", __base__=_Model, **_FIGURES)


class Training(_Entry):
    """How the model was made."""

    steps: Measured = None
    trained_tokens: Measured = None
    trained_parameters: Measured = None
    changed_codes: Measured = None
    codes: Measured = None
    method: str | None = None
    # Losses of the models of a full-precision baseline, and what QAT recovers.
    gap_recovered: dict[str, Measured | dict[str, Measured]] | None = None


class Threshold(_Entry):
    """A limit, and whether the last model keeps it; value None = not measured."""

    name: str
    value: Measured
    limit: Number
    passed: bool


class Sample(_Entry):
    """What each model answers."""

    prompt: str
    expected: str | None
    answers: dict[str, str]


class Report(_Entry):
    """The whole file."""

    models: dict[str, ModelReport] = {}
    training: Training = Training()
    thresholds: list[Threshold] = []
    samples: list[Sample] = []
    speculation: dict[str, dict[str, Speculation]] = {}


def read_report(file: Path) -> dict:
    """The values of a report.json, as `Report`; empty if there is no such file.

    Raises:
        UserError: the file is not a report.
    """
    if not file.is_file():
        return {}
    report = parse_json(file.read_bytes(), file)
    try:
        return Report.model_validate(report).model_dump(exclude_unset=True)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        reason = f"{key}: {first['msg']}".removeprefix(": ")
        raise UserError(f"not a report of lmx: {reason}", place=str(file)) from error


@dataclass(frozen=True)
class Record:
    """The files of a run, as far as they exist.

    Attributes:
        report: empty before the first evaluation.
        resolved: all values of the recipe, including defaults and overrides.
        log: the last lines of log.txt.
        has_model: the folder `model` exists and is of this run, not of an earlier
            recipe.
    """

    manifest: dict
    report: dict
    metrics: list[dict]
    samples: list[dict]
    recipe: str
    resolved_text: str
    resolved: dict
    log: list[str]
    has_model: bool

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
            manifest=content,
            report=read_report(path / REPORT),
            metrics=read_metrics(path),
            samples=read_jsonl(samples, stage=str, step=int, prompt=str, answer=str),
            recipe=read_text(path / RECIPE),
            resolved_text=read_text(path / RESOLVED),
            resolved=read_resolved(path),
            log=read_text(path / "log.txt").splitlines()[-LAST_LINES:],
            has_model="model" in written and (path / "model").is_dir(),
        )

    @property
    def output(self) -> str:
        """The run directory, relative to where the run was started."""
        return self.resolved.get("output") or f"exports/{self.manifest['name']}"


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

"""The results of a run: report.json, and the other files of its directory.

report.json has the measured models, as far as tables and pages show them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
)

from ..config import yaml_io
from ..errors import UserError
from . import manifest
from .fs import parse_json, read_jsonl, read_metrics, read_text
from .tables import KL_WEIGHTS_ONLY, METRICS

REPORT, RECIPE, RESOLVED = "report.json", "recipe.yaml", "resolved.yaml"
LARGEST = 2**63 - 1
# Final lines of log.txt that the page shows.
LAST_LINES = 6
PUBLISHED = ("model", "draft", "adapters")


def _moderate(number: float) -> float:
    if abs(number) > LARGEST and abs(number) != float("inf"):
        raise ValueError("a number of more than 63 bits")
    return number


# NaN and infinity are results too.
Number = Annotated[int | float, AfterValidator(_moderate)]
Measured = Number | None
Finite = Annotated[int | float, Field(ge=-LARGEST, le=LARGEST, allow_inf_nan=False)]
Integer = Annotated[int, Field(ge=-LARGEST, le=LARGEST)]


class _Entry(BaseModel):
    """A block of the report; values that are not shown are kept as they are."""

    model_config = ConfigDict(extra="allow", strict=True)


class Layer(_Entry):
    """A layer of a quantized model, with its squared error relative to its weights."""

    bits: Integer | None = None
    group_size: Integer | None = None
    error: Finite | None = None


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
    for metric in (*METRICS, KL_WEIGHTS_ONLY)
    for keys in (metric.path, metric.error)
    if len(keys) == 1
}
ModelReport = create_model("ModelReport", __base__=_Model, **_FIGURES)


class RecoveredGap(_Entry):
    """Losses of the models of a full-precision baseline, and what QAT recovers."""

    loss: Measured = None
    loss_stderr: Measured = None
    kl: Measured = None
    kl_stderr: Measured = None
    gain_retained: Measured = None
    fp_baseline: "RecoveredGap | None" = None
    fp_baseline_rtn: "RecoveredGap | None" = None
    qat: "RecoveredGap | None" = None


class Training(_Entry):
    """How the model was made."""

    steps: Integer | None = None
    trained_tokens: Integer | None = None
    trained_parameters: Integer | None = None
    changed_codes: Integer | None = None
    codes: Integer | None = None
    method: str | None = None
    gap_recovered: RecoveredGap | None = None


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
            recipe=read_text(path / RECIPE),
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

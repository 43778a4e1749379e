"""The results of a run: report.json, and the other files of its directory.

report.json has the measured models, as far as tables and pages show them.
"""

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


class _Block(BaseModel):
    """Values that are not shown are kept as they are."""

    model_config = ConfigDict(extra="allow", strict=True)


# Figures, which are numbers in every block: of a model, of a layer, of a proposer, of a
# training, and of a comparison with a full-precision baseline.
FIGURES = (
    *(key for m in METRICS if not m.block for key in (m.key, m.error) if key),
    *("bits", "group_size", "error"),
    *("acceptance_rate", "accepted_length", "speedup"),
    *("steps", "trained_tokens", "trained_parameters", "changed_codes", "codes"),
    *("loss", "loss_stderr", "kl", "kl_stderr", "gain_retained"),
)
Figures = create_model(
    "Figures", __base__=_Block, **dict.fromkeys(FIGURES, (Measured, None))
)


class ModelReport(Figures):
    """A measured model: its layers, and the proposers that speed up its decoding."""

    generation: dict[str, dict[str, Measured]] | None = None
    tasks: dict[str, dict[str, Measured]] = Field(default_factory=dict)
    custom: dict[str, Number] = Field(default_factory=dict)
    layers: dict[str, Figures] | None = None
    speculation: dict[str, Figures] | None = None


class Gap(Figures):
    """Losses of the models of a full-precision baseline, and what QAT recovers."""

    fp_baseline: Figures = Figures()
    fp_baseline_rtn: Figures = Figures()
    qat: Figures = Figures()


class Training(Figures):
    """How the model was made."""

    method: str | None = None
    gap_recovered: Gap | None = None


class Threshold(_Block):
    """A limit, and whether the last model keeps it; value None = not measured."""

    name: str
    value: Measured
    limit: Number
    passed: bool


class Sample(_Block):
    """What each model answers."""

    prompt: str
    expected: str | None
    answers: dict[str, str]


class Report(_Block):
    """The whole file."""

    models: dict[str, ModelReport] = {}
    training: Training = Training()
    thresholds: list[Threshold] = []
    samples: list[Sample] = []
    speculation: dict[str, dict[str, Figures]] = {}


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


class Record:
    """The files of a run directory, as far as they exist.

    Args:
        is_report: the path is a report.json alone, without other files.

    Attributes:
        report: empty before the first evaluation.
        resolved: all values of the recipe, including defaults and overrides.
        log: the last lines of log.txt.
        has_model: the folder `model` exists and is of this run, not of an earlier
            recipe.

    Raises:
        UserError: this is not a run directory, or one of its files is damaged.
    """

    def __init__(self, path: Path, *, is_report: bool = False):
        content = {} if is_report else manifest.read(path)
        if content is None:
            raise UserError(
                "not a run directory: it has no manifest.json",
                place=str(path),
                hint="give the output folder of lmx-train, e.g. exports/<recipe>",
            )
        self.path, self.manifest = path, content
        self.report = read_report(path if is_report else path / REPORT)
        self.metrics = read_metrics(path)
        self.samples = read_jsonl(
            path / "samples.jsonl", stage=str, step=int, prompt=str, answer=str
        )
        self.recipe, self.resolved_text = (
            read_text(path / name) for name in (RECIPE, RESOLVED)
        )
        self.resolved = read_resolved(path)
        self.log = read_text(path / "log.txt").splitlines()[-LAST_LINES:]
        stages = self.manifest.get("stages", {}).values()
        is_written = any("model" in record["artifacts"] for record in stages)
        self.has_model = is_written and (path / "model").is_dir()

    @property
    def output(self) -> str:
        """The run directory, relative to where the run was started."""
        return self.resolved.get("output") or f"exports/{self.manifest['name']}"

    @property
    def status(self) -> str | None:
        """done, running, failed or interrupted; None = unknown."""
        return self.manifest.get("status")

    @property
    def is_done(self) -> bool:
        """Whether the run has finished."""
        return self.status == "done"

    @property
    def models(self) -> dict[str, dict]:
        """The metrics of all models."""
        return self.report.get("models", {})

    @property
    def model(self) -> str | None:
        """The name of the last model."""
        return next(reversed(self.models), None)

    @property
    def figures(self) -> dict:
        """The metrics of the last model; empty if there is none."""
        return self.models.get(self.model, {})


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
        or not isinstance(data.get("stages", []), list)
    ):
        raise UserError("not the recipe of a run", place=str(file))
    return data

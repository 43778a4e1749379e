"""report.json: the measured models of a run, as far as tables and pages show them."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from ..errors import UserError
from .fs import parse_json

REPORT = "report.json"
LARGEST = 2**63 - 1


def _moderate(number: float) -> float:
    if abs(number) > LARGEST and abs(number) != float("inf"):
        raise ValueError("a number of more than 63 bits")
    return number


Integer = Annotated[int, Field(ge=-LARGEST, le=LARGEST)]
# NaN and infinity are results too.
Number = Annotated[int | float, AfterValidator(_moderate)]
Finite = Annotated[int | float, Field(ge=-LARGEST, le=LARGEST, allow_inf_nan=False)]
Share = Annotated[int | float, Field(ge=0, le=1)]


class _Entry(BaseModel):
    """A block of the report; values that are not shown are kept as they are."""

    model_config = ConfigDict(extra="allow", strict=True)


class Histogram(_Entry):
    """Counts between edges."""

    edges: list[Finite] = []
    positions: list[Finite] = []
    agreed: list[Finite] = []


class Layer(_Entry):
    """A layer of a quantized model, with its squared error relative to its weights."""

    bits: Integer | None = None
    group_size: Integer | None = None
    error: Finite | None = None


class Speculation(_Entry):
    """How a proposer speeds up decoding."""

    acceptance_rate: Number | None = None
    accepted_length: Number | None = None
    speedup: Number | None = None
    acceptance_rate_by_position: list[Finite] | None = None


class ModelReport(_Entry):
    """The metrics of a model, see `tables.METRICS`."""

    perplexity: Number | None = None
    perplexity_stderr: Number | None = None
    perplexity_ratio: Number | None = None
    perplexity_ratio_stderr: Number | None = None
    kl_mean: Number | None = None
    kl_stderr: Number | None = None
    kl_p99: Number | None = None
    kl_mean_weights_only: Number | None = None
    kl_stderr_weights_only: Number | None = None
    top1_agreement: Number | None = None
    exact_match: Number | None = None
    exact_match_stderr: Number | None = None
    exact_match_change: Number | None = None
    exact_match_change_stderr: Number | None = None
    bits_per_weight: Number | None = None
    bytes: Number | None = None
    generation: dict[str, dict[str, Number | None]] | None = None
    tasks: dict[str, dict[str, Number | None]] = {}
    custom: dict[str, Number] = {}
    kl_histogram: Histogram | None = None
    agreement_by_confidence: Histogram | None = None
    layers: dict[str, Layer] | None = None
    speculation: dict[str, Speculation] | None = None


class RecoveredGap(_Entry):
    """Losses of the models of a full-precision baseline, and what QAT recovers."""

    loss: Number | None = None
    loss_stderr: Number | None = None
    kl: Number | None = None
    kl_stderr: Number | None = None
    gain_retained: Number | None = None
    fp_baseline: "RecoveredGap | None" = None
    fp_baseline_rtn: "RecoveredGap | None" = None
    qat: "RecoveredGap | None" = None


class Training(_Entry):
    """How the model was made."""

    steps: Integer | None = None
    trained_tokens: Integer | None = None
    trained_parameters: Integer | None = None
    method: str | None = None
    gap_recovered: RecoveredGap | None = None


class Threshold(_Entry):
    """A limit, and whether the last model keeps it; value None = not measured."""

    name: str
    value: Number | None
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
        reason = f"{key}: {first['msg']}" if key else first["msg"]
        raise UserError(f"not a report of lmx: {reason}", place=str(file)) from error

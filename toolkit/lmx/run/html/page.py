"""report.html of a run, and the page that compares runs."""

from datetime import datetime
from pathlib import Path

from ...files.atomic import write_atomic
from .. import compare
from ..manifest import TIME_FORMAT
from ..progress import format_duration
from ..report import LARGEST, Record
from ..tables import Metric, TableCells, metrics_table, recovery_table
from .blocks import Block, Point, line_chart, render, table, text
from .layer_maps import layer_maps

NAME = "report.html"
# A browser loads the page of a running run again after this time.
REFRESH_SECONDS = 10
STATUS = {
    "running": "running or crashed",
    "interrupted": "interrupted; the same command resumes it",
}
TRAINING = {"training": "train"}
# Key in metrics.jsonl, title, unit, and the kind of records of each line. The best
# weights of a draft model are selected by its accepted length.
CURVES = (
    ("loss", "Loss", "nats per token", TRAINING | {"validation": "valid"}),
    (
        *("accepted_length_all", "Accepted length", "tokens per round"),
        {"held-out prompts": "draft"},
    ),
    ("learning_rate", "Learning rate", "per step", TRAINING),
    ("gradient_norm", "Gradient norm", "before clipping", TRAINING),
    ("trained_tokens_per_second", "Speed", "trained tokens per second", TRAINING),
    ("peak_memory_gb", "Peak memory", "GB", TRAINING),
)
SPECULATION = (
    Metric("acceptance rate", "acceptance_rate", ".4g"),
    Metric("accepted length", "accepted_length", ".4g"),
    Metric("speed-up", "speedup", ".4g"),
)
STANDARD_ERROR = "on the validation data; ± one standard error"


def write_page(folder: Path) -> Path:
    """Write report.html of a run directory, finished or not; returns its path.

    Raises:
        UserError: this is not a run directory, or a file is damaged or not writable.
    """
    target = folder / NAME
    # A damaged file may hold half of a surrogate pair.
    write_atomic(target, page(folder).encode(errors="replace"))
    return target


def page(folder: Path) -> str:
    """The page of a run directory; see `write_page`."""
    record = Record(folder)
    report, models = record.report, record.models
    is_well = record.status in ("done", "running")
    gap = report.get("training", {}).get("gap_recovered")
    sections = {
        "Final log lines": [text("" if is_well else "\n".join(record.log))],
        "Thresholds": [_thresholds(report.get("thresholds", []))],
        "Models": [
            table(
                f"Metrics of the reloaded checkpoints {STANDARD_ERROR}",
                *metrics_table(models),
            )
        ],
        "Gap recovered": [
            table(
                f"Share of the round-to-nearest gap that QAT recovers {STANDARD_ERROR}",
                *(recovery_table(gap) if gap else ([], [])),
            )
        ],
    }
    for stage in dict.fromkeys(row["stage"] for row in record.metrics):
        rows = [row for row in record.metrics if row["stage"] == stage]
        sections[f"Curves of {stage}"] = [
            _kl_of_codes(rows, _method_of_codes(record.resolved, stage)),
            *(
                line_chart(
                    title, unit, {n: _points(rows, k, key) for n, k in kinds.items()}
                )
                for key, title, unit, kinds in CURVES
            ),
        ]
    sections |= {
        "Layers": layer_maps(models),
        "Speculative decoding": _speculation(report),
        "Samples": _samples(record),
        "Commands": _commands(record),
        "Recipe": [
            text(record.recipe),
            text(
                record.resolved_text,
                "Resolved recipe, with defaults and overrides",
                folded=True,
            ),
        ],
        "Versions and hashes": _versions(record.manifest),
    }
    refresh = REFRESH_SECONDS if record.status == "running" else None
    return render(
        record.manifest["name"], [_summary(record)], sections, refresh_seconds=refresh
    )


def comparison_page(
    runs: dict[str, Record],
    *,
    title: str | None = None,
    groups: TableCells | None = None,
) -> str:
    """The page of `lmx compare`, with the curves of all runs in the same charts.

    Args:
        title: None = the names of the runs.
        groups: a table over groups of runs; see `compare.groups_table`.
    """
    curves = [("valid", "loss", "Validation loss", "nats per token")]
    curves += [("train", *words) for *words, kinds in CURVES if "training" in kinds]
    trained = {}
    for name, run in runs.items():
        stages = [row["stage"] for row in run.metrics if row["kind"] == "train"]
        trained[name] = [row for row in run.metrics if row["stage"] in stages[:1]]
    charts = [
        line_chart(
            label, unit, {n: _points(rows, kind, key) for n, rows in trained.items()}
        )
        for kind, key, label, unit in curves
    ]
    last = (
        "Metrics of the last model of every run; "
        "in parentheses the change from the first run"
    )
    columns, rows = compare.recipe_table(runs)
    recipes = text("The recipes are the same.")
    if rows:
        recipes = table("Recipe values that differ", columns, rows)
    sections = {
        "Sweep": [table(compare.SWEEP, *(groups or ([], [])))],
        "Models": [table(last, *compare.comparison_table(runs))],
        "Curves": charts,
        "Recipes": [recipes],
    }
    return render(title or ", ".join(runs), [], sections)


def _summary(record: Record) -> Block:
    facts, training = record.manifest, record.report.get("training", {})
    start, end = facts["started"], facts["ended"]
    rows = {
        "Status": STATUS.get(facts["status"], facts["status"]),
        "Started": start.replace("T", " "),
        "Duration": None,
        "Model": str(record.resolved.get("model", {}).get("path") or "from scratch"),
        "Completed stages": ", ".join(facts["stages"]) or "none yet",
    }
    if end:
        times = [datetime.strptime(time, TIME_FORMAT) for time in (start, end)]
        rows["Duration"] = format_duration((times[1] - times[0]).total_seconds())
    for key in ("steps", "trained_tokens", "trained_parameters"):
        if (count := training.get(key)) is not None:
            rows[key.replace("_", " ").capitalize()] = f"{count:,}"
    changed, codes = training.get("changed_codes"), training.get("codes")
    if changed is not None and codes is not None:
        rows["Changed codes"] = f"{changed:,} of {codes:,}"
    rows["Quantization method"] = training.get("method")
    return table("Summary", [], [[k, v] for k, v in rows.items() if v], "facts")


def _thresholds(thresholds: list[dict]) -> Block:
    rows = []
    for each in thresholds:
        value = "not measured" if each["value"] is None else f"{each['value']:.4g}"
        result = {"text": "missed", "class": "bad"}
        if each["passed"]:
            result = {"text": "passed", "class": "good"}
        rows.append([each["name"], value, f"{each['limit']:g}", result])
    title = "Limits for the last model. A missed threshold publishes nothing"
    columns = ["threshold", "value", "limit", "result"]
    return table(title, columns, rows)


def _method_of_codes(recipe: dict, stage: str) -> str | None:
    """The method of the codes that a stage trains with a teacher alone; else None."""
    method = None
    for number, block in enumerate(recipe.get("stages", []), 1):
        match block:
            case {"quantize": {"method": str(method)}}:
                pass
            case {"train": {"qat": dict(), "teacher": dict(teacher)}} if (
                stage == f"{number}-train"
            ):
                # At another temperature, the loss is not the divergence itself.
                is_kl = (
                    teacher.get("ce_weight") == 0 and teacher.get("temperature") == 1
                )
                return method if is_kl else None
            case {"train": _}:
                method = None
    return None


def _kl_of_codes(rows: list[dict], method: str | None) -> Block:
    """What training adds: its KL by trained tokens, and that of the codes it began
    with. Without `method` it has no line."""
    points = _points(rows, "valid", "loss", across="trained_tokens") if method else []
    lines = {"QAT": points}
    if points:
        lines[f"{method} alone"] = [(tokens, points[0][1]) for tokens, _ in points]
    unit = "nats per token from the teacher"
    return line_chart("Validation KL", unit, lines, across="trained tokens")


def _points(
    records: list[dict], kind: str, key: str, *, across: str = "step"
) -> list[Point]:
    """Position and value of the records of a kind; None = not a finite number."""
    return [
        (row[across], row[key])
        for row in records
        if row["kind"] == kind
        and _is_shown(row.get(across))
        and key in row
        and (row[key] is None or _is_shown(row[key]))
    ]


def _is_shown(value) -> bool:
    """Whether a value is a finite number that charts can show."""
    return isinstance(value, int | float) and abs(value) < LARGEST


def _speculation(report: dict) -> list[Block]:
    """A table for each model: how each proposer speeds up decoding."""
    models = report.get("models", {}).items()
    measured = {name: figures.get("speculation") for name, figures in models}
    # The benchmark of a draft stage, by sampling and prompt set.
    measured |= report.get("speculation", {})
    return [
        table(f"Speculative decoding, {name}", *metrics_table(proposers, SPECULATION))
        for name, proposers in measured.items()
        if proposers
    ]


def _samples(record: Record) -> list[Block]:
    answered = record.report.get("samples", [])
    models = dict.fromkeys(name for row in answered for name in row["answers"])
    answers = []
    for row in answered:
        given = (row["answers"].get(name, "") for name in models)
        answers.append([row["prompt"], row["expected"] or "", *given])
    made = [[str(row["step"]), row["prompt"], row["answer"]] for row in record.samples]
    columns, folded = ["step", "prompt", "completion"], bool(answered)
    title = "Completions at every validation"
    return [
        table(
            "Answers of the models", ["prompt", "expected", *models], answers, "answers"
        ),
        table(title, columns, made, "answers", folded=folded),
    ]


def _commands(record: Record) -> list[Block]:
    output, blocks = record.output, []
    if record.has_model:
        model = f"{output}/model"
        uses = [
            f'lmx generate {model} --prompt "..."',
            f'mlx_lm.generate --model {model} --prompt "..."',
            f"mlx_lm.server --model {model}",
        ]
        blocks = [text("\n".join(uses), "Usage")]
    command = record.manifest["command"]
    again = [f"{command} --restart"] if command else []
    again.append(f"lmx report {output}")
    return [*blocks, text("\n".join(again), "Reproduce")]


def _versions(manifest: dict) -> list[Block]:
    facts = manifest["versions"] | manifest["machine"]
    rows = [[key, str(value)] for key, value in facts.items() if value is not None]
    hashes = {"resolved recipe": manifest["recipe_hash"]}
    for stage in manifest["stages"].values():
        for folder, files in stage["artifacts"].items():
            hashes |= {f"{folder}/{name}": digest for name, digest in files.items()}
    title = f"SHA-256 of the files that each stage wrote ({len(hashes)})"
    digests = [[*row] for row in hashes.items()]
    return [
        table("Versions and machine", [], rows, "facts"),
        table(title, [], digests, "facts digests", folded=True),
    ]

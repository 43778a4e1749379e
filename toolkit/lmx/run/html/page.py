"""report.html of a run, and the page that compares runs."""

from datetime import datetime
from pathlib import Path

from ...files.atomic import write_atomic
from .. import tables
from ..compare import RunSummary, metrics_table, recipe_table
from ..manifest import TIME_FORMAT
from ..progress import format_duration, format_number
from ..report import LARGEST, Record
from .blocks import Block, Point, line_chart, render, table
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
    ("tokens_per_second", "Speed", "trained tokens per second", TRAINING),
    ("peak_memory_gb", "Peak memory", "GB", TRAINING),
)
SPECULATION = ("acceptance_rate", "accepted_length", "speedup")
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
    record = Record.read(folder)
    manifest, report = record.manifest, record.report
    status, models = manifest["status"], report.get("models", {})
    sections: dict[str, list[Block]] = {
        "Final log lines": [],
        "Thresholds": _thresholds(report.get("thresholds", [])),
        "Models": [],
        "Gap recovered": [],
        "Curves": _curves(record.metrics),
        "Layers": layer_maps(models),
        "Speculative decoding": _speculation(report),
        "Samples": _samples(record),
        "Commands": _commands(record),
        "Recipe": [_text(record.recipe)],
        "Versions and hashes": _versions(manifest),
    }
    if record.log and status not in ("done", "running"):
        sections["Final log lines"] = [_text("\n".join(record.log))]
    if models:
        caption = f"Metrics of the reloaded checkpoints {STANDARD_ERROR}"
        sections["Models"] = [table(caption, *tables.table(models))]
    if gap := report.get("training", {}).get("gap_recovered"):
        caption = (
            f"Share of the round-to-nearest gap that QAT recovers {STANDARD_ERROR}"
        )
        sections["Gap recovered"] = [table(caption, *tables.recovery_table(gap))]
    resolved = "Resolved recipe, with defaults and overrides"
    sections["Recipe"].append(_details(resolved, _text(record.resolved_text)))
    refresh = REFRESH_SECONDS if status == "running" else None
    return render(
        manifest["name"], [_summary(record)], sections, refresh_seconds=refresh
    )


def comparison_page(
    runs: list[RunSummary],
    *,
    title: str | None = None,
    groups: tuple[str, list[str], list[list[str]]] | None = None,
) -> str:
    """The page of `lmx compare`, with the curves of all runs in the same charts.

    Args:
        title: None = the names of the runs.
        groups: title, columns and rows of a table over groups of runs; see
            `compare.groups_table`.
    """
    curves = [("valid", "loss", "Validation loss", "nats per token")]
    curves += [("train", *words) for *words, kinds in CURVES if "training" in kinds]
    charts = []
    for kind, key, label, unit in curves:
        lines = {}
        for run in runs:
            stages = (row["stage"] for row in run.records if row["kind"] == "train")
            lines[run.name] = _points(run.records, next(stages, None), kind, key)
        charts += line_chart(label, unit, lines)
    columns, rows = recipe_table(runs)
    recipes = _text("The recipes are the same.")
    if rows:
        recipes = table("Recipe values that differ", columns, rows)
    caption = (
        "Metrics of the last model of every run; "
        "in parentheses the change from the first run"
    )
    sections = {
        "Sweep": [table(*groups)] if groups else [],
        "Models": [table(caption, *metrics_table(runs))],
        "Curves": _group("grid", charts),
        "Recipes": [recipes],
    }
    return render(title or ", ".join(run.name for run in runs), [], sections)


def _text(text: str) -> Block:
    return {"type": "text", "text": text}


def _group(kind: str, blocks: list[Block]) -> list[Block]:
    """Blocks side by side; [] if there are none."""
    return [{"type": "group", "kind": kind, "blocks": blocks}] if blocks else []


def _details(summary: str, block: Block, *, is_open: bool = False) -> Block:
    """A block that the reader opens and closes."""
    return {"type": "details", "summary": summary, "open": is_open, "blocks": [block]}


def _summary(record: Record) -> Block:
    facts, training = record.manifest, record.report.get("training", {})
    start, end = facts["started"], facts["ended"]
    duration = None
    if end:
        times = [datetime.strptime(text, TIME_FORMAT) for text in (start, end)]
        duration = format_duration((times[1] - times[0]).total_seconds())
    rows: list[tuple[str, str | None]] = [
        ("Status", STATUS.get(facts["status"], facts["status"])),
        ("Started", start.replace("T", " ")),
        ("Duration", duration),
        ("Model", str(record.resolved.get("model", {}).get("path") or "from scratch")),
        ("Completed stages", ", ".join(facts["stages"]) or "none yet"),
    ]
    for key in ("steps", "trained_tokens", "trained_parameters"):
        if (count := training.get(key)) is not None:
            rows.append((key.replace("_", " ").capitalize(), f"{count:,}"))
    changed, codes = training.get("changed_codes"), training.get("codes")
    if changed is not None and codes is not None:
        rows.append(("Changed codes", f"{changed:,} of {codes:,}"))
    rows.append(("Quantization method", training.get("method")))
    return table("Summary", [], [[*row] for row in rows if row[1]], "facts")


def _thresholds(thresholds: list[dict]) -> list[Block]:
    rows = []
    for each in thresholds:
        value = "not measured" if each["value"] is None else f"{each['value']:.4g}"
        result = {"text": "missed", "kind": "bad"}
        if each["passed"]:
            result = {"text": "passed", "kind": "good"}
        rows.append([each["name"], value, f"{each['limit']:g}", result])
    caption = "Limits for the last model. A missed threshold publishes nothing"
    columns = ["threshold", "value", "limit", "result"]
    return [table(caption, columns, rows)] if rows else []


def _curves(metrics: list[dict]) -> list[Block]:
    """The charts of every stage that has some, in the order of the run."""
    blocks = []
    for stage in dict.fromkeys(row["stage"] for row in metrics):
        charts = []
        for key, title, unit, kinds in CURVES:
            points = {
                name: _points(metrics, stage, kind, key) for name, kind in kinds.items()
            }
            charts += line_chart(title, unit, points)
        if charts:
            blocks += [{"type": "heading", "text": stage}, *_group("grid", charts)]
    return blocks


def _points(records: list[dict], stage: str | None, kind: str, key: str) -> list[Point]:
    """Step and value of the records of a kind; None = not a finite number."""
    return [
        (row["step"], row[key])
        for row in records
        if (row["stage"], row["kind"]) == (stage, kind)
        and _is_shown(row["step"])
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
    columns = ["proposer", "acceptance rate", "accepted length", "speed-up"]
    tables = []
    for model, proposers in measured.items():
        rows = []
        for name, facts in (proposers or {}).items():
            values = [facts.get(key) for key in SPECULATION]
            shown = ["-" if v is None else format_number(v) for v in values]
            rows.append([name, *shown])
        if rows:
            tables.append(table(f"Speculative decoding, {model}", columns, rows))
    return tables


def _samples(record: Record) -> list[Block]:
    blocks = []
    answered = record.report.get("samples", [])
    for row in answered:
        prompt, expected = [("prompt", row["prompt"])], row["expected"]
        answers = [("expected", expected)] if expected is not None else []
        answers += row["answers"].items()
        rows = [{"type": "pairs", "rows": each} for each in (prompt, answers)]
        blocks += _group("sample", rows)
    if record.samples:
        columns = ["step", "prompt", "completion"]
        rows = [[str(r["step"]), r["prompt"], r["answer"]] for r in record.samples]
        made = table("Completions at every validation", columns, rows, "facts")
        title = "Completions during training"
        blocks.append(_details(title, made, is_open=not answered))
    return blocks


def _commands(record: Record) -> list[Block]:
    output, blocks = record.output, []
    if record.has_model:
        model = f"{output}/model"
        uses = [
            f'lmx generate {model} --prompt "..."',
            f'mlx_lm.generate --model {model} --prompt "..."',
            f"mlx_lm.server --model {model}",
        ]
        blocks = [{"type": "heading", "text": "Usage"}, _text("\n".join(uses))]
    command = record.manifest["command"]
    again = [f"{command} --restart"] if command else []
    again.append(f"lmx report {output}")
    heading = {"type": "heading", "text": "Reproduce"}
    return [*blocks, heading, _text("\n".join(again))]


def _versions(manifest: dict) -> list[Block]:
    facts = manifest["versions"] | manifest["machine"]
    rows = [[key, str(value)] for key, value in facts.items() if value is not None]
    hashes = {"resolved recipe": manifest["recipe_hash"]}
    for stage in manifest["stages"].values():
        for folder, files in stage["artifacts"].items():
            hashes |= {f"{folder}/{name}": digest for name, digest in files.items()}
    caption = "SHA-256 of the files that each stage wrote"
    digests = table(caption, [], [[*row] for row in hashes.items()], "facts digests")
    return [
        table("Versions and machine", [], rows, "facts"),
        _details(f"Hashes of files ({len(hashes)})", digests),
    ]

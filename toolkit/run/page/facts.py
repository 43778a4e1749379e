"""What a run says of itself: how it ended, versions, hashes, commands."""

from datetime import datetime

from ..report import format_duration
from .record import Record

STATUS = {
    "running": "running, or ended without a goodbye",
    "done": "done",
    "failed": "failed",
    "interrupted": "interrupted; the same command goes on",
}


def overview(record: Record) -> list[tuple[str, str]]:
    """Name and value of what matters first."""
    facts, source = record.manifest, record.resolved.get("model") or {}
    training = record.report.get("training", {})
    rows = [
        ("Status", STATUS.get(facts["status"], facts["status"])),
        ("Started", (facts.get("started") or "").replace("T", " ")),
        ("Took", _duration(facts)),
        ("Model", source.get("path") or "fresh"),
        ("Stages done", ", ".join(facts.get("stages", {})) or "none yet"),
        ("Steps", _grouped(training.get("steps"))),
        ("Trained tokens", _grouped(training.get("trained_tokens"))),
        ("Trained parameters", _grouped(training.get("trained_parameters"))),
        ("Quantized with", training.get("method")),
    ]
    return [(name, value) for name, value in rows if value]


def gates(record: Record) -> list[tuple[str, str, str, str]]:
    """Name, value, limit and verdict of every gate."""
    return [
        (
            gate["name"],
            "not measured" if gate.get("value") is None else f"{gate['value']:.4g}",
            f"{gate['limit']:g}",
            "passed" if gate["passed"] else "missed",
        )
        for gate in record.report.get("gates", [])
    ]


def versions(record: Record) -> list[tuple[str, str]]:
    """Versions and machine."""
    facts = record.manifest
    rows = [*facts.get("versions", {}).items(), *facts.get("machine", {}).items()]
    return [(name, str(value)) for name, value in rows if value is not None]


def hashes(record: Record) -> list[tuple[str, str]]:
    """Sha256 of the recipe and of every file that a stage left."""
    rows = [("resolved recipe", record.manifest["recipe_hash"])]
    for stage in record.manifest.get("stages", {}).values():
        for folder, files in stage.get("artefacts", {}).items():
            rows += [(f"{folder}/{name}", digest) for name, digest in files.items()]
    return list(dict.fromkeys(rows))


def uses(record: Record) -> list[str]:
    """Commands that use what the run has published."""
    model = f"{record.output}/model"
    if "model" not in record.folders:
        return []
    return [
        f'lmx generate {model} --prompt "..."',
        f'mlx_lm.generate --model {model} --prompt "..."',
        f"mlx_lm.server --model {model}",
    ]


def reproduces(record: Record) -> list[str]:
    """Commands that make the run, setting this one aside, or this page again."""
    command = record.manifest.get("command")
    again = [f"{command} --fresh"] if command else []
    return [*again, f"lmx report {record.output}"]


def _duration(facts: dict) -> str | None:
    start, end = facts.get("started"), facts.get("ended")
    if not start or not end:
        return None
    times = [datetime.strptime(t, "%Y-%m-%dT%H:%M:%S%z") for t in (start, end)]
    return format_duration((times[1] - times[0]).total_seconds())


def _grouped(number: int | None) -> str | None:
    return None if number is None else f"{number:,}"

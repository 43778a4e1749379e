"""What a run has reported, read back from metrics.jsonl and samples.jsonl."""

import json
from contextlib import suppress
from pathlib import Path


def rows_of(folder: Path, stage: str) -> list[dict]:
    """The metrics of a stage, oldest first."""
    return [row for row in read_rows(folder / "metrics.jsonl") if row["stage"] == stage]


def read_rows(file: Path) -> list[dict]:
    """All rows of a file, oldest first; none if there is no file."""
    rows = []
    for line in file.read_text().splitlines() if file.exists() else []:
        # The last line of a run that was killed may be half a row.
        with suppress(ValueError):
            rows.append(json.loads(line))
    return rows

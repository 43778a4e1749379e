"""What a run has reported, read back from metrics.jsonl."""

import json
from contextlib import suppress
from pathlib import Path


def rows_of(folder: Path, stage: str) -> list[dict]:
    """The rows of a stage, oldest first."""
    file = folder / "metrics.jsonl"
    rows = []
    for line in file.read_text().splitlines() if file.exists() else []:
        # The last line of a run that was killed may be half a row.
        with suppress(ValueError):
            rows.append(json.loads(line))
    return [row for row in rows if row["stage"] == stage]

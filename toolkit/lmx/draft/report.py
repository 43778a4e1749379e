"""What is said of a finished draft: draft.json, its card, and whether it pays."""

import json
from dataclasses import dataclass
from pathlib import Path

from .. import __version__
from .benchmark import DRAFT, DecodingStats, DraftBenchmarkResult
from .cost_model import SpeculationCosts

MIN_SPEEDUP = 1.05
"""The speed-up from which on a draft is worth its memory."""

CARD = """\
---
library_name: mlx
pipeline_tag: text-generation
tags:
- mlx
- lmx
- speculative-decoding
---

# {name}: draft model

**{verdict}** on {machine}. Made with lmx {version} for one target alone, the model
whose files have the digest `{digest}`.

{table}

Speed-ups are over plain decoding, on held-out prompts, with {length} guesses a round;
guesses change no word of what the target says.

## Use

```bash
mlx_lm.server --model TARGET --draft-model . --num-draft-tokens {length}
```
"""


@dataclass(frozen=True)
class DraftReport:
    """A draft and how its trials went.

    Attributes:
        digest: of the target's files.
        tokenizer: a hash of the tokenizer both have.
        trials: by way of sampling.
    """

    digest: str
    tokenizer: str
    costs: SpeculationCosts
    benchmarks: dict[str, DraftBenchmarkResult]
    machine: str

    @property
    def speedup(self) -> float:
        """The smallest measured; 0 where answers are too short for a guess."""
        return min((column.speedup for column in self._guessed), default=0.0)

    @property
    def acceptance_rate(self) -> float:
        """The smallest measured; 0 where answers are too short for a guess."""
        return min((column.acceptance_rate for column in self._guessed), default=0.0)

    @property
    def _guessed(self) -> list[DecodingStats]:
        columns = [found.stats[DRAFT] for found in self.benchmarks.values()]
        return [column for column in columns if column.acceptance_rate is not None]

    @property
    def num_draft_tokens(self) -> int:
        """Guesses of a round to recommend: what pays most on average."""
        curves = [
            found.predicted_accepted_lengths for found in self.benchmarks.values()
        ]
        mean = [sum(tokens) / len(tokens) for tokens in zip(*curves, strict=True)]
        return self.costs.best(mean)[0]

    @property
    def recommendation(self) -> str:
        """Whether to serve it here."""
        return "recommended" if self.speedup >= MIN_SPEEDUP else "not recommended"

    def to_json(self) -> dict:
        """What draft.json and the report hold."""
        return {
            "recommendation": self.recommendation,
            "target": self.digest,
            "tokenizer": self.tokenizer,
            "machine": self.machine,
            "acceptance_rate": self.acceptance_rate,
            "speedup": self.speedup,
            "num_draft_tokens": self.num_draft_tokens,
            "costs": self.costs.to_json(),
            "benchmark": {
                name: found.to_json() for name, found in self.benchmarks.items()
            },
        }

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Column names and rows, one column a way of decoding."""
        names = list(next(iter(self.benchmarks.values())).stats)
        rows = []
        for how, found in self.benchmarks.items():
            columns = [found.stats[name] for name in names]
            predicted = (
                f"{found.predicted_speedup:.2f}x",
                f"{found.predicted_accepted_length:.2f}",
            )
            gain, rounds = (
                [v if n == DRAFT else "-" for n in names] for v in predicted
            )
            rows += [
                [f"{how}: tokens/s", *(f"{c.tokens_per_second:.0f}" for c in columns)],
                [f"{how}: speed-up", *map(_speedup, columns)],
                [f"{how}: speed-up, predicted", *gain],
                [f"{how}: guesses that stand", *map(_share, columns)],
                [f"{how}: tokens a round", *map(_rounds, columns)],
                [f"{how}: tokens a round, predicted", *rounds],
                [f"{how}: guesses a round", *map(_guesses, columns)],
            ]
            for suite, own in found.prompt_sets.items():
                columns = [own[name] for name in names]
                rows += [
                    [f"{how}, {suite}: speed-up", *map(_speedup, columns)],
                    [f"{how}, {suite}: tokens a round", *map(_rounds, columns)],
                ]
        return ["", *names], rows


def write_report(folder: Path, verdict: DraftReport, *, name: str, facts: dict) -> None:
    """Write draft.json and README.md beside the draft's weights.

    Args:
        facts: how it was made.
    """
    record = verdict.to_json() | {"training": facts, "lmx": __version__}
    (folder / "draft.json").write_text(json.dumps(record, indent=2) + "\n")
    columns, rows = verdict.table()
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    card = CARD.format(
        name=name,
        verdict=verdict.recommendation.capitalize(),
        machine=verdict.machine,
        version=__version__,
        digest=verdict.digest,
        table="\n".join(f"| {' | '.join(line)} |" for line in lines),
        length=verdict.num_draft_tokens,
    )
    (folder / "README.md").write_text(card)


def _speedup(column: DecodingStats) -> str:
    return f"{column.speedup:.2f}x"


def _share(column: DecodingStats) -> str:
    return "-" if column.acceptance_rate is None else f"{column.acceptance_rate:.1%}"


def _rounds(column: DecodingStats) -> str:
    rounds = column.accepted_length
    return "-" if rounds is None else f"{rounds:.2f}"


def _guesses(column: DecodingStats) -> str:
    return str(column.num_draft_tokens or "-")

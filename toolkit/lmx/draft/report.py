"""Publication of a draft: compatibility check, draft.json and model card."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..errors import UserError
from ..files.atomic import write_atomic
from ..models.checkpoint import config_int
from ..models.loader import build_model, make_cache
from ..version import __version__
from .benchmark import DRAFT, DecoderStats, DecodingStats, DraftBenchmarkResult
from .cost_model import SpeculationCosts

FULL_ATTENTION_CACHE = "KVCache"
MIN_SPEEDUP = 1.05
"""Smallest speed-up that is worth the memory of a draft model."""

CARD = """\
---
library_name: mlx
pipeline_tag: text-generation
tags:
- mlx
- lmx
- speculative-decoding
---

# {name}: draft for speculative decoding

**{recommendation}** on {machine}. Trained with lmx {version} for one target: the model
whose files have the digest `{digest}`.

{table}

Speed-ups are relative to standard decoding, on validation prompts, with
{num_draft_tokens} draft tokens per round. Speculative decoding does not change the
output distribution.

## Use

{usage}
"""
USAGE = """\
```bash
mlx_lm.server --model TARGET --draft-model . --num-draft-tokens {num_draft_tokens}
```"""
DRAFTER_USAGE = """\
```bash
lmx generate TARGET --draft-model . --num-draft-tokens {num_draft_tokens}
```

It reads the target's hidden states, in the {architecture} format: engines that support
this architecture can load the folder as well."""


def require_servable(
    config: dict, target_config: dict, num_tokens: int, *, place: str
) -> None:
    """Check that mlx-lm can serve a draft with this config for the target.

    mlx-lm and LM Studio compare only the vocabulary sizes. Other differences lower the
    acceptance rate without an error. Token ids are checked by
    `models.tokenizer_compat`.

    Args:
        num_tokens: tokens of the tokenizer.

    Raises:
        UserError: the draft has its own code, a cache without rollback, fewer positions
            than the target, or too small an LM head.
    """
    if "model_file" in config:
        raise UserError("mlx-lm cannot serve a draft with its own code", place=place)
    caches = make_cache(build_model(config))
    kinds = {type(cache).__name__ for cache in caches} - {FULL_ATTENTION_CACHE}
    if kinds:
        raise UserError(
            "a draft needs full attention, because rejected tokens are rolled back; "
            f"this one has a {sorted(kinds)[0]}",
            place=place,
            hint="draft_model: {init_from: <a small model with full attention>}",
        )
    positions = config_int(config, "max_position_embeddings")
    target_positions = config_int(target_config, "max_position_embeddings")
    if positions < target_positions:
        raise UserError(
            f"the draft has {positions:,} positions, the target {target_positions:,}; "
            "later draft tokens would be rejected",
            place=place,
            hint="use a model with as many positions as the target",
        )
    vocab_size = config_int(config, "vocab_size")
    if vocab_size < num_tokens:
        raise UserError(
            f"the draft's LM head has {vocab_size:,} rows for {num_tokens:,} tokens",
            place=place,
        )


@dataclass(frozen=True)
class DraftReport:
    """A draft with its benchmark results.

    Attributes:
        target_digest: hash of the target's files.
        tokenizer_digest: hash of the tokenizer of both models.
        benchmarks: results by decoding mode.
        machine: the platform of the measurements.
        architecture: of the draft, as in a recipe.
    """

    target_digest: str
    tokenizer_digest: str
    costs: SpeculationCosts
    benchmarks: dict[str, DraftBenchmarkResult]
    machine: str
    architecture: str = "model"

    @property
    def speedup(self) -> float:
        """The smallest measured speed-up; 0 if no draft token was proposed."""
        return min((stats.speedup for stats in self._draft_stats), default=0.0)

    @property
    def acceptance_rate(self) -> float:
        """The smallest measured acceptance rate; 0 if no draft token was proposed."""
        return min((stats.acceptance_rate for stats in self._draft_stats), default=0.0)

    @property
    def _draft_stats(self) -> list[DecodingStats]:
        """The draft's statistics in every mode with at least one draft token."""
        stats = [result.stats[DRAFT] for result in self.benchmarks.values()]
        return [one for one in stats if one.acceptance_rate is not None]

    @property
    def num_draft_tokens(self) -> int:
        """The draft length with the best predicted speed-up over all modes."""
        lengths = [b.predicted_accepted_lengths for b in self.benchmarks.values()]
        means = [sum(column) / len(column) for column in zip(*lengths, strict=True)]
        return self.costs.best_draft_length(means)[0]

    @property
    def recommendation(self) -> str:
        """Whether the draft is fast enough to be served on this machine."""
        return "recommended" if self.speedup >= MIN_SPEEDUP else "not recommended"

    def to_json(self) -> dict:
        """The contents of draft.json."""
        return {
            "recommendation": self.recommendation,
            "architecture": self.architecture,
            "target": self.target_digest,
            "tokenizer": self.tokenizer_digest,
            "machine": self.machine,
            "acceptance_rate": self.acceptance_rate,
            "speedup": self.speedup,
            "num_draft_tokens": self.num_draft_tokens,
            "costs": self.costs.to_json(),
            "benchmark": {
                mode: result.to_json() for mode, result in self.benchmarks.items()
            },
        }

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Column names and rows of the results, one column per decoder."""
        decoders = list(next(iter(self.benchmarks.values())).stats)

        def row(label: str, stats: DecoderStats, form: Callable) -> list[str]:
            return [label, *(form(stats[decoder]) for decoder in decoders)]

        def predicted(label: str, value: str) -> list[str]:
            cells = (value if decoder == DRAFT else "-" for decoder in decoders)
            return [f"{label} (predicted)", *cells]

        rows = []
        for mode, result in self.benchmarks.items():
            stats, length = result.stats, result.predicted_accepted_length
            rows += [
                row(f"{mode}: tokens/s", stats, lambda s: f"{s.tokens_per_second:.0f}"),
                row(f"{mode}: speed-up", stats, _speedup),
                predicted(f"{mode}: speed-up", f"{result.predicted_speedup:.2f}x"),
                row(f"{mode}: acceptance rate", stats, _acceptance_rate),
                row(f"{mode}: accepted length", stats, _accepted_length),
                predicted(f"{mode}: accepted length", f"{length:.2f}"),
                row(f"{mode}: acceptance by position", stats, _by_position),
                row(
                    f"{mode}: draft tokens",
                    stats,
                    lambda s: str(s.num_draft_tokens or "-"),
                ),
            ]
            for name, set_stats in result.prompt_sets.items():
                rows += [
                    row(f"{mode}, {name}: speed-up", set_stats, _speedup),
                    row(
                        f"{mode}, {name}: accepted length", set_stats, _accepted_length
                    ),
                ]
        return ["", *decoders], rows


def write_report(
    folder: Path, report: DraftReport, *, name: str, training: dict
) -> None:
    """Write draft.json and README.md next to the draft's weights.

    Args:
        training: the training record for draft.json.
    """
    record = report.to_json() | {"training": training, "lmx": __version__}
    write_atomic(folder / "draft.json", json.dumps(record, indent=2) + "\n")
    columns, rows = report.table()
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    usage = USAGE if report.architecture == "model" else DRAFTER_USAGE
    usage = usage.format(
        architecture=report.architecture, num_draft_tokens=report.num_draft_tokens
    )
    card = CARD.format(
        name=name,
        recommendation=report.recommendation.capitalize(),
        machine=report.machine,
        version=__version__,
        digest=report.target_digest,
        table="\n".join(f"| {' | '.join(line)} |" for line in lines),
        num_draft_tokens=report.num_draft_tokens,
        usage=usage,
    )
    write_atomic(folder / "README.md", card)


def _speedup(stats: DecodingStats) -> str:
    return f"{stats.speedup:.2f}x"


def _acceptance_rate(stats: DecodingStats) -> str:
    rate = stats.acceptance_rate
    return "-" if rate is None else f"{rate:.1%}"


def _by_position(stats: DecodingStats) -> str:
    rates = stats.acceptance_rate_by_position
    return " ".join(f"{rate:.0%}" for rate in rates) or "-"


def _accepted_length(stats: DecodingStats) -> str:
    length = stats.accepted_length
    return "-" if length is None else f"{length:.2f}"

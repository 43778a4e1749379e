"""`--dry-run`: everything that can be known without weights, offline, in seconds."""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..config.base import ConfigModel
from ..config.loader import LoadedRecipe
from ..convert.exporters import hub
from ..data.dataset import BUILTIN, RecordReader
from ..data.record_formats import DataRecord
from ..data.tokenization import (
    LAST_ONLY,
    EncodeResult,
    Example,
    encode_all,
    render_mask,
)
from .estimate import ModelShape
from .plan import RunPlan
from .resources import ResourceCheck, model_shape, readable_size

SAMPLED = 500_000  # characters, tokenized in half a second
NAMED = 5
SHOWN = 600
CHARACTERS = 3
MARKS = ", trained tokens between ⟦ and ⟧"

Line = tuple[str, str]


class RowReservoir:
    """Every n-th of many rows, so many that they hold about `SAMPLED` characters."""

    def __init__(self):
        self.rows: list[DataRecord] = []
        self.total = 0
        self._every = 1
        self._characters = 0

    def add(self, row: DataRecord) -> None:
        """Count a row, and hold it if it is its turn."""
        if self.total % self._every == 0:
            self.rows.append(row)
            self._characters += len(row.as_text())
        self.total += 1
        while self._characters > SAMPLED and len(self.rows) > 1:
            self._every *= 2
            self.rows = self.rows[::2]
            self._characters = sum(len(held.as_text()) for held in self.rows)


def dry_run(loaded: LoadedRecipe, plan: RunPlan, *, ignore_limits: bool) -> int:
    """Print what a run would read, need and leave; returns the exit code.

    Raises:
        UserError: the model or the data cannot be used, or, without `ignore_limits`, memory
            or disk will not do.
    """
    anatomy, tokenizer, lines = _model(loaded)
    _print(lines)
    sample = RowReservoir()
    for split in ("valid", "train"):
        sample, lines = _rows(loaded, split, sample)
        _print(lines)
    lengths, lines = _tokens(loaded, sample.rows, sample.total, tokenizer)
    _print(lines)
    _print(_steps(plan))
    if anatomy:
        share = sample.total / max(1, len(sample.rows))
        needs = ResourceCheck(loaded, plan, anatomy, lengths, share)
        _print(needs.lines())
        needs.require(ignore_limits=ignore_limits)
    return 0


def _model(loaded: LoadedRecipe) -> tuple[ModelShape | None, Any, list[Line]]:
    """The model's anatomy, its tokenizer, and what to say of them."""
    from ..models.loader import load_tokenizer

    model = loaded.recipe.model
    anatomy = model_shape(loaded)
    name = model.path or "fresh"
    if anatomy is None:
        text = f"{name}: not on this disk as plain data; its needs are not known here"
        return None, None, [("model", text)]
    kind, vocabulary = anatomy.config["model_type"], anatomy.setting("vocab_size")
    lines = [
        (
            "model",
            f"{name}: {kind}, {anatomy.parameters:,} parameters, "
            f"{readable_size(anatomy.bytes)}, vocabulary {vocabulary:,}",
        )
    ]
    for stage in loaded.recipe.stages:
        # What is quantized in distilling is another model.
        if stage.kind != "draft":
            lines += _kept(anatomy, stage.config)
    if model.from_scratch:
        lines.append(("model", "its tokenizer is trained at the start of the run"))
        return anatomy, None, lines
    folder = loaded.find(model.path)
    trust = model.trust_remote_code
    return anatomy, load_tokenizer(folder, trust_remote_code=trust), lines


def _kept(anatomy: ModelShape, config: ConfigModel) -> Iterator[Line]:
    """The layers a stage would like to quantize and cannot, named."""
    grid = getattr(config, "qat", None) or getattr(config, "quantization", None)
    grid = config if hasattr(config, "method") else grid
    if grid:
        selection = anatomy.selection(grid)
        count = len(selection.specs) + len(selection.kept)
        yield "model", f"{len(selection.specs)} of {count} layers are quantized"
        for reason in dict.fromkeys(selection.kept.values()):
            paths = sorted(p for p, why in selection.kept.items() if why == reason)
            more = ", ..." * (len(paths) > NAMED)
            yield "model", f"kept, as {reason}: {', '.join(paths[:NAMED])}{more}"


def _rows(
    loaded: LoadedRecipe, split: str, instead: RowReservoir
) -> tuple[RowReservoir, list[Line]]:
    """A sample of all local rows of a split, or `instead`, and what to say of them."""
    data = loaded.recipe.data
    sample = RowReservoir()
    lines = []
    for source in getattr(data, split):
        if not source.startswith(BUILTIN) and loaded.find(source) is None:
            lines.append((split, f"{source}: on the Hub, not read by this check"))
            continue
        rows = RecordReader(
            source,
            split=split,
            find=lambda name: loaded.find(name) or Path(name),
            columns=data.columns,
            limit=data.max_samples,
        )
        for row in rows:
            sample.add(row)
        found = rows.stats
        text = f"{source}: {found.rows:,} rows, format {found.format}"
        lines.append((split, text))
        lines += [(split, f"skipped: {where}: {why}") for where, why in found.named]
        if found.bad > len(found.named):
            lines.append((split, f"{found.bad:,} rows skipped in all"))
    return (sample if sample.total else instead), lines


def _tokens(
    loaded: LoadedRecipe, sample: list[DataRecord], total: int, tokenizer: Any
) -> tuple[list[int], list[Line]]:
    """Lengths of the sample's examples in tokens, and what to say of them."""
    if not sample:
        return [], []
    data = loaded.recipe.data
    if tokenizer is None:
        length = data.max_seq_length
        guessed = [len(row.as_text()) // CHARACTERS + 1 for row in sample]
        windows = [min(length, n) for n in guessed for _ in range(0, n, length)]
        text = f"not counted yet; {CHARACTERS} characters each are assumed below"
        return windows, [
            ("tokens", text),
            *_example(sample[0], sample[0].as_text(), ""),
        ]
    encoded = encode_all(
        sample, tokenizer, max_seq_length=data.max_seq_length, loss_on=data.loss_on
    )
    first = encoded.examples[0]
    spans = render_mask(first, tokenizer)
    text = "".join(f"⟦{span}⟧" if is_trained else span for span, is_trained in spans)
    lines = [*_lengths(encoded, len(sample), total), *_example(first, text, MARKS)]
    # The first token of an example is only read, the last one only predicted.
    return [len(example.tokens) - 1 for example in encoded.examples], lines


def _lengths(encoded: EncodeResult, looked_at: int, total: int) -> Iterator[Line]:
    lengths = sorted(len(example.tokens) for example in encoded.examples)
    trained = sum(int(example.mask.sum()) for example in encoded.examples)
    yield (
        "tokens",
        f"{looked_at:,} of {total:,} rows looked at: {len(lengths):,} examples of "
        f"{lengths[0]} to {lengths[-1]} tokens, half of them up to "
        f"{lengths[len(lengths) // 2]}; {trained / sum(lengths):.0%} are trained",
    )
    yield "tokens", f"{encoded.truncated:,} truncated, {len(encoded.dropped):,} dropped"
    if encoded.last_only:
        yield "tokens", f"{encoded.last_only:,} {LAST_ONLY}"
    for where, reason in encoded.dropped[:NAMED]:
        yield "tokens", f"dropped: {where}: {reason}"


def _example(row: DataRecord | Example, text: str, marks: str) -> Iterator[Line]:
    yield "example", f"{row.where}{marks}:"
    for line in (text[:SHOWN] + " ..." * (len(text) > SHOWN)).splitlines():
        yield "", f"  {line}"


def _steps(plan: RunPlan) -> Iterator[Line]:
    """The plan; whether a token may write on the Hub is asked when the run starts."""
    yield "output", f"{plan.output}, recipe {plan.recipe_hash[:12]}"
    for step in plan.steps:
        outputs = ", ".join(map(str, step.outputs))
        yield "plan", f"{step.name}: {', '.join(step.inputs)} -> {outputs}"
        if name := getattr(step.config, "hub_repo_id", None):
            hub.require_token(name)
            seen = "private" if step.config.private else "public"
            yield "plan", f"{step.name}: pushed to {name} on the Hub, {seen}"


def _print(lines: Iterable[Line]) -> None:
    for topic, text in lines:
        sys.stdout.write(f"{topic:<9}{text}\n")

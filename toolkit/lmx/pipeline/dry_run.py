"""`lmx-train --dry-run`: checks that need no weights and no network, in seconds."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import launcher
from ..config.loader import LoadedRecipe
from ..convert.importers import find_importable, gguf
from ..data import builtin
from ..data.dataset import RecordReader
from ..data.record_formats import CHARACTERS_PER_TOKEN, DataRecord
from ..data.splits import num_held_out, validation_sources
from ..data.tokenization import encode_all, render_mask, template_messages
from ..models.rope_parameters import check_length
from ..models.tensor_parallel import shard_share
from ..run import terminal
from ..run.parallel_dims import require_process_count
from ..run.progress import readable_size
from ..run.run_dir import check_output
from .estimate import ModelShape
from .plan import RunPlan
from .resources import ResourceCheck, model_shape

SAMPLE_CHARACTERS = 500_000  # tokenized in half a second
MAX_NAMES = 5
MAX_EXAMPLE_CHARACTERS = 600
MARKS = ", trained tokens between ⟦ and ⟧"

Line = tuple[str, str]


class RowReservoir:
    """Every n-th of many examples, `SAMPLE_CHARACTERS` characters or slightly more.

    Attributes:
        total, characters: of all examples.
    """

    def __init__(self):
        self.total = self.characters = 0
        self._longest: DataRecord | None = None
        self._most_characters = -1
        self._rows: list[DataRecord] = []
        self._stride = 1
        self._sampled_characters = 0

    @property
    def rows(self) -> list[DataRecord]:
        """The sample, and the longest example, which decides about memory."""
        longest = self._longest
        if longest is None or any(row is longest for row in self._rows):
            return self._rows
        if longest.text:
            longest = replace(longest, text=longest.text[:SAMPLE_CHARACTERS])
        return [*self._rows, longest]

    def add_row(self, row: DataRecord) -> None:
        """Count an example, and sample it if its number is a multiple of n."""
        characters = len(row.as_text())
        if characters > self._most_characters:
            self._longest, self._most_characters = row, characters
        if self.total % self._stride == 0:
            self._rows.append(row)
            self._sampled_characters += characters
        self.total += 1
        self.characters += characters
        while self._sampled_characters > SAMPLE_CHARACTERS and len(self._rows) > 1:
            self._stride *= 2
            self._rows = self._rows[::2]
            self._sampled_characters = _characters(self._rows)


def _characters(rows: list[DataRecord]) -> int:
    return sum(len(row.as_text()) for row in rows)


class DryRun:
    """What a run would read, need and write.

    Attributes:
        resources: what it needs of this machine, once `lines` has ended; None if the
            size of the model is unknown.
    """

    def __init__(self, loaded: LoadedRecipe, plan: RunPlan):
        self.loaded = loaded
        self.plan = plan
        self.resources: ResourceCheck | None = None

    def lines(self) -> Iterator[Line]:
        """Topics and texts, each as soon as it is known.

        Raises:
            UserError: the model or the data cannot be used.
        """
        loaded, plan = self.loaded, self.plan
        shape, tokenizer, lines = _model(loaded, plan)
        yield from lines
        valid, lines = _split(loaded, "valid", RowReservoir())
        yield from lines
        sample, lines = _split(loaded, "train", valid)
        yield from lines
        lengths, lines = _tokens(loaded, sample.rows, sample.total, tokenizer)
        yield from lines
        yield "output", f"{plan.output}, recipe {plan.recipe_hash[:12]}"
        finished = plan.finished()
        for planned in plan.stages:
            name, outputs = planned.name, ", ".join(map(str, planned.outputs))
            done = ", already complete" * (name in finished)
            yield "plan", f"{name}: {', '.join(planned.inputs)} -> {outputs}{done}"
            # The run itself checks whether the token may write to the Hub.
            for text in planned.stage.offline_checks():
                yield "plan", f"{name}: {text}"
        held = _num_held_out(loaded, sample.total)
        if held:
            yield "valid", f"about {held:,.0f} examples are held out from train"
        share = (sample.total - held) / max(1, len(sample.rows))
        if shape:
            check_length(shape.config, max(lengths, default=0))
            valid_tokens = None
            if held:
                valid_tokens = held * sum(lengths) / len(sample.rows)
            elif valid.total and all(
                _is_local(loaded, s) for s in loaded.recipe.data.valid
            ):
                per_character = sum(lengths) / max(1, _characters(sample.rows))
                valid_tokens = valid.characters * per_character
            self.resources = ResourceCheck(
                loaded, plan, shape, lengths, share, valid_tokens
            )
            yield from self.resources.lines()
            config = loaded.recipe.parallel
            tensor = config.tensor
            size = (config.data or 1) * tensor
            if launcher.launched_rank() is not None:
                size = launcher.process_count()
                require_process_count(config, size)
            if size > 1:
                text = f"{size // tensor} (data) x {tensor} (tensor) = {size} processes"
                yield "parallel", text
            if size > 1 and tensor > 1:
                held = shard_share(shape.model(), tensor)
                size = readable_size(int(held * shape.bytes))
                yield "parallel", f"a process holds {held:.0%} of the model, {size}"

    def require(self) -> None:
        """Raise UserError with code 3 if memory or disk are too small."""
        if self.resources:
            self.resources.require()


def dry_run(loaded: LoadedRecipe, plan: RunPlan, *, ignore_limits: bool) -> int:
    """Print what a run would read, need and write; returns the exit code.

    Raises:
        UserError: the output, the model or the data cannot be used, or, without
            `ignore_limits`, memory or disk are too small.
    """
    check_output(plan.output)
    run = DryRun(loaded, plan)
    for topic, text in run.lines():
        terminal.write_out(f"{topic:<9}{text}\n")
    if not ignore_limits:
        run.require()
    return 0


def require_resources(loaded: LoadedRecipe, plan: RunPlan) -> None:
    """Refuse a run that exceeds memory or disk.

    A run for which examples of `max_seq_length` tokens fit starts at once. Otherwise
    the data decides, as in a dry run, if all of it is on this disk.

    Raises:
        UserError: the run does not fit; its code is 3.
    """
    shape = model_shape(loaded)
    if shape is None:
        return
    check = ResourceCheck(loaded, plan, shape)
    if check.fits:
        return
    if all(_is_local(loaded, source) for source in loaded.recipe.data.train):
        run = DryRun(loaded, plan)
        for _ in run.lines():
            pass
        run.require()
    else:
        check.require()


def _model(
    loaded: LoadedRecipe, plan: RunPlan
) -> tuple[ModelShape | None, Any, list[Line]]:
    """The model's shape, its tokenizer, and lines about them."""
    from ..models.loader import load

    model = loaded.recipe.model
    shape = model_shape(loaded)
    name = model.path or "from scratch"
    if shape is None:
        text = f"{name}: not on this disk as an MLX checkpoint, so its size is unknown"
        return None, None, [("model", text)]
    kind, vocabulary = shape.config["model_type"], shape.setting("vocab_size")
    text = (
        f"{name}: {kind}, {shape.parameters:,} parameters, "
        f"{readable_size(shape.bytes)}, vocabulary {vocabulary:,}"
    )
    lines = [("model", text)]
    for planned in plan.stages:
        if not (quantization := planned.stage.quantization):
            continue
        selection = shape.selection(quantization)
        count = len(selection.specs) + len(selection.skipped)
        text = f"{planned.name}: {len(selection.specs)} of {count} layers are quantized"
        lines.append(("model", text))
        for reason in dict.fromkeys(selection.skipped.values()):
            paths = sorted(p for p, why in selection.skipped.items() if why == reason)
            more = ", ..." * (len(paths) > MAX_NAMES)
            names = ", ".join(paths[:MAX_NAMES])
            text = f"{planned.name}: left unquantized, {reason}: {names}{more}"
            lines.append(("model", text))
    if model.from_scratch:
        lines.append(("model", "its tokenizer is trained at the start of the run"))
        return shape, None, lines
    place = loaded.find(model.path)
    if (source := find_importable(place)) and source.is_file():
        return shape, gguf.load_tokenizer(source), lines
    # The weights stay unread. Their shapes are compared with the config.
    checkpoint = load(place, compute="stored", lazy=True)
    return shape, checkpoint.tokenizer, lines


def _is_local(loaded: LoadedRecipe, source: str) -> bool:
    return source.startswith(builtin.PREFIX) or loaded.find(source) is not None


def _num_held_out(loaded: LoadedRecipe, count: int) -> float:
    """About how many of the local training examples are held out for validation."""
    data, find = loaded.recipe.data, lambda name: loaded.find(name) or Path(name)
    local = [source for source in data.train if _is_local(loaded, source)]
    return 0 if validation_sources(data.valid, local, find) else num_held_out(count)


def _split(
    loaded: LoadedRecipe, split: str, default: RowReservoir
) -> tuple[RowReservoir, list[Line]]:
    """A sample of a split's local examples, or `default`, and lines about them."""
    data = loaded.recipe.data
    sample = RowReservoir()
    lines = []
    for source in getattr(data, split):
        if not _is_local(loaded, source):
            lines.append((split, f"{source}: on the Hub, not read by a dry run"))
            continue
        reader = RecordReader(
            source,
            split=split,
            find=lambda name: loaded.find(name) or Path(name),
            columns=data.columns,
            limit=data.max_samples,
        )
        for row in reader:
            sample.add_row(row)
        stats = reader.stats
        lines += [(split, text) for text in (*stats.counts(), *stats.problems())]
    return (sample if sample.total else default), lines


def _tokens(
    loaded: LoadedRecipe, sample: list[DataRecord], total: int, tokenizer: Any
) -> tuple[list[int], list[Line]]:
    """Tokens of the sequences of the sampled examples, and lines about them.

    Without a tokenizer they are assumed.
    """
    if not sample:
        return [], []
    data = loaded.recipe.data
    window = data.max_seq_length
    if tokenizer is None:
        lengths = [len(row.as_text()) // CHARACTERS_PER_TOKEN + 1 for row in sample]
        windows = [min(window, n) for n in lengths for _ in range(0, n, window)]
        text = (
            f"unknown; the estimates below assume {CHARACTERS_PER_TOKEN} characters "
            "per token"
        )
        first = sample[0]
        return windows, [("tokens", text), *_example(first.where, first.as_text())]
    encoded = encode_all(sample, tokenizer, max_seq_length=window, loss_on=data.loss_on)
    first = encoded.examples[0]
    spans = render_mask(first, tokenizer)
    text = "".join(f"⟦{span}⟧" if is_trained else span for span, is_trained in spans)
    example = _example(first.where + MARKS, text)
    lengths = sorted(len(example.tokens) for example in encoded.examples)
    trained = sum(int(example.mask.sum()) for example in encoded.examples)
    texts = [
        f"{len(sample):,} of {total:,} examples tokenized: {len(lengths):,} sequences "
        f"of {lengths[0]} to {lengths[-1]} tokens, median "
        f"{lengths[len(lengths) // 2]}; {trained / sum(lengths):.0%} are trained",
        f"{encoded.truncated:,} truncated, {len(encoded.dropped):,} skipped",
        *template_messages(vars(encoded)),
    ]
    skipped = encoded.dropped[:MAX_NAMES]
    texts += [f"skipped: {where}: {reason}" for where, reason in skipped]
    # The first token of an example is only an input, the last one only a target.
    lengths = [len(example.tokens) - 1 for example in encoded.examples]
    return lengths, [*(("tokens", text) for text in texts), *example]


def _example(title: str, text: str) -> Iterator[Line]:
    yield "example", f"{title}:"
    more = " ..." * (len(text) > MAX_EXAMPLE_CHARACTERS)
    for line in (text[:MAX_EXAMPLE_CHARACTERS] + more).splitlines():
        yield "", f"  {line}"

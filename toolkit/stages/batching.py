"""What a train stage is fed: its rows as tokens, cut into batches."""

from collections.abc import Callable

from ..data import cache, keys, store
from ..data.batches import Batches, Examples
from ..data.packing import PackedBatches, packed
from ..data.sources import Tally, tell
from ..data.template import LAST_ONLY, encode_all
from ..model.load import Loaded
from .context import Context
from .train import Config


def training_batches(
    config: Config,
    context: Context,
    loaded: Loaded,
    *,
    packing: bool,
    answered: Callable[[Examples], Examples] = lambda examples: examples,
) -> Batches | PackedBatches:
    """Batches of the training rows, which are tokenised once and kept in the cache.

    Args:
        packing: fill rows with several examples. Where the recipe asks for that and the
            model cannot, batches have as many tokens, padding included.
        answered: gives the rows other answers.
    """
    longest = context.data.max_length
    examples = answered(_tokenised(context, loaded))
    if not packing:
        return Batches(examples, **_sizes(config, context))
    batches = PackedBatches(
        examples,
        packed(examples, longest + 1, context.report.warn),
        max_length=longest,
        rows=config.packed_rows(longest),
        seed=context.seed,
    )
    context.report.say(
        f"{len(examples):,} examples packed into {batches.rows:,} rows, "
        f"{batches.filled:.1%} filled"
    )
    return batches


def validation_batches(config: Config, context: Context, loaded: Loaded) -> Batches:
    """Batches of the validation rows, all in memory."""
    data = context.data
    encoded = encode_all(
        context.rows.valid,
        loaded.tokenizer,
        max_length=data.max_length,
        train_on=data.train_on,
    )
    counts = vars(encoded) | {"dropped": len(encoded.dropped)}
    _tell(context, "valid", counts, encoded.dropped[: store.NAMED])
    return Batches(encoded.examples, **_sizes(config, context))


def _tokenised(context: Context, loaded: Loaded) -> store.Store:
    data, rows, report = context.data, context.rows, context.report
    settings = {"max_length": data.max_length, "train_on": data.train_on}

    def fill(folder):
        report.say("tokenising the training rows")
        facts = store.write(
            folder, rows.train, loaded.tokenizer, **settings, say=report.say
        )
        return facts | {"sources": [vars(t) for t in rows.train.tallies.values()]}

    tokenizer = [keys.tokenizer(loaded.path), keys.versions(), keys.code()]
    kept = cache.kept(
        "tokens",
        cache.key_of([rows.fingerprint, tokenizer, settings]),
        fill,
        warn=report.warn,
        # A token of four bytes stands for about as many characters.
        space=rows.size,
    )
    facts = kept.facts
    for tally in facts["sources"]:
        tell("train", Tally(**tally), report.say, report.warn)
    _tell(context, "train", facts, facts["named"])
    how = f"tokenised into {kept.folder}" if kept.made else "tokenised before"
    report.say(f"train: {facts['rows']:,} rows, {facts['tokens']:,} tokens, {how}")
    return store.Store(kept)


def _tell(context: Context, split: str, counts: dict, named) -> None:
    """Say what became of the rows that are not trained whole."""
    say, longest = context.report.say, context.data.max_length
    if counts["truncated"]:
        say(f"{split}: {counts['truncated']:,} rows cut at {longest} tokens")
    if counts["last_only"]:
        say(f"{split}: {counts['last_only']:,} {LAST_ONLY}")
    for where, reason in named:
        context.report.warn(f"{where}: row dropped: {reason}")
    if counts["dropped"] > len(named):
        say(f"{split}: {counts['dropped']:,} rows dropped in all")


def _sizes(config: Config, context: Context) -> dict:
    longest, tokens = context.data.max_length, config.batch_tokens
    if config.packing:
        tokens = config.packed_rows(longest) * longest
    return {
        "max_length": longest,
        "rows": None if tokens else config.batch_size,
        "tokens": tokens,
        "seed": context.seed,
    }

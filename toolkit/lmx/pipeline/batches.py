"""What a train stage is fed: its rows as tokens, cut into batches."""

from collections.abc import Callable

from ..config.train import TrainConfig
from ..cpu import on_cpu
from ..data import cache, fingerprint, token_store
from ..data.batching import BucketBatchSampler, ExampleDataset
from ..data.dataset import ReadStats
from ..data.packing import PackedBatchSampler, packed
from ..data.splits import log_read_stats
from ..data.tokenization import LAST_ONLY, encode_all
from ..models.checkpoint import config_int
from ..models.loader import LoadedModel
from ..training.chunked_loss import ChunkedLoss, ChunkedLossUnsupported
from ..training.document_mask import DocumentCaches, PackingUnsupported
from .context import StageContext
from .teacher import TeacherSetup


def training_batches(
    config: TrainConfig,
    context: StageContext,
    loaded: LoadedModel,
    *,
    packing: bool,
    answered: Callable[[ExampleDataset], ExampleDataset] = lambda examples: examples,
) -> BucketBatchSampler | PackedBatchSampler:
    """Batches of the training rows, which are tokenised once and kept in the cache.

    Args:
        packing: fill rows with several examples. Where the recipe asks for that and the
            model cannot, batches have as many tokens, padding included.
        answered: gives the rows other answers.
    """
    longest = context.data.max_seq_length
    examples = answered(_tokenised(context, loaded))
    if not packing:
        return BucketBatchSampler(examples, **_sizes(config, context))
    batches = PackedBatchSampler(
        examples,
        packed(examples, longest + 1, context.logger.warning),
        max_seq_length=longest,
        rows=config.sequences_per_batch(longest),
        seed=context.seed,
    )
    context.logger.info(
        f"{len(examples):,} examples packed into {batches.rows:,} rows, "
        f"{batches.filled:.1%} filled"
    )
    return batches


def validation_batches(
    config: TrainConfig, context: StageContext, loaded: LoadedModel
) -> BucketBatchSampler:
    """Batches of the validation rows, all in memory."""
    data = context.data
    encoded = encode_all(
        context.rows.valid,
        loaded.tokenizer,
        max_seq_length=data.max_seq_length,
        loss_on=data.loss_on,
    )
    counts = vars(encoded) | {"dropped": len(encoded.dropped)}
    _tell(context, "valid", counts, encoded.dropped[: token_store.MAX_LOGGED])
    return BucketBatchSampler(encoded.examples, **_sizes(config, context))


def _tokenised(context: StageContext, loaded: LoadedModel) -> token_store.TokenStore:
    data, rows, logger = context.data, context.rows, context.logger
    settings = {"max_seq_length": data.max_seq_length, "loss_on": data.loss_on}

    def fill(folder):
        logger.info("tokenizing the training examples")
        facts = token_store.write_token_store(
            folder, rows.train, loaded.tokenizer, **settings, info=logger.info
        )
        return facts | {"sources": [vars(t) for t in rows.train.stats.values()]}

    tokenizer = [
        fingerprint.tokenizer(loaded.path),
        fingerprint.versions(),
        fingerprint.code(),
    ]
    kept = cache.get_or_create(
        "tokens",
        cache.key_of([rows.fingerprint, tokenizer, settings]),
        fill,
        warning=logger.warning,
        # A token of four bytes stands for about as many characters.
        space=rows.size,
    )
    facts = kept.facts
    for tally in facts["sources"]:
        log_read_stats("train", ReadStats(**tally), logger.info, logger.warning)
    _tell(context, "train", facts, facts["first_dropped"])
    how = f"tokenized into {kept.folder}" if kept.made else "tokenized before"
    counts = f"{facts['records']:,} examples, {facts['tokens']:,} tokens"
    logger.info(f"train: {counts}, {how}")
    return token_store.TokenStore(kept)


def _tell(context: StageContext, split: str, counts: dict, named) -> None:
    """Say what became of the rows that are not trained whole."""
    info, longest = context.logger.info, context.data.max_seq_length
    if counts["truncated"]:
        info(f"{split}: {counts['truncated']:,} examples truncated at {longest} tokens")
    if counts["last_only"]:
        info(f"{split}: {counts['last_only']:,} {LAST_ONLY}")
    for where, reason in named:
        context.logger.warning(f"{where}: example skipped: {reason}")
    if counts["dropped"] > len(named):
        info(f"{split}: {counts['dropped']:,} examples skipped in total")


def _sizes(config: TrainConfig, context: StageContext) -> dict:
    longest, tokens = context.data.max_seq_length, config.batch_tokens
    if config.packing:
        tokens = config.sequences_per_batch(longest) * longest
    return {
        "max_seq_length": longest,
        "rows": None if tokens else config.batch_size,
        "tokens": tokens,
        "seed": context.seed,
    }


# --- from stages.splitting: How a train stage cuts its work: rows into documents, and the loss into chunks.


def document_caches(
    loaded: LoadedModel, context: StageContext, teaching: TeacherSetup | None
) -> DocumentCaches | None:
    """What keeps packed documents apart; None, aloud, if a model cannot do that."""
    try:
        caches = DocumentCaches(loaded.model)
        if teaching:
            teaching.keep_apart()
        return caches
    except PackingUnsupported as reason:
        context.logger.warning(
            f"rows are padded, packing is off: this model does not keep documents "
            f"apart: {reason}"
        )
        return None


def chunked_loss(
    config: TrainConfig, context: StageContext, loaded: LoadedModel
) -> ChunkedLoss | None:
    """The loss by chunks; None, aloud where it matters, if the model does not split."""
    longest = context.data.max_seq_length
    tokens = max(config.batch_tokens or config.batch_size * longest, longest)
    sizes = {"vocabulary": config_int(loaded.config, "vocab_size"), "tokens": tokens}
    try:
        return ChunkedLoss(loaded.model, config.chunk(**sizes, on_cpu=on_cpu()))
    except ChunkedLossUnsupported as reason:
        # Else it is but a little slower.
        if config.chunk(**sizes, on_cpu=False):
            context.logger.warning(
                f"the loss is made of all logits at once, loss_chunk_tokens is off: {reason}"
            )
        return None

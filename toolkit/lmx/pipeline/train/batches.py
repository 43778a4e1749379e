"""The batches of a train stage, and how it cuts them into documents and chunks."""

from collections.abc import Callable
from functools import partial

from ...config.train import TrainConfig
from ...cpu import on_cpu
from ...data import cache, fingerprint, token_store
from ...data.batching import BucketBatchSampler, ExampleDataset, StepSampler
from ...data.dataset import ReadStats
from ...data.packing import PackedBatchSampler, packed
from ...data.splits import log_read_stats
from ...data.token_store import Encode
from ...data.tokenization import (
    EncodeResult,
    encode_all,
    encode_block,
    template_messages,
)
from ...models.blockwise import NoTrunkHeadSplit
from ...models.checkpoint import config_int
from ...models.loader import LoadedModel
from ...training.chunked_loss import ChunkedLossModel
from ...training.document_mask import DocumentCaches, PackingUnsupported
from ...training.losses import LossModel
from ..context import StageContext


def training_batches(
    config: TrainConfig,
    context: StageContext,
    loaded: LoadedModel,
    replace_completions: Callable[[ExampleDataset], ExampleDataset],
    *,
    packing: bool,
    encode: Encode | None = None,
) -> StepSampler:
    """Batches of the training examples, which are tokenized once into the cache.

    Args:
        encode: makes the examples of records; None = one of each record.
        packing: several examples per sequence. If the recipe asks for packing and the
            model cannot do it, padded batches have as many tokens.
    """
    longest = context.data.max_seq_length
    examples = replace_completions(tokenized_examples(context, loaded, encode))
    if not packing:
        return _padded_batches(examples, config, context, encode)
    batches = PackedBatchSampler(
        examples,
        packed(examples, longest + 1, context.logger.warning),
        max_seq_length=longest,
        batch_size=config.sequences_per_batch(longest),
        accumulation=config.gradient_accumulation_steps,
        seed=context.seed,
    )
    context.logger.info(
        f"{len(examples):,} examples packed into {batches.num_sequences:,} sequences, "
        f"{batches.filled:.1%} filled"
    )
    return batches


def validation_batches(
    config: TrainConfig,
    context: StageContext,
    loaded: LoadedModel,
    *,
    encode: Encode | None = None,
) -> BucketBatchSampler:
    """Batches of the validation examples, all in memory.

    Args:
        encode: makes the examples of records; None = one of each record.
    """
    encoded = encode_valid(context, loaded.tokenizer, encode)
    counts = vars(encoded) | {"dropped": len(encoded.dropped)}
    _log_changed(context, "valid", counts, encoded.dropped[: token_store.MAX_LOGGED])
    return _padded_batches(encoded.examples, config, context, encode)


def encode_valid(
    context: StageContext, tokenizer, encode: Encode | None = None
) -> EncodeResult:
    """The validation examples: those with a false label if there are no others."""
    data, records = context.data, context.rows.valid
    if encode is None and all(record.label is False for record in records):
        context.logger.warning(
            "valid: all labels are false, so its loss is that of bad completions"
        )
        encode = partial(encode_block, for_preference=True)
    settings = {"max_seq_length": data.max_seq_length, "loss_on": data.loss_on}
    return encode_all(records, tokenizer, encode=encode, **settings)


def document_caches(
    loaded: LoadedModel, context: StageContext, enable_packing: Callable[[], None]
) -> DocumentCaches | None:
    """The mask between packed documents; None with a warning if it is unsupported."""
    try:
        caches = DocumentCaches(loaded.model)
        enable_packing()
        return caches
    except PackingUnsupported as reason:
        context.logger.warning(
            "packing is off and sequences are padded, because this model does not keep "
            f"documents apart: {reason}"
        )
        return None


def loss_model(
    config: TrainConfig, context: StageContext, loaded: LoadedModel
) -> LossModel:
    """The model for a loss, in chunks if it can be split into trunk and head."""
    longest = context.data.max_seq_length
    tokens = max(config.batch_tokens or config.batch_size * longest, longest)
    vocabulary = config_int(loaded.config, "vocab_size")
    chunk = config.chunk(vocabulary=vocabulary, tokens=tokens, on_cpu=on_cpu())
    try:
        return ChunkedLossModel(loaded.model, chunk)
    except NoTrunkHeadSplit as reason:
        # On a CPU a small batch is only a little slower without chunks.
        if config.chunk(vocabulary=vocabulary, tokens=tokens, on_cpu=False):
            context.logger.warning(
                "loss_chunk_tokens is off and all logits are computed at once: "
                f"{reason}"
            )
        return LossModel(loaded.model)


def _padded_batches(
    examples, config: TrainConfig, context: StageContext, encode: Encode | None
) -> BucketBatchSampler:
    longest, tokens = context.data.max_seq_length, config.batch_tokens
    if config.packing:
        tokens = config.sequences_per_batch(longest) * longest
    return BucketBatchSampler(
        examples,
        max_seq_length=longest,
        batch_size=None if tokens else config.batch_size,
        batch_tokens=tokens,
        accumulation=config.gradient_accumulation_steps,
        seed=context.seed,
        sequences_per_example=2 if encode else 1,
    )


def tokenized_examples(
    context: StageContext, loaded: LoadedModel, encode: Encode | None = None
) -> token_store.TokenStore:
    """The training examples, which are tokenized once into the cache."""
    data, rows, logger = context.data, context.rows, context.logger
    settings = {"max_seq_length": data.max_seq_length, "loss_on": data.loss_on}

    def fill(folder):
        logger.info("tokenizing the training examples")
        facts = token_store.write_token_store(
            folder,
            rows.train,
            loaded.tokenizer,
            **settings,
            info=logger.info,
            encode=encode,
        )
        return facts | {"sources": [vars(t) for t in rows.train.stats.values()]}

    tokenizer = [
        # Ids beyond the model's are refused while tokenizing.
        config_int(loaded.config, "vocab_size"),
        fingerprint.tokenizer(loaded.path),
        fingerprint.versions(),
        fingerprint.code(),
    ]
    artifact = cache.store(logger.warning).get_or_make(
        "tokens",
        cache.key_of(
            [rows.fingerprint, tokenizer, settings, encode and encode.__name__]
        ),
        fill,
        # A token has four bytes, and about four characters.
        space=rows.size,
    )
    facts = artifact.facts
    for stats in facts["sources"]:
        log_read_stats("train", ReadStats(**stats), logger.info, logger.warning)
    _log_changed(context, "train", facts, facts["first_dropped"])
    origin = (
        f"tokenized into {artifact.folder}" if artifact.made else "read from the cache"
    )
    logger.info(
        f"train: {facts['records']:,} examples, {facts['tokens']:,} tokens, {origin}"
    )
    return token_store.TokenStore(artifact)


def _log_changed(context: StageContext, split: str, counts: dict, named) -> None:
    """Log the examples that are truncated or skipped."""
    info, longest = context.logger.info, context.data.max_seq_length
    if counts["truncated"]:
        info(f"{split}: {counts['truncated']:,} examples truncated to {longest} tokens")
    for text in template_messages(counts):
        info(f"{split}: {text}")
    for where, reason in named:
        context.logger.warning(f"{where}: example skipped: {reason}")
    if counts["dropped"] > len(named):
        info(f"{split}: {counts['dropped']:,} examples skipped in total")

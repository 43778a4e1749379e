"""Reads single records in tests."""

from lmx.data.dataset import DataRecord, RecordReader
from lmx.data.tokenization import encode_block


def read(path, **options) -> DataRecord:
    """The only record of a source."""
    [record] = RecordReader(path, **options)
    return record


def skip_reason(write, good, bad) -> str:
    """Why a record is skipped, which stands after a good one."""
    reader = RecordReader(write([good, bad]))
    assert len(list(reader)) == reader.stats.skipped == 1
    return reader.stats.first_skipped[0][1]


def encode(
    record: DataRecord, tokenizer, *, max_seq_length: int, loss_on="completions"
):
    """The examples of one record: several for a long text, none without a target."""
    settings = {"max_seq_length": max_seq_length, "loss_on": loss_on}
    return encode_block([record], tokenizer, **settings).examples

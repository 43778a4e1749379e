"""Reads single records in tests."""

from lmx.data.dataset import DataRecord, RecordReader


def read(path, **options) -> DataRecord:
    """The only record of a source."""
    [record] = RecordReader(path, **options)
    return record


def skip_reason(write, good, bad) -> str:
    """Why a record is skipped, which stands after a good one."""
    reader = RecordReader(write([good, bad]))
    assert len(list(reader)) == reader.stats.skipped == 1
    return reader.stats.first_skipped[0][1]

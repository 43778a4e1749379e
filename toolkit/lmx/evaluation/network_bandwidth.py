"""Latency and bandwidth of all-reduces between the processes of a run."""

from dataclasses import dataclass

import mlx.core as mx

from ..interfaces import Communicator
from .memory_bandwidth import shortest_time

LARGE_BYTES = 1 << 24
SMALL_REPEATS, LARGE_REPEATS = 50, 5


@dataclass(frozen=True)
class Link:
    """The connection of a process with the next one, as all-reduces see it.

    Attributes:
        message_seconds: of a message of a few bytes.
        bytes_per_second: in one direction.
    """

    message_seconds: float
    bytes_per_second: float


def measure_link(ranks: Communicator) -> Link:
    """The slowest link of the ring, measured by all ranks together; several ranks.

    In an all-reduce by the ring algorithm, every one of N processes sends 2 (N - 1)
    messages, and 2 (N - 1) / N of the array (Patarasuk and Yuan 2009, doi
    10.1016/j.jpdc.2008.09.002).
    """
    messages = 2 * (ranks.size - 1)
    small = all_reduce_seconds(ranks, 4) / messages
    large = all_reduce_seconds(ranks, LARGE_BYTES) - messages * small
    measured = [small, messages / ranks.size * LARGE_BYTES / large]
    # All ranks wait for the slowest one.
    return Link(*ranks.broadcast_object(measured))


def all_reduce_seconds(ranks: Communicator, size: int) -> float:
    """Seconds of the fastest of a few all-reduces of so many bytes of float32."""
    values = mx.ones(size // 4)
    repeats = LARGE_REPEATS if size >= 1 << 20 else SMALL_REPEATS
    mx.eval(values, ranks.all_sum([values]))
    return shortest_time(lambda: mx.eval(ranks.all_sum([values])), repeats)

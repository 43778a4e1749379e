"""Latency and bandwidth of all-reduces between the processes of a run.

`lmx doctor --distributed` measures them and keeps them in the cache, where dry runs
find them.
"""

import json
from dataclasses import asdict, dataclass

import mlx.core as mx

from ..data import cache
from ..errors import UserError
from ..run.distributed import ProcessGroup
from ..run.fs import object_in, write_atomic
from .memory_bandwidth import shortest_time

LINKS = "links.json"
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

    def all_reduce_seconds(self, size: int, processes: int) -> float:
        """Of the sum of an array of so many bytes, by the ring algorithm.

        Every process sends 2 (N - 1) messages, and 2 (N - 1) / N of the array
        (Patarasuk and Yuan 2009, doi 10.1016/j.jpdc.2008.09.002).
        """
        messages = 2 * (processes - 1)
        sent = messages / processes * size
        return messages * self.message_seconds + sent / self.bytes_per_second


def measure_link(ranks: ProcessGroup) -> Link:
    """The slowest link of the ring, measured by all ranks together; several ranks."""
    messages = 2 * (ranks.size - 1)
    small = all_reduce_seconds(ranks, 4) / messages
    large = all_reduce_seconds(ranks, LARGE_BYTES) - messages * small
    measured = [small, messages / ranks.size * LARGE_BYTES / large]
    # All ranks wait for the slowest one, and rank 0 keeps the result.
    return Link(*ranks.broadcast_object(measured))


def all_reduce_seconds(ranks: ProcessGroup, size: int) -> float:
    """Seconds of the fastest of a few all-reduces of so many bytes of float32."""
    values = mx.ones(size // 4)
    repeats = LARGE_REPEATS if size >= 1 << 20 else SMALL_REPEATS
    mx.eval(values, ranks.all_sum([values]))
    return shortest_time(lambda: mx.eval(ranks.all_sum([values])), repeats)


def keep_link(link: Link, processes: int) -> None:
    """Write a measurement into the cache."""
    path = cache.root() / LINKS
    path.parent.mkdir(parents=True, exist_ok=True)
    known = object_in(path) | {str(processes): asdict(link)}
    write_atomic(path, json.dumps(known, indent=2) + "\n")


def known_link(processes: int) -> Link | None:
    """The last measurement with so many processes; None if there is none."""
    try:
        values = object_in(cache.root() / LINKS).get(str(processes))
    except UserError:  # Without a home folder there is no cache.
        return None
    return Link(**values) if values else None

"""Process group: collectives, and propagation of errors and interrupts to all ranks."""

import atexit
import fcntl
import json
import math
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from itertools import accumulate, islice
from pathlib import Path
from tempfile import gettempdir
from typing import Any, TypeVar
from uuid import uuid4

import mlx.core as mx

from ..errors import FAILED, INTERRUPTED, Interrupted, UserError
from . import launcher, watchdog
from .watchdog import RESUMES, Watchdog

Item = TypeVar("Item")
Result = TypeVar("Result")
# Bytes per all-reduce. Small arrays are concatenated, because each call has latency.
BUCKET_BYTES = 32 << 20
# Whose versions all processes must share.
PACKAGES = ("lmx-toolkit", "mlx", "mlx-lm")
# Attribute of an error: the group to whose ranks it was reported.
REPORTED = "reported_to"
# Arrays in a message begin at multiples of so many bytes, for loads of any dtype.
ALIGNMENT = 16
# Products of so many rows at a time are rounded alike, and those of a rest otherwise.
ROWS_AT_ONCE = 16
# Prefixes of MLX's messages about lost connections.
BACKEND_PREFIXES = ("[ring]", "[jaccl]", "[nccl]", "[mpi]")
# The backend may notice a lost connection before the watchdog does.
NOTICE_SECONDS = 5.0


class RemoteError(UserError):
    """Another process of the run failed; it prints its own message."""

    def __init__(self, code: int):
        super().__init__("", code=code)


class ProcessGroup:
    """The processes of a run. With one process, collectives have no cost.

    All processes must call the collective methods in the same order.

    Attributes:
        group: MLX's own, for layers that communicate; None with one process.
        rank: rank of this process, from 0.
        size: number of processes.
    """

    def __init__(
        self,
        group: mx.distributed.Group | None = None,
        watchdog: Watchdog | None = None,
    ):
        self.group = group
        self._watchdog = watchdog
        self.rank = group.rank() if group else 0
        self.size = group.size() if group else 1

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes files and logs."""
        return self.rank == 0

    def split(self, color: int) -> "ProcessGroup":
        """The processes that call this with the same number, ordered by rank.

        Raises:
            RuntimeError: the backend has no such groups; only MPI has.
        """
        return ProcessGroup(self.group.split(color), self._watchdog)

    def shard(self, items: Iterable[Item]) -> Iterator[Item]:
        """The items of this rank: every `size`-th."""
        return islice(items, self.rank, None, self.size)

    def all_sum(self, values: Sequence[mx.array]) -> list[mx.array]:
        """Lazy sums of arrays over all processes, in float32.

        Values in float64, which only a CPU has, are summed in float64.
        """
        if self.size == 1:
            return list(values)
        dtype = mx.float64 if values[0].dtype == mx.float64 else mx.float32
        flat = [value.astype(dtype).reshape(-1) for value in values]
        sums: list[mx.array] = []
        for bucket in _buckets(flat):
            # The dependency gives all ranks the same order of calls.
            [joined] = mx.depends([mx.concatenate(bucket)], sums[-1:])
            total = mx.distributed.all_sum(joined, group=self.group)
            ends = accumulate(value.size for value in bucket[:-1])
            sums += mx.split(total, list(ends))
        pairs = zip(sums, values, strict=True)
        return [total.reshape(value.shape) for total, value in pairs]

    def all_gather(self, value: mx.array) -> mx.array:
        """The lazy concatenation of the arrays of all ranks along axis 0."""
        return mx.distributed.all_gather(value, group=self.group)

    def reduce_scatter(self, value: mx.array) -> mx.array:
        """This rank's slice of the lazy sum over all ranks, along axis 0.

        Only NCCL and JACCL support it; other backends raise a RuntimeError.
        """
        return mx.distributed.sum_scatter(value, group=self.group)

    def all_reduce_scalars(self, *values: float) -> list[float]:
        """Sums of numbers over all processes, in float64."""
        if self.size == 1:
            return list(values)
        # Two float32 parts per number, because MLX has no float64 collectives.
        high = mx.array(values, mx.float32)
        low = [v - h for v, h in zip(values, high.tolist(), strict=True)]
        parts = [high, mx.array(low, mx.float32)]
        gathered = [mx.distributed.all_gather(p[None], group=self.group) for p in parts]
        rows = [row for part in gathered for row in part.tolist()]
        return [math.fsum(column) for column in zip(*rows, strict=True)]

    def broadcast(self, values: Sequence[mx.array]) -> list[mx.array]:
        """The arrays of rank 0, of any dtype, bit for bit."""
        if self.size == 1:
            return list(values)
        received = []
        for value in values:
            # As bytes: a sum with zero would change -0.0 and some NaN.
            data = mx.contiguous(value).reshape(-1).view(mx.uint8)
            data = data if self.is_first else mx.zeros_like(data)
            data = mx.distributed.all_sum(data, group=self.group)
            received.append(data.view(value.dtype).reshape(value.shape))
            mx.eval(received[-1])
        return received

    def broadcast_object(self, value: Any) -> Any:
        """The JSON value of rank 0; those of other ranks are ignored."""
        if self.size == 1:
            return value
        with self.collective_errors():
            text = json.dumps(value).encode() if self.is_first else b""
        [length] = self.broadcast([mx.array(len(text))])
        [data] = self.broadcast([mx.array(text.ljust(length.item()))])
        return json.loads(bytes(memoryview(data)))

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """The data of all ranks, by rank."""
        if self.size == 1:
            return [data]
        array = mx.array(data) if data else mx.zeros(0, mx.uint8)
        return [bytes(memoryview(each)) for each in self._gather_arrays(array)]

    def gather_objects(self, value: Any) -> list[Any]:
        """The JSON values of all ranks, by rank."""
        if self.size == 1:
            return [value]
        with self.collective_errors():
            data = json.dumps(value).encode()
        return [*map(json.loads, self.gather_bytes(data))]

    def divide(
        self,
        items: Iterable[Item],
        work: Callable[[Iterable[Item]], Iterable[Result]],
    ) -> list[Result]:
        """The results of all items in order; every rank works on its share.

        Args:
            items: the same on all ranks.
            work: returns one result per item. From other ranks a result comes as plain
                JSON data, in which arrays are lists.
        """
        if self.size == 1:
            return list(work(items))
        with self.collective_errors():
            share = [*work(self.shard(items))]
            text = json.dumps(share, default=lambda array: array.tolist())
        parts = [*map(json.loads, self.gather_bytes(text.encode()))]
        results: list = [None] * sum(map(len, parts))
        for rank, part in enumerate(parts):
            results[rank :: self.size] = part
        return results

    def in_turn(self, work: Callable[[], Result]) -> Result:
        """The result of `work`, which one rank after the other does."""
        for rank in range(self.size):
            with self.collective_errors():
                if rank == self.rank:
                    result = work()
        return result

    def alone(self, work: Callable[[], Result], *, is_worker: bool) -> Result | None:
        """The result of `work` on the workers, while the other ranks sleep.

        A rank that waits in a collective keeps a core busy. A file lock does not, and
        a worker that dies releases it. Ranks on other machines wait as usual.

        Args:
            is_worker: whether this rank works; the others get None.
        """
        if self.size == 1:
            return work()
        name = f"lmx-{self.broadcast_object(uuid4().hex)}.lock"
        path, result = Path(gettempdir()) / name, None
        with self.collective_errors():
            lock = path.open("w")
            if is_worker:
                fcntl.flock(lock, fcntl.LOCK_SH)
        with self.collective_errors(), lock:
            if is_worker:
                result = work()
            else:
                fcntl.flock(lock, fcntl.LOCK_EX)
        path.unlink(missing_ok=True)
        return result

    def exchange(self, arrays: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """The arrays of all ranks by name, of any dtype, bit for bit.

        No two ranks have the same name.
        """
        if self.size == 1:
            return dict(arrays)
        shapes = {k: [_name(v.dtype), list(v.shape)] for k, v in arrays.items()}
        data = mx.concatenate([mx.zeros(0, mx.uint8), *map(_bytes, arrays.values())])
        shapes_by_rank, received = self.gather_objects(shapes), {}
        for rank, message in enumerate(self._gather_arrays(data)):
            start = 0
            for name, (dtype, shape) in shapes_by_rank[rank].items():
                end = start + math.prod(shape) * getattr(mx, dtype).size
                value = message[start:end].view(getattr(mx, dtype))
                received[name] = value.reshape(shape)
                start = end + -end % ALIGNMENT
        mx.eval(received)
        return received

    def own_rows(self, count: int) -> list[int]:
        """Indices of this rank's share of some rows; see `gather_rows`.

        All shares have one length: the last ones repeat the last row.
        """
        step = math.ceil(count / self.size / ROWS_AT_ONCE) * ROWS_AT_ONCE
        start = self.rank * step
        return [min(row, count - 1) for row in range(start, start + step)]

    def gather_rows(self, shares: Sequence[mx.array], count: int) -> list[mx.array]:
        """Arrays of so many rows, float32, of which every rank has its `own_rows`."""
        if self.size == 1:
            return [share[:count] for share in shares]
        # One message, because each has latency.
        flat = [share.reshape(len(share), -1) for share in shares]
        ends = list(accumulate(share.shape[1] for share in flat[:-1]))
        rows = self.all_gather(mx.concatenate(flat, axis=1))[:count]
        parts = zip(mx.split(rows, ends, axis=1), shares, strict=True)
        gathered = [part.reshape(count, *share.shape[1:]) for part, share in parts]
        mx.eval(gathered)
        return gathered

    def require_same(self, value: Any, what: str, *, hint: str) -> None:
        """Raise a `UserError` on ranks whose value differs from that of rank 0.

        Args:
            what: the difference in words, such as "reads other data".
        """
        expected = self.broadcast_object(value)
        with self.collective_errors():
            if value != expected:
                raise UserError(
                    f"process {self.rank} {what} than the first one", hint=hint
                )

    @contextmanager
    def collective_errors(self) -> Iterator[None]:
        """Raise on all ranks if one of them raises in this context.

        Inside, a rank may only communicate with methods that begin with a context of
        their own, where it learns that another rank has failed: those for objects,
        `divide`, `in_turn`, `alone` and `require_same`.

        Raises:
            RemoteError: another process failed; has its exit code.
            Interrupted: another process was interrupted.
        """
        try:
            yield
        except BaseException as error:
            # An inner context may have reported it.
            if getattr(error, REPORTED, None) is not self:
                setattr(error, REPORTED, self)
                with suppress(RuntimeError):
                    self._max_code(_exit_code(error))
            raise
        if code := self._max_code(0):
            error = Interrupted() if code == INTERRUPTED else RemoteError(code)
            setattr(error, REPORTED, self)
            raise error

    @contextmanager
    def connection_errors(self) -> Iterator[None]:
        """Convert lost connections to `UserError`, which names the process.

        A process that leaves with an error ends the others, unless they know of it.
        """
        try:
            yield
        except BaseException as error:
            if self._watchdog is None:
                raise
            atexit.unregister(self._watchdog.close)
            is_lost = str(error).startswith(BACKEND_PREFIXES)
            if not (isinstance(error, RuntimeError) and is_lost):
                raise
            if self._watchdog.failure_within(NOTICE_SECONDS):
                raise self._watchdog.error() from error
            raise UserError(
                f"lost the connection to another process: {error}",
                hint=RESUMES,
                code=FAILED,
            ) from error

    def _gather_arrays(self, data: mx.array) -> list[mx.array]:
        """The bytes of all ranks, uint8 [N] each, by rank."""
        lengths = self.all_gather(mx.array([data.size], mx.int64)).tolist()
        longest = max(1, *lengths)
        longest += -longest % ALIGNMENT
        rows = self.all_gather(mx.pad(data, (0, longest - data.size))[None])
        mx.eval(rows)
        return [row[:length] for row, length in zip(rows, lengths, strict=True)]

    def _max_code(self, code: int) -> int:
        if self.size == 1:
            return code
        codes = mx.distributed.all_gather(mx.array([code]), group=self.group)
        return max(codes.tolist())


SINGLE_PROCESS = ProcessGroup()


def join() -> ProcessGroup:
    """Connect the launched processes; SINGLE_PROCESS without a launcher.

    A watchdog watches them until this process exits.

    Raises:
        UserError: the connection fails, or the processes have other versions.
    """
    rank = launcher.launched_rank()
    if rank is None:
        return SINGLE_PROCESS
    seconds = watchdog.JOIN_SECONDS
    message = f"not all processes have connected within {seconds:g} s\n"
    try:
        with watchdog.killed_after(seconds, message):
            group = mx.distributed.init(strict=True)
    except RuntimeError as error:
        raise UserError(
            f"cannot connect the processes with {launcher.backend()}: {error}",
            hint="see `mlx.launch --help` for hosts and backends",
        ) from error
    if group.size() == 1:
        return SINGLE_PROCESS
    ranks = ProcessGroup(group)
    host = launcher.first_host() or ranks.broadcast_object(socket.gethostname())
    watching = watchdog.start(rank, group.size(), host, ranks.broadcast_object)
    atexit.register(watching.close)
    ranks = ProcessGroup(group, watching)
    with ranks.connection_errors():
        ranks.require_same(
            {name: version(name) for name in PACKAGES},
            f"has other versions of {', '.join(PACKAGES)}",
            hint="install the same versions on all machines",
        )
    return ranks


def _buckets(values: list[mx.array]) -> Iterator[list[mx.array]]:
    bucket, size = [], 0
    for value in values:
        if bucket and size + value.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(value)
        size += value.nbytes
    if bucket:
        yield bucket


def _bytes(value: mx.array) -> mx.array:
    """The bytes of an array, uint8 [N], filled up to a multiple of ALIGNMENT."""
    data = mx.contiguous(value).reshape(-1).view(mx.uint8)
    return mx.pad(data, (0, -data.size % ALIGNMENT))


def _name(dtype: mx.Dtype) -> str:
    """The name of a dtype in `mlx.core`."""
    return str(dtype).rpartition(".")[2]


def _exit_code(error: BaseException) -> int:
    """The exit code of the command line for an error."""
    if isinstance(error, UserError):
        return error.code
    is_interrupt = isinstance(error, KeyboardInterrupt | Interrupted)
    return INTERRUPTED if is_interrupt else FAILED

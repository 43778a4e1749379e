"""Process group: collectives, and propagation of errors and interrupts to all ranks."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate, islice
from typing import Any, TypeVar

import mlx.core as mx

from ..errors import FAILED, INTERRUPTED, Interrupted, UserError
from . import launcher

Item = TypeVar("Item")
# Bytes per all-reduce. Small arrays are concatenated, because each call has latency.
BUCKET_BYTES = 32 << 20
# Arrays in a message begin at multiples of so many bytes, for loads of any dtype.
ALIGNMENT = 16
# Prefixes of MLX's messages about lost connections.
BACKEND_PREFIXES = ("[ring]", "[jaccl]", "[nccl]", "[mpi]")


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

    def __init__(self, group: mx.distributed.Group | None = None):
        self.group = group
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
        return ProcessGroup(self.group.split(color))

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
        text = json.dumps(value).encode() if self.is_first else b""
        [length] = self.broadcast([mx.array(len(text))])
        data = mx.array(list(text.ljust(length.item())), mx.uint8)
        [data] = self.broadcast([data])
        return json.loads(bytes(data.tolist()))

    def gather_objects(self, value: Any) -> list[Any]:
        """The JSON values of all ranks, by rank."""
        if self.size == 1:
            return [value]
        data = mx.array(list(json.dumps(value).encode()), mx.uint8)
        return [json.loads(bytes(each)) for each in self._gather_bytes(data)]

    def exchange(self, arrays: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """The arrays of all ranks by name, of any dtype, bit for bit.

        No two ranks have the same name.
        """
        if self.size == 1:
            return dict(arrays)
        shapes = {k: [_name(v.dtype), list(v.shape)] for k, v in arrays.items()}
        data = mx.concatenate([mx.zeros(0, mx.uint8), *map(_bytes, arrays.values())])
        shapes_by_rank, received = self.gather_objects(shapes), {}
        for rank, message in enumerate(self._gather_bytes(data)):
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
        step = math.ceil(count / self.size)
        start = self.rank * step
        return [min(row, count - 1) for row in range(start, start + step)]

    def gather_rows(self, shares: Sequence[mx.array], count: int) -> list[mx.array]:
        """Arrays of so many rows, float32, of which every rank has its `own_rows`."""
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

        Collectives inside the context are not allowed, because other ranks may have
        failed.

        Raises:
            RemoteError: another process failed; has its exit code.
            Interrupted: another process was interrupted.
        """
        try:
            yield
        except BaseException as error:
            with suppress(RuntimeError):
                self._max_code(_exit_code(error))
            raise
        code = self._max_code(0)
        if code == INTERRUPTED:
            raise Interrupted
        if code:
            raise RemoteError(code)

    @contextmanager
    def connection_errors(self) -> Iterator[None]:
        """Convert lost connections to `UserError`."""
        try:
            yield
        except RuntimeError as error:
            if self.size == 1 or not str(error).startswith(BACKEND_PREFIXES):
                raise
            raise UserError(
                f"lost the connection to another process: {error}",
                hint="see the message of that process; the same command resumes from "
                "the last checkpoint",
                code=FAILED,
            ) from error

    def _gather_bytes(self, data: mx.array) -> list[mx.array]:
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

    Raises:
        UserError: the connection fails.
    """
    rank = launcher.launched_rank()
    if rank is None:
        return SINGLE_PROCESS
    try:
        group = mx.distributed.init(strict=True)
    except RuntimeError as error:
        raise UserError(
            f"cannot connect the processes with {launcher.backend()}: {error}",
            hint="see `mlx.launch --help` for hosts and backends",
        ) from error
    return ProcessGroup(group) if group.size() > 1 else SINGLE_PROCESS


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

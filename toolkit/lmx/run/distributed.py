"""Several processes that train one model: sums over them, and one fate for all."""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate, islice
from typing import Any, TypeVar

import mlx.core as mx

from ..errors import FAILED, INTERRUPTED, Interrupted, UserError
from . import launcher

Item = TypeVar("Item")
# Bytes that travel at once: many small arrays would wait for the line one by one.
BUCKET = 32 << 20
# How MLX begins to speak of a connection that is no more.
LINKS = ("[ring]", "[jaccl]", "[nccl]", "[mpi]")


class RemoteError(UserError):
    """Another process of the run has failed, and tells why itself."""

    def __init__(self, code: int):
        super().__init__("", code=code)


class ProcessGroup:
    """The processes of a run; one that is alone pays nothing for it.

    Every method that talks to the others must be called by all, in the same order.

    Attributes:
        rank: this process's number, from 0.
        size: how many there are.
    """

    def __init__(self, group: mx.distributed.Group | None = None):
        self._group = group
        self.rank = group.rank() if group else 0
        self.size = group.size() if group else 1

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes and tells."""
        return self.rank == 0

    def shard(self, items: Iterable[Item]) -> Iterator[Item]:
        """This process's share of some items: every `size`-th."""
        return islice(items, self.rank, None, self.size)

    def all_sum(self, values: Sequence[mx.array]) -> list[mx.array]:
        """The sums of arrays over all processes, not yet computed, in float32."""
        if self.size == 1:
            return list(values)
        flat = [value.astype(mx.float32).reshape(-1) for value in values]
        sums: list[mx.array] = []
        for bucket in _buckets(flat):
            # One after the other, in the same order everywhere.
            [joined] = mx.depends([mx.concatenate(bucket)], sums[-1:])
            total = mx.distributed.all_sum(joined, group=self._group)
            ends = accumulate(value.size for value in bucket[:-1])
            sums += mx.split(total, list(ends))
        pairs = zip(sums, values, strict=True)
        return [total.reshape(value.shape) for total, value in pairs]

    def all_gather(self, value: mx.array) -> mx.array:
        """The rows of all processes below each other, not yet computed."""
        return mx.distributed.all_gather(value, group=self._group)

    def reduce_scatter(self, value: mx.array) -> mx.array:
        """This process's share of the rows of a sum over all, not yet computed.

        Only NCCL and JACCL can; others raise a RuntimeError.
        """
        return mx.distributed.sum_scatter(value, group=self._group)

    def all_reduce_scalars(self, *numbers: float) -> list[float]:
        """The sums of numbers over all processes, computed."""
        if self.size == 1:
            return list(numbers)
        # As two parts each: one float32 would lose digits.
        whole = mx.array(numbers, mx.float32)
        rest = [n - w for n, w in zip(numbers, whole.tolist(), strict=True)]
        parts = [whole, mx.array(rest, mx.float32)]
        gathered = [
            mx.distributed.all_gather(p[None], group=self._group) for p in parts
        ]
        rows = [row for part in gathered for row in part.tolist()]
        return [math.fsum(column) for column in zip(*rows, strict=True)]

    def broadcast(self, values: Sequence[mx.array]) -> list[mx.array]:
        """The first process's values of arrays, of any type, bit for bit."""
        if self.size == 1:
            return list(values)
        found = []
        for value in values:
            # As bytes: of a sum with zero, -0.0 and some NaN would come out changed.
            data = mx.contiguous(value).reshape(-1).view(mx.uint8)
            data = data if self.is_first else mx.zeros_like(data)
            data = mx.distributed.all_sum(data, group=self._group)
            found.append(data.view(value.dtype).reshape(value.shape))
            mx.eval(found[-1])
        return found

    def broadcast_object(self, value: Any) -> Any:
        """The first process's value, of what JSON can hold; the others' is ignored."""
        if self.size == 1:
            return value
        text = json.dumps(value).encode() if self.is_first else b""
        [length] = self.broadcast([mx.array(len(text))])
        data = mx.array(list(text.ljust(length.item())), mx.uint8)
        [data] = self.broadcast([data])
        return json.loads(bytes(data.tolist()))

    def require_same(self, value: Any, what: str, *, hint: str) -> None:
        """Raise a `UserError` in whoever has another value than the first process.

        Args:
            what: what it then does, such as "reads other rows".
        """
        firsts = self.broadcast_object(value)
        with self.collective_errors():
            if value != firsts:
                raise UserError(
                    f"process {self.rank} {what} than the first one", hint=hint
                )

    @contextmanager
    def collective_errors(self) -> Iterator[None]:
        """What fails in one process while this is open fails in all when it closes.

        Inside of it nothing may talk to the others, who may have failed.

        Raises:
            Elsewhere: another one failed, with its exit code.
            Interrupted: another one was stopped.
        """
        try:
            yield
        except BaseException as fault:
            with suppress(RuntimeError):
                self._worst(_code(fault))
            raise
        worst = self._worst(0)
        if worst == INTERRUPTED:
            raise Interrupted
        if worst:
            raise RemoteError(worst)

    @contextmanager
    def connection_errors(self) -> Iterator[None]:
        """Turn the loss of another process into a `UserError`."""
        try:
            yield
        except RuntimeError as fault:
            if self.size == 1 or not str(fault).startswith(LINKS):
                raise
            raise UserError(
                f"another process of this run is gone: {fault}",
                hint="its own message says why; the same command goes on from the "
                "last checkpoint",
                code=FAILED,
            ) from fault

    def _worst(self, code: int) -> int:
        if self.size == 1:
            return code
        codes = mx.distributed.all_gather(mx.array([code]), group=self._group)
        return max(codes.tolist())


SINGLE_PROCESS = ProcessGroup()


def join() -> ProcessGroup:
    """The processes that a launcher started, connected; else `ALONE`.

    Raises:
        UserError: they cannot be connected.
    """
    rank = launcher.launched_rank()
    if rank is None:
        return SINGLE_PROCESS
    try:
        group = mx.distributed.init(strict=True)
    except RuntimeError as fault:
        raise UserError(
            f"the processes cannot be connected over {launcher.backend()}: {fault}",
            hint="see `mlx.launch --help` for hosts and backends",
        ) from fault
    return ProcessGroup(group) if group.size() > 1 else SINGLE_PROCESS


def _buckets(values: list[mx.array]) -> Iterator[list[mx.array]]:
    bucket, size = [], 0
    for value in values:
        if bucket and size + value.nbytes > BUCKET:
            yield bucket
            bucket, size = [], 0
        bucket.append(value)
        size += value.nbytes
    if bucket:
        yield bucket


def _code(fault: BaseException) -> int:
    """The exit code that the command line gives to a fault."""
    if isinstance(fault, UserError):
        return fault.code
    stopped = isinstance(fault, KeyboardInterrupt | Interrupted)
    return INTERRUPTED if stopped else FAILED

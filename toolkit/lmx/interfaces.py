"""What the numerics get from outside: other processes, weights, a log, its progress.

Each class here is also the object for nothing: one process, weights as they are, and
a log that nobody reads. `run.distributed.ProcessGroup` and `run.logger.RunLogger` are
real ones.
"""

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from itertools import accumulate, islice
from typing import Any, TypeVar

import mlx.core as mx

from .errors import UserError

Item = TypeVar("Item")
Result = TypeVar("Result")
# Products of so many rows at a time are rounded alike, and those of a rest otherwise.
ROWS_AT_ONCE = 16


class Communicator:
    """The processes that do a piece of work together; this class: one process.

    All processes call the collective methods in the same order. A process that raises
    ends the others, so nobody waits for it.

    Attributes:
        group: MLX's own, for layers that communicate; None with one process.
        rank: of this process, from 0.
        size: number of processes.
    """

    group: mx.distributed.Group | None = None
    rank = 0
    size = 1

    def all_sum(self, values: Sequence[mx.array]) -> list[mx.array]:
        """Lazy sums of arrays over all processes, in float32.

        Values in float64, which only a CPU has, are summed in float64.
        """
        return list(values)

    def all_gather(self, value: mx.array) -> mx.array:
        """The lazy concatenation of the arrays of all ranks along axis 0."""
        return value

    def reduce_scatter(self, value: mx.array) -> mx.array:
        """This rank's slice of the lazy sum over all ranks, along axis 0.

        Only NCCL and JACCL support it; other backends raise a RuntimeError.
        """
        return value

    def broadcast(self, values: Sequence[mx.array]) -> list[mx.array]:
        """The arrays of rank 0, of any dtype, bit for bit."""
        return list(values)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes files and logs."""
        return self.rank == 0

    def shard(self, items: Iterable[Item]) -> Iterator[Item]:
        """The items of this rank: every `size`-th."""
        return islice(items, self.rank, None, self.size)

    def all_reduce_scalars(self, *values: float) -> list[float]:
        """Sums of numbers over all processes, in float64."""
        # As JSON, because MLX has no float64 collectives.
        rows = self.gather_objects([float(value) for value in values])
        return [math.fsum(column) for column in zip(*rows, strict=True)]

    def broadcast_object(self, value: Any) -> Any:
        """The JSON value of rank 0; those of other ranks are ignored."""
        if self.size == 1:
            return value
        text = json.dumps(value).encode() if self.is_first else b""
        [length] = self.broadcast([mx.array(len(text))])
        [data] = self.broadcast([mx.array(text.ljust(length.item()))])
        return json.loads(bytes(memoryview(data)))

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """The data of all ranks, by rank."""
        if self.size == 1:
            return [data]
        lengths = self.all_gather(mx.array([len(data)], mx.int64)).tolist()
        rows = self.all_gather(mx.array(data.ljust(max(1, *lengths)))[None])
        mx.eval(rows)
        pairs = zip(rows, lengths, strict=True)
        return [bytes(memoryview(row)[:length]) for row, length in pairs]

    def gather_objects(self, value: Any) -> list[Any]:
        """The JSON values of all ranks, by rank."""
        if self.size == 1:
            return [value]
        return [*map(json.loads, self.gather_bytes(json.dumps(value).encode()))]

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
        share = [*work(self.shard(items))]
        text = json.dumps(share, default=lambda array: array.tolist())
        parts = [*map(json.loads, self.gather_bytes(text.encode()))]
        results: list = [None] * sum(map(len, parts))
        for rank, part in enumerate(parts):
            results[rank :: self.size] = part
        return results

    def wait_for_all(self) -> None:
        """Return when all ranks have called this."""
        mx.eval(self.all_gather(mx.array([self.rank])))

    @contextmanager
    def ends_together(self) -> Iterator[None]:
        """End all processes if one of them raises in this context, with its exit code.

        The process that raises first prints its error; the others end without a word.

        Raises:
            UserError: in place of MLX's own error if the connection to a process is
                lost, and without a message if another process prints it.
            Interrupted: another process was interrupted.
        """
        yield

    def exchange(self, arrays: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """The arrays of all ranks by name, of any dtype but float64, bit for bit.

        No two ranks have the same name.
        """
        if self.size == 1:
            return dict(arrays)
        stream, received = BytesIO(), {}
        mx.save_safetensors(stream, dict(arrays))
        for message in self.gather_bytes(stream.getvalue()):
            received |= mx.load(BytesIO(message), format="safetensors")
        mx.eval(received)
        return dict(sorted(received.items()))

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
        """Raise a `UserError` on all ranks if a value differs from that of rank 0.

        Args:
            what: the difference in words, such as "reads other data".
        """
        first, *others = self.gather_objects(value)
        for rank, other in enumerate(others, 1):
            if other != first:
                raise UserError(f"process {rank} {what} than the first one", hint=hint)


SINGLE_PROCESS = Communicator()


class WeightTransform:
    """Makes weights of a forward pass from trained parameters; this class makes none.

    Attributes:
        qparams: initial values of parameters that are trained besides the model's own
            weights, float32, by path.
        derived_weights: paths of weights in the model that are trainable so that
            gradients reach their quantizers, but are computed from other parameters.
    """

    qparams: Mapping[str, mx.array] = {}
    derived_weights: Collection[str] = ()

    def on_step(self, step: int, parameters: dict[str, mx.array]) -> bool:
        """Prepare for a step, counted from 0; returns whether the forward pass changes.

        Args:
            parameters: the trained ones, which may be set in place.
        """
        return False

    def forward_weights(
        self, parameters: dict[str, mx.array], compute: mx.Dtype
    ) -> dict[str, mx.array]:
        """Weights of the forward pass by path, in the type that it computes in."""
        return {}


class Progress:
    """The progress of a long operation; this class shows it to nobody."""

    def update(self, done: float, **values: float) -> None:
        """Log the progress, with values such as loss=2.5."""

    def advance(
        self, amount: float | Mapping[str, float] = 1, note: str | None = None
    ) -> None:
        """Count finished work.

        Args:
            amount: by kind if there are several.
            note: what comes next. None = as before.
        """

    def skip(self, amount: float) -> None:
        """Count work that says nothing about the time left, e.g. of an earlier run."""

    def skip_time(self) -> None:
        """The time since the last amount was spent on something that is not counted."""

    def track(self, items: Iterable[Item]) -> Iterator[Item]:
        """The items; each is counted when the next one is asked for."""
        for item in items:
            yield item
            self.advance()


class Logger:
    """The log of a run; this class writes nothing.

    Attributes:
        stage: the running stage, such as "1-train".
    """

    stage = ""

    def info(self, text: str) -> None:
        """Log a line."""

    def warning(self, text: str) -> None:
        """Log a warning."""

    def debug(self, text: str) -> None:
        """Log lines to the file only."""

    def table(self, title: str, columns: list[str], rows: list[list[str]]) -> None:
        """Print a table. Only the first column is left-aligned."""

    def metrics(self, record: dict) -> None:
        """Keep a record of numbers."""

    def sample(self, record: dict) -> None:
        """Keep a record of a sample answer."""

    def truncate(self, step: int) -> None:
        """Drop this stage's records after `step`; the resumed run repeats them."""

    @contextmanager
    def progress(
        self,
        total: float | Mapping[str, Any],
        description: str,
        *,
        percent: bool = False,
    ) -> Iterator[Progress]:
        """The progress of an operation, with the remaining time.

        Args:
            total: amount of work in any unit, or work of several kinds.
            percent: show the share that is done instead of amounts.
        """
        yield Progress()

    @contextmanager
    def activity(self, text: str) -> Iterator[None]:
        """What happens in the context, such as "reading weights"; its amount is
        unknown. The heartbeat says it."""
        yield

    @contextmanager
    def heartbeat(self) -> Iterator[None]:
        """Log what happens inside the context whenever nothing else is logged."""
        yield

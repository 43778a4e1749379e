"""The process group of a run: collectives on MLX's backends, and ending together."""

import atexit
import fcntl
import os
import socket
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from tempfile import gettempdir
from typing import TypeVar
from uuid import uuid4

import mlx.core as mx

from .. import launcher
from ..errors import FAILED, INTERRUPTED, Interrupted, UserError
from ..interfaces import SINGLE_PROCESS, Communicator
from . import watchdog
from .signals import before_exit
from .watchdog import RESUMES, End, Watchdog

Result = TypeVar("Result")
# Bytes per all-reduce. Small arrays are concatenated, because each call has latency.
BUCKET_BYTES = 32 << 20
# Whose versions all processes must share.
PACKAGES = ("lmx-toolkit", "mlx", "mlx-lm")
# Prefixes of MLX's messages about lost connections.
BACKENDS = ("[ring]", "[jaccl]", "[nccl]", "[mpi]")
# The backend may notice a lost connection before the watchdog does.
NOTICE_SECONDS = 5.0
# Longest wait of a thread of the ring backend in the kernel, in microseconds.
RING_WAIT = 2000


class ProcessGroup(Communicator):
    """The processes that mlx.launch or mpirun has started.

    Args:
        group: MLX's own.
        watchdog: ends the other processes when this one fails; None = they wait for
            this one for ever.
    """

    def __init__(self, group: mx.distributed.Group, watchdog: Watchdog | None = None):
        self.group = group
        self.rank = group.rank()
        self.size = group.size()
        self.watchdog = watchdog

    def split(self, color: int) -> "ProcessGroup":
        """The processes that call this with the same number, ordered by rank.

        Raises:
            RuntimeError: the backend has no such groups; only MPI has.
        """
        return ProcessGroup(self.group.split(color), self.watchdog)

    def all_sum(self, values: Sequence[mx.array]) -> list[mx.array]:
        """Sum arrays over all ranks, in few messages of many arrays."""
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
        """Join the arrays of all ranks along axis 0."""
        return mx.distributed.all_gather(value, group=self.group)

    def reduce_scatter(self, value: mx.array) -> mx.array:
        """Sum over all ranks, and keep the slice of this one."""
        return mx.distributed.sum_scatter(value, group=self.group)

    def broadcast(self, values: Sequence[mx.array]) -> list[mx.array]:
        """Send the arrays of rank 0 to all ranks, bit for bit."""
        received = []
        for value in values:
            # As bytes: a sum with zero would change -0.0 and some NaN.
            data = mx.contiguous(value).reshape(-1).view(mx.uint8)
            data = data if self.is_first else mx.zeros_like(data)
            data = mx.distributed.all_sum(data, group=self.group)
            received.append(data.view(value.dtype).reshape(value.shape))
            mx.eval(received[-1])
        return received

    @contextmanager
    def ends_together(self) -> Iterator[None]:
        """Let the watchdog end all processes after an error in this context."""
        if self.watchdog is None:
            yield
            return
        try:
            yield
        except BaseException as raised:
            atexit.unregister(self.watchdog.close)
            error = raised
            if isinstance(raised, RuntimeError) and str(raised).startswith(BACKENDS):
                self.watchdog.wait_for_end(NOTICE_SECONDS)
                error = UserError(
                    f"lost the connection to another process: {raised}",
                    hint=RESUMES,
                    code=FAILED,
                )
            code = error.code if isinstance(error, UserError) else FAILED
            if isinstance(error, KeyboardInterrupt | Interrupted):
                code = INTERRUPTED
            end = self.watchdog.main_raised(code)
            if end != End(code, self.rank) and not end.code == code == INTERRUPTED:
                error = end.error(self.rank)
            if error is raised:
                raise
            raise error from raised


def alone(
    ranks: Communicator, work: Callable[[], Result], *, is_worker: bool
) -> Result | None:
    """The result of `work` on the workers, while the other ranks sleep.

    A rank that waits in a collective keeps a core busy on most backends. A file lock
    does not, and a worker that dies releases it. Ranks on other machines wait as usual.

    Args:
        is_worker: whether this rank works; the others get None.
    """
    if ranks.size == 1:
        return work()
    name = f"lmx-{ranks.broadcast_object(uuid4().hex)}.lock"
    path, result = Path(gettempdir()) / name, None
    with path.open("w") as lock:
        if is_worker:
            fcntl.flock(lock, fcntl.LOCK_SH)
        ranks.wait_for_all()
        if is_worker:
            result = work()
        else:
            fcntl.flock(lock, fcntl.LOCK_EX)
    ranks.wait_for_all()
    path.unlink(missing_ok=True)
    return result


def join() -> Communicator:
    """Connect the launched processes; SINGLE_PROCESS without a launcher.

    A watchdog watches them until this process exits.

    Raises:
        UserError: the connection fails, or the processes have other versions.
    """
    rank = launcher.launched_rank()
    if rank is None:
        return SINGLE_PROCESS
    seconds = watchdog.JOIN_SECONDS
    message = f"not all processes have connected within {seconds} s"
    try:
        with watchdog.killed_after(seconds, message):
            group = _connect()
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
    before_exit.append(watching.tell)
    ranks = ProcessGroup(group, watching)
    with ranks.ends_together():
        ranks.require_same(
            {name: version(name) for name in PACKAGES},
            f"has other versions of {', '.join(PACKAGES)}",
            hint="install the same versions on all machines",
        )
    return ranks


def _connect() -> mx.distributed.Group:
    """MLX's group; on Linux the threads of the ring backend wait in the kernel.

    They ask non-blocking sockets for data without a pause, so that a rank that waits
    takes the cores of those that work. A blocking socket with a time limit ends its
    calls with the same error, EAGAIN, when the time is over.
    """
    before = _sockets()
    group = mx.distributed.init(strict=True)
    limit = struct.pack("ll", 0, RING_WAIT)
    made = _sockets().items() - before.items()
    for _, number in made if launcher.backend() == "ring" else ():
        with socket.socket(fileno=os.dup(number)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            connection.setblocking(True)
    return group


def _sockets() -> dict[str, int]:
    """The sockets of this process on Linux, and their file descriptors."""
    found, folder = {}, Path("/proc/self/fd")
    for file in folder.iterdir() if sys.platform == "linux" else ():
        # The descriptor of the folder itself is closed by now.
        with suppress(OSError):
            found[os.readlink(file)] = int(file.name)
    return {name: n for name, n in found.items() if name.startswith("socket:")}


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

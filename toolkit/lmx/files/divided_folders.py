"""Folders that several processes make: each makes its share, and all machines get all.

Processes on one machine, or on machines with a common disk, see the folders of each
other. Where a process does not, the folder is sent to it.
"""

from collections.abc import Callable, Sequence
from io import BytesIO
from itertools import zip_longest
from pathlib import Path
from zipfile import ZipFile

from ..interfaces import Communicator
from .atomic import atomic_folder
from .hashes import key_of


def make_folders(
    folders: Sequence[Path],
    ranks: Communicator,
    *,
    key: str,
    is_whole: Callable[[int], bool],
    make: Callable[[int], None],
    receive: Callable[[int, bytes], None] | None = None,
    made_elsewhere: Callable[[int], None] = lambda number: None,
) -> None:
    """Make the folders that no rank has, each on one rank.

    Args:
        folders: the same on all ranks, perhaps on other disks.
        key: of what the folders depend on.
        is_whole: whether this rank has the folder of a number.
        make: makes it, whole or not at all.
        receive: makes it from what another rank has packed; None = with `unpack`.
        made_elsewhere: called with the number of a folder that another rank makes.

    Raises:
        UserError: this rank has another key than rank 0.
    """
    numbers = range(len(folders))
    here = [is_whole(number) for number in numbers]
    ranks.require_same(
        key_of([key, len(folders)]),
        "prepares other data",
        hint="give all machines the same recipe, data and models",
    )
    held = ranks.gather_objects(here)
    missing = [n for n, *has in zip(numbers, *held, strict=True) if not any(has)]
    rounds = range(0, len(missing), ranks.size)
    for start, number in zip(rounds, ranks.shard(missing), strict=False):
        make(number)
        for other in missing[start : start + ranks.size]:
            if other != number:
                made_elsewhere(other)
    if ranks.size > 1:
        _send_missing(folders, ranks, is_whole, receive)


def _send_missing(
    folders: Sequence[Path],
    ranks: Communicator,
    is_whole: Callable[[int], bool],
    receive: Callable[[int, bytes], None] | None,
) -> None:
    """Send every folder that a rank lacks, once, to all of them."""
    here = [is_whole(number) for number in range(len(folders))]
    to_send: list[list[int]] = [[] for _ in range(ranks.size)]
    for number, has in enumerate(zip(*ranks.gather_objects(here), strict=True)):
        if not all(has):
            to_send[has.index(True)].append(number)
    for numbers in zip_longest(*to_send):
        own = numbers[ranks.rank]
        data = b"" if own is None else _pack(folders[own])
        received = dict(zip(numbers, ranks.gather_bytes(data), strict=True))
        received.pop(None, None)

        def receive_all(received=received) -> None:
            for number, data in received.items():
                # Another rank of this machine may have received it.
                if not is_whole(number):
                    if receive:
                        receive(number, data)
                    else:
                        with atomic_folder(folders[number]) as partial:
                            unpack(data, partial)

        ranks.in_turn(receive_all)


def _pack(folder: Path) -> bytes:
    stream = BytesIO()
    with ZipFile(stream, "w", strict_timestamps=False) as archive:
        for file in sorted(folder.rglob("*")):
            archive.write(file, file.relative_to(folder))
    return stream.getvalue()


def unpack(data: bytes, folder: Path) -> None:
    """Write the files that another rank has packed into an empty folder."""
    with ZipFile(BytesIO(data)) as archive:
        archive.extractall(folder)

"""The state of a sequential pipeline on disk, which all its processes write together.

There is a folder for the embeddings, one before each block, and one for the head. Each
is whole or absent. The processes write the files of their own shards into a temporary
folder that all machines see; rank 0 adds the index and gives the folder its name. So
any number of processes resumes a run.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from ...files.atomic import atomic_folder, disk_errors
from ...files.hashes import hash_file, read_index, write_index
from ...interfaces import Communicator, Logger
from . import activation_cache
from .output_fisher import is_of_block_before

EMBEDDINGS, HEAD = "embeddings", "head"


class StateFolders:
    """The folders of a run.

    Args:
        root: that they are in.
        key: digest of everything that the result depends on. Folders with another key
            are not used.
        ranks: the processes of the run; all call `written` and `num_done`.
    """

    def __init__(self, root: Path, key: str, ranks: Communicator, logger: Logger):
        self.root = root
        self.key = key
        self.ranks = ranks
        self.logger = logger

    def before(self, index: int) -> Path:
        """The folder of the streams before a block."""
        return self.root / block_name(index)

    @contextmanager
    def written(self, name: str) -> Iterator[Path]:
        """A new folder, whole or absent, with an index."""
        ranks = self.ranks
        with ExitStack() as stack:
            target = None
            if ranks.is_first:
                target = stack.enter_context(atomic_folder(self.root / name))
            target = self.root / ranks.broadcast_object(target and target.name)
            with disk_errors(self.root / name):
                yield target
            own = self._hashes_of_own(target)
            hashes = ranks.gather_objects(own)
            if ranks.is_first:
                files = {k: v for each in hashes for k, v in each.items()}
                write_index(target, f"{self.key} {name}", {}, files=files)
            stack.close()
            ranks.wait_for_all()

    def _hashes_of_own(self, folder: Path) -> dict[str, str]:
        """SHA-256 of the files that this process has written, by name.

        Another machine may not list them yet.
        """
        ranks = self.ranks
        files = {path.name: path for path in folder.iterdir() if path.is_file()}
        return {
            name: hash_file(path)
            for name, path in sorted(files.items())
            if activation_cache.shard_of(name) % ranks.size == ranks.rank
        }

    def num_done(self) -> int | None:
        """Number of blocks before the newest streams on disk.

        None if no block can begin, or if anything that is needed is damaged or belongs
        to another run: the streams that made it are gone.
        """
        done = None
        if self.ranks.is_first:
            done = self._num_done()
        return self.ranks.broadcast_object(done)

    def _num_done(self) -> int | None:
        numbers = [int(p.name) for p in self.root.glob("[0-9]*") if p.name.isdecimal()]
        if not numbers:
            return None
        done = max(numbers)
        names = [EMBEDDINGS, *map(block_name, range(done + 1))]
        if os.path.lexists(self.root / HEAD):
            names.append(HEAD)
        for name in names:
            is_deleted = self._is_used_up(name, done)
            key, folder = f"{self.key} {name}", self.root / name
            if read_index(folder, key, is_deleted=is_deleted) is None:
                self.logger.warning(
                    f"{folder}: damaged or of other settings, quantizing again from "
                    "the first block"
                )
                return None
        return done

    def _is_used_up(self, name: str, done: int) -> Callable[[str], bool]:
        """Whether a file in a folder is deleted once `done` blocks are done."""
        if name == EMBEDDINGS:
            return partial(is_of_block_before, index=done)
        if name in (HEAD, block_name(done)):
            return lambda _: False
        return activation_cache.is_stream


def block_name(index: int) -> str:
    """The name of the folder before a block."""
    return f"{index:04d}"

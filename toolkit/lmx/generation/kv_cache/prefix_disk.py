"""Prefixes of a prefix cache on the disk, where they outlive the process."""

import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import mlx.core as mx
from annotated_types import Len
from mlx.utils import tree_flatten, tree_unflatten
from pydantic import BaseModel, ConfigDict, NonNegativeInt

from ...errors import UserError
from ...files.artifacts import ArtifactStore
from ...files.hashes import key_of

ARRAYS_FILE = "states.safetensors"

Run = tuple[str, str]
"""The model of a run of tokens, and the run: hashes. See `PrefixDisk`."""


class RunFacts(BaseModel):
    """What is stored of a run of tokens, besides its arrays.

    Attributes:
        parent: hash of the run before it.
        start: tokens before it.
        scalars: values of the states that are no arrays.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    parent: str
    start: NonNegativeInt
    tokens: Annotated[list[NonNegativeInt], Len(1)]
    layer_ids: list[NonNegativeInt]
    scalars: dict[str, int | None] = {}


class PrefixDisk:
    """Runs of tokens in a folder, with what the caches hold of them.

    The hash of a run is that of all tokens from the first one to its end. The least
    recently used runs of all models are deleted first.

    Args:
        max_bytes: of all runs in the folder.
        model_hash: of the weights and the kinds of caches of the model with the adapter
            of a number.
        warning: logs that a run is damaged, or that the disk is full.

    Attributes:
        nbytes: of all runs.
    """

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        model_hash: Callable[[int], str],
        warning: Callable[[str], None],
    ):
        self.max_bytes, self.model_hash = max_bytes, model_hash
        self._warning = warning
        hint = "--prefix-cache-dir with another folder"
        self._store = ArtifactStore(folder, warning, other_folder=hint)
        found = []
        for model in (path.name for path in folder.glob("*") if path.is_dir()):
            for key in self._store.keys(model):
                file = self._store.folder(model, key) / ARRAYS_FILE
                if file.is_file():
                    status = file.stat()
                    found.append((status.st_mtime_ns, (model, key), status.st_size))
        # Bytes by last use: it outlives the process as the time of the file.
        self._sizes = OrderedDict((run, size) for _, run, size in sorted(found))
        self.nbytes = sum(self._sizes.values())

    def run(self, model: str, tokens: Iterable[int]) -> Run:
        """The run that ends with these tokens, counted from the first one."""
        return model, key_of([model, *map(int, tokens)])

    def runs(self, model: str) -> list[tuple[Run, RunFacts]]:
        """All runs of a model, parents first. Unreadable ones are deleted."""
        runs = []
        for run in [run for run in self._sizes if run[0] == model]:
            try:
                runs.append((run, RunFacts.model_validate(self._store.facts(*run))))
            except ValueError:
                self.delete(run)
        return sorted(runs, key=lambda each: each[1].start)

    def use(self, run: Run) -> None:
        """Count a use of a run. A run is used before the one that it follows."""
        self._sizes.move_to_end(run)

    def write(self, run: Run, facts: RunFacts, states: dict) -> bool:
        """Write a run with a tree of states; returns whether it is there now."""
        arrays, scalars = {}, {}
        for name, value in tree_flatten(states):
            (arrays if isinstance(value, mx.array) else scalars)[name] = value
        if sum(array.nbytes for array in arrays.values()) > self.max_bytes:
            return False

        def make(target: Path) -> dict:
            mx.save_safetensors(str(target / ARRAYS_FILE), arrays)
            return facts.model_dump() | {"scalars": scalars}

        try:
            artifact = self._store.put(*run, make)
        except UserError as error:
            self._warning(f"prefixes do not get to the disk: {error}")
            return False
        size = (artifact.folder / ARRAYS_FILE).stat().st_size
        self.nbytes += size - self._sizes.pop(run, 0)
        self._sizes[run] = size
        return True

    def read(self, run: Run) -> dict | None:
        """The states of a run; None if it is damaged or was deleted."""
        artifact = self._store.find(*run)
        if artifact is None:
            self._warning(f"{self._store.folder(*run)}: damaged, dropped")
            return None
        arrays = mx.load(str(artifact.folder / ARRAYS_FILE))
        mx.eval(arrays)
        return tree_unflatten([*arrays.items(), *artifact.facts["scalars"].items()])

    def delete(self, run: Run) -> None:
        """Delete a run."""
        self.nbytes -= self._sizes.pop(run)
        self._store.remove(*run)

    def surplus(self) -> Run | None:
        """The least recently used run, if there are too many bytes."""
        return next(iter(self._sizes)) if self.nbytes > self.max_bytes else None

    def keep_order(self) -> None:
        """Let the times of the files have the order of the last uses."""
        # The clock of files may stand still for some milliseconds.
        start = time.time_ns() - len(self._sizes)
        for time_ns, run in enumerate(self._sizes, start=start):
            with suppress(OSError):
                file = self._store.folder(*run) / ARRAYS_FILE
                os.utime(file, ns=(time_ns, time_ns))

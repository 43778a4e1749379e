"""Checkpoints of a training in progress: whole or absent, exact to resume."""

import json
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

from ..models.safetensors_io import stream_safetensors
from ..run.fs import atomic_folder, hash_file, need_space
from .step import TrainStep

WEIGHTS = "state.safetensors"
# Room for the new checkpoint beside the old ones, and some for the reports.
SLACK = 16 << 20


@dataclass
class TrainingProgress:
    """Where a training stands; with the parameters and moments, all there is to know.

    Batches, the learning rate and everything random are functions of the step, so no
    position in the data and no random state need be kept.
    """

    step: int = 0
    trained_tokens: int = 0
    seconds: float = 0.0
    # Sums since the last line of the report.
    loss_since: float = 0.0
    tokens_since: int = 0
    seconds_since: float = 0.0
    # Of the last validation.
    valid_loss: float = 0.0
    # Of the lowest one, and how many came after it.
    best_step: int = 0
    best_loss: float = math.inf
    validations_since: int = 0
    # A hash of the training examples.
    examples: str = ""

    def judge(self, loss: float) -> None:
        """Take in a validation of the step as it is now."""
        self.valid_loss = loss
        self.validations_since += 1
        if loss < self.best_loss:
            self.best_step, self.best_loss = self.step, loss
            self.validations_since = 0


def save(
    folder: Path,
    step: TrainStep,
    progress: TrainingProgress,
    *,
    newest: int = 2,
    spared: int | None = None,
) -> Path | None:
    """Write `folder/<step>`, whole or not at all, and drop what is not kept.

    All processes call this; the first one writes, and gets the path.

    Args:
        newest: checkpoints kept, this one included.
        spared: the step of one more that is kept, however old.
    """
    whole = (step.shards.whole(_owner(k), v) for k, v in _tensors(step).items())
    with step.ranks.collective_errors():
        try:
            if not step.ranks.is_first:
                return None
            target = _write(folder, step, progress, whole)
            _drop(folder, target, newest, spared)
            return target
        finally:
            # The others wait for every tensor, though the disk may have refused one.
            for _ in whole:
                pass


def restore(
    folder: Path, step: TrainStep, warning: Callable[[str], None]
) -> TrainingProgress:
    """Put the newest whole checkpoint into `step`; from the start when there is none.

    All processes call this; the first one reads, and all have what it has.

    Args:
        warn: told about every damaged checkpoint that is passed over.
    """
    tensors, progress = None, TrainingProgress()
    with step.ranks.collective_errors():
        if step.ranks.is_first:
            tensors, progress = _newest(folder, warning)
    is_found = step.ranks.broadcast_object(tensors is not None)
    if is_found or not step.shards:
        _fill(step, _tensors(step) if tensors is None else tensors)
    return TrainingProgress(**step.ranks.broadcast_object(vars(progress)))


def recall(folder: Path, step: TrainStep, number: int) -> bool:
    """Put the parameters after `number` steps into `step`, if that checkpoint is whole.

    The optimizer is left as it is: nothing goes on from here. All processes call this.
    """
    tensors = None
    with step.ranks.collective_errors():
        checkpoint = _place(folder, number)
        if step.ranks.is_first and _is_whole(checkpoint):
            tensors = mx.load(str(checkpoint / WEIGHTS))
    if not step.ranks.broadcast_object(tensors is not None):
        return False
    _fill_parameters(step, tensors or {})
    return True


def numbered(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if p.name.isdigit())


def _place(folder: Path, number: int) -> Path:
    return folder / f"{number:07d}"


def _is_whole(checkpoint: Path) -> bool:
    """Whether the files of a checkpoint are the ones written."""
    weights = checkpoint / WEIGHTS
    try:
        state = json.loads((checkpoint / "state.json").read_text())
        return state == {
            "bytes": weights.stat().st_size,
            "sha256": hash_file(weights),
        }
    except (OSError, ValueError):
        return False


def _write(
    folder: Path, step: TrainStep, progress: TrainingProgress, whole: Iterator[mx.array]
) -> Path:
    layout = {
        name: (value.dtype, step.shards.shape(_owner(name), value))
        for name, value in _tensors(step).items()
    }
    size = sum(dtype.size * math.prod(shape) for dtype, shape in layout.values())
    need_space(folder, size + SLACK)
    target = _place(folder, progress.step)
    with atomic_folder(target) as partial:
        weights = partial / WEIGHTS
        # In the same file, under the same hash.
        metadata = {"progress": json.dumps(vars(progress))}
        if step.shards:
            stream_safetensors(weights, layout, whole, metadata)
        else:
            mx.save_safetensors(str(weights), _tensors(step), metadata=metadata)
        state = {"bytes": weights.stat().st_size, "sha256": hash_file(weights)}
        (partial / "state.json").write_text(json.dumps(state, indent=2) + "\n")
    return target


def _drop(folder: Path, target: Path, newest: int, spared: int | None) -> None:
    # Newer ones are those that were passed over as damaged.
    kept = [p for p in numbered(folder) if p.name <= target.name][-newest:]
    if spared is not None:
        kept.append(_place(folder, spared))
    for other in set(numbered(folder)) - set(kept):
        shutil.rmtree(other)


def _newest(
    folder: Path, warning: Callable[[str], None]
) -> tuple[dict[str, mx.array] | None, TrainingProgress]:
    for checkpoint in reversed(numbered(folder)):
        if not _is_whole(checkpoint):
            warning(f"checkpoint {checkpoint} is damaged; using what was before it")
            continue
        path = str(checkpoint / WEIGHTS)
        tensors, metadata = mx.load(path, return_metadata=True)
        return tensors, TrainingProgress(**json.loads(metadata["progress"]))
    return None, TrainingProgress()


def _tensors(step: TrainStep) -> dict[str, mx.array]:
    """What a step is made of, by its names in files; of shares, this process's."""
    state = dict(tree_flatten(step.optimizer.state))
    return {f"parameters:{k}": v for k, v in step.parameters.items()} | {
        f"optimizer:{k}": v for k, v in state.items()
    }


def _owner(name: str) -> str:
    """The parameter that a tensor in a file is, or is a moment of."""
    kind, _, path = name.partition(":")
    return path if kind == "parameters" else path.rpartition(".")[0]


def _fill(step: TrainStep, tensors: dict[str, mx.array]) -> None:
    _fill_parameters(step, tensors)
    _replace(step, step.optimizer.state, tensors, "optimizer:")


def _fill_parameters(step: TrainStep, tensors: dict[str, mx.array]) -> None:
    _replace(step, step.parameters, tensors, "parameters:")


def _replace(
    step: TrainStep, state: dict, tensors: dict[str, mx.array], path: str
) -> None:
    # In place: optimizers and the compiled step hold on to these very dictionaries. By
    # the paths they have now, because a parameter's name is one key, dots and all.
    for name, value in state.items():
        if isinstance(value, dict):
            _replace(step, value, tensors, f"{path}{name}.")
        else:
            state[name] = _received(step, f"{path}{name}", value, tensors)


def _received(
    step: TrainStep, name: str, value: mx.array, tensors: dict[str, mx.array]
) -> mx.array:
    """The first process's tensor, in all processes, or this one's share of it."""
    owner = _owner(name)
    if step.ranks.is_first:
        # Let go of when it is sent: read from a file, it may be one of too many.
        whole = tensors.pop(name)
    else:
        whole = mx.zeros(step.shards.shape(owner, value), value.dtype)
    [whole] = step.ranks.broadcast([whole])
    own = step.shards.cut(owner, whole)
    mx.eval(own)
    return own

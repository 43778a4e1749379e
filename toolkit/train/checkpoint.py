"""Checkpoints of a training in progress: whole or absent, exact to resume."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

from ..run.files import atomic_folder, hash_file, need_space
from ..run.ranks import Ranks
from .step import Step

WEIGHTS = "state.safetensors"
# Room for the new checkpoint beside the old ones, and some for the reports.
SLACK = 16 << 20


@dataclass
class Progress:
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
    step: Step,
    progress: Progress,
    *,
    newest: int = 2,
    spared: int | None = None,
) -> Path:
    """Write `folder/<step>`, whole or not at all, and drop what is not kept.

    Args:
        newest: checkpoints kept, this one included.
        spared: the step of one more that is kept, however old.
    """
    tensors = _tensors(step)
    need_space(folder, sum(v.nbytes for v in tensors.values()) + SLACK)
    target = _place(folder, progress.step)
    with atomic_folder(target) as partial:
        weights = partial / WEIGHTS
        # In the same file, under the same hash.
        metadata = {"progress": json.dumps(vars(progress))}
        mx.save_safetensors(str(weights), tensors, metadata=metadata)
        state = {"bytes": weights.stat().st_size, "sha256": hash_file(weights)}
        (partial / "state.json").write_text(json.dumps(state, indent=2) + "\n")
    # Newer ones are those that were passed over as damaged.
    kept = [p for p in numbered(folder) if p.name <= target.name][-newest:]
    if spared is not None:
        kept.append(_place(folder, spared))
    for other in set(numbered(folder)) - set(kept):
        shutil.rmtree(other)
    return target


def restore(folder: Path, step: Step, warn: Callable[[str], None]) -> Progress:
    """Put the newest whole checkpoint into `step`; from the start when there is none.

    Args:
        warn: told about every damaged checkpoint that is passed over.
    """
    for checkpoint in reversed(numbered(folder)):
        if not _is_whole(checkpoint):
            warn(f"checkpoint {checkpoint} is damaged; using what was before it")
            continue
        path = str(checkpoint / WEIGHTS)
        tensors, metadata = mx.load(path, return_metadata=True)
        _fill(step, tensors)
        return Progress(**json.loads(metadata["progress"]))
    return Progress()


def equalize(step: Step, progress: Progress, ranks: Ranks) -> Progress:
    """Give all processes the first one's parameters, moments and progress."""
    if ranks.size == 1:
        return progress
    tensors = _tensors(step)
    names = sorted(tensors)
    values = ranks.spread([tensors[name] for name in names])
    _fill(step, dict(zip(names, values, strict=True)))
    return Progress(**ranks.shared(vars(progress)))


def recall(folder: Path, step: Step, number: int) -> bool:
    """Put the parameters after `number` steps into `step`, if that checkpoint is whole.

    The optimizer is left as it is: nothing goes on from here.
    """
    checkpoint = _place(folder, number)
    if not _is_whole(checkpoint):
        return False
    _fill_parameters(step, mx.load(str(checkpoint / WEIGHTS)))
    mx.eval(step.parameters)
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


def _tensors(step: Step) -> dict[str, mx.array]:
    state = dict(tree_flatten(step.optimizer.state))
    return {f"parameters:{k}": v for k, v in step.parameters.items()} | {
        f"optimizer:{k}": v for k, v in state.items()
    }


def _fill(step: Step, tensors: dict[str, mx.array]) -> None:
    _fill_parameters(step, tensors)
    _replace(step.optimizer.state, tensors, "optimizer:")
    mx.eval(step.parameters, step.optimizer.state)


def _fill_parameters(step: Step, tensors: dict[str, mx.array]) -> None:
    step.parameters.update({k: tensors[f"parameters:{k}"] for k in step.parameters})


def _replace(state: dict, tensors: dict[str, mx.array], path: str) -> None:
    # In place: optimizers and the compiled step hold on to these very dictionaries. By
    # the paths they have now, because a parameter's name is one key, dots and all.
    for name, value in state.items():
        if isinstance(value, dict):
            _replace(value, tensors, f"{path}{name}.")
        else:
            state[name] = tensors[f"{path}{name}"]

"""Checkpoints of a training in progress: whole or absent, two kept, exact to resume."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from ..run.files import atomic_folder, hash_file, need_space
from .step import Step

KEPT = 2
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


def save(folder: Path, step: Step, progress: Progress) -> Path:
    """Write `folder/<step>`, whole or not at all, and drop all but the newest two."""
    tensors = _tensors(step)
    need_space(folder, sum(v.nbytes for v in tensors.values()) + SLACK)
    target = folder / f"{progress.step:07d}"
    with atomic_folder(target) as partial:
        mx.save_safetensors(str(partial / "state.safetensors"), tensors)
        state = vars(progress) | {"sha256": hash_file(partial / "state.safetensors")}
        (partial / "state.json").write_text(json.dumps(state, indent=2) + "\n")
    for old in numbered(folder)[:-KEPT]:
        shutil.rmtree(old)
    return target


def restore(folder: Path, step: Step, warn) -> Progress:
    """Put the newest whole checkpoint into `step`; from the start when there is none.

    Args:
        warn: told about every damaged checkpoint that is passed over.
    """
    for checkpoint in reversed(numbered(folder)):
        state = _read_state(checkpoint)
        if state is None:
            warn(f"checkpoint {checkpoint} is damaged; using the one before it")
            continue
        _fill(step, mx.load(str(checkpoint / "state.safetensors")))
        return Progress(**state)
    return Progress()


def numbered(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if p.name.isdigit())


def _read_state(checkpoint: Path) -> dict | None:
    """The state of a checkpoint, or None if its files are not the ones written."""
    try:
        state = json.loads((checkpoint / "state.json").read_text())
        digest = state.pop("sha256")
        whole = hash_file(checkpoint / "state.safetensors") == digest
    except (OSError, ValueError, KeyError):
        return None
    return state if whole else None


def _tensors(step: Step) -> dict[str, mx.array]:
    state = dict(tree_flatten(step.optimizer.state))
    return {f"parameters:{k}": v for k, v in step.parameters.items()} | {
        f"optimizer:{k}": v for k, v in state.items()
    }


def _fill(step: Step, tensors: dict[str, mx.array]) -> None:
    parts: dict[str, dict[str, mx.array]] = {"parameters": {}, "optimizer": {}}
    for name, value in tensors.items():
        part, _, path = name.partition(":")
        parts[part][path] = value
    # In place: the compiled step holds on to these very dictionaries.
    step.parameters.update(parts["parameters"])
    step.optimizer.state.update(tree_unflatten(list(parts["optimizer"].items())))
    mx.eval(step.parameters, step.optimizer.state)

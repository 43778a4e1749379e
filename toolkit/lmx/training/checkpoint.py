"""Checkpoints of a running training: whole or absent, exact to resume."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

from ..files.artifacts import Artifact, ArtifactStore
from ..files.atomic import require_space
from ..models.safetensors_io import stream_safetensors
from .step import TrainStep

KIND, WEIGHTS = "steps", "state.safetensors"
# Free bytes required beyond the new checkpoint, for logs and metrics.
DISK_SLACK = 16 << 20


@dataclass
class TrainingProgress:
    """The state of a training besides its parameters and moments.

    Batches, the learning rate and all random numbers are functions of the step, so no
    data position and no random state is saved.

    Attributes:
        loss_since, loss_count_since, tokens_since, seconds_since, metrics_since: sums
            since the last logged step.
        valid_loss, score: of the last evaluation; None = the loss is the score.
        best_step, best_loss, best_score: of the best evaluation, which is that with the
            highest score, or with the lowest loss.
        evals_since_best: evaluations after that one.
        examples: a hash of the training examples.
    """

    step: int = 0
    trained_tokens: int = 0
    seconds: float = 0.0
    loss_since: float = 0.0
    loss_count_since: float = 0
    tokens_since: int = 0
    seconds_since: float = 0.0
    valid_loss: float = 0.0
    best_step: int = 0
    score: float | None = None
    best_loss: float = math.inf
    best_score: float | None = None
    evals_since_best: int = 0
    examples: str = ""
    metrics_since: list[float] = field(default_factory=list)

    def add_evaluation(self, loss: float, score: float | None = None) -> None:
        """Record the validation loss of the current step, and its score."""
        self.valid_loss, self.score = loss, score
        self.evals_since_best += 1
        best = -self.best_loss if self.best_score is None else self.best_score
        if (-loss if score is None else score) > best:
            self.best_step = self.step
            self.best_loss, self.best_score = loss, score
            self.evals_since_best = 0


def save(
    folder: Path,
    step: TrainStep,
    progress: TrainingProgress,
    *,
    save_total_limit: int = 2,
    best_step: int | None = None,
) -> Path | None:
    """Write a checkpoint into a folder and delete old ones.

    All ranks call this; only the first one writes, and gets the path.

    Args:
        save_total_limit: newest checkpoints kept, this one included.
        best_step: the step of one more checkpoint that is kept.
    """
    tensors = (
        step.sharding.unshard(_parameter_path(name), value)
        for name, value in _state_tensors(step).items()
    )
    if not step.ranks.is_first:
        # They take part in every gather.
        for _ in tensors:
            pass
        return None
    layout = _layout(step)
    size = sum(dtype.size * math.prod(shape) for dtype, shape in layout.values())
    require_space(folder, size + DISK_SLACK)

    def write(target: Path) -> dict:
        if step.sharding:
            stream_safetensors(target / WEIGHTS, layout, tensors, {})
        else:
            mx.save_safetensors(str(target / WEIGHTS), _state_tensors(step))
        return {"progress": vars(progress), "shapes": _shapes(layout)}

    store = ArtifactStore(folder)
    saved = store.put(KIND, _key(progress.step), write)
    # Newer checkpoints than this one are damaged: `restore` skipped them.
    kept = [n for n in list_checkpoints(folder) if n <= progress.step]
    kept = kept[-save_total_limit:]
    if best_step is not None:
        kept.append(best_step)
    store.remove_others(KIND, [_key(number) for number in kept])
    return saved.folder


def restore(
    folder: Path, step: TrainStep, warning: Callable[[str], None]
) -> TrainingProgress:
    """Load the newest undamaged checkpoint into `step`, if there is one.

    All ranks call this; the first one reads and sends the tensors to the others.

    Args:
        warning: called for every damaged checkpoint that is skipped.
    """
    tensors, progress = None, TrainingProgress()
    if step.ranks.is_first:
        for number in reversed(list_checkpoints(folder)):
            if saved := _find(folder, step, number):
                tensors = mx.load(str(saved.folder / WEIGHTS))
                progress = TrainingProgress(**saved.facts["progress"])
                break
            place = folder / KIND / _key(number)
            warning(f"checkpoint {place} is damaged; using the one before it")
    has_checkpoint = step.ranks.broadcast_object(tensors is not None)
    if has_checkpoint or not step.sharding:
        state = _state_tensors(step) if tensors is None else tensors
        _load_in_place(step, step.parameters, state, "parameters:")
        _load_in_place(step, step.optimizer.state, state, "optimizer:")
    return TrainingProgress(**step.ranks.broadcast_object(vars(progress)))


def load_weights(folder: Path, step: TrainStep, number: int) -> bool:
    """Load the parameters after `number` steps; False if that checkpoint is damaged.

    The optimizer state is not loaded: training does not continue. All ranks call this.
    """
    tensors = None
    if step.ranks.is_first and (saved := _find(folder, step, number)):
        tensors = mx.load(str(saved.folder / WEIGHTS))
    if not step.ranks.broadcast_object(tensors is not None):
        return False
    _load_in_place(step, step.parameters, tensors or {}, "parameters:")
    return True


def list_checkpoints(folder: Path) -> list[int]:
    """The steps of the checkpoints in a folder, oldest first."""
    return [int(key) for key in ArtifactStore(folder).keys(KIND) if key.isdecimal()]


def _key(number: int) -> str:
    return f"{number:07d}"


def _find(folder: Path, step: TrainStep, number: int) -> Artifact | None:
    """The checkpoint after `number` steps, if it has the layout of this model."""
    saved = ArtifactStore(folder).find(KIND, _key(number))
    return saved if saved and saved.facts["shapes"] == _shapes(_layout(step)) else None


def _layout(step: TrainStep) -> dict[str, tuple[mx.Dtype, tuple[int, ...]]]:
    """Type and whole shape of every tensor by its name in files."""
    return {
        name: (value.dtype, step.sharding.full_shape(_parameter_path(name), value))
        for name, value in _state_tensors(step).items()
    }


def _shapes(layout: dict) -> dict[str, list[int]]:
    return {name: list(shape) for name, (_, shape) in layout.items()}


def _state_tensors(step: TrainStep) -> dict[str, mx.array]:
    """Parameters and moments by their names in files; of a shard, this rank's."""
    state = dict(tree_flatten(step.optimizer.state))
    return {f"parameters:{k}": v for k, v in step.parameters.items()} | {
        f"optimizer:{k}": v for k, v in state.items()
    }


def _parameter_path(name: str) -> str:
    """The path of the parameter that a tensor in a file is, or is a moment of."""
    kind, _, path = name.partition(":")
    return path if kind == "parameters" else path.rpartition(".")[0]


def _load_in_place(
    step: TrainStep, state: dict, tensors: dict[str, mx.array], prefix: str
) -> None:
    # In place, because the optimizer and the compiled step hold these dictionaries. By
    # key, because the path of a parameter is one key, with its dots.
    for key, value in state.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            _load_in_place(step, value, tensors, f"{name}.")
            continue
        path = _parameter_path(name)
        if step.ranks.is_first:
            # Popped, so that at most one tensor read from the file is in memory.
            full = tensors.pop(name)
        else:
            full = mx.zeros(step.sharding.full_shape(path, value), value.dtype)
        [full] = step.ranks.broadcast([full])
        state[key] = step.sharding.shard(path, full)
        mx.eval(state[key])

"""Python callbacks of a run, and what they see of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import UserError


@dataclass
class RunState:
    """Where a run is. Every callback of the run gets the same object.

    Attributes:
        path: the run directory.
        stage: the running stage, such as "1-train".
        step: finished optimizer steps of the stage.
        steps: optimizer steps of the whole stage.
        loss: of this step, in nats per trained token; with a teacher, the divergence;
            a loss of completions is a mean over what it counts.
        learning_rate: of this step.
        gradient_norm: of this step, before clipping.
        trained_tokens: tokens with a loss in this step.
        validation_loss: of the last evaluation, in nats per trained token.
        metrics: figures of every evaluated model by name, once a stage has evaluated
            them.
    """

    path: Path = field(default_factory=Path)
    stage: str = ""
    step: int = 0
    steps: int = 0
    loss: float | None = None
    learning_rate: float | None = None
    gradient_norm: float | None = None
    trained_tokens: int | None = None
    validation_loss: float | None = None
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    _stopped: bool = False

    def stop(self) -> None:
        """Stop the run as an interruption does: saved and resumable."""
        self._stopped = True

    @property
    def is_stopped(self) -> bool:
        """Whether a callback has stopped the run."""
        return self._stopped


class Callback:
    """Base class of callbacks: override what you need.

    A method that returns False stops the run, as `state.stop()` does. The step that is
    already running is finished and a checkpoint is saved. An exception ends the run.
    """

    def on_step(self, state: RunState) -> bool | None:
        """Called after every optimizer step."""

    def on_evaluate(self, state: RunState) -> bool | None:
        """Called after every validation of a training, also before its first step."""

    def on_stage_end(self, state: RunState) -> bool | None:
        """Called after every stage that was not already complete."""


class CallbackList:
    """The callbacks of a run, called in order with its state.

    Raises:
        UserError: a callback has no hook, or a method that is never called.
    """

    def __init__(self, callbacks: Sequence[Callback] = ()):
        for callback in callbacks:
            _require_hooks(callback)
        self._callbacks = tuple(callbacks)
        self.state = RunState()

    @property
    def is_stopped(self) -> bool:
        """Whether a callback has stopped the run."""
        return self.state.is_stopped

    def call(self, event: str, **values: Any) -> None:
        """Set values of the state, and call `on_<event>` of every callback."""
        for name, value in values.items():
            setattr(self.state, name, value)
        for callback in self._callbacks:
            if getattr(callback, f"on_{event}")(self.state) is False:
                self.state.stop()


def _require_hooks(callback: Callback) -> None:
    kind, hooks = type(callback), {n for n in vars(Callback) if n.startswith("on_")}
    names = {n for n in dir(kind) if n.startswith("on_")}
    if names == hooks and any(getattr(kind, n) is not vars(Callback)[n] for n in hooks):
        return
    unknown = ", ".join(sorted(names - hooks)) or "a method"
    raise UserError(
        f"lmx never calls {unknown} of {kind.__name__}",
        hint=f"a callback has one or more of {', '.join(sorted(hooks))}",
    )

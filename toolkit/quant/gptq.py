"""GPTQ and what follows from it: every layer quantized for the inputs it will get."""

import hashlib
from typing import Literal

import mlx.core as mx
import mlx.nn as nn
from pydantic import Field, model_validator

from ..model.cpu import on_cpu
from . import closed_form
from .calibrate import Stored, Walk
from .closed_form import Settings, Solution
from .hessian import DAMPING, Hessian, damped
from .inputs import Moments
from .spec import QuantSpec, expand, pack
from .task import PostTraining, Task, Tune, Tuning

TOKENS_PER_COLUMN = 8
LEAST_TOKENS = 1 << 15
TOKENS_AT_ONCE = 2048
# What an error of a token's embedding costs where it is looked up, in every column, as
# a share of what one costs on average in the head that is tied to it. Of 0.01, 0.1, 0.5
# and 2 this lost least on data/tiny-base, at 2 bits and at 4.
LOOK_UP = 0.5


class Config(PostTraining):
    """Fit codes and grids to what the layers see on calibration tokens."""

    method: Literal["gptq"] = "gptq"
    """The method's name."""
    tune: Tuning = Tune()
    """Tune scales and biases afterwards; false = off."""
    rounds: int = Field(3, ge=0)
    """Rounds of refit and coordinate descent after GPTQ itself."""
    asymmetry: float = Field(0.5, ge=0, le=1)
    """How far a layer makes up for the errors of those before it."""
    damping: float = Field(DAMPING, gt=0, le=1)
    """Share of the mean of a Hessian's diagonal that is added to it, to begin with."""

    @model_validator(mode="after")
    def _affine(self):
        if self.mode != "affine":
            raise ValueError(f"gptq is for affine grids; {self.mode} is rounded by rtn")
        return self


def quantize(config: Config, task: Task) -> dict[str, mx.array]:
    """Codes, scales and biases of the layers in `task.specs`, as they are stored."""
    return _Method(config, task).run()


class _Method:
    def __init__(self, config: Config, task: Task):
        self.config = config
        self.task = task
        self.settings = Settings(config.rounds, config.asymmetry)
        self.modules = dict(task.model.named_modules())

    def run(self) -> dict[str, mx.array]:
        task = self.task
        walk = self._walk()
        tensors = walk.run(self._solve)
        for path, spec in task.specs.items():
            if f"{path}.weight" not in tensors:
                tensors |= self._unseen(path, spec)
        return tensors

    def _walk(self) -> Walk:
        task, config = self.task, self.config
        affine = [path for path, spec in task.specs.items() if spec.mode == "affine"]
        widest = max(self.modules[path].weight.shape[-1] for path in affine)
        wanted = max(LEAST_TOKENS, TOKENS_PER_COLUMN * widest)
        tokens = task.windows(config.calibration, config.calibration.tokens or wanted)
        if tokens.size < TOKENS_PER_COLUMN * widest:
            task.report.warn(
                f"calibration has {tokens.size:,} tokens; a layer {widest} wide wants "
                f"{TOKENS_PER_COLUMN * widest:,}"
            )
        key = hashlib.sha256(memoryview(tokens))
        key.update(config.model_dump_json().encode())
        return Walk(
            task.model,
            affine,
            tokens,
            task.folder / "walk",
            key=key.hexdigest(),
            compute=mx.float32 if on_cpu() else task.dtype,
            rows=max(1, TOKENS_AT_ONCE // tokens.shape[1]),
            say=task.report.say,
        )

    def _solve(self, weights: dict[str, mx.array], moments: Moments):
        if moments.counts.ndim:
            return {p: self._experts(p, w, moments) for p, w in weights.items()}
        found, hessians = {}, {}
        mean = mx.diagonal(moments.squares).mean()
        cross = moments.cross / mx.where(mean == 0, 1.0, mean)
        for path, weight in weights.items():
            group = self.task.specs[path].group_size
            if group not in hessians:
                hessians[group] = self._hessian(path, moments.squares, group)
            solution = self._closed_form(path, weight, hessians[group], cross)
            found[path] = self._stored(path, solution)
        return found

    def _experts(self, path: str, weight: mx.array, moments: Moments) -> Stored:
        """Every expert by its own inputs, and the fewer it had, by those of all."""
        counts, width = moments.counts.tolist(), weight.shape[-1]
        total = moments.squares.sum(axis=0) / max(1, sum(counts))
        parts = []
        for own, squares, count in zip(weight, moments.squares, counts, strict=True):
            blended = (squares + width * total) / (count + width)
            hessian = self._hessian(path, blended, self.task.specs[path].group_size)
            parts.append(self._closed_form(path, own, hessian, None))
        rare = [number for number, count in enumerate(counts) if count < width]
        if rare:
            self.task.report.say(
                f"{path}: {len(rare)} of {len(counts)} experts saw fewer than {width} "
                f"tokens, as expert {rare[0]}, which saw {counts[rare[0]]}; the inputs "
                "of all experts count for them too"
            )
        names = parts[0].tensors
        tensors = {k: mx.stack([part.tensors[k] for part in parts]) for k in names}
        return self._stored(path, Solution(tensors, {}))

    def _hessian(self, path: str, squares: mx.array, group: int) -> Hessian:
        damping = self.config.damping
        if isinstance(self.modules[path], nn.Embedding):
            damping = max(LOOK_UP, damping)
        hessian = damped(squares, group, damping)
        if hessian.damping > damping:
            self.task.report.say(f"{path}: damped by {hessian.damping:g}")
        return hessian

    def _closed_form(self, path: str, weight, hessian: Hessian, cross) -> Solution:
        task = self.task
        solution = closed_form.solve(
            weight.astype(task.dtype),
            hessian,
            task.specs[path],
            task.dtype,
            cross=cross,
            settings=self.settings,
        )
        errors = ", ".join(f"{way} {e:.3g}" for way, e in solution.errors.items())
        task.report.log(f"{path}: output lost: {errors}")
        return solution

    def _stored(self, path: str, solution: Solution) -> Stored:
        spec, dtype = self.task.specs[path], self.task.dtype
        return Stored(solution.tensors, expand(solution.tensors, spec, dtype))

    def _unseen(self, path: str, spec: QuantSpec) -> dict[str, mx.array]:
        """A layer that no hidden state goes into, such as an embedding."""
        weight = self.modules[path].weight
        if spec.mode != "affine" or weight.ndim > 2:
            self.task.report.say(f"{path} is rounded to the nearest")
            tensors = pack(weight, spec, self.task.dtype)
        else:
            same = damped(mx.eye(weight.shape[-1]), spec.group_size)
            tensors = self._closed_form(path, weight, same, None).tensors
        return {f"{path}.{name}": value for name, value in tensors.items()}

"""GPTQ and what follows from it: every layer quantized for the inputs it will get."""

from typing import Literal

import mlx.core as mx
from pydantic import Field, model_validator

from .. import closed_form
from ..block_folds import Folding
from ..block_training import BlockTraining, TrainBlocks
from ..calibrate import Stored
from ..calibrated import quantize_watched, stored
from ..closed_form import Solution
from ..hessian import DAMPING, Hessian, damped
from ..inputs import Moments
from ..making_up import Missing
from ..spec import pack
from ..task import PostTraining, Task, Tune, Tuning


class Config(PostTraining):
    """Fit codes and grids to what the layers see on calibration tokens."""

    method: Literal["gptq"] = "gptq"
    """The method's name."""
    tune: Tuning = Tune()
    """Tune scales and biases afterwards; false = off."""
    rounds: int = Field(3, ge=0)
    """Rounds of refit and coordinate descent after GPTQ itself."""
    asymmetry: bool = True
    """Layers make up for the errors of those before them, and for what the residual
    stream they add to has lost, as far as the half of the tokens says of the others."""
    outputs: bool = True
    """Rows make up for each other's errors, by how the loss answers to what comes out:
    before it all begins, tokens go through the model and the slopes of their loss back.
    Not with `fold`, which changes what comes out."""
    damping: float = Field(DAMPING, gt=0, le=1)
    """Share of the mean of a Hessian's diagonal that is added to it, to begin with."""

    fold: bool = False
    """Fold AWQ's scales into a block first, where its rounded layers then lose less.
    Off: a small Llama came out 3 to 4% further from itself with it, at 2 and 3 bits."""
    blocks: TrainBlocks | None = None
    """Train every block's weights and grids afterwards, {} = with all defaults; what is
    no better on windows held out is undone. Off: at 2 bits data/tiny-base came out but
    2% nearer to itself, in several times the time."""

    @model_validator(mode="after")
    def _affine(self):
        if self.mode != "affine":
            raise ValueError(f"gptq is for affine grids; {self.mode} is rounded by rtn")
        return self

    @property
    def takes_all_alike(self) -> list[str]:
        """What of it does not tell tokens that count from others."""
        own = [key for key in ("fold", "blocks") if getattr(self, key)]
        return own + super().takes_all_alike


def quantize(config: Config, task: Task) -> dict[str, mx.array]:
    """Codes, scales and biases of the layers in `task.specs`, as they are stored."""
    return _Method(config, task).run()


class _Method:
    def __init__(self, config: Config, task: Task):
        self.config = config
        self.task = task

    def run(self) -> dict[str, mx.array]:
        config, task = self.config, self.task
        folding = Folding(task) if config.fold else None
        training = BlockTraining(config.blocks, task) if config.blocks else None
        tensors = quantize_watched(
            config,
            task,
            self._solve,
            folding,
            training,
            compares=bool(config.asymmetry or training),
            weighs_outputs=config.outputs and not config.fold,
        )
        for part in filter(None, (folding, training)):
            part.sum_up()
        return tensors

    def _solve(self, weights: dict[str, mx.array], moments: Moments | None):
        if moments is None:
            return {p: self._unseen(p, w) for p, w in weights.items()}
        if moments.clusters is not None:
            return {p: self._clusters(p, w, moments) for p, w in weights.items()}
        if moments.counts.ndim:
            return {p: self._experts(p, w, moments) for p, w in weights.items()}
        hessians = self._hessians(list(weights), moments)
        answers, missing = moments.answers, self._missing(moments)
        # They are as large as all that is made of them.
        del moments
        found = {}
        for path, weight in weights.items():
            hessian = hessians[self.task.specs[path].group_size]
            rows = answers.pop(path, None)
            solution = self._closed_form(path, weight, hessian, missing.get(path), rows)
            found[path] = self._stored(path, solution)
        return found

    def _hessians(self, paths: list[str], moments: Moments) -> dict[int, Hessian]:
        """By the group size of the paths."""
        hessians: dict[int, Hessian] = {}
        for path in paths:
            group = self.task.specs[path].group_size
            if group not in hessians:
                hessians[group] = self._hessian(path, moments.squares, group)
        return hessians

    def _missing(self, moments: Moments) -> dict[str, Missing]:
        """What the outputs of layers miss, by path."""
        if not self.config.asymmetry:
            return {}
        mean = mx.diagonal(moments.squares).mean().item() or 1.0
        moments.cross = moments.cross / mean
        mx.eval(moments.cross)
        if moments.residual is not None:
            moments.residual = moments.residual / mean
            mx.eval(moments.residual)
        return {
            path: Missing(moments.cross, moments.residual, share)
            for path, share in moments.shares.items()
        }

    def _clusters(self, path: str, weight: mx.array, moments: Moments) -> Stored:
        """Every cluster of rows by what errors in them cost."""
        group, parts, rows = self.task.specs[path].group_size, [], []
        order = mx.argsort(moments.clusters)
        for number, squares in enumerate(moments.squares):
            size = (moments.clusters == number).sum().item()
            own, order = order[:size], order[size:]
            hessian = self._hessian(path, squares, group)
            name = f"{path}, cluster {number + 1}"
            solution = self._closed_form(path, weight[own], hessian, name=name)
            parts.append(solution.tensors)
            rows.append(own)
        back = mx.argsort(mx.concatenate(rows))
        tensors = {
            k: mx.concatenate([part[k] for part in parts])[back] for k in parts[0]
        }
        return self._stored(path, Solution(tensors, {}))

    def _experts(self, path: str, weight: mx.array, moments: Moments) -> Stored:
        """Every expert by its own inputs, and the fewer it had, by those of all."""
        counts, width = moments.counts.tolist(), weight.shape[-1]
        total = moments.squares.sum(axis=0) / max(1, sum(counts))
        parts = []
        for own, squares, count in zip(weight, moments.squares, counts, strict=True):
            blended = (squares + width * total) / (count + width)
            hessian = self._hessian(path, blended, self.task.specs[path].group_size)
            parts.append(self._closed_form(path, own, hessian))
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
        hessian = damped(squares, group, damping)
        if hessian.damping > damping:
            self.task.report.say(f"{path}: damped by {hessian.damping:g}")
        return hessian

    def _closed_form(
        self,
        path: str,
        weight: mx.array,
        hessian: Hessian,
        missing: Missing | None = None,
        answers: mx.array | None = None,
        name: str | None = None,
    ) -> Solution:
        task = self.task
        solution = closed_form.solve(
            weight.astype(task.dtype),
            hessian,
            task.specs[path],
            task.dtype,
            missing=missing,
            answers=answers,
            rounds=self.config.rounds,
        )
        errors = ", ".join(f"{way} {e:.3g}" for way, e in solution.errors.items())
        share = "" if missing is None else f"; made up for {missing.share:.0%}"
        task.report.log(f"{name or path}: output lost: {errors}{share}")
        return solution

    def _stored(self, path: str, solution: Solution) -> Stored:
        return stored(solution.tensors, self.task.specs[path], self.task.dtype)

    def _unseen(self, path: str, weight: mx.array) -> Stored:
        """A layer that no hidden state goes into, such as an embedding."""
        spec = self.task.specs[path]
        if weight.ndim > 2:
            self.task.report.say(f"{path} is rounded to the nearest")
            return stored(pack(weight, spec, self.task.dtype), spec, self.task.dtype)
        same = damped(mx.eye(weight.shape[-1]), spec.group_size)
        return self._stored(path, self._closed_form(path, weight, same))

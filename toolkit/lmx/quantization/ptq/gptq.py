"""GPTQ and what follows from it: every layer quantized for the inputs it will get."""

import mlx.core as mx

from ...config.quantize import GPTQConfig
from ..packing import pack
from . import gptq_solver
from .base import PTQContext
from .block_reconstruction import BlockReconstruction
from .error_propagation import OutputError
from .gptq_solver import QuantizedLayer
from .hessian import Hessian, damped
from .input_statistics import InputStatistics
from .sequential import QuantizedTensor, quantize_sequentially, quantized_tensor


def quantize(config: GPTQConfig, task: PTQContext) -> dict[str, mx.array]:
    """Codes, scales and biases of the layers in `task.specs`, as they are stored."""
    return GPTQ(config, task).run()


class GPTQ:
    def __init__(self, config: GPTQConfig, task: PTQContext):
        self.config = config
        self.task = task

    def run(self) -> dict[str, mx.array]:
        config, task = self.config, self.task
        training = (
            BlockReconstruction(config.block_reconstruction, task)
            if config.block_reconstruction
            else None
        )
        tensors = quantize_sequentially(
            config,
            task,
            self._solve,
            None,
            training,
            compares=bool(config.asymmetric_calibration or training),
            weighs_outputs=config.output_hessian,
        )
        if training is not None:
            training.sum_up()
        return tensors

    def _solve(self, weights: dict[str, mx.array], moments: InputStatistics | None):
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

    def _hessians(
        self, paths: list[str], moments: InputStatistics
    ) -> dict[int, Hessian]:
        """By the group size of the paths."""
        hessians: dict[int, Hessian] = {}
        for path in paths:
            group = self.task.specs[path].group_size
            if group not in hessians:
                hessians[group] = self._hessian(path, moments.squares, group)
        return hessians

    def _missing(self, moments: InputStatistics) -> dict[str, OutputError]:
        """What the outputs of layers miss, by path."""
        if not self.config.asymmetric_calibration:
            return {}
        mean = mx.diagonal(moments.squares).mean().item() or 1.0
        moments.cross = moments.cross / mean
        mx.eval(moments.cross)
        if moments.residual is not None:
            moments.residual = moments.residual / mean
            mx.eval(moments.residual)
        return {
            path: OutputError(moments.cross, moments.residual, share)
            for path, share in moments.shares.items()
        }

    def _clusters(
        self, path: str, weight: mx.array, moments: InputStatistics
    ) -> QuantizedTensor:
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
        return self._stored(path, QuantizedLayer(tensors, {}))

    def _experts(
        self, path: str, weight: mx.array, moments: InputStatistics
    ) -> QuantizedTensor:
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
            self.task.logger.info(
                f"{path}: {len(rare)} of {len(counts)} experts saw fewer than {width} "
                f"tokens, as expert {rare[0]}, which saw {counts[rare[0]]}; the inputs "
                "of all experts count for them too"
            )
        names = parts[0].tensors
        tensors = {k: mx.stack([part.tensors[k] for part in parts]) for k in names}
        return self._stored(path, QuantizedLayer(tensors, {}))

    def _hessian(self, path: str, squares: mx.array, group: int) -> Hessian:
        damping = self.config.dampening_frac
        hessian = damped(squares, group, damping)
        if hessian.damping > damping:
            self.task.logger.info(f"{path}: damped by {hessian.damping:g}")
        return hessian

    def _closed_form(
        self,
        path: str,
        weight: mx.array,
        hessian: Hessian,
        missing: OutputError | None = None,
        answers: mx.array | None = None,
        name: str | None = None,
    ) -> QuantizedLayer:
        task = self.task
        solution = gptq_solver.solve_layer(
            weight.astype(task.dtype),
            hessian,
            task.specs[path],
            task.dtype,
            missing=missing,
            answers=answers,
            rounds=self.config.refine_iters,
        )
        errors = ", ".join(f"{way} {e:.3g}" for way, e in solution.errors.items())
        share = "" if missing is None else f"; made up for {missing.share:.0%}"
        task.logger.debug(f"{name or path}: output lost: {errors}{share}")
        return solution

    def _stored(self, path: str, solution: QuantizedLayer) -> QuantizedTensor:
        return quantized_tensor(
            solution.tensors, self.task.specs[path], self.task.dtype
        )

    def _unseen(self, path: str, weight: mx.array) -> QuantizedTensor:
        """A layer that no hidden state goes into, such as an embedding."""
        spec = self.task.specs[path]
        if weight.ndim > 2:
            self.task.logger.info(f"{path} is rounded to the nearest")
            return quantized_tensor(
                pack(weight, spec, self.task.dtype), spec, self.task.dtype
            )
        same = damped(mx.eye(weight.shape[-1]), spec.group_size)
        return self._stored(path, self._closed_form(path, weight, same))

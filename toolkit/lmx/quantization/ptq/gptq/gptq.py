"""GPTQ: quantize every layer for the inputs it receives in the quantized model.

`SequentialPipeline` calls `GPTQ.quantize_group` for every group of layers. `GPTQ`
decides which Hessian a layer gets, and `solver.solve_layers` quantizes the
weights, with `float_solver` in the floating-point modes.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, pairwise

import mlx.core as mx

from ....config.quant_spec import QuantSpec
from ....config.quantize import GPTQConfig
from ....interfaces import SINGLE_PROCESS, Communicator
from ....models import global_scale
from ..base import PTQContext, PTQMethod, QuantizedTensor
from ..hessian import Hessian, damped
from ..input_statistics import InputStatistics, OutputError
from ..sequential import SequentialPipeline
from .column_updates import BestGridTracker
from .solver import LayerProblem, QuantizedLayer, solve_layers

# `max_compared_tokens` of `PTQMethod` by effort.
COMPARED_TOKENS = {"fast": 1 << 12, "standard": 1 << 30}


class GPTQ(PTQMethod):
    """GPTQ with fitted grids, asymmetric calibration and output Hessians.

    The paper is arXiv 2210.17323; `solver` names those of the extensions.
    """

    weighs_embeddings = True
    # See `solve_layers`.
    solve_rows: Callable[..., BestGridTracker] | None = None

    def __init__(self, config: GPTQConfig, context: PTQContext):
        super().__init__(config, context)
        self.needs_cross_moments = config.asymmetric_calibration
        self.weighs_outputs = config.output_hessian
        self.max_compared_tokens = COMPARED_TOKENS[config.effort]

    def quantize(self) -> dict[str, mx.array]:
        """Quantize the layers in `context.specs`.

        Returns:
            Packed codes, scales and biases by name.
        """
        self.context.logger.info(f"effort: {self.config.effort}")
        return SequentialPipeline.from_method(self).run()

    def quantize_group(
        self, weights: dict[str, mx.array], statistics: InputStatistics | None
    ) -> dict[str, QuantizedTensor]:
        context = self.context
        if statistics is None:
            return {p: self._uncalibrated(p, w) for p, w in weights.items()}
        if statistics.clusters is not None:
            return {p: self._clusters(p, w, statistics) for p, w in weights.items()}
        if statistics.counts.ndim:
            return {p: self._experts(p, w, statistics) for p, w in weights.items()}
        hessians: dict[int, Hessian] = {}
        # The layers of each grid are solved together.
        by_spec: dict[QuantSpec, list[str]] = {}
        for path in weights:
            spec = context.specs[path]
            by_spec.setdefault(spec, []).append(path)
            if spec.group_size not in hessians:
                moments = statistics.second_moments
                hessians[spec.group_size] = self._hessian(path, moments)
        fisher, errors = statistics.output_fisher, self._output_errors(statistics)
        # As large as the Hessians, which are made of them.
        del statistics, moments
        quantized = {}
        for spec, paths in by_spec.items():
            problems = {
                path: LayerProblem(
                    weights[path].astype(context.dtype),
                    errors.get(path),
                    fisher.pop(path, None),
                )
                for path in paths
            }
            layers = solve_layers(
                problems,
                hessians[spec.group_size],
                spec,
                context.dtype,
                refine_iters=self.config.refine_iters,
                ranks=context.ranks,
                solve=self.solve_rows,
            )
            for path, layer in layers.items():
                self._log_errors(path, layer, errors.get(path))
                quantized[path] = context.quantized_tensor(path, layer.tensors)
        return quantized

    def _hessian(self, path: str, moments: mx.array) -> Hessian:
        damping = self.config.dampening_frac
        hessian = damped(moments, self.context.specs[path].group_size, damping)
        if hessian.damping > damping:
            self.context.logger.info(
                f"{path}: Hessian dampening raised to {hessian.damping:g}"
            )
        return hessian

    def _output_errors(self, statistics: InputStatistics) -> dict[str, OutputError]:
        """The errors to compensate for, by path, on the scale of the Hessians."""
        if not self.config.asymmetric_calibration:
            return {}
        moments = statistics.compared_moments
        mean = mx.diagonal(moments).mean().item() or 1.0
        hessian = damped(moments, len(moments), self.config.dampening_frac)
        cross, residual = statistics.cross_moments / mean, statistics.residual_moments
        statistics.cross_moments = statistics.residual_moments = None
        statistics.compared_moments = None
        mx.eval(cross)
        if residual is not None:
            residual = residual / mean
            mx.eval(residual)
        strengths = statistics.correction_strength.items()
        return {
            path: OutputError(hessian, cross, residual, strength)
            for path, strength in strengths
        }

    def _clusters(
        self, path: str, weight: mx.array, statistics: InputStatistics
    ) -> QuantizedTensor:
        """Quantize each cluster of embedding rows with its own Hessian."""
        order = mx.argsort(statistics.clusters)
        sizes = mx.zeros(len(statistics.second_moments), mx.int32)
        sizes = sizes.at[statistics.clusters].add(1).tolist()
        ends = [*accumulate(sizes, initial=0)]
        clusters = [order[start:end] for start, end in pairwise(ends)]

        def solve(number: int) -> QuantizedLayer:
            hessian = self._hessian(path, statistics.second_moments[number])
            name = f"{path}, cluster {number + 1}"
            return self._solve(path, weight[clusters[number]], hessian, name)

        layers = self._divided(len(clusters), solve)
        original = mx.argsort(order)
        tensors = {
            name: mx.concatenate([layer[name] for layer in layers])[original]
            for name in layers[0]
        }
        return self.context.quantized_tensor(path, tensors)

    def _experts(
        self, path: str, weight: mx.array, statistics: InputStatistics
    ) -> QuantizedTensor:
        """Quantize each expert of a mixture.

        Its second moments are blended with those of all experts; the fewer tokens it
        received, the more.
        """
        counts, width = statistics.counts.tolist(), weight.shape[-1]
        all_moments = statistics.second_moments
        mean = all_moments.sum(axis=0) / max(1, sum(counts))

        def solve(expert: int) -> QuantizedLayer:
            blended = (all_moments[expert] + width * mean) / (counts[expert] + width)
            return self._solve(path, weight[expert], self._hessian(path, blended), path)

        layers = self._divided(len(counts), solve)
        rare = [number for number, count in enumerate(counts) if count < width]
        if rare:
            self.context.logger.info(
                f"{path}: {len(rare)} of {len(counts)} experts received fewer than "
                f"{width} tokens (expert {rare[0]}: {counts[rare[0]]}); their "
                "statistics include the inputs of all experts"
            )
        names = layers[0]
        tensors = {k: mx.stack([layer[k] for layer in layers]) for k in names}
        return self.context.quantized_tensor(path, tensors)

    def _divided(
        self, count: int, solve: Callable[[int], QuantizedLayer]
    ) -> list[dict[str, mx.array]]:
        """The tensors of weights of which each has its own Hessian.

        Every process solves some of them.
        """
        ranks = self.context.ranks
        own = {
            f"{number} {name}": value
            for number in ranks.shard(range(count))
            for name, value in solve(number).tensors.items()
        }
        layers: list[dict[str, mx.array]] = [{} for _ in range(count)]
        for key, value in ranks.exchange(own).items():
            number, _, name = key.partition(" ")
            layers[int(number)][name] = value
        return layers

    def _uncalibrated(self, path: str, weight: mx.array) -> QuantizedTensor:
        """Quantize a layer without statistics, such as an embedding."""
        if weight.ndim > 2:
            self.context.logger.info(f"{path} quantized with RTN")
            return self.context.rtn(path, weight)
        hessian = self._hessian(path, mx.eye(weight.shape[-1]))
        layer = self._solve(path, weight, hessian, path, ranks=self.context.ranks)
        return self.context.quantized_tensor(path, layer.tensors)

    def _solve(
        self,
        path: str,
        weight: mx.array,
        hessian: Hessian,
        name: str,
        ranks: Communicator = SINGLE_PROCESS,
    ) -> QuantizedLayer:
        spec, dtype = self.context.specs[path], self.context.dtype
        weight, fixed = weight.astype(dtype), {}
        if spec.global_scale:
            largest = global_scale.largest_magnitude(weight)
            weight, dtype = global_scale.normalized(weight, largest), mx.float32
            spec = spec.model_copy(update={"global_scale": False})
            fixed = {global_scale.NAME: largest}
        layer = solve_layers(
            {path: LayerProblem(weight)},
            hessian,
            spec,
            dtype,
            refine_iters=self.config.refine_iters,
            ranks=ranks,
            solve=self.solve_rows,
        )[path]
        self._log_errors(name, layer)
        return replace(layer, tensors=layer.tensors | fixed)

    def _log_errors(
        self, name: str, layer: QuantizedLayer, compensated: OutputError | None = None
    ) -> None:
        errors = ", ".join(f"{key} {error:.3g}" for key, error in layer.errors.items())
        if compensated is not None:
            errors += f"; correction strength {compensated.strength:.0%}"
        self.context.logger.debug(f"{name}: relative output error: {errors}")

"""Mixed precision: grids by layer with the least divergence for a size budget.

The divergence that every grid costs is predicted layer by layer (sensitivity.py). A
knapsack makes several plans of the predictions (knapsack.py). All plans are measured,
and the one whose predictions diverge least from the model is selected.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from ...config.quant_spec import QuantSpec
from ...config.quantize import MixedPrecisionConfig, PTQConfig
from ...data import cache
from ...errors import UserError
from ...files.atomic import PARTIAL, write_atomic
from ...interfaces import SINGLE_PROCESS, Communicator
from ..packing import dequantize, pack, packed_bytes
from ..ptq.base import PTQContext
from ..target_layers import QuantizationPlan, has_known_inputs
from . import knapsack
from .sensitivity import LayerStatistics, collect_stats, input_energies, sensitivity

# Grids by path.
SpecByLayer = dict[str, QuantSpec]


# Tokens for sensitivities, and tokens for comparing plans.
CALIBRATION_TOKENS, HELD_OUT_TOKENS = 4096, 4096
# Predictions hold for small errors and for one quantized layer, so plans are also made
# of these powers of them.
POWERS = (0.85, 1.15)
# A new version discards cached sensitivities.
VERSION = 1
ENERGIES_FILE = "columns.safetensors"


@dataclass(frozen=True)
class SizeModel:
    """What a model weighs on any grids.

    A free layer is one that the search chooses a grid for.

    Attributes:
        num_weights: weights of the model.
        dense_bytes: bytes of the unquantized model.
        fixed_bytes: bytes of all but the free layers, as they will be written.
        free: number of weights of every free layer, by path.
        options: candidate grids of every free layer, by path.
        dtype: the type of scales.
    """

    num_weights: int
    dense_bytes: int
    fixed_bytes: int
    free: dict[str, int]
    options: dict[str, list[QuantSpec]]
    dtype: mx.Dtype

    @classmethod
    def of(
        cls, task: PTQContext, plan: QuantizationPlan, config: MixedPrecisionConfig
    ) -> "SizeModel":
        """The sizes of a task's model.

        A layer that no candidate fits keeps its grid, as does one whose weight has
        three dimensions and is no expert layer: how it is used is unknown.
        """
        candidates = [
            QuantSpec(bits=bits, group_size=group_size)
            for bits in sorted(set(config.candidate_bits))
            for group_size in sorted(set(config.candidate_group_sizes))
        ]
        parameters = dict(tree_flatten(task.model.parameters()))
        modules = dict(task.model.named_modules())
        options, fixed = {}, 0
        for name, value in parameters.items():
            path = name.removesuffix(".weight")
            is_layer = name != path and path in plan.specs
            width = value.shape[-1] if value.ndim else 0
            fitting = [spec for spec in candidates if spec.fits(width)]
            is_free = is_layer and path not in plan.explicit
            is_free = is_free and has_known_inputs(modules[path])
            if is_free and fitting:
                options[path] = fitting
            elif is_layer:
                fixed += packed_bytes(
                    value.size, plan.specs[path], task.dtype, num_experts=len(value)
                )
            else:
                fixed += value.nbytes
        return cls(
            num_weights=sum(value.size for value in parameters.values()),
            dense_bytes=sum(value.nbytes for value in parameters.values()),
            fixed_bytes=fixed,
            free={path: parameters[f"{path}.weight"].size for path in options},
            options=options,
            dtype=task.dtype,
        )

    def layer_bytes(self, path: str, spec: QuantSpec) -> int:
        """Bytes of one layer on a grid."""
        return packed_bytes(self.free[path], spec, self.dtype)

    def total_bytes(self, specs: SpecByLayer) -> int:
        """Bytes of the whole model with these grids of the free layers."""
        layers = (self.layer_bytes(path, spec) for path, spec in specs.items())
        return self.fixed_bytes + sum(layers)

    def bits_per_weight(self, size: int) -> float:
        """Bits per weight of a model of so many bytes."""
        return 8 * size / self.num_weights

    def max_bytes(self, config: MixedPrecisionConfig) -> int:
        """The budget in bytes.

        Raises:
            UserError: no assignment fits into the budget, or the dense model does.
        """
        limit = config.max_bytes(self.num_weights)
        if limit >= self.dense_bytes:
            bits = self.bits_per_weight(self.dense_bytes)
            raise UserError(
                f"the budget of {limit:,} bytes holds the unquantized model, which has "
                f"{self.dense_bytes:,} ({bits:.4g} bits per weight)",
                hint="give a smaller budget, or leave this stage out",
            )
        smallest = self.fixed_bytes + sum(
            min(self.layer_bytes(path, spec) for spec in specs)
            for path, specs in self.options.items()
        )
        if limit < smallest:
            bits = math.ceil(1000 * self.bits_per_weight(smallest)) / 1000
            raise UserError(
                f"no choice of grids fits into {limit:,} bytes "
                f"({self.bits_per_weight(limit):.4g} bits per weight)",
                hint=f"the smallest possible is {smallest:,} bytes, or {bits:g} bits "
                "per weight",
            )
        return limit


def search_plan(
    config: PTQConfig,
    plan: QuantizationPlan,
    task: PTQContext,
    model: nn.Module,
    source: Path,
) -> tuple[QuantizationPlan, dict]:
    """Choose grids for all layers whose grid neither the recipe nor the model names.

    Args:
        task: only types and shapes of its model are used.
        model: the same model in the type it computes in; unchanged on return.
        source: the folder of the model; its content is the key of cached sensitivities.

    Returns:
        The plan with these grids, and facts for the report.

    Raises:
        UserError: the budget is too small for any choice, or holds the dense model.
    """
    sizes = SizeModel.of(task, plan, config.mixed_precision)
    limit = sizes.max_bytes(config.mixed_precision)
    calibration, held_out = _tokens(config, task)
    ranks = task.ranks
    with _scratch_of_all(task.folder, ranks) as folder:
        facts, energies = _sensitivities(
            model, sizes, calibration, task, source, folder
        )
        if ranks.is_first:
            write_atomic(task.folder / "sensitivity.json", json.dumps(facts))
        candidates = candidate_plans(sizes, **facts, limit=limit)
        evaluator = GridEvaluator(model, energies, held_out, folder, task.dtype, ranks)
        with task.logger.progress(len(candidates), "comparing plans") as progress:
            losses = {
                name: evaluator(plan.specs | specs)
                for name, specs in progress.track(candidates.items())
            }
        evaluator.close()
    best = min(losses, key=losses.get)
    _log(candidates, losses, best, sizes, task)
    size = sizes.total_bytes(candidates[best])
    assert size <= limit
    facts = {
        "bytes": size,
        "bits_per_weight": sizes.bits_per_weight(size),
        "candidates": losses,
        "selected": best,
    }
    return replace(plan, specs=plan.specs | candidates[best]), facts


@contextmanager
def _scratch_of_all(folder: Path, ranks: Communicator) -> Iterator[Path]:
    """A temporary folder that all processes see."""
    # By this name the next run removes it after a kill.
    options = {"dir": folder, "prefix": ".search.", "suffix": PARTIAL}
    with ExitStack() as stack:
        name = None
        if ranks.is_first:
            scratch = stack.enter_context(TemporaryDirectory(**options))
            name = Path(scratch).name
        yield folder / ranks.broadcast_object(name)


def _tokens(config: PTQConfig, task: PTQContext) -> tuple[mx.array, mx.array]:
    """Sequences for sensitivities, and others for comparing plans."""
    default = CALIBRATION_TOKENS + HELD_OUT_TOKENS
    allowed = config.calibration.num_tokens or default
    windows = task.windows(min(allowed, default))
    if len(windows) < 2:
        raise UserError(
            "a budget needs two windows of calibration tokens, and there is one",
            hint="give calibration a smaller length, or another source",
        )
    split = max(1, len(windows) * CALIBRATION_TOKENS // default)
    return tuple(mx.array(p.tokens) for p in (windows[:split], windows[split:]))


def _sensitivities(
    model: nn.Module,
    sizes: SizeModel,
    tokens: mx.array,
    task: PTQContext,
    source: Path,
    scratch: Path,
) -> tuple[dict, dict[str, mx.array]]:
    """Groups of layers and sensitivities by path, and energies by path.

    They are cached by model, tokens and grids, on the machine of rank 0.
    """
    options, ranks = sizes.options, task.ranks
    store = cache.store(task.logger.warning, ranks)
    key = _key(source, tokens, options, task) if ranks.is_first else ""
    known = store.find_on_first("sensitivity", key)
    if known is None:
        facts, energies = _measure(model, sizes, tokens, task, scratch)

        def write(folder: Path) -> dict:
            mx.save_safetensors(str(folder / ENERGIES_FILE), energies)
            return facts

        if ranks.is_first:
            store.get_or_make("sensitivity", key, write)
        return facts, energies
    energies = mx.load(str(known.folder / ENERGIES_FILE)) if ranks.is_first else {}
    return known.facts, ranks.exchange(energies)


def _key(source: Path, tokens: mx.array, options: dict, task: PTQContext) -> str:
    files = sorted(source.glob("model*.safetensors"))
    return cache.key_of(
        {
            "version": VERSION,
            "model": [cache.file_hash(f) for f in files],
            "tokens": hashlib.sha256(memoryview(tokens)).hexdigest(),
            "options": {p: [s.model_dump() for s in o] for p, o in options.items()},
            "dtype": str(task.dtype),
        }
    )


def _measure(
    model: nn.Module,
    sizes: SizeModel,
    tokens: mx.array,
    task: PTQContext,
    scratch: Path,
) -> tuple[dict, dict[str, mx.array]]:
    """Every process runs some sequences, then measures some layers."""
    options, ranks = sizes.options, task.ranks
    task.logger.info(
        f"measuring the sensitivity of {len(options)} layers to every grid"
    )
    args = model, list(options), tokens, scratch
    stats = collect_stats(*args, logger=task.logger, ranks=ranks)
    groups, costs, energies = stats.groups(), {}, {}
    paths = [path for group in groups for path in group]
    own = list(ranks.shard(paths))
    with task.logger.progress(len(own), "sensitivity of layers") as progress:
        modules = dict(model.named_modules())
        for path in progress.track(own):
            weight = modules[path].weight.astype(task.dtype)
            energies[path] = input_energies(path, weight.shape[-1], stats)
            layer = LayerStatistics(weight, energies[path])
            costs[path] = sensitivity(path, layer, options[path], stats)
    by_path = {k: v for part in ranks.gather_objects(costs) for k, v in part.items()}
    facts = {"groups": groups, "costs": {path: by_path[path] for path in paths}}
    return facts, ranks.exchange(energies)


def candidate_plans(
    sizes: SizeModel, groups: list[list[str]], costs: dict[str, list[float]], limit: int
) -> dict[str, SpecByLayer]:
    """Grids of all free layers that fit into `limit` bytes, by how they were chosen.

    Args:
        groups: layers that share their input, and so a grid.
        costs: sensitivities of a layer for each of its options.
    """
    unmeasured = [[path] for path in sizes.free if path not in costs]
    costs = _complete_costs(sizes, costs)
    tied = groups + unmeasured
    alone = [[path] for group in groups for path in group] + unmeasured
    rules = {"sensitivity": (tied, 1.0), "sensitivity, layers untied": (alone, 1.0)}
    rules |= {f"sensitivity ** {power:g}": (tied, power) for power in POWERS}
    plans = {}
    for name, (layers, power) in rules.items():
        items = [_item(group, sizes, costs, power) for group in layers]
        choice = knapsack.solve(items, limit - sizes.fixed_bytes)
        assert choice is not None
        specs = {
            path: sizes.options[path][option]
            for group, option in zip(layers, choice, strict=True)
            for path in group
        }
        if specs not in plans.values():
            plans[name] = specs
    return plans | _uniform_plan(sizes, costs, limit)


def _item(group: list[str], sizes: SizeModel, costs: dict, power: float):
    """Sizes and costs of the grids that a group of layers shares."""
    options = sizes.options[group[0]]
    layer_sizes = [
        [sizes.layer_bytes(path, spec) for spec in options] for path in group
    ]
    layer_costs = [costs[path] for path in group]
    return np.array(layer_sizes).sum(axis=0), np.array(layer_costs).sum(axis=0) ** power


def _complete_costs(sizes: SizeModel, costs: dict) -> dict[str, list[float]]:
    """Costs of all free layers.

    A layer without a gradient (it only routes, or no token reached it) gets the largest
    cost per weight of all layers.
    """
    measured = {path: layer for path, layer in costs.items() if any(layer)}
    largest: dict[QuantSpec, float] = {}
    for path, layer in measured.items():
        for spec, cost in zip(sizes.options[path], layer, strict=True):
            per_weight = cost / sizes.free[path]
            largest[spec] = max(largest.get(spec, 0.0), per_weight)
    return {
        path: measured.get(path)
        or [count * largest.get(spec, 0.0) for spec in sizes.options[path]]
        for path, count in sizes.free.items()
    }


def _uniform_plan(sizes: SizeModel, costs: dict, limit: int) -> dict[str, SpecByLayer]:
    """The one grid for all layers that fits with the least predicted cost, if any."""
    options = sizes.options
    fitting = {}
    for spec in max(options.values(), key=len):
        specs = dict.fromkeys(options, spec)
        is_common = all(spec in candidates for candidates in options.values())
        if is_common and sizes.total_bytes(specs) <= limit:
            cost = sum(costs[path][options[path].index(spec)] for path in costs)
            fitting[cost] = {f"uniform {_spec_name(spec)}": specs}
    return fitting[min(fitting)] if fitting else {}


def _spec_name(spec: QuantSpec) -> str:
    if spec.mode != "affine":
        return spec.mode
    return f"{spec.bits} bits g{spec.group_size}"


def _log(
    candidates: dict[str, SpecByLayer],
    losses: dict[str, float],
    best: str,
    sizes: SizeModel,
    task: PTQContext,
) -> None:
    rows = []
    for name, specs in candidates.items():
        bits = sizes.bits_per_weight(sizes.total_bytes(specs))
        rows.append([name, f"{bits:.3f}", f"{losses[name]:.5f}"])
    columns = ["plan", "bits per weight", "KL after RTN"]
    task.logger.table(f"mixed precision: selected {best}", columns, rows)
    weights: Counter = Counter()
    for path, spec in candidates[best].items():
        weights[_spec_name(spec)] += sizes.free[path]
        task.logger.debug(f"{path}: {_spec_name(spec)}")
    shares = [
        f"{n / weights.total():.0%} {name}" for name, n in sorted(weights.items())
    ]
    task.logger.info("weights: " + ", ".join(shares))


class GridEvaluator:
    """Measures the divergence of a model on candidate grids from the model itself.

    Args:
        model: in the type it computes in; `close` restores its weights.
        energies: costs of an error by column, by path of the layers whose grids are
            fitted to them; other layers are quantized by RTN.
        tokens: int32 [n, L].
        folder: where the model's own logits are written.
        dtype: the type the checkpoint stores.
        ranks: the processes that divide layers and sequences.
    """

    def __init__(
        self,
        model: nn.Module,
        energies: dict[str, mx.array],
        tokens: mx.array,
        folder: Path,
        dtype: mx.Dtype,
        ranks: Communicator = SINGLE_PROCESS,
    ):
        self.model, self.energies, self.tokens = model, energies, tokens
        self.folder, self.dtype, self.ranks = folder, dtype, ranks
        self._own = list(ranks.shard(range(len(tokens))))
        self._modules = dict(model.named_modules())
        self._dense: dict[str, mx.array] = {}
        self._specs: dict[str, QuantSpec] = {}
        for number in self._own:
            logits = model(tokens[number][None])
            mx.save_safetensors(self._logits_file(number), {"logits": logits})

    def __call__(self, specs: dict[str, QuantSpec]) -> float:
        """KL(model || model on these grids), nats per token."""
        changed = [p for p, spec in specs.items() if self._specs.get(p) != spec]
        step, total = self.ranks.size, 0.0
        # One layer of every process at a time, as all would need much memory.
        for start in range(0, len(changed), step):
            self._quantize({p: specs[p] for p in changed[start : start + step]})
        for number in self._own:
            logits = mx.load(self._logits_file(number))["logits"]
            reference = _log_softmax(logits)
            predicted = _log_softmax(self.model(self.tokens[number][None]))
            divergence = mx.exp(reference) * (reference - predicted)
            total += divergence.sum().item()
        [total] = self.ranks.all_reduce_scalars(total)
        return total / self.tokens.size

    def close(self) -> None:
        """Restore the model's own weights."""
        for path, weight in self._dense.items():
            self._modules[path].weight = weight
        self._specs.clear()

    def _quantize(self, specs: dict[str, QuantSpec]) -> None:
        """Set the weights of some layers, each computed by one process."""
        own = {p: self._quantized(p, specs[p]) for p in self.ranks.shard(specs)}
        mx.eval(own)
        for path, weight in self.ranks.exchange(own).items():
            dense = self._dense.setdefault(path, self._modules[path].weight)
            self._modules[path].weight = weight.astype(dense.dtype)
            mx.eval(self._modules[path].weight)
        self._specs |= specs

    def _quantized(self, path: str, spec: QuantSpec) -> mx.array:
        """The dequantized weight of a layer, in the type the checkpoint stores."""
        dense = self._dense.get(path, self._modules[path].weight)
        stored = dense.astype(self.dtype)
        if path not in self.energies:
            return dequantize(pack(stored, spec, self.dtype), spec, self.dtype)
        return LayerStatistics(stored, self.energies[path]).fake_quantize(spec)

    def _logits_file(self, number: int) -> str:
        return str(self.folder / f"logits-{number:04d}.safetensors")


def _log_softmax(logits: mx.array) -> mx.array:
    return nn.log_softmax(logits.astype(mx.float32))

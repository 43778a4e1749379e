"""Grids by layer that lose least within a budget of bytes.

What every grid costs is predicted layer by layer (sensitivity.py); a knapsack makes
choices of the predictions (choices.py); several such choices are tried, and the one
that moves the model's predictions least is taken.
"""

import hashlib
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import mlx.core as mx
import mlx.nn as nn

from ...config.quantize import PTQConfig
from ...data.cache import CacheEntry, file_hash, get_or_create, key_of
from ...errors import UserError
from ...run.fs import write_atomic
from ..ptq.base import PTQContext
from ..target_layers import QuantizationPlan
from .calibration_stats import collect_stats
from .grid_evaluator import GridEvaluator
from .sensitivity import LayerStatistics, input_energies, sensitivity
from .size_model import SizeModel, SpecByLayer, candidate_plans, spec_name

# Tokens that layers are watched on, and those that choices are compared on.
WATCHED, HELD_OUT = 4096, 4096
# Of measured sensitivities that are kept; another one makes them anew.
VERSION = 1
COLUMNS = "columns.safetensors"


def search_plan(
    config: PTQConfig,
    selection: QuantizationPlan,
    task: PTQContext,
    model: nn.Module,
    source: Path,
) -> tuple[QuantizationPlan, dict]:
    """Choose grids for all layers that neither recipe nor model asks one for.

    Args:
        task: of its model, only types and shapes are looked at.
        model: the same in the type it computes in; it is left as it was.
        source: the folder it comes from, whose content names what is kept of it.

    Returns:
        The selection with these grids, and facts of how they were found.

    Raises:
        UserError: the budget is too small for any choice, or holds the dense model.
    """
    weighing = SizeModel.of(task, selection, config.mixed_precision)
    limit = weighing.limit(config.mixed_precision)
    watched, held_out = _tokens(config, task)
    with TemporaryDirectory(dir=task.folder) as scratch:
        measured = _measured(model, weighing, watched, task, source, Path(scratch))
        write_atomic(task.folder / "sensitivity.json", json.dumps(measured.facts))
        found = candidate_plans(weighing, **measured.facts, limit=limit)
        columns = mx.load(str(measured.folder / COLUMNS))
        trial = GridEvaluator(model, columns, held_out, Path(scratch), task.dtype)
        losses = {name: trial(selection.specs | grids) for name, grids in found.items()}
        trial.close()
    best = min(losses, key=losses.get)
    _tell(found, losses, best, weighing, task)
    size = weighing.bytes(found[best])
    assert size <= limit
    facts = {"bytes": size, "bits_per_weight": weighing.bits(size)}
    facts |= {"candidates": losses, "selected": best}
    return replace(selection, specs=selection.specs | found[best]), facts


def _tokens(config: PTQConfig, task: PTQContext) -> tuple[mx.array, mx.array]:
    """Windows to watch the layers on, and others to compare choices on."""
    wanted = WATCHED + HELD_OUT
    allowed = config.calibration.num_tokens or wanted
    found = task.windows(min(allowed, wanted))
    if len(found) < 2:
        raise UserError(
            "a budget needs two windows of calibration tokens, and there is one",
            hint="give calibration a smaller length, or another source",
        )
    watched = max(1, len(found) * WATCHED // wanted)
    parts = found[:watched], found[watched:]
    return tuple(mx.array(part.tokens) for part in parts)


def _measured(
    model: nn.Module,
    weighing: SizeModel,
    tokens,
    task: PTQContext,
    source: Path,
    scratch,
) -> CacheEntry:
    """Groups of layers, and costs by path; made once for a model, tokens and grids."""
    options = weighing.options

    def fill(folder: Path) -> dict:
        task.logger.info(f"measuring what {len(options)} layers lose on every grid")
        signals = collect_stats(model, list(options), tokens, scratch, seed=0)
        modules = dict(model.named_modules())
        groups, costs, columns = signals.groups(), {}, {}
        for path in (path for group in groups for path in group):
            weight = modules[path].weight.astype(task.dtype)
            columns[path] = input_energies(path, weight.shape[-1], signals)
            layer = LayerStatistics(weight, columns[path])
            costs[path] = sensitivity(path, layer, options[path], signals)
        mx.save_safetensors(str(folder / COLUMNS), columns)
        return {"groups": groups, "costs": costs}

    key = key_of(
        {
            "version": VERSION,
            "model": [file_hash(f) for f in sorted(source.glob("model*.safetensors"))],
            "tokens": hashlib.sha256(memoryview(tokens)).hexdigest(),
            "options": {p: [s.model_dump() for s in o] for p, o in options.items()},
            "dtype": str(task.dtype),
        }
    )
    return get_or_create("sensitivity", key, fill, warning=task.logger.warning)


def _tell(
    found: dict[str, SpecByLayer],
    losses: dict[str, float],
    best: str,
    weighing: SizeModel,
    task: PTQContext,
) -> None:
    rows = [
        [name, f"{weighing.bits(weighing.bytes(grids)):.3f}", f"{losses[name]:.5f}"]
        for name, grids in found.items()
    ]
    columns = ["grids by layer, of", "bits per weight", "KL when rounded"]
    task.logger.table(f"grids are taken of: {best}", columns, rows)
    weights: Counter = Counter()
    for path, spec in found[best].items():
        weights[spec_name(spec)] += weighing.free[path]
        task.logger.debug(f"{path}: {spec_name(spec)}")
    shares = [
        f"{n / weights.total():.0%} {name}" for name, n in sorted(weights.items())
    ]
    task.logger.info("weights: " + ", ".join(shares))

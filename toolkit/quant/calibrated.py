"""What methods that watch the layers share: the walk, and what is left to rounding."""

import hashlib

import mlx.core as mx

from .. import allocator
from ..model.cpu import on_cpu
from .calibrate import Improve, Solve, Stored, Walk
from .opened import Prepare
from .spec import QuantSpec, expand, pack
from .task import Task

TOKENS_PER_COLUMN = 8
LEAST_TOKENS = 1 << 15
TOKENS_AT_ONCE = 2048
KEPT_BYTES = 1 << 27


def quantize_watched(
    config,
    task: Task,
    solve: Solve,
    prepare: Prepare | None = None,
    improve: Improve | None = None,
    *,
    compares: bool,
    weighs_embeddings: bool = True,
    weighs_outputs: bool = False,
) -> dict[str, mx.array]:
    """Walk through the model; layers whose grid is not affine are rounded.

    Args:
        config: the method's.
        prepare, improve, compares, weighs_embeddings, weighs_outputs: see `Walk`.

    Returns:
        What is stored, by name: codes, scales, biases, and dense weights that changed.
    """
    walk = _walk(
        config,
        task,
        prepare=prepare,
        improve=improve,
        compares=compares,
        weighs_embeddings=weighs_embeddings,
        weighs_outputs=weighs_outputs,
    )
    # What MLX keeps of freed memory counts, too, where a model hardly fits.
    before = mx.set_cache_limit(KEPT_BYTES)
    try:
        with allocator.lean():
            tensors = walk.run(_affine_alone(solve, task))
    finally:
        mx.set_cache_limit(before)
    modules = dict(task.model.named_modules())
    for path, spec in task.specs.items():
        if f"{path}.scales" not in tensors:
            task.report.say(f"{path} is rounded to the nearest")
            # It may have had a scale folded in.
            weight = tensors.pop(f"{path}.weight", modules[path].weight)
            packed = pack(weight, spec, task.dtype)
            tensors |= {f"{path}.{name}": value for name, value in packed.items()}
    return tensors


def stored(tensors: dict[str, mx.array], spec: QuantSpec, dtype: mx.Dtype) -> Stored:
    """Packed tensors and the weight they stand for."""
    return Stored(tensors, expand(tensors, spec, dtype))


def _affine_alone(solve: Solve, task: Task) -> Solve:
    """`solve` for layers on affine grids; there is nothing to fit in the others."""

    def solve_all(weights: dict[str, mx.array], moments) -> dict[str, Stored]:
        fixed = {p: w for p, w in weights.items() if task.specs[p].mode != "affine"}
        found = {}
        for path, weight in fixed.items():
            task.report.say(f"{path} is rounded to the nearest")
            spec = task.specs[path]
            found[path] = stored(pack(weight, spec, task.dtype), spec, task.dtype)
        affine = {p: w for p, w in weights.items() if p not in fixed}
        return found | solve(affine, moments) if affine else found

    return solve_all


def _walk(config, task: Task, **settings) -> Walk:
    modules = dict(task.model.named_modules())
    widest = max(modules[path].weight.shape[-1] for path in task.specs)
    wanted = max(LEAST_TOKENS, TOKENS_PER_COLUMN * widest)
    windows = task.windows(config.calibration.tokens or wanted)
    if windows.size < TOKENS_PER_COLUMN * widest:
        task.report.warn(
            f"calibration has {windows.size:,} tokens; a layer {widest} wide wants "
            f"{TOKENS_PER_COLUMN * widest:,}"
        )
    key = hashlib.sha256(windows.tokens.tobytes() + windows.counted.tobytes())
    key.update(config.model_dump_json().encode())
    key.update(repr(sorted(task.specs.items())).encode())
    return Walk(
        task.model,
        list(task.specs),
        windows,
        task.folder / "walk",
        key=key.hexdigest(),
        compute=mx.float32 if on_cpu() else task.dtype,
        at_once=TOKENS_AT_ONCE,
        say=task.report.say,
        reread=task.reread,
        **settings,
    )

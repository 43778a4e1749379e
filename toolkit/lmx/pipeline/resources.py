"""What this machine has: memory, disk, speed."""

import math
import os
import time
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from .. import cpu
from ..config.base import ConfigModel
from ..config.loader import LoadedRecipe
from ..convert import importers
from ..data.batching import bucket_lengths
from ..errors import WILL_NOT_FIT, UserError
from ..models.checkpoint import check_weights, read_config
from ..run.fs import free_bytes
from .draft_estimate import GenerationCost, drafting, lessons
from .estimate import BatchShape, ModelShape, TrainingCost, disk, training
from .plan import PlannedStage, RunPlan

# A step of a whole model takes 2 to 3.5 times its arithmetic at `training_speed`,
# which has no attention, norms or optimizer (measured on 2 cores, 3 to 60 million
# parameters).
OVERHEAD = 2.5
PROBE_ROWS, PROBE_WIDTH = 256, 512
DEVICE_MEMORY = ("max_recommended_working_set_size", "total_memory", "memory_size")
CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")


def memory_limit() -> int:
    """Bytes a run may take: what the GPU recommends, else this machine's memory."""
    info = mx.device_info()
    if own := next((int(info[key]) for key in DEVICE_MEMORY if key in info), 0):
        return own
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(physical, int(CONTAINER_LIMIT.read_text()))
    except (OSError, ValueError):  # no container, or "max"
        return physical


def training_speed(dtype: mx.Dtype) -> float:
    """Floating-point operations per second of a small network's training step."""
    cpu.enable()
    width = PROBE_WIDTH
    net = nn.Sequential(
        nn.Linear(width, 3 * width), nn.SiLU(), nn.Linear(3 * width, width)
    )
    net.set_dtype(dtype)
    rows = mx.random.normal((PROBE_ROWS, width), key=mx.random.key(0)).astype(dtype)
    step = nn.value_and_grad(net, lambda x: mx.logsumexp(net(x), axis=-1).sum())
    mx.eval(step(rows))
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        mx.eval(step(rows))
        seconds.append(time.perf_counter() - start)
    return 6 * PROBE_ROWS * 6 * width**2 / min(seconds)


# --- from recipe.needs: What a plan needs of this machine, whether it is there, and what to do if not.


def require_resources(loaded: LoadedRecipe, plan: RunPlan) -> None:
    """Refuse a run that memory or disk cannot hold, as far as is known without data.

    Raises:
        UserError: it will not fit; its code is 3.
    """
    anatomy = model_shape(loaded)
    if anatomy:
        ResourceCheck(loaded, plan, anatomy, [], 1.0).require(ignore_limits=False)


class ResourceCheck:
    """What a plan needs of this machine.

    Args:
        lengths: tokens of a sample of the examples; none = all have max_seq_length.
        share: training examples for every one in `lengths`.
    """

    def __init__(
        self,
        loaded: LoadedRecipe,
        plan: RunPlan,
        anatomy: ModelShape,
        lengths: list[int],
        share: float,
    ):
        self.plan = plan
        self.longest = loaded.recipe.data.max_seq_length
        self.lengths = _padded(lengths or [self.longest], self.longest)
        self.examples = len(lengths) * share
        self.stored = _stored(anatomy.config)
        self.loads: dict[int, TrainingCost] = {}
        self.lessons: dict[int, GenerationCost] = {}
        for index, step in enumerate(plan.steps):
            if step.kind in ("train", "draft"):
                self._estimate(index, step, anatomy, loaded.find)
        stages = [step.config for step in plan.steps]
        self.disk = disk(anatomy, stages, self.loads)
        self.free = free_bytes(plan.output)
        self.limit = memory_limit()

    def lines(self) -> Iterator[tuple[str, str]]:
        """Memory, time and disk, for people."""
        for index, made in self.lessons.items():
            yield from self._told(self.plan.steps[index], made)
        for index, load in self.loads.items():
            step = self.plan.steps[index]
            parts = ", ".join(f"{k} {readable_size(v)}" for k, v in load.memory.items())
            yield (
                "memory",
                f"{step.name}: about {readable_size(sum(load.memory.values()))}"
                + (
                    f" ({parts}) of {readable_size(self.limit)}; "
                    f"{load.trained:,} of {load.parameters:,} parameters trained"
                ),
            )
            yield "time", f"{step.name}: {self._time(step, load)}"
        yield (
            "disk",
            f"needs {readable_size(self.disk)}, free {readable_size(self.free)}",
        )

    def require(self, *, ignore_limits: bool) -> None:
        """Raise UserError with code 3 when something will not fit."""
        for index, load in self.loads.items():
            needed = sum(load.memory.values())
            if needed > self.limit and not ignore_limits:
                step = self.plan.steps[index]
                raise UserError(
                    f"{step.name} needs about {readable_size(needed)} of memory, "
                    f"{readable_size(self.limit)} are there",
                    hint=f"try {' or '.join(self._remedies(step))}; "
                    "--ignore-limits runs it all the same",
                    code=WILL_NOT_FIT,
                )
        if self.disk > self.free and not ignore_limits:
            raise UserError(
                f"the run needs {readable_size(self.disk)} of disk, "
                f"{readable_size(self.free)} are free",
                hint="output=<a folder elsewhere>; --ignore-limits runs it all the same",
                place=str(self.plan.output),
                code=WILL_NOT_FIT,
            )

    def _estimate(
        self, index: int, step: PlannedStage, anatomy: ModelShape, find
    ) -> None:
        compute = _dtype(step, self.stored).size
        if step.kind == "train":
            batch = self._batch(step.config)
            self.loads[index] = training(anatomy, step.config, batch, compute)
            return
        answer = step.config.data_generation.max_tokens
        longest = max(self.lengths) + answer
        tokens = max(step.config.batch_tokens, longest)
        batch = BatchShape(longest, tokens, tokens)
        if load := drafting(anatomy, step.config, batch, compute, find):
            self.loads[index] = load
        # Of a row with an answer only the prompt is read.
        mean = sum(self.lengths) / len(self.lengths)
        self.lessons[index] = lessons(anatomy, step.config, mean)

    def _told(
        self, step: PlannedStage, made: GenerationCost
    ) -> Iterator[tuple[str, str]]:
        """Of what a draft learns from."""
        kept = f"{readable_size(made.bytes)} in the cache" if made.bytes else "not kept"
        speed = training_speed(_dtype(step, self.stored))
        yield (
            "answers",
            f"{step.name}: at most {made.tokens:,} tokens, their predictions {kept}; "
            f"about {_duration(OVERHEAD * made.operations / speed)}, roughly",
        )

    def _batch(self, config: ConfigModel) -> BatchShape:
        longest = max(self.lengths)
        mean = sum(self.lengths) / len(self.lengths)
        if config.packing:
            tokens = config.sequences_per_batch(self.longest) * self.longest
            return BatchShape(self.longest, tokens, tokens)
        if config.batch_tokens:
            tokens = max(config.batch_tokens, longest)
            return BatchShape(longest, tokens, tokens)
        return BatchShape(
            longest, config.batch_size * longest, config.batch_size * mean
        )

    def _time(self, step: PlannedStage, load: TrainingCost) -> str:
        steps = step.config.steps
        if steps is None:
            if not self.examples:
                return "unknown before the data is read"
            mean = sum(self.lengths) / len(self.lengths)
            rows = self._batch(step.config).mean_tokens / mean
            batches = step.config.batches(self.examples / rows)
            steps = math.ceil(batches / step.config.gradient_accumulation_steps)
        speed = training_speed(_dtype(step, self.stored))
        seconds = OVERHEAD * load.operations * steps / speed
        return (
            f"about {_duration(seconds)} for {steps:,} steps, roughly, at the "
            f"{speed / 1e9:,.0f} GFLOP/s just measured"
        )

    def _remedies(self, step: PlannedStage) -> Iterator[str]:
        at = f"stages.{step.index}.{step.kind}"
        config = step.config
        if step.kind == "draft":
            yield f"{at}.batch_tokens={max(8, config.batch_tokens // 2)}"
            yield f"{at}.draft_model.num_layers=1"
            return
        if not config.gradient_checkpointing:
            yield f"{at}.gradient_checkpointing=true"
        if config.loss_chunk_tokens is None:
            yield f"{at}.loss_chunk_tokens=auto"
        twice = (
            f"{at}.gradient_accumulation_steps={2 * config.gradient_accumulation_steps}"
        )
        if (config.batch_tokens or 0) > self.longest:
            half = max(self.longest, config.batch_tokens // 2)
            yield f"{at}.batch_tokens={half} {twice}"
        elif (config.batch_size or 1) > 1:
            yield f"{at}.batch_size={config.batch_size // 2} {twice}"
        yield f"data.max_seq_length={max(8, self.longest // 2)}"
        if config.adapter is None:
            yield f"{at}.adapter={{rank: 16}}"


def model_shape(loaded: LoadedRecipe) -> ModelShape | None:
    """What is known of the recipe's model; None if it is not on this disk.

    Raises:
        UserError: the folder is no model that can be loaded.
    """
    model = loaded.recipe.model
    if model.from_scratch:
        from ..models.from_scratch import llama_config

        config = llama_config(model.from_scratch)
        empty = ModelShape(config, 0)
        size = empty.parameters * getattr(mx, model.from_scratch.dtype).size
        return ModelShape(config, size)
    folder = loaded.find(model.path)
    # What another program quantized is known when it has been imported.
    if folder is None or importers.find_importable(folder):
        return None
    config = read_config(folder)
    check_weights(folder)
    if "model_file" in config:
        return None
    return ModelShape.of_folder(folder, config)


def _padded(lengths: list[int], max_seq_length: int) -> list[int]:
    """Lengths of examples as they are padded in batches."""
    rungs = bucket_lengths(max_seq_length)
    return [next(rung for rung in rungs if length <= rung) for length in lengths]


def _stored(config: dict) -> mx.Dtype:
    """The type a checkpoint says it stores; transformers 5 has a new name for it."""
    name = config.get("torch_dtype") or config.get("dtype") or "bfloat16"
    return getattr(mx, name, mx.bfloat16)


def _dtype(step: PlannedStage, stored: mx.Dtype) -> mx.Dtype:
    from .train_run import training_dtype

    # A draft is trained in what the target's type asks for.
    return training_dtype(getattr(step.config, "compute_dtype", "auto"), stored)


def readable_size(count: float) -> str:
    """Bytes in the largest unit that fits."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, seconds):.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"

"""Speed of lmx and of mlx_lm in one process, with the same model, tokens and memory."""

import io
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np

from ...config.lora import LoRAConfig
from ...config.quant_spec import QuantizationConfig
from ...config.quantize import GPTQConfig
from ...data.batching import Batch
from ...data.calibration import CalibrationBatch
from ...generation.engine import Engine
from ...generation.sequence import GenerationRequest
from ...interfaces import Logger
from ...models.dtypes import set_compute_dtype, stored_dtype
from ...models.loader import load
from ...models.lora import lora_model
from ...quantization.ptq.base import PTQContext
from ...quantization.ptq.gptq.gptq import GPTQ
from ...quantization.target_layers import select_layers
from ...training.optimizers import OptimizerConfig
from ...training.step import TrainStep
from .checks import TINY, Lab

VOCAB_SIZE = TINY["vocab_size"]
RANK, LEARNING_RATE, WARMUP_STEPS = 16, 1e-4, 2
TOGETHER = 16


def sizes(lab: Lab) -> SimpleNamespace:
    """What is measured: tokens of a prompt and of a completion, sequences and steps of
    a training, tokens that calibrate, and runs."""
    if lab.quick:
        return SimpleNamespace(
            prompt=32, completion=8, batch=2, steps=1, calibration=256, repeats=1
        )
    return SimpleNamespace(
        prompt=512, completion=64, batch=8, steps=6, calibration=16384, repeats=3
    )


def tokens(count: int, length: int) -> list[list[int]]:
    """Random tokens, of which no text has fewer or more."""
    return np.random.default_rng(0).integers(3, VOCAB_SIZE, (count, length)).tolist()


def _own_training(lab: Lab) -> Iterator[float]:
    size, model = sizes(lab), load(lab.measured).model
    compute = stored_dtype(model)
    lora_model.attach(model, LoRAConfig(rank=RANK), seed=0)
    set_compute_dtype(model, compute)
    step = TrainStep(model, OptimizerConfig(), compute_dtype=compute)
    sequences = mx.array(tokens(size.batch, size.prompt + 1), mx.int32)
    mask = mx.ones((size.batch, size.prompt), mx.bool_)
    batch = Batch(sequences, mask, ("",) * size.batch)
    for number in range(WARMUP_STEPS + size.steps):
        start = time.perf_counter()
        mx.eval(step(batch, LEARNING_RATE, number), step.parameters)
        mx.eval(step.optimizer.state)
        if number >= WARMUP_STEPS:
            yield size.batch * size.prompt / (time.perf_counter() - start)


def _other_training(lab: Lab) -> Iterator[float]:
    from mlx.optimizers import Adam
    from mlx_lm.tuner import trainer
    from mlx_lm.tuner.callbacks import TrainingCallback
    from mlx_lm.tuner.utils import linear_to_lora_layers

    class Record(TrainingCallback):
        def __init__(self) -> None:
            self.rates: list[float] = []

        def on_train_loss_report(self, train_info: dict) -> None:
            self.rates.append(train_info["iterations_per_second"])

    size, model = sizes(lab), load(lab.measured).model
    model.freeze()
    settings = {"rank": RANK, "scale": 1.0, "dropout": 0.0}
    linear_to_lora_layers(model, len(model.layers), settings)
    arguments = trainer.TrainingArgs(
        batch_size=size.batch,
        iters=WARMUP_STEPS + size.steps,
        steps_per_report=1,
        max_seq_length=size.prompt + 1,
        adapter_file=str(lab.folder / "adapters.safetensors"),
    )
    examples = [(row, 0) for row in tokens(size.batch, size.prompt + 1)]
    record = Record()
    trainer.train(
        model, Adam(LEARNING_RATE), examples, args=arguments, training_callback=record
    )
    for rate in record.rates[WARMUP_STEPS:]:
        yield rate * size.batch * size.prompt


def _generators(lab: Lab) -> tuple[Callable, Callable]:
    """From prompts and a number of tokens to all tokens, by lmx and by mlx_lm."""
    from mlx_lm.generate import BatchGenerator, generate_step

    model = load(lab.measured).model

    def own(prompts: list[list[int]], count: int) -> Iterator[int]:
        requests = [GenerationRequest(prompt, count) for prompt in prompts]
        for output in Engine(model).run(requests):
            yield output.token

    def other(prompts: list[list[int]], count: int) -> Iterator[int]:
        if len(prompts) == 1:
            step = generate_step(mx.array(prompts[0]), model, max_tokens=count)
            yield from (int(token) for token, _ in step)
            return
        generator = BatchGenerator(model, max_tokens=count)
        generator.insert(prompts)
        while responses := generator.next_generated():
            yield from (response.token for response in responses)

    return own, other


def _generation(lab: Lab, side: int, kind: str) -> Iterator[float]:
    size, generate = sizes(lab), _generators(lab)[side]
    prompts, count = tokens(1, size.prompt), size.completion
    if kind == "batch":
        prompts = tokens(TOGETHER, size.prompt // 4)
    for _ in range(1 + size.repeats):
        start = time.perf_counter()
        outputs = generate(prompts, count)
        next(outputs)
        first = time.perf_counter()
        decoded = sum(1 for _ in outputs)
        end = time.perf_counter()
        yield {
            "prefill": size.prompt / (first - start),
            "decoding": decoded / (end - first),
            "batch": (1 + decoded) / (end - start),
        }[kind]


def _own_gptq(lab: Lab) -> Iterator[float]:
    size, start = sizes(lab), time.perf_counter()
    loaded = load(lab.measured)
    grid = {"bits": 4, "group_size": 64}
    specs = select_layers(loaded.model, QuantizationConfig(**grid)).specs
    data = np.array(tokens(size.calibration // size.prompt, size.prompt), np.int32)
    context = PTQContext(
        *(loaded.model, specs, loaded.dtype),
        lambda count: CalibrationBatch(data, np.ones(data.shape, bool)),
        lab.folder / "gptq",
        Logger(),
        loaded.reread,
    )
    mx.eval(GPTQ(GPTQConfig(effort="fast", **grid), context).quantize())
    yield data.size / (time.perf_counter() - start)


def _other_gptq(lab: Lab) -> Iterator[float]:
    from mlx_lm.quant.gptq import gptq_quantize

    size, start = sizes(lab), time.perf_counter()
    model = load(lab.measured).model
    # Sums of squares overflow in float16.
    model.set_dtype(mx.float32)
    count = size.calibration // size.prompt
    data = mx.array(tokens(count, size.prompt), mx.int32)
    quantized, _ = gptq_quantize(
        model, data, 4, 64, fallback_bits=4, fallback_group_size=64
    )
    mx.eval(quantized.parameters())
    yield data.size / (time.perf_counter() - start)


Measure = Callable[[Lab], Iterator[float]]


def _silent(measure: Callable, *arguments: Any) -> Measure:
    """A measurement without what mlx_lm prints."""

    def measured(lab: Lab) -> list[float]:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            return [*measure(lab, *arguments)]

    return measured


def _both(kind: str) -> tuple[Measure, Measure]:
    return _silent(_generation, 0, kind), _silent(_generation, 1, kind)


SPEEDS: dict[str, tuple[Measure, Measure]] = {
    "training, LoRA of rank 16": (_silent(_own_training), _silent(_other_training)),
    "prefill": _both("prefill"),
    "decoding": _both("decoding"),
    "16 requests, prompts included": _both("batch"),
    "gptq, 4 bits, calibration tokens": (_silent(_own_gptq), _silent(_other_gptq)),
}
"""By name, tokens per second of lmx and of mlx_lm."""

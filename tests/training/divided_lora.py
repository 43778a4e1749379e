"""LoRA steps of a model that ranks hold together, beside those of the whole model."""

import hashlib
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from lmx.config.lora import LoRAConfig
from lmx.models import tensor_parallel
from lmx.models.lora import divided_layers, lora_model
from lmx.run.distributed import SINGLE_PROCESS, ProcessGroup
from lmx.run.parallel_dims import ParallelDims
from lmx.training.chunked_loss import ChunkedLoss
from lmx.training.parameter_shards import ParameterShards
from lmx.training.step import TrainStep
from tiny_families import VOCABULARY
from tiny_llamas import tokens_of
from tiny_shards import model_of
from tiny_steps import make_step

STEPS = 3
RATE = 1e-2


def step_of(
    ranks: ProcessGroup,
    family: str,
    mode: str | None = None,
    *,
    dropout: float = 0.0,
    chunk: int | None = None,
    target_modules: str = "*",
    **settings,
) -> TrainStep:
    """A step of SGD. Its B is not zero, or A would have no gradient."""
    make = partial(model_of, family, mode)
    model = make()
    if ranks.size > 1:
        tensor_parallel.shard(model, ranks, make)
    adapter = LoRAConfig(rank=4, dropout=dropout, target_modules=[target_modules])
    lora_model.attach(model, adapter, seed=1)
    settings |= {"name": "sgd", "momentum": 0.9, "max_grad_norm": 1.0}
    if chunk:
        settings["chunked_loss"] = ChunkedLoss(model, chunk)
    parallel = ParallelDims(ranks, SINGLE_PROCESS, ranks)
    step = make_step(model, parallel=parallel, **settings)
    for number, (path, value) in enumerate(step.parameters.items()):
        if path.endswith("lora_b"):
            shape, key = step.shards.full_shape(path, value), mx.random.key(number)
            whole = 0.1 * mx.random.normal(shape, key=key)
            step.parameters[path] = step.shards.shard(path, whole)
    return step


def trained(step: TrainStep) -> dict[str, np.ndarray]:
    """Loss, tokens and norm of every step, whole gradients of the first one, the whole
    weights after the last one, and a validation loss."""
    batches = [tokens_of(3, 11, seed=seed) for seed in range(STEPS)]
    batches = [replace(b, tokens=b.tokens % VOCABULARY) for b in batches]
    found, figures = {}, []
    for number, batch in enumerate(batches):
        output = step([batch], RATE, number)
        figures.append([value.item() for value in output[:3]])
        if number == 0:
            for path, state in step.optimizer.state.items():
                if path in step.parameters:
                    found[f"gradient {path}"] = step.shards.unshard(path, state["v"])
    for path, value in step.parameters.items():
        found[f"weight {path}"] = step.shards.unshard(path, value)
    found["steps"] = np.array(figures)
    found["valid"] = np.array(step.evaluate(batches)[:2])
    return {name: np.array(value) for name, value in found.items()}


def largest_error(found: dict, expected: dict) -> float:
    """Over all arrays, relative to the largest value of each."""
    assert found.keys() == expected.keys()
    return max(
        float(np.abs(found[name] - value).max() / np.abs(value).max())
        for name, value in expected.items()
    )


def compare(ranks: ProcessGroup, folder: str, *cases: str) -> None:
    """Save for every case the largest error, and a hash of what was compared.

    A case is a family, a mode of quantization and settings as JSON, with spaces
    between. "no gradient sums" and "local norms" are wrong.
    """
    found = {}
    for case in cases:
        family, mode, settings = case.split(" ", 2)
        options = json.loads(settings or "{}")
        wrong = options.pop("wrong", None)
        names = family, None if mode == "-" else mode
        expected = trained(step_of(SINGLE_PROCESS, *names, **options))
        with pytest.MonkeyPatch.context() as patches:
            if wrong == "gradients":
                patches.setattr(divided_layers, "sum_gradients", lambda _: lambda x: x)
            if wrong == "norms":
                patches.setattr(ParameterShards, "grad_norm", local_norm)
            ours = trained(step_of(ranks, *names, **options))
        digest = hashlib.sha256(b"".join(ours[name].tobytes() for name in sorted(ours)))
        found[case] = largest_error(ours, expected), digest.hexdigest()
    (Path(folder) / f"{ranks.rank}.json").write_text(json.dumps(found))


def local_norm(shards: ParameterShards, gradients: dict) -> mx.array:
    return mx.sqrt(sum(mx.square(value).sum() for value in gradients.values()))

"""Evaluation functions on models that the ranks of a stage hold together."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from lmx.config.parallel import ParallelConfig
from lmx.data.batching import Batch
from lmx.evaluation.divergence import measure_divergence
from lmx.generation.generator import Generator
from lmx.interfaces import SINGLE_PROCESS, Communicator
from lmx.models.loader import load
from lmx.pipeline.context import StageContext
from lmx.run.distributed import join
from lmx.run.parallel_dims import ParallelDims
from mlx.utils import tree_flatten
from processes import in_ring
from tiny_checkpoints import QWEN3_MOE
from tiny_shards import read_keys

PROGRAM = """
import sys
import test_sharded_evaluation as module
module.evaluate_part(*sys.argv[1:])
"""


def batches() -> list[Batch]:
    draw = np.random.default_rng(0)
    tokens = draw.integers(1, 320, (3, 4, 33)).astype(np.int32)
    masks = draw.random((3, 4, 32)) < 0.7
    return [
        Batch(mx.array(rows), mx.array(mask), ("",) * len(rows))
        for rows, mask in zip(tokens, masks, strict=True)
    ]


def evaluate(ranks: Communicator, reference: str, model: str) -> dict:
    """Figures and answers; all ranks of a group of several call this."""
    config = ParallelConfig(data=1, tensor=ranks.size)
    context = SimpleNamespace(
        source=SimpleNamespace(trust_remote_code=False),
        parallel=ParallelDims.build(config, ranks),
    )
    models = [
        StageContext.load(context, Path(path), sharded=True)
        for path in (reference, model)
    ]
    result = measure_divergence(*(each.model for each in models), batches())
    generator = Generator(models[1].model, models[1].tokenizer)
    prompts = [generator.encode_text(f"the fox {n} jumps") for n in range(4)]
    requests = [generator.request(prompt, max_tokens=12) for prompt in prompts]
    answers = [each.tokens for each in generator.generate_all(requests)]
    return {
        "kl": result.kl_mean,
        "perplexity": result.perplexity.value,
        "sequences": result.perplexity.sequence_losses.tolist(),
        "answers": answers,
    }


def evaluate_part(folder: str, *models: str) -> None:
    ranks = join()
    found = evaluate(ranks, *models)
    (Path(folder) / f"{ranks.rank}.json").write_text(json.dumps(found))


@pytest.mark.parametrize(
    ("base", "bits"),
    [
        (QWEN3_MOE, 16),
        pytest.param(QWEN3_MOE, 4, marks=pytest.mark.slow),
        pytest.param(read_keys("qwen3_next"), 16, marks=pytest.mark.slow),
    ],
    ids=["qwen3_moe", "qwen3_moe_4bit", "by_layers"],
)
def test_ranks_measure_what_one_process_does(tmp_path, make_checkpoint, base, bits):
    base = base | {"num_key_value_heads": 2, "vocab_size": 320}
    reference = make_checkpoint(base)
    model = make_checkpoint(base, rms_norm_eps=1e-2)
    if bits == 4:
        model = quantized(model, tmp_path / "quantized")
    models = str(reference), str(model)
    expected = evaluate(SINGLE_PROCESS, *models)
    results = in_ring(PROGRAM, str(tmp_path), *models, folder=tmp_path)
    assert not any(r.returncode for r in results), results[0].stderr
    first, second = (
        json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)
    )
    assert first == second
    assert expected["kl"] > 1e-4
    for name in ("kl", "perplexity", "sequences"):
        assert first[name] == pytest.approx(expected[name], rel=1e-5), name
    assert first["answers"] == expected["answers"]


def quantized(source: Path, target: Path) -> Path:
    """The checkpoint with 4 bits in groups of 32, but for its routers."""
    shutil.copytree(source, target)
    model = load(source, compute="stored").model
    grid = {"group_size": 32, "bits": 4}
    nn.quantize(
        model,
        **grid,
        class_predicate=lambda path, layer: (
            hasattr(layer, "to_quantized") and not path.endswith(".gate")
        ),
    )
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(target / "model.safetensors"), weights)
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"quantization": grid}))
    return target

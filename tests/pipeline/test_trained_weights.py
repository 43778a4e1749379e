"""The weights of the last forward pass are those of the exported checkpoint."""

from types import SimpleNamespace

import mlx.core as mx
import pytest
from lmx.interfaces import SINGLE_PROCESS
from lmx.models.loader import load
from lmx.models.quantized_layers import is_quantized
from lmx.pipeline.draft.distillation import DraftDistillation
from lmx.pipeline.train.run import TrainRun
from mlx.utils import tree_flatten
from tiny_runs import TRAIN, Run

TRAINING = TRAIN | {"steps": 3, "eval_steps": 3, "learning_rate": 5e-3}
GRID = {"bits": 4, "group_size": 32}
# Every trained layer but those that are skipped: embeddings, norms, and a projection.
KEPT = GRID | {"overrides": {"*.down_proj": "skip", "*embed*": "skip"}}
ADAPTER = {"adapter": {"rank": 4, "target_modules": ["mlp.*"]}}
CASES = {
    "full": {},
    "qat": {"qat": KEPT},
    "lsq": {"qat": KEPT | {"quantizer": "lsq"}},
    "lora_qat": {"qat": KEPT} | ADAPTER,
}


def values(model) -> dict[str, mx.array]:
    """All weights without adapters, dequantized as they are served, in float32."""
    weights = {k: v for k, v in tree_flatten(model.parameters()) if "lora" not in k}
    for path, module in model.named_modules():
        if is_quantized(module):
            scales, biases = (weights.pop(f"{path}.{n}") for n in ("scales", "biases"))
            weights[f"{path}.weight"] = mx.dequantize(
                module.weight, scales, biases, dtype=scales.dtype, **GRID
            )
    return {
        k.replace(".linear.", "."): v.astype(mx.float32) for k, v in weights.items()
    }


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        ("full", "bfloat16"),
        ("qat", "float16"),
        ("lsq", "bfloat16"),
        ("lora_qat", "float16"),
    ],
)
def test_exported_weights_are_those_of_the_forward_pass(
    make_checkpoint, tmp_path, monkeypatch, case, dtype
):
    found = {}

    def finish(self):
        found["trained"] = values(self.step.materialize())
        found["masters"] = self.step.parameters
        artifact = real(self)
        found["exported"] = values(load(artifact.model, compute="stored").model)
        return artifact

    real = TrainRun.finish
    monkeypatch.setattr(TrainRun, "finish", finish)
    model = make_checkpoint(dtype=dtype)
    assert Run(tmp_path, {"train": TRAINING | CASES[case]}, model=model)() == 0
    trained, exported = found["trained"], found["exported"]
    assert exported.keys() == trained.keys()
    for name, value in exported.items():
        assert mx.array_equal(value, trained[name]), name
    # Negative control: the master weights have more bits.
    rounded = [v.astype(getattr(mx, dtype)) for v in found["masters"].values()]
    pairs = zip(found["masters"].values(), rounded, strict=True)
    assert not all(mx.array_equal(master, half) for master, half in pairs)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_drafts_run_with_the_weights_that_are_saved(make_checkpoint, dtype):
    model = load(make_checkpoint(dtype="float32"), compute="stored").model
    stage = SimpleNamespace(context=SimpleNamespace(ranks=SINGLE_PROCESS))
    step = DraftDistillation.make_step(stage, model, dtype)
    for name, value in tree_flatten(step.materialize().trainable_parameters()):
        assert mx.array_equal(value, step.parameters[name].astype(dtype)), name

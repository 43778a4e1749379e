"""A model's outputs do not depend on models that the process built before."""

import pytest
import warm
from lmx.cpu import on_cpu

pytestmark = pytest.mark.fused

PROGRAM = """
import sys
import mlx.core as mx
from lmx.models.loader import build_model, load

config = {
    "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1,
    "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5, "vocab_size": 24,
}
if sys.argv[2] == "built before":
    mx.eval(build_model(config)(mx.zeros((1, 5), mx.int32)))
tokens = mx.arange(21).reshape(3, 7) % 300
print(load(sys.argv[1]).model(tokens).tolist())
"""


@pytest.mark.skipif(not on_cpu(), reason="GPUs use mlx-lm's functions")
def test_earlier_models_change_no_bit(make_checkpoint):
    folder = make_checkpoint(hidden_size=256, intermediate_size=384)
    outputs = [
        warm.run(PROGRAM, str(folder), history)
        for history in ("nothing", "built before")
    ]
    assert [output.returncode for output in outputs] == [0, 0], outputs
    assert outputs[0].stdout == outputs[1].stdout

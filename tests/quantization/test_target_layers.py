"""Which layers are quantized, on which grid, and what is said of the others."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from lmx.config.quant_spec import QuantizationConfig, QuantSpec
from lmx.errors import UserError
from lmx.models.loader import build_model
from lmx.quantization.target_layers import select_layers
from tiny_checkpoints import LLAMA, QWEN3_MOE

UNTIED = LLAMA | {"tie_word_embeddings": False}
GRID = QuantSpec(bits=4, group_size=64)
BLOCK = {f"self_attn.{x}_proj" for x in "qkvo"} | {
    f"mlp.{x}_proj" for x in ("gate", "up", "down")
}
BLOCK = {f"model.layers.0.{path}" for path in BLOCK}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("embeddings", [True, False])
@pytest.mark.parametrize("head", [True, False])
def test_embeddings_and_head_by_choice(tied, embeddings, head):
    model = build_model(LLAMA | {"tie_word_embeddings": tied})
    chosen = select_layers(
        model, QuantizationConfig(quantize_embeddings=embeddings, quantize_lm_head=head)
    )
    wanted, kept = set(BLOCK), {}
    if embeddings:
        wanted.add("model.embed_tokens")
    else:
        kept["model.embed_tokens"] = "embeddings are kept by choice"
    if head and not tied:
        wanted.add("lm_head")
    elif not tied:
        kept["lm_head"] = "the head is kept by choice"
    assert chosen.specs == dict.fromkeys(wanted, GRID)
    assert chosen.kept == kept


def test_a_head_of_another_name():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.mix = nn.Embedding(320, 64), nn.Linear(64, 64)
            self.output = nn.Linear(64, 320, bias=False)

    chosen = select_layers(Model(), QuantizationConfig(quantize_lm_head=False))
    assert chosen.specs.keys() == {"embed", "mix"}
    assert chosen.kept == {"output": "the head is kept by choice"}


def test_widths_no_group_divides_are_kept_and_named():
    chosen = select_layers(
        build_model(UNTIED | {"intermediate_size": 172}), QuantizationConfig()
    )
    reason = "its width 172 is no multiple of 64"
    assert chosen.kept == {"model.layers.0.mlp.down_proj": reason}
    assert chosen.specs.keys() == (BLOCK - chosen.kept.keys()) | {
        "model.embed_tokens",
        "lm_head",
    }


def test_nothing_to_quantize():
    with pytest.raises(UserError) as caught:
        select_layers(
            build_model(
                LLAMA | {"hidden_size": 172, "head_dim": 43, "intermediate_size": 44}
            ),
            QuantizationConfig(),
        )
    assert "its width 172 is no multiple of 64" in caught.value.message
    with pytest.raises(UserError, match="no linear layer"):
        select_layers(nn.RMSNorm(8), QuantizationConfig())


@pytest.mark.parametrize("mode", ["affine", "mxfp4", "nvfp4", "mxfp8"])
def test_the_models_own_wishes_are_respected(mode):
    """A router asks for 8 bits, affine, whatever the others have."""
    chosen = select_layers(build_model(QWEN3_MOE), QuantizationConfig(mode=mode))
    router = QuantSpec(bits=8, group_size=64)
    grids = {
        path: spec for path, spec in chosen.specs.items() if path.endswith("mlp.gate")
    }
    assert grids == {f"model.layers.{n}.mlp.gate": router for n in range(2)}
    others = {grid for path, grid in chosen.specs.items() if path not in grids}
    assert len(others) == 1
    assert others.pop().mode == mode
    assert "model.layers.0.mlp.switch_mlp.up_proj" in chosen.specs


@pytest.mark.parametrize(
    ("asked", "grid"),
    [
        ({"bits": 8}, QuantSpec(bits=8, group_size=32)),
        ({"mode": "mxfp8"}, QuantSpec(mode="mxfp8")),
        ({"group_size": 128, "bits": 6}, QuantSpec(bits=6, group_size=128)),
    ],
)
def test_wishes_are_completed_by_the_recipe(asked, grid):
    model = build_model(LLAMA)
    type(model).quant_predicate = property(
        lambda _: lambda path, module: asked if "o_proj" in path else "up" not in path
    )
    try:
        chosen = select_layers(model, QuantizationConfig(bits=3, group_size=32))
    finally:
        del type(model).quant_predicate
    assert chosen.specs["model.layers.0.self_attn.o_proj"] == grid
    assert chosen.specs["model.embed_tokens"] == QuantSpec(bits=3, group_size=32)
    assert chosen.kept == {"model.layers.0.mlp.up_proj": "the model asks to keep it"}


def test_no_weight_is_touched():
    model = build_model(LLAMA)
    before = model.layers[0].mlp.up_proj.weight
    select_layers(model, QuantizationConfig())
    assert model.layers[0].mlp.up_proj.weight is before
    assert before.dtype == mx.float32

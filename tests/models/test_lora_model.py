"""Attach, save and fuse adapters, compared with mlx-lm."""

import json

import mlx.core as mx
import pytest
from lmx.config.lora import LoRAConfig
from lmx.errors import UserError
from lmx.models.loader import load
from lmx.models.lora import io, lora_model
from mlx.utils import tree_flatten, tree_unflatten

OPTIONS = {"rank": 4, "alpha": 6.0}
TOKENS = mx.random.randint(0, 320, (2, 12), key=mx.random.key(0))


def adapt(folder, patterns, *, merged=False, seed=0, **changes):
    """Return a model with changed adapters, their parameters, base weights and keys."""
    model = load(folder).model
    base = dict(tree_flatten(model.parameters()))
    adapter = LoRAConfig(**OPTIONS | {"target_modules": patterns} | changes)
    keys = lora_model.attach(model, adapter, seed=seed, merged=merged)
    trained = {}
    for number, (name, value) in enumerate(tree_flatten(model.trainable_parameters())):
        noise = mx.random.normal(value.shape, key=mx.random.key(number))
        trained[name] = value + 0.1 * noise
    model.update(tree_unflatten(list(trained.items())))
    return model, trained, base, keys


def save(folder, model, trained, keys, *, num_layers=3, **changes):
    io.save_adapter(
        folder,
        trained,
        layers=lora_model.adapted_layers(model),
        adapter=LoRAConfig(**OPTIONS | changes),
        keys=keys,
        num_layers=num_layers,
    )


@pytest.fixture(params=[LLAMA_ALL := ["self_attn.*", "mlp.*"], ["self_attn.[qv]_proj"]])
def patterns(request):
    return request.param


@pytest.fixture
def folder(make_checkpoint):
    return make_checkpoint(
        dtype="float32", num_hidden_layers=3, attention_bias=True, mlp_bias=True
    )


def test_save_adapter_config_is_readable_by_mlx_swift(folder, tmp_path, patterns):
    model, trained, _, keys = adapt(folder, patterns)
    save(tmp_path, model, trained, keys)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["fine_tune_type"] == "lora"
    assert config["num_layers"] == 3
    assert config["lora_parameters"] == {
        "rank": 4,
        "scale": 1.5,
        "dropout": 0.0,
        "keys": keys,
    }
    assert not any("layers." in key for key in keys)


def test_attach_depends_on_the_seed(folder):
    initial = []
    for seed in (0, 0, 1):
        model = load(folder).model
        lora_model.attach(
            model, LoRAConfig(**OPTIONS, target_modules=["mlp.*"]), seed=seed
        )
        layers = lora_model.adapted_layers(model).values()
        initial.append([layer.lora_a for layer in layers])
    first, repeated, other_seed = initial
    assert all(map(mx.array_equal, first, repeated))
    assert not any(map(mx.array_equal, first, other_seed))
    assert not mx.array_equal(first[0], first[2])
    limit = max(mx.abs(a).max().item() * a.shape[0] ** 0.5 for a in first)
    assert 0.9 < limit <= 1


def test_dropout_applies_only_in_training(folder):
    model, *_ = adapt(folder, ["mlp.*"], dropout=0.5)
    served = model.eval()(TOKENS)
    assert mx.array_equal(model(TOKENS), served)
    mx.random.seed(0)
    assert not mx.allclose(model.train()(TOKENS), served)


def test_attach_refuses_an_unknown_pattern_and_lists_layers(folder):
    model = load(folder).model
    with pytest.raises(UserError) as caught:
        lora_model.attach(model, LoRAConfig(target_modules=["mlp.*", "attn.*"]), seed=0)
    assert caught.value.message == "no layer that lora adapts here matches 'attn.*'"
    assert "mlp.down_proj, mlp.gate_proj" in caught.value.hint

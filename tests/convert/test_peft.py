"""PEFT export and import. tests/clients loads the exports with peft."""

import json

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from exporting import export
from lmx.cli import main
from lmx.config.lora import LoRAConfig
from lmx.convert.exporters import peft as peft_exporter
from lmx.convert.importers import peft
from lmx.errors import UserError
from lmx.models.loader import load
from lmx.models.lora import io, lora_model
from lmx.models.lora.io import init_adapter
from mlx.utils import tree_flatten, tree_unflatten
from safetensors.numpy import load_file, save_file

TOKENS = mx.random.randint(0, 320, (2, 9), key=mx.random.key(0))
LORA = {"target_modules": {"self_attn.[qv]_proj": 4, "mlp.*": 2}, "alpha": 3.0}


@pytest.fixture
def base(make_checkpoint):
    return make_checkpoint(
        dtype="float32", num_hidden_layers=2, tie_word_embeddings=False
    )


def save_random_adapter(base, folder, **settings):
    """Save an adapter with random matrices and return its logits."""
    model = load(base).model
    adapter = LoRAConfig(**LORA | settings)
    keys = lora_model.attach(model, adapter, seed=0)
    parameters = {}
    for number, (name, value) in enumerate(tree_flatten(model.trainable_parameters())):
        noise = mx.random.normal(value.shape, key=mx.random.key(number))
        parameters[name] = value + 0.1 * noise
    model.update(tree_unflatten(list(parameters.items())))
    folder.mkdir()
    io.save_adapter(
        folder,
        parameters,
        layers=lora_model.adapted_layers(model),
        adapter=adapter,
        keys=keys,
        num_layers=2,
        base="someone/base",
    )
    return model(TOKENS)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_export_and_import_give_the_same_adapter(base, tmp_path, kind):
    expected = save_random_adapter(base, tmp_path / "adapter", type=kind)
    export(peft_exporter, base, tmp_path / "peft", adapters=tmp_path / "adapter")
    assert (
        main.main(["convert", str(tmp_path / "peft"), str(tmp_path / "imported")]) == 0
    )
    adapted, _ = mlx_lm.load(str(base), adapter_path=str(tmp_path / "imported"))
    assert mx.allclose(adapted(TOKENS), expected, rtol=1e-5, atol=1e-5)
    base_model, _ = mlx_lm.load(str(base))
    assert not mx.allclose(base_model(TOKENS), expected, rtol=1e-2, atol=1e-2)
    config = json.loads((tmp_path / "peft" / peft.CONFIG).read_text())
    assert config["base_model_name_or_path"] == "someone/base"
    assert config["use_dora"] == (kind == "dora")
    assert len(config["target_modules"]) == 2 * 5


def write_peft_adapter(folder, weights, **settings):
    """Write an adapter in the format of peft."""
    folder.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "bias": "none"} | settings
    (folder / peft.CONFIG).write_text(json.dumps(config))
    named = {f"base_model.model.{name}": value for name, value in weights.items()}
    save_file(named, folder / peft.WEIGHTS)
    return folder


def lora_matrices(path, rank, outputs=128, inputs=128, seed=0):
    rng = np.random.default_rng(seed)
    return {
        f"{path}.lora_A.weight": rng.normal(size=(rank, inputs)).astype(np.float32),
        f"{path}.lora_B.weight": rng.normal(size=(outputs, rank)).astype(np.float32),
    }


def test_ranks_and_scales_by_layer_equal_peft(base, tmp_path):
    """The case has rsLoRA, ranks and alphas by pattern, and one adapted block."""
    paths = "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.up_proj"
    weights = lora_matrices(paths[0], 4) | lora_matrices(
        paths[1], 2, outputs=256, seed=1
    )
    folder = write_peft_adapter(
        tmp_path / "peft",
        weights,
        use_rslora=True,
        rank_pattern={"up_proj": 2},
        alpha_pattern={"mlp.up_proj": 5},
    )
    adapted, _ = mlx_lm.load(str(base), adapter_path=str(peft.resolve_adapter(folder)))
    expected = load_file(base / "model.safetensors")
    for path, scale in zip(paths, (6 / 4**0.5, 5 / 2**0.5), strict=True):
        update = weights[f"{path}.lora_B.weight"] @ weights[f"{path}.lora_A.weight"]
        expected[f"{path}.weight"] = expected[f"{path}.weight"] + scale * update
    model = load(base).model
    model.load_weights([(name, mx.array(value)) for name, value in expected.items()])
    assert mx.allclose(adapted(TOKENS), model(TOKENS), rtol=1e-4, atol=1e-4)


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("settings", "weights", "message"),
    [
        ({"peft_type": "VERA"}, {}, "type VERA"),
        ({"bias": "all"}, {}, "bias: all"),
        ({"init_lora_weights": "pissa"}, {}, "init_lora_weights: pissa"),
        ({"layer_replication": [[0, 1]]}, {}, "layer_replication"),
        ({"something_new": True}, {}, "something_new: True"),
        ({"alpha_pattern": {"(": 3}}, {}, "adapter_config.json is damaged"),
        ({"lora_alpha": "six"}, {}, "adapter_config.json is damaged"),
        ({"use_dora": True}, {}, "is incomplete"),
        ({}, {f"{Q}.lora_magnitude_vector": np.ones(128)}, "is incomplete"),
        ({}, {"lm_head.weight": np.ones((2, 2))}, "lm_head.weight does not belong"),
        ({}, {"model.embed_tokens.lora_embedding_A": np.ones((2, 2))}, "not belong"),
    ],
)
def test_unsupported_peft_adapters_are_refused(tmp_path, settings, weights, message):
    weights = {name: value.astype(np.float32) for name, value in weights.items()}
    folder = write_peft_adapter(tmp_path, lora_matrices(Q, 4) | weights, **settings)
    with pytest.raises(UserError, match=message):
        peft.resolve_adapter(folder)


def test_adapters_that_peft_lacks_are_refused(base, tmp_path):
    save_random_adapter(
        base, tmp_path / "adapter", target_modules=["model.embed_tokens"]
    )
    with pytest.raises(UserError, match=r"no adapter like that of model.embed"):
        export(peft_exporter, base, tmp_path / "peft", adapters=tmp_path / "adapter")
    with pytest.raises(UserError, match="no adapter was trained"):
        export(peft_exporter, base, tmp_path / "none")


def test_changed_export_is_refused(base, tmp_path, monkeypatch):
    save_random_adapter(base, tmp_path / "adapter")
    original = peft_exporter.lora_config

    def corrupted_config(config, paths):
        return original(config, paths) | {"lora_alpha": 1.0}

    monkeypatch.setattr(peft_exporter, "lora_config", corrupted_config)
    with pytest.raises(UserError, match="differs after reading"):
        export(peft_exporter, base, tmp_path / "peft", adapters=tmp_path / "adapter")


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("adapter_format", ["mlx-lm", "peft"])
def test_training_starts_from_an_adapter(base, tmp_path, kind, adapter_format):
    """The new adapter can have another scale and a higher rank."""
    expected = save_random_adapter(base, tmp_path / "adapter", type=kind)
    start = tmp_path / "adapter"
    if adapter_format == "peft":
        start = tmp_path / "peft"
        export(peft_exporter, base, start, adapters=tmp_path / "adapter")
    model = load(base).model
    ranks = {"self_attn.[qv]_proj": 4, "mlp.*": 6}
    lora_model.attach(
        model, LoRAConfig(type=kind, alpha=7.0, target_modules=ranks), seed=5
    )
    init_adapter(lora_model.adapted_layers(model), peft.resolve_adapter(start))
    assert mx.allclose(model(TOKENS), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_modules": ["mlp.*"], "rank": 4}, "does not adapt so"),
        ({"type": "dora"}, "does not adapt so"),
        ({"target_modules": {"self_attn.[qv]_proj": 4, "mlp.*": 1}}, "no higher rank"),
    ],
)
def test_incompatible_initial_adapter_is_refused(base, tmp_path, settings, message):
    save_random_adapter(base, tmp_path / "adapter")
    model = load(base).model
    lora_model.attach(model, LoRAConfig(**LORA | settings), seed=0)
    with pytest.raises(UserError) as caught:
        init_adapter(lora_model.adapted_layers(model), tmp_path / "adapter")
    assert message in str(caught.value)

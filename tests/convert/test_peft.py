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
from lmx.convert.importers import load_model, peft
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
        ({"peft_type": "VERA"}, {}, "peft_type: expected 'LORA', got \"VERA\""),
        ({"bias": "all"}, {}, "bias: expected 'none', got \"all\""),
        ({"init_lora_weights": "pissa"}, {}, 'init_lora_weights: .* got "pissa"'),
        ({"layer_replication": [[0, 1]]}, {}, "layer_replication"),
        ({"something_new": True}, {}, "something_new: true is not supported"),
        ({"alpha_pattern": {"(": 3}}, {}, r"\( is no pattern: missing \)"),
        ({"lora_alpha": "six"}, {}, 'lora_alpha: expected a number, got "six"'),
        ({"lora_alpha": None}, {}, "lora_alpha: expected a number, got nothing"),
        ({"r": 0}, {}, "r: must be at least 1, got 0"),
        ({"r": 5}, {}, "or no floats of rank 5"),
        ({"target_modules": 5}, {}, "target_modules: expected a list, got 5"),
        ({"use_dora": True}, {}, "is incomplete"),
        ({}, {f"{Q}.lora_magnitude_vector": np.ones(128)}, "is incomplete"),
        ({}, {f"{Q}.lora_B.weight": None}, "is incomplete"),
        ({}, {f"{Q}.lora_A.weight": np.ones((4, 4), np.int8)}, "or no floats"),
        ({}, {f"{Q}.lora_A.weight": np.ones(4)}, "q_proj is incomplete, or no"),
        ({}, {"lm_head.weight": np.ones((2, 2))}, "lm_head.weight does not belong"),
        ({}, {"lm_head.base_layer.weight": np.ones((2, 2))}, "save_embedding_layers=F"),
        ({}, {"model.embed_tokens.lora_embedding_A": np.ones((2, 2))}, "not belong"),
    ],
)
def test_unsupported_peft_adapters_are_refused(tmp_path, settings, weights, message):
    weights = {
        name: value if value is None or value.dtype == np.int8 else np.float32(value)
        for name, value in (lora_matrices(Q, 4) | weights).items()
    }
    weights = {name: value for name, value in weights.items() if value is not None}
    folder = write_peft_adapter(tmp_path, weights, **settings)
    with pytest.raises(UserError, match=message) as caught:
        peft.resolve_adapter(folder)
    assert str(caught.value.place).startswith(str(folder / "adapter_"))


def test_lora_on_the_head_is_imported_or_refused(base, make_checkpoint, tmp_path):
    """peft stores it so with `save_embedding_layers=False`."""
    weights = lora_matrices("lm_head", 4, outputs=320)
    folder = write_peft_adapter(tmp_path / "peft", weights, target_modules=["lm_head"])
    adapted = load_model(base, adapter=folder).model
    expected = load_file(base / "model.safetensors")
    update = weights["lm_head.lora_B.weight"] @ weights["lm_head.lora_A.weight"]
    expected["lm_head.weight"] = expected["lm_head.weight"] + 6 / 4 * update
    model = load(base).model
    model.load_weights([(name, mx.array(value)) for name, value in expected.items()])
    assert mx.allclose(adapted(TOKENS), model(TOKENS), rtol=1e-4, atol=1e-4)
    tied = make_checkpoint(dtype="float32", tie_word_embeddings=True)
    with pytest.raises(UserError, match=r"lm_head\.lora_a is not read here"):
        load_model(tied, adapter=folder)


@pytest.mark.parametrize("settings", [{}, {"layers_to_transform": [1]}])
def test_layers_that_peft_adapts_are_all_there(base, tmp_path, settings):
    """The config does not name the blocks, so all of them are adapted."""
    names = "model.layers.{}.self_attn.q_proj", "model.layers.{}.self_attn.o_proj"
    targets = {"target_modules": ["q_proj", "self_attn.o_proj"]} | settings
    weights = {}
    for name in names:
        weights |= lora_matrices(name.format(1), 4)
    partial = write_peft_adapter(tmp_path / "partial", weights, **targets)
    for name in names:
        weights |= lora_matrices(name.format(0), 4)
    whole = write_peft_adapter(tmp_path / "whole", weights, **targets)
    load_model(base, adapter=whole)
    model = load(base).model
    lora_model.attach(model, LoRAConfig(rank=4, target_modules=["self_attn*"]), seed=0)
    if settings:
        load_model(base, adapter=partial)
        init_adapter(model, peft.resolve_adapter(partial))
        return
    lacking = r"tensor model\.layers\.0\.self_attn\.o_proj"
    with pytest.raises(UserError, match=lacking):
        load_model(base, adapter=partial)
    with pytest.raises(UserError, match=lacking):
        init_adapter(model, peft.resolve_adapter(partial))


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
    init_adapter(model, peft.resolve_adapter(start))
    assert mx.allclose(model(TOKENS), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_modules": ["mlp.*"], "rank": 4}, "is not read here"),
        ({"type": "dora", "target_modules": ["*"], "rank": 4}, "down_proj.m"),
        ({"target_modules": {"self_attn.[qv]_proj": 4, "mlp.*": 1}}, "no lower rank"),
    ],
)
def test_incompatible_initial_adapter_is_refused(base, tmp_path, settings, message):
    save_random_adapter(base, tmp_path / "adapter")
    model = load(base).model
    lora_model.attach(model, LoRAConfig(**LORA | settings), seed=0)
    with pytest.raises(UserError) as caught:
        init_adapter(model, tmp_path / "adapter")
    assert message in str(caught.value)

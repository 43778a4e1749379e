"""Adapter folders in mlx-lm's format: mlx-lm's load, damaged ones are refused."""

import json

import mlx.core as mx
import mlx_lm
import pytest
from lmx.config.lora import LoRAConfig
from lmx.errors import UserError
from lmx.models.loader import load
from lmx.models.lora import io, lora_model
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from tiny_checkpoints import QWEN3_MOE

TOKENS = mx.random.randint(0, 320, (2, 9), key=mx.random.key(0))
Q = "model.layers.1.self_attn.q_proj"
LORA = {"rank": 4, "scale": 2.0, "dropout": 0.0}


@pytest.fixture(scope="module")
def base(make_checkpoint):
    return make_checkpoint(dtype="float32", num_hidden_layers=3)


def write_mlx_lm_adapter(base, folder, *, kind="lora", num_layers=2, **lora):
    """Write an adapter as mlx-lm's trainer does, with random values."""
    model, _ = mlx_lm.load(str(base))
    model.freeze()
    lora = LORA | lora
    if kind == "full":
        for block in model.layers[-max(num_layers, 0) :]:
            block.unfreeze()
    else:
        linear_to_lora_layers(model, num_layers, dict(lora), use_dora=kind == "dora")
    trained = {}
    for number, (name, value) in enumerate(tree_flatten(model.trainable_parameters())):
        noise = mx.random.normal(value.shape, key=mx.random.key(number))
        trained[name] = value + 0.1 * noise
    model.load_weights(list(trained.items()), strict=False)
    folder.mkdir(exist_ok=True)
    config = {
        "model": str(base),
        "train": True,
        "fine_tune_type": kind,
        "num_layers": num_layers,
        "lora_parameters": lora,
        "iters": 3,
    }
    write(folder, config, trained)
    return model(TOKENS), config, trained


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory):
    """The config and the tensors of a sound adapter."""
    _, config, tensors = write_mlx_lm_adapter(base, tmp_path_factory.mktemp("sound"))
    return json.dumps(config), tensors


def write(folder, config, tensors):
    (folder / io.CONFIG_FILE).write_text(json.dumps(config))
    mx.save_safetensors(str(folder / io.WEIGHTS_FILE), tensors)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_layers": -1},
        {"kind": "dora", "num_layers": 16},
        {"kind": "full"},
        {"kind": "full", "num_layers": -1},
        {"keys": ["self_attn.q_proj", "mlp.up_proj"]},
        {"keys": ["self_attn.o_proj", "model.embed_tokens"], "alpha": 16},
    ],
    ids=str,
)
def test_adapters_of_mlx_lm_load(base, tmp_path, options):
    expected, *_ = write_mlx_lm_adapter(base, tmp_path, **options)
    model = load(base, adapter=tmp_path).model
    assert mx.allclose(model(TOKENS), expected, rtol=1e-5, atol=1e-5)
    assert not mx.allclose(load(base).model(TOKENS), expected, atol=1e-2)


def test_adapters_of_mlx_lm_on_codes_and_experts_load(make_checkpoint, tmp_path):
    experts = make_checkpoint(QWEN3_MOE, dtype="float32")
    codes = tmp_path / "codes"
    mlx_lm.convert(str(experts), str(codes), quantize=True, q_bits=4, q_group_size=32)
    for base in (experts, codes):
        expected, *_ = write_mlx_lm_adapter(base, tmp_path / "adapter")
        model = load(base, adapter=tmp_path / "adapter").model
        assert mx.allclose(model(TOKENS), expected, rtol=1e-3, atol=1e-3)


def without(*ends):
    return lambda tensors: {
        name: value for name, value in tensors.items() if not name.endswith(ends)
    }


def cast(name, dtype):
    return lambda tensors: tensors | {name: tensors[name].astype(dtype)}


DAMAGES = [
    (f"tensor {Q}.lora_b", without(f"{Q}.lora_b")),
    ("tensor .*lora_a is missing", without(".lora_a")),
    ("tensor .*lora_b is missing", without(".lora_b")),
    (f"tensor {Q}", without(f"{Q}.lora_a", f"{Q}.lora_b")),
    ("tensor model.layers.2.mlp.down_proj.* is missing", lambda t: {
        k: v for k, v in t.items() if "layers.2" not in k}),
    ("is missing", lambda tensors: {}),
    (f"{Q}.lora_a has values of .*int8", cast(f"{Q}.lora_a", mx.int8)),
    (f"{Q}.lora_b has values of .*uint32", cast(f"{Q}.lora_b", mx.uint32)),
    (f"{Q}.lora_a has the shape .*128, 3.*, here it must be .*128, 4", lambda t: t | {
        f"{Q}.lora_a": mx.zeros((128, 3)), f"{Q}.lora_b": mx.zeros((3, 128))}),
    (f"{Q}.lora_b has the shape", lambda t: t | {f"{Q}.lora_b": mx.zeros((4,))}),
    (f"{Q}.lora_a has the shape .*64, 4.*128, 4", lambda t: t | {
        f"{Q}.lora_a": mx.zeros((64, 4))}),
    ("tensor model.norm.weight is not read here", lambda t: t | {
        "model.norm.weight": mx.ones(128)}),
    ("tensor model.layers.0.* is not read here", lambda t: t | {
        k.replace("layers.1", "layers.0"): v for k, v in t.items()}),
]  # fmt: skip


@pytest.mark.parametrize(("message", "damage"), DAMAGES)
def test_incomplete_adapters_are_refused(base, adapter, tmp_path, message, damage):
    config, tensors = adapter
    write(tmp_path, json.loads(config), damage(tensors))
    with pytest.raises(UserError, match=message) as caught:
        load(base, adapter=tmp_path)
    assert caught.value.place == str(tmp_path / io.WEIGHTS_FILE)


@pytest.mark.parametrize(("message", "damage"), DAMAGES[:9:3])
def test_training_does_not_start_from_them(base, adapter, tmp_path, message, damage):
    config, tensors = adapter
    model = load(base).model
    lora_model.attach(model, LoRAConfig(rank=4, target_modules=["*"]), seed=0)
    write(tmp_path, json.loads(config), tensors)
    io.init_adapter(model, tmp_path)
    write(tmp_path, json.loads(config), damage(tensors))
    with pytest.raises(UserError, match=message):
        io.init_adapter(model, tmp_path)


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ('scale: expected a number, got "x"', {"scale": "x"}),
        ("scale: expected a number, got nothing", {"scale": None}),
        ("scale: expected a finite number", {"scale": float("nan")}),
        ("rank: must be at least 1, got 0", {"rank": 0}),
        ("rank: expected a whole number, got 4.0", {"rank": 4.0}),
        ("dropout: must be less than 1, got 1", {"dropout": 1}),
        ("keys: expected a list, got \"q_proj\"", {"keys": "q_proj"}),
        ("keys.0: expected text, got 1", {"keys": [1]}),
        ("use_rslora: this key is unknown", {"use_rslora": True}),
        ("fine_tune_type: expected 'lora', 'dora'", {"/fine_tune_type": "vera"}),
        ("num_layers: expected a whole number", {"/num_layers": "4"}),
        ("lora_parameters: expected a block", {"/lora_parameters": 5}),
        ("lora_parameters: expected a block", {"/lora_parameters": None}),
        ("tensor .*lora_a is missing", {"keys": ["self_attn.q_proj", "mlp.nothing"],
                            "/num_layers": 3}),
        ("tensor .*.m is missing", {"/fine_tune_type": "dora"}),
    ],
)  # fmt: skip
def test_values_of_the_config_are_checked(base, adapter, tmp_path, message, changes):
    config, tensors = json.loads(adapter[0]), adapter[1]
    for key, value in changes.items():
        if key.startswith("/"):
            config[key[1:]] = value
        else:
            config["lora_parameters"][key] = value
    write(tmp_path, config, tensors)
    with pytest.raises(UserError, match=message) as caught:
        load(base, adapter=tmp_path)
    assert str(tmp_path) in caught.value.place


def test_a_config_without_scale_and_files_that_are_none_are_refused(
    base, adapter, tmp_path
):
    config, tensors = json.loads(adapter[0]), adapter[1]
    del config["lora_parameters"]["scale"]
    write(tmp_path, config, tensors)
    with pytest.raises(UserError, match=r"lora_parameters\.scale: this key is missing"):
        load(base, adapter=tmp_path)
    file = tmp_path / io.WEIGHTS_FILE
    file.write_bytes(file.read_bytes()[:-4])
    config["lora_parameters"]["scale"] = 1.0
    (tmp_path / io.CONFIG_FILE).write_text(json.dumps(config))
    with pytest.raises(UserError, match="cut short"):
        load(base, adapter=tmp_path)
    file.unlink()
    with pytest.raises(UserError, match=r"no adapters\.safetensors"):
        load(base, adapter=tmp_path)


def test_whole_weights_are_complete_too(base, tmp_path):
    _, config, tensors = write_mlx_lm_adapter(base, tmp_path, kind="full")
    norm = "model.layers.1.input_layernorm.weight"
    write(tmp_path, config, without(norm)(tensors))
    with pytest.raises(UserError, match=f"tensor {norm} is missing"):
        load(base, adapter=tmp_path)

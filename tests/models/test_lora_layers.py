"""Every adapter type on every base model: gradients, fusion, and loading in mlx-lm."""

import json
import shutil

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from lmx.config.lora import LoRAConfig
from lmx.errors import UserError
from lmx.models import quantized_layers
from lmx.models.loader import load
from lmx.models.lora import io, lora_model
from mlx.utils import tree_flatten, tree_unflatten
from tiny_checkpoints import QWEN3_MOE

TOKENS = mx.random.randint(0, 320, (2, 40), key=mx.random.key(0))
GRIDS = {f"{bits} bits": (32, bits, "affine") for bits in (3, 4)}
GRIDS |= {"mxfp8": (32, 8, "mxfp8"), "nvfp4": (16, 4, "nvfp4")}
ALL_MODULES = ["*", "model.embed_tokens"]
# DoRA skips experts.
KINDS = pytest.mark.parametrize(
    ("kind", "experts"), [("lora", False), ("dora", False), ("lora", True)]
)


@pytest.fixture(scope="session")
def bases(make_checkpoint, tmp_path_factory):
    """A cached function: (grid, config changes) -> float32 checkpoint folder."""
    folders = {}

    def make_base(grid="dense", *, experts=False, **changes):
        key = json.dumps([grid, experts, changes])
        if key not in folders:
            config = {"base": QWEN3_MOE} if experts else {"num_hidden_layers": 3}
            dense = make_checkpoint(dtype="float32", **config, **changes)
            folder = tmp_path_factory.mktemp("base")
            folders[key] = dense if grid == "dense" else quantized(dense, folder, grid)
        return folders[key]

    return make_base


def quantized(dense, folder, grid):
    """Quantize with stock MLX. It dequantizes mxfp embeddings to bfloat16."""
    shutil.copytree(dense, folder, dirs_exist_ok=True)
    model, _ = mlx_lm.load(str(dense))
    group_size, bits, mode = GRIDS[grid]
    dense = () if mode == "affine" else ("model.embed_tokens",)
    nn.quantize(
        model,
        group_size,
        bits,
        mode=mode,
        class_predicate=lambda p, m: hasattr(m, "to_quantized") and p not in dense,
    )
    tensors = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(
        str(folder / "model.safetensors"), tensors, metadata={"format": "mlx"}
    )
    config = json.loads((folder / "config.json").read_text())
    block = {"group_size": group_size, "bits": bits, "mode": mode}
    config["quantization"] = block | dict.fromkeys(dense, False)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class Adapted:
    """A model whose adapters differ from their initial values."""

    def __init__(self, folder, **settings):
        self.folder = folder
        self.adapter = LoRAConfig(**{"rank": 4, "alpha": 6.0} | settings)
        self.model = load(folder).model.eval()
        self.before = self.model(TOKENS)
        self.base = dict(tree_flatten(self.model.parameters()))
        self.keys = lora_model.attach(self.model, self.adapter, seed=0)
        self.first = self.model(TOKENS)
        self.trained = {}
        start = tree_flatten(self.model.trainable_parameters())
        for number, (name, value) in enumerate(start):
            noise = mx.random.normal(value.shape, key=mx.random.key(number))
            self.trained[name] = value + 0.1 * noise
        self.model.update(tree_unflatten(list(self.trained.items())))
        self.after = self.model(TOKENS)

    def fused(self):
        return lora_model.fuse(self.model, self.base, self.trained, mx.float32)

    def stock(self, folder):
        blocks = self.adapter.num_layers or len(self.model.layers)
        io.save_adapter(
            folder,
            self.trained,
            layers=lora_model.adapted_layers(self.model),
            adapter=self.adapter,
            keys=self.keys,
            num_layers=blocks,
        )
        return mlx_lm.load(str(self.folder), adapter_path=str(folder))[0](TOKENS)


def is_close(actual, expected, tolerance=2e-5):
    return (mx.abs(actual - expected).max() / mx.abs(expected).max()).item() < tolerance


def dense_model(folder, tensors, tmp_path):
    """Return the model of a folder with unquantized weights."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("quantization", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(
        str(tmp_path / "model.safetensors"), tensors, metadata={"format": "mlx"}
    )
    return load(tmp_path).model.eval()


@KINDS
@pytest.mark.parametrize("grid", ["dense", *GRIDS])
def test_adapted_model_starts_as_the_base_and_equals_the_fused_model(
    bases, tmp_path, grid, kind, experts
):
    run = Adapted(bases(grid, experts=experts), type=kind, target_modules=ALL_MODULES)
    assert is_close(run.first, run.before)
    assert not is_close(run.after, run.before, 1e-2)
    model = dense_model(run.folder, run.fused(), tmp_path / "fused")
    assert is_close(model(TOKENS), run.after, 1e-4)


@KINDS
@pytest.mark.parametrize("grid", ["dense", *GRIDS])
def test_stock_mlx_lm_loads_saved_adapters(bases, tmp_path, grid, kind, experts):
    """mlx-lm cannot load some adapters: see `io.layers_mlx_lm_cannot_load`."""
    is_unsupported = grid == "3 bits" and kind == "dora"
    layers = ["*"] if kind == "dora" and grid != "dense" else ALL_MODULES
    run = Adapted(bases(grid, experts=experts), type=kind, target_modules=layers)
    assert (
        bool(io.layers_mlx_lm_cannot_load(lora_model.adapted_layers(run.model)))
        == is_unsupported
    )
    if is_unsupported:
        with pytest.raises(ValueError, match="does not match"):
            run.stock(tmp_path)
    else:
        assert is_close(run.stock(tmp_path), run.after, 1e-4)


@pytest.mark.parametrize(
    ("grid", "kind", "use_rslora"), [("dense", "dora", True), ("4 bits", "lora", False)]
)
def test_ranks_by_pattern_and_num_layers(bases, tmp_path, grid, kind, use_rslora):
    layers = {"mlp.*": 3, "*_proj": 6}
    run = Adapted(
        bases(grid),
        type=kind,
        target_modules=layers,
        use_rslora=use_rslora,
        num_layers=2,
    )
    assert len(lora_model.adapted_layers(run.model)) == 14
    paths = lora_model.adapted_layers(run.model)
    actual = {p: layer.lora_a.shape[1] for p, layer in paths.items()}
    assert not any(".layers.0." in path for path in actual)
    assert actual["model.layers.1.mlp.up_proj"] == 3
    assert actual["model.layers.2.self_attn.q_proj"] == 6
    divisor = 6**0.5 if use_rslora else 6
    assert paths["model.layers.2.self_attn.q_proj"].scale == pytest.approx(6 / divisor)
    assert is_close(run.stock(tmp_path), run.after, 1e-4)


def test_save_adapter_pads_experts_of_different_ranks(bases, tmp_path):
    layers = {"mlp.switch_mlp.up_proj": 2, "*": 5}
    run = Adapted(bases(experts=True), target_modules=layers)
    assert is_close(run.stock(tmp_path), run.after, 1e-4)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["lora_parameters"]["rank"] == 5
    assert config["lora_parameters"]["scale"] == 1


def reference_merge(run, trained):
    """Return the merged weights by the formulas of the papers."""
    result = {}
    for path in lora_model.adapted_layers(run.model):
        a, b = trained[f"{path}.lora_a"], trained[f"{path}.lora_b"]
        weight = run.base[f"{path}.weight"]
        if weight.ndim == 3:
            update = mx.einsum("eor,eri->eoi", b, a)
        elif "embed" in path:
            update = a @ b
        else:
            update = (a @ b).T
        total = weight + run.adapter.scale(4) * update
        if f"{path}.m" in trained:
            norms = mx.stop_gradient(mx.linalg.norm(total, axis=1, keepdims=True))
            total = trained[f"{path}.m"][:, None] * total / norms
        result[f"{path}.weight"] = total
    return result


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("experts", [False, True], ids=["llama", "experts"])
def test_gradients_equal_those_of_the_merged_weight(bases, kind, experts):
    """Includes the tied embedding. 80 tokens are enough for sorted experts."""
    run = Adapted(bases(experts=experts), type=kind, target_modules=ALL_MODULES)
    merged_model = load(run.folder).model.eval()

    def merged_loss(trained):
        merged_model.update(tree_unflatten(list(reference_merge(run, trained).items())))
        return mx.logsumexp(merged_model(TOKENS), axis=-1).sum()

    def adapter_loss(trained):
        run.model.update(tree_unflatten(list(trained.items())))
        return mx.logsumexp(run.model(TOKENS), axis=-1).sum()

    expected, actual = (mx.grad(f)(run.trained) for f in (merged_loss, adapter_loss))
    assert all(mx.abs(gradient).max() > 0 for gradient in expected.values())
    for name, gradient in expected.items():
        assert is_close(actual[name], gradient, 1e-4), name


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("grid", GRIDS)
def test_gradients_on_quantized_layers_equal_those_on_dense_ones(
    bases, tmp_path, grid, kind
):
    """Adapters of the dequantized model have the same gradients."""
    run = Adapted(bases(grid), type=kind, target_modules=ALL_MODULES)
    quantized_model = load(run.folder).model
    expanded = lora_model.fuse(quantized_model, run.base, {}, mx.float32)
    dense_copy = dense_model(run.folder, expanded, tmp_path / "dense_copy")
    lora_model.attach(dense_copy, run.adapter, seed=0)

    def loss(model):
        def loss_of(trained):
            model.update(tree_unflatten(list(trained.items())))
            return mx.logsumexp(model(TOKENS), axis=-1).sum()

        return loss_of

    expected, actual = (mx.grad(loss(m))(run.trained) for m in (dense_copy, run.model))
    for name, gradient in expected.items():
        assert is_close(actual[name], gradient, 1e-3), name


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("grid", GRIDS)
def test_quantized_embedding_adapters_merge(grid, kind):
    group_size, bits, mode = GRIDS[grid]
    layer = nn.Embedding(40, 96).to_quantized(group_size, bits, mode)
    expanded = quantized_layers.dequantized_weight(layer)
    layer = lora_model.LAYER_CLASSES[kind]["embedding"](
        layer, 4, 1.5, 0.0, mx.random.key(1)
    )
    assert io.layers_mlx_lm_cannot_load({"embed": layer}) == ["embed"] * (
        kind == "dora"
    )
    layer.lora_b = 0.1 * mx.random.normal((4, 96), key=mx.random.key(2))
    trained = {name: layer[name] for name in layer.TRAINABLE}
    merged = layer.merge(expanded, trained)
    assert not is_close(merged, expanded, 1e-2)
    tokens, x = mx.arange(7), mx.random.normal((3, 96), key=mx.random.key(3))
    # A lookup in floating-point codes returns bfloat16.
    assert is_close(layer(tokens), merged[:7], 1e-5 if mode == "affine" else 1e-2)
    assert is_close(layer.as_linear(x), x @ merged.T)


def test_embeddings_and_heads_are_adapted_only_by_name(bases):
    folder = bases(tie_word_embeddings=False)
    assert not any("embed" in k or "head" in k for k in Adapted(folder).keys)
    run = Adapted(folder, target_modules=["lm_head", "*embed*"])
    assert run.keys == ["lm_head", "model.embed_tokens"]


def test_dora_skips_experts(bases):
    folder = bases(experts=True)
    assert not any("switch" in key for key in Adapted(folder, type="dora").keys)
    with pytest.raises(UserError, match="no layer that dora adapts here matches"):
        Adapted(folder, type="dora", target_modules=["mlp.switch_mlp.*"])


def test_num_layers_above_the_block_count_is_refused(bases):
    with pytest.raises(UserError, match="this model has 3 blocks"):
        Adapted(bases(), num_layers=4)

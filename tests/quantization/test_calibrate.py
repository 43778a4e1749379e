"""The walk: what layers see, in which order, and where it goes on after a kill."""

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from lmx.config.quant_spec import QuantizationConfig
from lmx.errors import UserError
from lmx.models.loader import build_model, load
from lmx.quantization.packing import expand, pack
from lmx.quantization.ptq.sequential import QuantizedTensor, SequentialPipeline
from lmx.quantization.target_layers import select_layers
from mlx.utils import tree_flatten, tree_map
from test_costs import slopes_of
from tiny_checkpoints import LLAMA, QWEN3_MOE
from tiny_windows import windows_of

TOKENS = mx.random.randint(0, 320, (6, 24), key=mx.random.key(0))
GRID = QuantizationConfig(bits=3, group_size=32)
KINDS = ("scales", "biases")
SIZES = {"num_hidden_layers": 3, "vocab_size": 320, "tie_word_embeddings": False}


def model_of(config=LLAMA, **changes):
    mx.random.seed(5)
    model = build_model(config | SIZES | changes)
    model.update(tree_map(lambda v: 2 * v if v.ndim > 1 else v, model.parameters()))
    return model.eval()


def walk(
    model, folder, *, key="a", rows=4, reread=None, grid=GRID, counted=None, **more
) -> SequentialPipeline:
    more = {"compute": mx.float32} | more
    return SequentialPipeline(
        model,
        list(select_layers(model, grid).specs),
        windows_of(TOKENS, counted),
        folder / "walk",
        key=key,
        at_once=rows * TOKENS.shape[1],
        info=lambda _: None,
        reread=reread,
        **more,
    )


class Rounding:
    """Rounds to nearest and notes what it was given."""

    def __init__(self, stop_at: str | None = None):
        self.stop_at = stop_at
        self.moments = {}

    def __call__(self, weights, moments):
        if self.stop_at in weights:
            raise KeyboardInterrupt
        found = {}
        for path, weight in weights.items():
            self.moments[path] = moments
            tensors = pack(weight, GRID, mx.float32)
            found[path] = QuantizedTensor(tensors, expand(tensors, GRID, mx.float32))
        return found


class Seeing(nn.Module):
    """A layer that keeps what it is called with."""

    def __init__(self, layer, seen):
        super().__init__()
        self.layer, self.seen = layer, seen

    def __call__(self, x, *rest, **more):
        self.seen.append((x, *rest))
        return self.layer(x, *rest, **more)


def inputs_of(model, path, rounded=()):
    """What goes into a layer of a model some of whose layers are rounded."""
    modules = dict(model.named_modules())
    for name in rounded:
        layer = modules[name]
        layer.weight = expand(pack(layer.weight, GRID, mx.float32), GRID, mx.float32)
    parent, _, name = path.rpartition(".")
    seen = []
    modules[parent][name] = Seeing(modules[path], seen)
    model(TOKENS)
    return seen[0]


def rows_of(model, path, rounded=()):
    x = inputs_of(model, path, rounded)[0]
    return np.array(x, np.float64).reshape(-1, x.shape[-1])


def test_layers_come_in_the_order_of_their_inputs(tmp_path):
    rounding = Rounding()
    walk(model_of(), tmp_path).run(rounding)
    parts = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    parts += ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    blocks = [f"model.layers.{number}.{part}" for number in range(3) for part in parts]
    outside = ["lm_head", "model.embed_tokens"]
    assert sorted(rounding.moments) == sorted([*blocks, *outside])
    order, last = [], None
    for path, moments in rounding.moments.items():
        if moments is not last:
            order.append(path.rpartition(".")[2])
        last = moments
    inside = ["q_proj", "o_proj", "gate_proj", "down_proj"]
    assert order == ["embed_tokens", *inside * 3, "lm_head"]


@pytest.mark.parametrize(
    "path",
    ["model.layers.1.self_attn.o_proj", "model.layers.2.mlp.down_proj", "lm_head"],
)
def test_moments_are_those_of_the_model_quantized_so_far(tmp_path, path):
    rounding = Rounding()
    walk(model_of(), tmp_path).run(rounding)
    before = list(rounding.moments)[: list(rounding.moments).index(path)]
    mine = rounding.moments[path]
    before = [name for name in before if rounding.moments[name] is not mine]
    x, y = rows_of(model_of(), path, before), rows_of(model_of(), path)
    assert mine.counts.item() == TOKENS.size
    largest = np.abs(x.T @ x).max()
    np.testing.assert_allclose(mine.squares, x.T @ x, atol=1e-4 * largest)
    np.testing.assert_allclose(mine.cross, x.T @ (y - x), atol=1e-4 * largest)
    assert np.abs(x.T @ (y - x)).max() > 1e-2 * largest


@pytest.mark.parametrize(
    ("path", "norm"),
    [
        ("self_attn.o_proj", "input_layernorm"),
        ("mlp.down_proj", "post_attention_layernorm"),
    ],
)
def test_what_the_residual_stream_has_lost_is_known(tmp_path, path, norm):
    rounding = Rounding()
    walk(model_of(), tmp_path).run(rounding)
    path, norm = (f"model.layers.1.{name}" for name in (path, norm))
    before = list(rounding.moments)[: list(rounding.moments).index(path)]
    x = rows_of(model_of(), path, before)
    lost = rows_of(model_of(), norm) - rows_of(model_of(), norm, before)
    expected = lost.T @ x
    largest = np.abs(expected).max()
    assert largest > 1e-2 * np.abs(x.T @ x).max()
    found = rounding.moments[path]
    np.testing.assert_allclose(found.residual, expected, atol=1e-3 * largest)
    assert 0 < found.shares[path] <= 1
    # The others give to something else first.
    assert {
        name for name, m in rounding.moments.items() if m and m.residual is not None
    } == {
        f"model.layers.{n}.{layer}"
        for n in range(3)
        for layer in ("self_attn.o_proj", "mlp.down_proj")
    }


@pytest.mark.parametrize("compute", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("behind_a_norm", [False, True])
def test_who_adds_to_the_residual_stream_as_it_is(tmp_path, compute, behind_a_norm):
    """Gemma's norms change what its layers add; far states stay what they are."""
    rounding, gemma = Rounding(), {"model_type": "gemma2", "query_pre_attn_scalar": 64}
    gemma |= {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0}
    model = model_of(**gemma if behind_a_norm else {})
    embedding = model.model.embed_tokens
    embedding.weight = 1000 * embedding.weight
    walk(model, tmp_path, compute=compute).run(rounding)
    found = {
        path for path, m in rounding.moments.items() if m and m.residual is not None
    }
    ends = ("o_proj", "down_proj")
    adding = {path for path in rounding.moments if path.endswith(ends)}
    assert len(adding) == 2 * 3
    assert found == (set() if behind_a_norm else adding)


def test_a_tied_embedding_is_quantized_once_and_the_blocks_know(tmp_path):
    rounding, path = Rounding(), "model.embed_tokens"
    found = walk(model_of(tie_word_embeddings=True), tmp_path).run(rounding)
    assert next(iter(rounding.moments)) == path
    assert f"{path}.scales" in found
    assert len(rounding.moments) == 1 + 7 * 3
    for name in ("model.layers.0.self_attn.q_proj", "model.layers.2.mlp.down_proj"):
        before = list(rounding.moments)[: list(rounding.moments).index(name)]
        mine = rounding.moments[name]
        before = [other for other in before if rounding.moments[other] is not mine]
        x = rows_of(model_of(tie_word_embeddings=True), name, before)
        y = rows_of(model_of(tie_word_embeddings=True), name)
        largest = np.abs(x.T @ x).max()
        np.testing.assert_allclose(mine.squares, x.T @ x, atol=1e-4 * largest)
        np.testing.assert_allclose(mine.cross, x.T @ (y - x), atol=1e-4 * largest)


def test_a_method_need_not_ask_what_embeddings_cost(tmp_path):
    rounding = Rounding()
    walk(model_of(), tmp_path, weighs_embeddings=False).run(rounding)
    path, moments = next(iter(rounding.moments.items()))
    assert (path, moments) == ("model.embed_tokens", None)


def test_layers_come_with_what_errors_in_their_outputs_cost(tmp_path):
    asked, plain = Rounding(), Rounding()
    walk(model_of(), tmp_path, weighs_outputs=True).run(asked)
    walk(model_of(), tmp_path / "plain").run(plain)
    modules = dict(model_of().named_modules())
    for path, moments in asked.moments.items():
        if ".layers." in path:
            size = modules[path].weight.shape[0]
            assert moments.answers[path].shape == (size, size)
            assert not plain.moments[path].answers
    # On disk as long as their block is not done.
    assert not list(tmp_path.glob("walk/*/answers-*"))


def test_without_a_full_stream_there_is_nothing_to_compare(tmp_path):
    rounding, alone = Rounding(), Rounding()
    walk(model_of(), tmp_path / "both").run(rounding)
    walk(model_of(), tmp_path, compares=False).run(alone)
    for path, moments in rounding.moments.items():
        if moments is not None:
            # Summed up in other parts.
            mine, theirs = alone.moments[path].squares, moments.squares
            assert mx.allclose(mine, theirs, atol=1e-6 * mx.abs(theirs).max().item())
            assert alone.moments[path].cross is None
    assert not list(tmp_path.glob("walk/*/stream-full-*"))


def test_a_layer_that_is_called_twice_gets_both_inputs(tmp_path):
    def model_that_calls_twice():
        model = model_of()
        mlp = model.model.layers[1].mlp

        class Twice(type(mlp)):
            def __call__(self, x):
                return super().__call__(x) + 0.5 * super().__call__(0.25 * x)

        mlp.__class__ = Twice
        return model

    rounding = Rounding()
    walk(model_that_calls_twice(), tmp_path).run(rounding)
    path = "model.layers.2.self_attn.q_proj"
    before = list(rounding.moments)[: list(rounding.moments).index(path)]
    x = rows_of(model_that_calls_twice(), path, before)
    squares = rounding.moments[path].squares
    np.testing.assert_allclose(squares, x.T @ x, atol=1e-4 * np.abs(x.T @ x).max())


def test_the_next_block_sees_what_was_improved(tmp_path):
    path = "model.layers.1.self_attn.q_proj"

    def improve(closed):
        name = f"{closed.prefix}self_attn.q_proj"
        codes = closed.tensors[f"{name}.weight"]
        zeros = [mx.zeros_like(closed.tensors[f"{name}.{k}"]) for k in KINDS]
        tensors = dict(zip(("weight", *KINDS), (codes, *zeros), strict=True))
        return {name: QuantizedTensor(tensors, expand(tensors, GRID, mx.float32))}

    rounding = Rounding()
    walk(model_of(), tmp_path, improve=improve).run(rounding)
    before = list(rounding.moments)[: list(rounding.moments).index(path)]
    model = model_of()
    attention = model.model.layers[0].self_attn
    attention.q_proj.weight = mx.zeros_like(attention.q_proj.weight)
    x = rows_of(model, path, [name for name in before if "0.self_attn.q" not in name])
    squares = rounding.moments[path].squares
    np.testing.assert_allclose(squares, x.T @ x, atol=1e-4 * np.abs(x.T @ x).max())


def test_every_expert_has_its_own_rows(tmp_path):
    rounding = Rounding()
    model = model_of(QWEN3_MOE)
    walk(model, tmp_path).run(rounding)
    path = "model.layers.0.mlp.switch_mlp.down_proj"
    before = list(rounding.moments)[: list(rounding.moments).index(path)]
    x, experts, *_ = inputs_of(model_of(QWEN3_MOE), path, before)
    x = np.array(mx.broadcast_to(x.squeeze(-2), (*experts.shape, x.shape[-1])))
    x, experts = x.reshape(-1, x.shape[-1]).astype(np.float64), np.array(experts)
    moments = rounding.moments[path]
    assert moments.cross is None
    assert moments.counts.sum().item() == experts.size
    for number, squares in enumerate(moments.squares):
        rows = x[experts.reshape(-1) == number]
        assert moments.counts[number].item() == len(rows)
        np.testing.assert_allclose(squares, rows.T @ rows, atol=1e-4)


def test_a_walk_goes_on_where_it_was_stopped(tmp_path):
    whole = walk(model_of(), tmp_path / "whole").run(Rounding())
    with pytest.raises(KeyboardInterrupt):
        walk(model_of(), tmp_path).run(Rounding("model.layers.2.mlp.up_proj"))
    second = Rounding()
    found = walk(model_of(), tmp_path).run(second)
    last = ("model.layers.2", "lm_head", "model.embed_tokens")
    assert all(path.startswith(last) for path in second.moments)
    assert found.keys() == whole.keys()
    assert all(mx.array_equal(found[name], whole[name]) for name in whole)
    third = Rounding()
    walk(model_of(), tmp_path).run(third)
    assert not third.moments
    walk(model_of(), tmp_path, key="other").run(third)
    assert len(third.moments) == 23


def test_the_model_is_as_it_was_and_old_streams_are_gone(tmp_path):
    model, same = model_of(), model_of()
    walk(model, tmp_path).run(Rounding())
    assert all(
        mx.array_equal(value, other)
        for (_, value), (_, other) in zip(
            tree_flatten(model.parameters()),
            tree_flatten(same.parameters()),
            strict=True,
        )
    )
    names = {p.relative_to(tmp_path / "walk") for p in tmp_path.rglob("stream-*")}
    assert names == {
        Path(f"0003/stream-{name}-{part:04d}.safetensors")
        for name in ("full", "rounded")
        for part in range(2)
    }


def test_a_model_that_is_no_plain_sequence_is_refused(tmp_path):
    model = model_of()

    class Skipping(type(model.model)):
        def __call__(self, inputs, cache=None, **more):
            first = super().__call__(inputs, cache, **more)
            return first + 0.1 * super().__call__(inputs, cache, **more)

    model.model.__class__ = Skipping
    model.model.layers = model.model.layers[:1] * 2 + model.model.layers[1:]
    with pytest.raises(UserError, match="one by one"):
        walk(model, tmp_path).run(Rounding())


def test_weights_of_one_block_are_in_memory_at_a_time(make_checkpoint, tmp_path):
    source = make_checkpoint(num_hidden_layers=18, dtype="float32")
    loaded = load(source, lazy=True)
    size = sum(v.nbytes for _, v in tree_flatten(loaded.model.parameters()))

    def peak(folder, reread):
        model = load(source, lazy=True).model
        rounding = Rounding()
        rounding.moments = Forgetful()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        walk(model, folder, reread=reread).run(rounding)
        return mx.get_peak_memory() - before

    assert peak(tmp_path / "read", loaded.reread) < size / 3
    assert peak(tmp_path / "kept", None) > size


class Forgetful(dict):
    """Keeps nothing."""

    def __setitem__(self, key, value):
        pass


def test_tokens_count_by_what_the_loss_makes_of_them(tmp_path):
    """Of the layers in front of which nothing is rounded, against the whole model."""
    counted = np.array(mx.random.bernoulli(0.3, TOKENS.shape, key=mx.random.key(2)))
    counted[:, -1] = True
    model, rounding = model_of(), Rounding()
    grid = GRID.model_copy(update={"quantize_embeddings": False})
    walk(model, tmp_path, rows=1, grid=grid, counted=counted, weighs_outputs=True).run(
        rounding
    )
    model = model_of()
    group = [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"]
    squares = sum(
        np.square(slopes_of(model, path, TOKENS, mx.array(counted))).sum(axis=1)
        for path in group
    )
    counts, squares = counted.reshape(-1), squares.reshape(-1)
    means = np.where(counts, squares[counts].mean(), squares[~counts].mean())
    weights = (squares + means) / 2
    weights /= weights.mean()
    x = model.layers[0].input_layernorm(model.model.embed_tokens(TOKENS))
    x = np.array(x, np.float64).reshape(-1, x.shape[-1])
    expected = x.T @ np.diag(weights) @ x
    found = rounding.moments[group[0]].squares
    largest = np.abs(expected).max()
    np.testing.assert_allclose(found, expected, atol=1e-3 * largest)
    # What is not told apart is something else.
    assert np.abs(x.T @ x - expected).max() > 0.05 * largest

"""SequentialPipeline: calibration inputs, order of the layers, and resume."""

import shutil

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from folder_damages import DAMAGES
from lmx.config.quant_spec import QuantizationConfig
from lmx.config.quantize import GPTQConfig
from lmx.errors import UserError
from lmx.models.loader import load
from lmx.quantization.packing import dequantize, pack
from lmx.quantization.ptq.base import PTQContext, PTQMethod, QuantizedTensor
from lmx.quantization.ptq.gptq.gptq import GPTQ
from lmx.quantization.ptq.sequential import SequentialPipeline
from lmx.quantization.target_layers import select_layers
from lmx.run.logger import RunLogger
from lmx.run.progress import ProgressBar
from memory_at_rest import active_memory
from mlx.utils import tree_flatten
from quantization_samples import context_of, enlarged_model, windows_of
from test_output_fisher import gradients_of
from tiny_checkpoints import LLAMA, QWEN3_MOE

TOKENS = mx.random.randint(0, 320, (6, 24), key=mx.random.key(0))
GRID = QuantizationConfig(bits=3, group_size=32)
SIZES = {"num_hidden_layers": 3, "vocab_size": 320, "tie_word_embeddings": False}


def model_of(config=LLAMA, **changes):
    return enlarged_model(config | SIZES | changes)


def task(model, folder, grid=GRID, counted=None, **options) -> PTQContext:
    specs, windows = select_layers(model, grid).specs, windows_of(TOKENS, counted)
    options = {"logger": RunLogger(None, quiet=True)} | options
    return context_of(model, specs, windows, folder, **options)


class RecordingRTN(PTQMethod):
    """Quantizes with RTN and records the statistics that it receives."""

    needs_cross_moments = True
    weighs_embeddings = True

    def __init__(self, stop_at: str | None = None, **flags):
        self.stop_at = stop_at
        self.statistics = {}
        vars(self).update(flags)

    def quantize_group(self, weights, statistics):
        if self.stop_at in weights:
            raise KeyboardInterrupt
        quantized = {}
        for path, weight in weights.items():
            self.statistics[path] = statistics
            tensors = pack(weight, GRID, mx.float32)
            quantized[path] = QuantizedTensor(
                tensors, dequantize(tensors, GRID, mx.float32)
            )
        return quantized

    def run(
        self,
        model,
        folder,
        *,
        key="a",
        shard_size=4,
        compute=mx.float32,
        counted=None,
        **options,
    ):
        self.context = task(model, folder, counted=counted, **options)
        return SequentialPipeline(
            self,
            windows_of(TOKENS, counted),
            folder / "pipeline",
            key=key,
            compute=compute,
            batch_tokens=shard_size * TOKENS.shape[1],
        ).run()

    def quantized_before(self, path) -> list[str]:
        """Return the layers that are quantized before the group of `path`."""
        paths, group = list(self.statistics), self.statistics[path]
        return [
            p for p in paths[: paths.index(path)] if self.statistics[p] is not group
        ]


class RecordingLayer(nn.Module):
    """A layer that records its inputs."""

    def __init__(self, layer, inputs):
        super().__init__()
        self.layer, self.inputs = layer, inputs

    def __call__(self, x, *args, **kwargs):
        self.inputs.append((x, *args))
        return self.layer(x, *args, **kwargs)


def inputs_of(model, path, quantized=()):
    """Return the inputs of a layer in a partly quantized model."""
    modules = dict(model.named_modules())
    for name in quantized:
        layer = modules[name]
        layer.weight = dequantize(
            pack(layer.weight, GRID, mx.float32), GRID, mx.float32
        )
    parent, _, name = path.rpartition(".")
    inputs = []
    modules[parent][name] = RecordingLayer(modules[path], inputs)
    model(TOKENS)
    return inputs[0]


def rows_of(model, path, quantized=()):
    x = inputs_of(model, path, quantized)[0]
    return np.array(x, np.float64).reshape(-1, x.shape[-1])


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A finished run: method, tensors and folder."""
    method, folder = RecordingRTN(), tmp_path_factory.mktemp("plain")
    return method, method.run(model_of(), folder), folder


def test_progress_reaches_the_end_block_by_block(tmp_path):
    bars, model = {}, model_of()

    class Recorder(RunLogger):
        def close_progress(self, progress):
            super().close_progress(progress)
            bars[progress.line().partition("  ")[0]] = notes[:]
            notes.clear()

    notes, advance = [], ProgressBar.advance

    def record(bar, amount=1, note=None):
        notes.append(note or amount)
        advance(bar, amount, note)

    config = GPTQConfig(bits=3)
    context = task(model, tmp_path, logger=Recorder(None, quiet=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProgressBar, "advance", record)
        GPTQ(config, context).quantize()
    assert list(bars) == ["Fisher information 100%", "quantization 100%"]
    texts = [note for note in bars["quantization 100%"] if isinstance(note, str)]
    assert texts == [f"block {number} of 3" for number in (1, 2, 3)]


def test_full_precision_stream_reads_the_first_tokens_only(plain, tmp_path):
    path = "model.layers.1.mlp.down_proj"
    method = RecordingRTN(max_compared_tokens=2 * TOKENS.shape[1])
    method.run(model_of(), tmp_path / "few", shard_size=2)
    few, full = method.statistics[path], plain[0].statistics[path]
    assert mx.allclose(few.second_moments, full.second_moments, rtol=1e-3, atol=1e-3)
    assert mx.array_equal(full.compared_moments, full.second_moments)
    share = mx.diagonal(few.compared_moments).sum()
    share = share / mx.diagonal(full.compared_moments).sum()
    assert 0.1 < share.item() < 0.6
    assert mx.abs(few.cross_moments).max() < mx.abs(full.cross_moments).max()


def test_groups_come_in_the_order_of_calls(plain):
    method = plain[0]
    parts = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    parts += ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    blocks = [f"model.layers.{number}.{part}" for number in range(3) for part in parts]
    outside = ["lm_head", "model.embed_tokens"]
    assert sorted(method.statistics) == sorted([*blocks, *outside])
    order, previous = [], None
    for path, statistics in method.statistics.items():
        if statistics is not previous:
            order.append(path.rpartition(".")[2])
        previous = statistics
    inside = ["q_proj", "o_proj", "gate_proj", "down_proj"]
    assert order == ["embed_tokens", *inside * 3, "lm_head"]


def assert_moments(method, path, make_model=model_of):
    quantized = method.quantized_before(path)
    x, y = rows_of(make_model(), path, quantized), rows_of(make_model(), path)
    statistics, largest = method.statistics[path], np.abs(x.T @ x).max()
    np.testing.assert_allclose(statistics.second_moments, x.T @ x, atol=1e-4 * largest)
    np.testing.assert_allclose(
        statistics.cross_moments, x.T @ (y - x), atol=1e-4 * largest
    )
    return x, y


@pytest.mark.parametrize(
    "path",
    ["model.layers.1.self_attn.o_proj", "model.layers.2.mlp.down_proj", "lm_head"],
)
def test_moments_use_inputs_of_the_partly_quantized_model(plain, path):
    method = plain[0]
    x, y = assert_moments(method, path)
    assert method.statistics[path].counts.item() == TOKENS.size
    assert np.abs(x.T @ (y - x)).max() > 1e-2 * np.abs(x.T @ x).max()


@pytest.mark.parametrize(
    ("path", "norm"),
    [
        ("self_attn.o_proj", "input_layernorm"),
        ("mlp.down_proj", "post_attention_layernorm"),
    ],
)
def test_residual_moments_hold_the_error_of_the_residual_stream(plain, path, norm):
    method = plain[0]
    path, norm = (f"model.layers.1.{name}" for name in (path, norm))
    quantized = method.quantized_before(path)
    x = rows_of(model_of(), path, quantized)
    error = rows_of(model_of(), norm) - rows_of(model_of(), norm, quantized)
    expected = error.T @ x
    largest = np.abs(expected).max()
    assert largest > 1e-2 * np.abs(x.T @ x).max()
    statistics = method.statistics[path]
    np.testing.assert_allclose(
        statistics.residual_moments, expected, atol=1e-3 * largest
    )
    assert 0 < statistics.correction_strength[path] <= 1
    # All other layers feed another layer and not the residual stream.
    assert residual_writers(method) == {
        f"model.layers.{n}.{layer}"
        for n in range(3)
        for layer in ("self_attn.o_proj", "mlp.down_proj")
    }


def residual_writers(method) -> set[str]:
    items = method.statistics.items()
    return {path for path, s in items if s and s.residual_moments is not None}


@pytest.mark.parametrize(
    ("compute", "has_post_norm"),
    [(mx.float16, False), (mx.bfloat16, False), (mx.float16, True)],
)
def test_layers_before_a_norm_are_no_residual_writers(tmp_path, compute, has_post_norm):
    """Gemma normalizes a layer output before the addition. Hidden states are large."""
    method, gemma = RecordingRTN(), {"model_type": "gemma2"}
    gemma |= {"query_pre_attn_scalar": 64, "final_logit_softcapping": 30.0}
    gemma |= {"attn_logit_softcapping": 50.0}
    model = model_of(**gemma if has_post_norm else {})
    embedding = model.model.embed_tokens
    embedding.weight = 1000 * embedding.weight
    method.run(model, tmp_path, compute=compute)
    ends = ("o_proj", "down_proj")
    expected = {path for path in method.statistics if path.endswith(ends)}
    assert len(expected) == 2 * 3
    assert residual_writers(method) == (set() if has_post_norm else expected)


def test_tied_embedding_is_quantized_once_before_the_blocks(tmp_path):
    """Without statistics, unless a method weighs it."""
    method, path = RecordingRTN(weighs_embeddings=False), "model.embed_tokens"
    tensors = method.run(model_of(tie_word_embeddings=True), tmp_path)
    assert next(iter(method.statistics.items())) == (path, None)
    assert f"{path}.scales" in tensors
    assert len(method.statistics) == 1 + 7 * 3
    for name in ("model.layers.0.self_attn.q_proj", "model.layers.2.mlp.down_proj"):
        assert_moments(method, name, lambda: model_of(tie_word_embeddings=True))


def test_without_cross_moments_there_is_no_full_stream(plain, tmp_path):
    with_cross, without_cross = plain[0], RecordingRTN(needs_cross_moments=False)
    without_cross.run(model_of(), tmp_path)
    for path, statistics in with_cross.statistics.items():
        if statistics is not None:
            # The order of the sums is different.
            actual = without_cross.statistics[path].second_moments
            expected = statistics.second_moments
            atol = 1e-6 * mx.abs(expected).max().item()
            assert mx.allclose(actual, expected, atol=atol)
            assert without_cross.statistics[path].cross_moments is None
    assert not list(tmp_path.glob("pipeline/*/stream-full-*"))


def test_layer_that_is_called_twice_receives_both_inputs(tmp_path):
    def make_model():
        model = model_of()
        mlp = model.model.layers[1].mlp

        class CallsTwice(type(mlp)):
            def __call__(self, x):
                return super().__call__(x) + 0.5 * super().__call__(0.25 * x)

        mlp.__class__ = CallsTwice
        return model

    method = RecordingRTN()
    method.run(make_model(), tmp_path)
    path = "model.layers.2.self_attn.q_proj"
    before = list(method.statistics)[: list(method.statistics).index(path)]
    x = rows_of(make_model(), path, before)
    moments = method.statistics[path].second_moments
    np.testing.assert_allclose(moments, x.T @ x, atol=1e-4 * np.abs(x.T @ x).max())


def test_experts_have_moments_of_their_inputs(tmp_path):
    method = RecordingRTN()
    model = model_of(QWEN3_MOE)
    method.run(model, tmp_path)
    path = "model.layers.0.mlp.switch_mlp.down_proj"
    before = list(method.statistics)[: list(method.statistics).index(path)]
    x, experts, *_ = inputs_of(model_of(QWEN3_MOE), path, before)
    x = np.array(mx.broadcast_to(x.squeeze(-2), (*experts.shape, x.shape[-1])))
    x, experts = x.reshape(-1, x.shape[-1]).astype(np.float64), np.array(experts)
    statistics = method.statistics[path]
    assert statistics.cross_moments is None
    assert statistics.counts.sum().item() == experts.size
    for number, moments in enumerate(statistics.second_moments):
        rows = x[experts.reshape(-1) == number]
        assert statistics.counts[number].item() == len(rows)
        np.testing.assert_allclose(moments, rows.T @ rows, atol=1e-4)


def test_experts_leave_out_tokens_that_do_not_count(tmp_path):
    """mlx-lm sorts many rows by expert, so that they are not in the order of tokens."""
    lengths = np.array([3, 24, 10, 17, 6, 12])[:, None]
    counted = np.arange(TOKENS.shape[1]) < lengths
    method = RecordingRTN()
    method.run(model_of(QWEN3_MOE), tmp_path, counted=counted)
    path = "model.layers.0.mlp.switch_mlp.up_proj"
    before = method.quantized_before(path)
    x, indices = inputs_of(model_of(QWEN3_MOE), path.rpartition(".")[0], before)
    x = np.array(x, np.float64).reshape(-1, x.shape[-1])
    indices = np.array(indices).reshape(len(x), -1)
    assert indices.size > 64
    visible = np.array(counted).reshape(-1)
    statistics = method.statistics[path]
    for number, moments in enumerate(statistics.second_moments):
        rows = x[visible & (indices == number).any(axis=1)]
        assert statistics.counts[number].item() == len(rows)
        np.testing.assert_allclose(moments, rows.T @ rows, atol=1e-4)


def test_killed_run_resumes_at_its_block(plain, killed, tmp_path):
    expected = plain[1]
    shutil.copytree(killed / "pipeline", tmp_path / "pipeline")
    second = RecordingRTN()
    tensors = second.run(model_of(), tmp_path)
    last = ("model.layers.2", "lm_head", "model.embed_tokens")
    assert all(path.startswith(last) for path in second.statistics)
    assert tensors.keys() == expected.keys()
    assert all(mx.array_equal(tensors[name], expected[name]) for name in expected)
    third = RecordingRTN()
    third.run(model_of(), tmp_path)
    assert not third.statistics
    third.run(model_of(), tmp_path, key="other")
    assert len(third.statistics) == 23


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The state of a run that was killed in the last block."""
    folder = tmp_path_factory.mktemp("killed")
    with pytest.raises(KeyboardInterrupt):
        RecordingRTN("model.layers.2.mlp.up_proj").run(model_of(), folder)
    return folder


def assert_starts_over(folder, expected, capsys):
    method = RecordingRTN()
    tensors = method.run(model_of(), folder)
    assert len(method.statistics) == 23
    assert tensors.keys() == expected.keys()
    assert all(mx.array_equal(tensors[name], expected[name]) for name in expected)
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith(
        f"{folder / 'pipeline'}: damaged or of other settings, quantizing again from "
        "the first block"
    )


def artifact(folder, name):
    """The folder of `<kind>/<name>` in the state of a run."""
    kind, name = name.split("/")
    [found] = (folder / "pipeline" / kind).glob(f"*-{name}/content")
    return found


@pytest.mark.parametrize("part", ["streams/2", "tensors/1", "tensors/embeddings"])
def test_damaged_state_is_not_used(plain, killed, tmp_path, part, capsys):
    """The newest streams, finished layers and statistics: all are read again."""
    shutil.copytree(killed / "pipeline", tmp_path / "pipeline")
    DAMAGES["flip"](artifact(tmp_path, part))
    assert_starts_over(tmp_path, plain[1], capsys)


def test_damaged_head_is_made_again(plain, tmp_path):
    _, expected, folder = plain
    shutil.copytree(folder / "pipeline", tmp_path / "pipeline")
    DAMAGES["flip"](artifact(tmp_path, "tensors/head"))
    method = RecordingRTN()
    tensors = method.run(model_of(), tmp_path)
    assert [*method.statistics] == ["lm_head"]
    assert all(mx.array_equal(tensors[name], expected[name]) for name in expected)


def test_lost_statistics_are_not_ignored(tmp_path, capsys):
    """Without them a layer would be quantized as if all outputs were equal."""
    method = RecordingRTN("model.layers.1.mlp.up_proj", weighs_outputs=True)
    with pytest.raises(KeyboardInterrupt):
        method.run(model_of(), tmp_path)
    [*_, last] = sorted(artifact(tmp_path, "tensors/embeddings").glob("fisher-*"))
    last.unlink()
    again = RecordingRTN(weighs_outputs=True)
    again.run(model_of(), tmp_path)
    assert len(again.statistics) == 23
    assert "quantizing again" in capsys.readouterr().err


def test_model_is_restored_and_old_streams_are_deleted(tmp_path):
    model, original_model = model_of(), model_of()
    RecordingRTN().run(model, tmp_path)
    assert all(
        mx.array_equal(value, original)
        for (_, value), (_, original) in zip(
            tree_flatten(model.parameters()),
            tree_flatten(original_model.parameters()),
            strict=True,
        )
    )
    streams = [*(tmp_path / "pipeline").rglob("stream-*")]
    assert {path.parent for path in streams} == {artifact(tmp_path, "streams/3")}
    assert {path.name for path in streams} == {
        f"stream-{name}-{shard:04d}.safetensors"
        for name in ("full", "quantized")
        for shard in range(2)
    }


def test_model_that_is_no_sequence_of_blocks_is_refused(tmp_path):
    model = model_of()

    class Skipping(type(model.model)):
        def __call__(self, inputs, cache=None, **options):
            first = super().__call__(inputs, cache, **options)
            return first + 0.1 * super().__call__(inputs, cache, **options)

    model.model.__class__ = Skipping
    model.model.layers = model.model.layers[:1] * 2 + model.model.layers[1:]
    with pytest.raises(UserError, match="one by one"):
        RecordingRTN().run(model, tmp_path)


def test_one_block_is_in_memory_at_a_time(make_checkpoint, tmp_path):
    source = make_checkpoint(num_hidden_layers=20, dtype="float32")
    loaded = load(source, lazy=True)
    size = sum(v.nbytes for _, v in tree_flatten(loaded.model.parameters()))

    def peak_memory(folder, reread):
        model = load(source, lazy=True).model
        method = RecordingRTN(needs_cross_moments=False)
        method.statistics = DiscardingDict()
        before = active_memory()
        method.run(model, folder, reread=reread)
        return mx.get_peak_memory() - before

    assert peak_memory(tmp_path / "reread", loaded.reread) < size / 3
    assert peak_memory(tmp_path / "in-memory", None) > size


class DiscardingDict(dict):
    """Stores nothing."""

    def __setitem__(self, key, value):
        pass


def test_tokens_are_weighted_by_their_gradients(tmp_path):
    """The reference is the full model, so no quantized layer precedes the group."""
    counted = np.array(mx.random.bernoulli(0.3, TOKENS.shape, key=mx.random.key(2)))
    counted[:, -1] = True
    model, method = model_of(), RecordingRTN(weighs_outputs=True)
    grid = GRID.model_copy(update={"overrides": {"*.embed_tokens": "skip"}})
    method.run(model, tmp_path, shard_size=1, grid=grid, counted=counted)
    model = model_of()
    group = [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"]
    norms = sum(
        np.square(gradients_of(model, path, TOKENS, mx.array(counted))).sum(axis=1)
        for path in group
    )
    counts, norms = counted.reshape(-1), norms.reshape(-1)
    means = np.where(counts, norms[counts].mean(), norms[~counts].mean())
    weights = (norms + means) / 2
    weights /= weights.mean()
    x = model.layers[0].input_layernorm(model.model.embed_tokens(TOKENS))
    x = np.array(x, np.float64).reshape(-1, x.shape[-1])
    expected = x.T @ np.diag(weights) @ x
    moments = method.statistics[group[0]].second_moments
    largest = np.abs(expected).max()
    np.testing.assert_allclose(moments, expected, atol=1e-3 * largest)
    # Unweighted moments differ.
    assert np.abs(x.T @ x - expected).max() > 0.05 * largest

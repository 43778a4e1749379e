"""`--dry-run` shows the model, the data and the cost, and refuses what does not fit."""

import gc
import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from lmx import cpu
from lmx.cli import main
from lmx.config.model import ScratchModelConfig
from lmx.config.quant_spec import QuantizationConfig
from lmx.config.quantize import GPTQConfig
from lmx.config.train import TeacherConfig, TrainConfig
from lmx.data.batching import Batch
from lmx.data.record_formats import DataRecord
from lmx.models import checkpoint_writer, from_scratch
from lmx.models.loader import build_model, set_compute_dtype
from lmx.models.lora import lora_model
from lmx.pipeline import dry_run, resources
from lmx.pipeline.estimate import (
    BatchShape,
    ModelShape,
    Workload,
)
from lmx.pipeline.plan import load, plan
from lmx.pipeline.quantize.estimate import QuantizeCost
from lmx.pipeline.train.estimate import training_cost
from lmx.pipeline.work import Work
from lmx.quantization.packing import dequantize, pack
from lmx.quantization.qat.fake_quant import FakeQuant
from lmx.quantization.target_layers import select_layers
from lmx.run.fs import free_bytes
from lmx.training.chunked_loss import ChunkedLoss
from lmx.training.optimizers import OptimizerConfig
from lmx.training.step import TrainStep
from mlx.utils import tree_flatten
from tiny_checkpoints import QWEN3_MOE

SHAPE = ScratchModelConfig(
    vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2
)
CHAT = {
    "messages": [
        {"role": "user", "content": "count to three"},
        {"role": "assistant", "content": "one two three"},
    ]
}
RECIPE = """\
model: tiny
data: {train: rows.jsonl, max_seq_length: 64}
stages:
  - train:
      adapter: {rank: 4}
      qat: {bits: 4, group_size: 64}
      epochs: 2
      batch_size: 2
  - evaluate:
  - export:
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = folder.parent / "tokenizer"
    for path in (folder, tokenizer):
        path.mkdir()
    from_scratch.train_tokenizer(["count to three, one two three"] * 3, 320, tokenizer)
    config = from_scratch.llama_config(SHAPE)
    weights = from_scratch.initial_weights(config, 0)
    checkpoint_writer.write_checkpoint(folder, weights, config, companions=tokenizer)
    return folder


@pytest.fixture
def workspace(model, tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").symlink_to(model)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    long_completion = json.loads(json.dumps(CHAT).replace("one two", "one two " * 60))
    long_prompt = json.loads(json.dumps(CHAT).replace("count", "count " * 80))
    records = [CHAT] * 6 + [long_completion, long_prompt, {"messages": "none"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return tmp_path


@pytest.mark.parametrize("count", [1, 5, 99, 10_000])
def test_reservoir_samples_every_nth_example(count, monkeypatch):
    monkeypatch.setattr(dry_run, "SAMPLE_CHARACTERS", 600)
    sample = dry_run.RowReservoir()
    for number in range(count):
        sample.add(DataRecord(str(number), text="x" * 10))
        assert len(sample.rows) <= 60
    positions = [int(record.where) for record in sample.rows]
    assert sample.total == count
    assert positions == list(range(0, count, positions[1] if count > 1 else 1))
    assert len(positions) >= min(count, 30)


def test_reservoir_takes_an_oversized_example():
    sample = dry_run.RowReservoir()
    sample.add(DataRecord("f:1", text="x" * (dry_run.SAMPLE_CHARACTERS + 1)))
    assert len(sample.rows) == 1


def test_dry_run_shows_model_data_and_plan(workspace, capsys):
    assert main.train(["recipe.yaml", "--dry-run"]) == 0
    output = capsys.readouterr().out
    for expected in (
        "llama, 90,432 parameters, 181 kB, vocabulary 320",
        "13 of 15 layers are quantized",
        "its width 96 is not a multiple of 64: model.layers.0.mlp.down_proj",
        "rows.jsonl: 8 examples, format chat",
        "rows.jsonl:9: example skipped: ",
        "8 of 8 examples tokenized: 7 sequences of ",
        "1 truncated, 1 skipped",
        "skipped: rows.jsonl:8: ",
        "count to three<|im_end|>\n",
        "⟦one two three<|im_end|>⟧",
        "1-train: tiny, rows.jsonl -> exports/recipe/stages/1-train",
        " for 7 steps\n",
        "disk     needs ",
    ):
        assert expected in output
    assert not (workspace / "exports").exists()


def test_dry_run_of_scratch_model_assumes_lengths(workspace, capsys):
    arguments = [
        "model={from_scratch: {vocab_size: 320, hidden_size: 64}}",
        "stages.train.adapter=null",
    ]
    assert main.train(["recipe.yaml", "--dry-run", *arguments]) == 0
    output = capsys.readouterr().out
    assert "its tokenizer is trained at the start of the run" in output
    assert "assume 3 characters per token" in output
    assert "one two three" in output


def test_dry_run_skips_hub_models(workspace, capsys):
    assert main.train(["recipe.yaml", "--dry-run", "model=org/model"]) == 0
    output = capsys.readouterr().out
    assert "org/model: not on this disk" in output
    assert "rows.jsonl: 8 examples" in output


@pytest.mark.parametrize("limit", ["memory", "disk"])
def test_run_that_does_not_fit_exits_3_unless_limits_are_ignored(
    workspace, capsys, monkeypatch, limit
):
    if limit == "memory":
        monkeypatch.setattr(resources, "memory_limit", lambda: 1000)
    else:
        monkeypatch.setattr(resources, "free_bytes", lambda folder: 1000)
    assert main.train(["recipe.yaml", "--dry-run"]) == 3
    error = capsys.readouterr().err
    assert limit in error
    assert "--ignore-limits" in error
    if limit == "memory":
        assert "stages.1.train.gradient_checkpointing=true or " in error
        half = (
            "stages.1.train.batch_size=1 stages.1.train.gradient_accumulation_steps=2"
        )
        assert f"{half} or data.max_seq_length=32" in error
    assert main.train(["recipe.yaml", "--dry-run", "--ignore-limits"]) == 0


@pytest.mark.parametrize("words", [3, 2000], ids=["short", "one is long"])
def test_run_is_refused_if_and_only_if_its_dry_run_is(
    workspace, monkeypatch, capsys, words
):
    """Examples are shorter than max_seq_length; the long one is not sampled."""
    monkeypatch.setattr(dry_run, "SAMPLE_CHARACTERS", 100)
    rows = [{"prompt": "count", "completion": "one " * n} for n in [3, words, 3, 3]]
    (workspace / "rows.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in rows))
    stages = "stages=[{train: {steps: 1, batch_size: 2, adapter: {rank: 4}}}]"
    arguments = ["recipe.yaml", "data.max_seq_length=2000", stages]
    monkeypatch.setattr(resources, "memory_limit", lambda: 20_000_000)
    expected = 3 if words > 3 else 0
    assert main.train([*arguments, "--dry-run"]) == expected
    assert main.train([*arguments, "--quiet"]) == expected
    assert (workspace / "exports").exists() == (expected == 0)


def test_run_with_data_on_the_hub_is_refused_by_max_seq_length(
    workspace, monkeypatch, capsys
):
    monkeypatch.setattr(resources, "memory_limit", lambda: 20_000_000)
    arguments = ["recipe.yaml", "data.max_seq_length=2000", "data.train=org/data"]
    assert main.train([*arguments, "data.valid=rows.jsonl"]) == 3


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("rows.jsonl", "", "the source has no examples"),
        ("rows.jsonl", '{"messages": [}\n', "rows.jsonl:1"),
        ("rows.jsonl", '{"colour": "red"}\n', "no dataset format matches"),
    ],
)
def test_unusable_data_exits_2(workspace, capsys, file, text, message):
    (workspace / file).write_text(text)
    assert main.train(["recipe.yaml", "--dry-run"]) == 2
    assert message in capsys.readouterr().err


def test_an_unknown_architecture_exits_2(workspace, capsys, model):
    unknown = workspace / "odd"
    unknown.mkdir()
    config = json.loads((model / "config.json").read_text())
    (unknown / "config.json").write_text(json.dumps(config | {"model_type": "abacus"}))
    (unknown / "model.safetensors").write_bytes(
        (model / "model.safetensors").read_bytes()
    )
    assert main.train(["recipe.yaml", "--dry-run", "model=odd"]) == 2
    assert "no model type 'abacus'" in capsys.readouterr().err


def model_shape(shape: ScratchModelConfig) -> ModelShape:
    config = from_scratch.llama_config(shape)
    return ModelShape(config, 2 * ModelShape(config, 0).parameters)


LOW_MEMORY = {"gradient_checkpointing": True, "loss_chunk_tokens": 64}


@pytest.mark.parametrize("adapter", [None, {"rank": 4}], ids=["full", "lora"])
@pytest.mark.parametrize(
    "settings",
    [
        {"loss_chunk_tokens": None},
        {"loss_chunk_tokens": None, "gradient_checkpointing": True},
        {"loss_chunk_tokens": 64},
        LOW_MEMORY,
        LOW_MEMORY | {"gradient_accumulation_steps": 2},
        LOW_MEMORY | {"optimizer": "lion"},
        LOW_MEMORY | {"optimizer": "adamw_8bit"},
        LOW_MEMORY | {"optimizer": "lion_8bit"},
    ],
    ids=str,
)
def test_training_cost_memory_is_near_measured_peak(adapter, settings):
    # Estimates assume the CPU functions of loaded models.
    cpu.enable()
    shape = ScratchModelConfig(
        vocab_size=2048, hidden_size=128, intermediate_size=256, num_hidden_layers=4
    )
    config = TrainConfig(adapter=adapter, steps=1, batch_size=4, **settings)
    estimate = training_cost(model_shape(shape), config, BatchShape(128, 512, 512), 4)
    step = make_step(shape, config)
    assert sum(v.size for v in step.parameters.values()) == estimate.trained
    tokens = mx.array(np.random.default_rng(0).integers(0, 2048, (4, 129)), mx.int32)
    batch = Batch(tokens, mx.ones((4, 128), mx.bool_), ())
    # Garbage of other tests would otherwise be freed during the measurement.
    gc.collect()
    before = mx.get_active_memory()
    model_bytes = sum(v.nbytes for _, v in tree_flatten(step.model.parameters()))
    mx.reset_peak_memory()
    for seed in range(2):
        outputs = step([batch] * config.gradient_accumulation_steps, 1e-3, seed)
        mx.eval(outputs, step.parameters, step.optimizer.state)
    optimizer_bytes = sum(v.nbytes for _, v in tree_flatten(step.optimizer.state))
    peak = mx.get_peak_memory() - before + optimizer_bytes + model_bytes
    assert 0.6 < sum(estimate.memory.values()) / peak < 1.6


@pytest.mark.parametrize(
    ("adapter", "quantizer", "from_codes"),
    [
        ({"rank": 4}, "minmax", False),
        ({"rank": 4}, "lsq", False),
        ({"rank": 4}, "fixed_scale", True),
        (None, "minmax", False),
        (None, "lsq", True),
    ],
)
def test_training_cost_memory_with_fake_quantizers(adapter, quantizer, from_codes):
    """Of so few tokens that most of the memory is weights."""
    cpu.enable()
    shape = ScratchModelConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4
    )
    qat = {"bits": 4, "quantizer": quantizer}
    config = TrainConfig(
        adapter=adapter, qat=qat, steps=1, batch_size=1, loss_chunk_tokens=None
    )
    shapes, batch_shape = model_shape(shape), BatchShape(8, 8, 8)
    gc.collect()
    start = mx.get_active_memory()
    network = build_model(shapes.config)
    network.set_dtype(mx.float16)
    specs, packed = select_layers(network, config.qat).specs, None
    if from_codes:
        packed = {}
        modules = dict(network.named_modules())
        for path, spec in specs.items():
            layer = modules[path]
            packed[path] = pack(layer.weight, spec, mx.float16)
            layer.weight = dequantize(packed[path], spec, mx.float32)
        network.set_dtype(mx.float32)
        shapes = shapes.quantized(specs)
    mx.eval(network.parameters(), packed)
    # A stage keeps the weights that it began with.
    initial = dict(tree_flatten(network.parameters()))
    if adapter:
        lora_model.attach(network, config.adapter, seed=0, merged=True)
    fake_quant = FakeQuant(network, specs, mx.float16, config.qat, packed)
    set_compute_dtype(network, mx.float32)
    step = TrainStep(network, OptimizerConfig(), fake_quant=fake_quant)
    batch = Batch(mx.ones((1, 9), mx.int32), mx.ones((1, 8), mx.bool_), ())
    mx.reset_peak_memory()
    for seed in range(2):
        outputs = step(batch, 1e-3, seed)
        mx.eval(outputs, step.parameters, step.optimizer.state)
    peak = mx.get_peak_memory() - start
    assert initial
    cost = training_cost(shapes, config, batch_shape, 4)
    assert sum(v.size for v in step.parameters.values()) == cost.trained
    assert 0.8 < sum(cost.memory.values()) / peak < 1.2


@pytest.mark.parametrize("grid", [{"mode": "mxfp8"}, {"bits": 4}], ids=str)
def test_training_cost_memory_of_an_adapter_on_codes(grid):
    """Of so few tokens that most of the memory is weights."""
    shape = ScratchModelConfig(
        vocab_size=320, hidden_size=512, intermediate_size=1024, num_hidden_layers=6
    )
    config = TrainConfig(
        adapter={"rank": 4}, steps=1, batch_size=4, loss_chunk_tokens=None
    )
    dense = model_shape(shape)
    gc.collect()
    start = mx.get_active_memory()
    network = build_model(dense.config)
    network.set_dtype(mx.float16)
    spec = QuantizationConfig(**grid)
    shapes = dense.quantized(select_layers(network, spec).specs)
    nn.quantize(network, spec.group_size, spec.bits, mode=spec.mode)
    cpu.enable(network)
    mx.eval(network.parameters())
    # A stage keeps the weights that it began with.
    initial = dict(tree_flatten(network.parameters()))
    assert sum(value.nbytes for value in initial.values()) == shapes.bytes
    lora_model.attach(network, config.adapter, seed=0)
    set_compute_dtype(network, mx.float32)
    step = TrainStep(network, OptimizerConfig())
    batch = Batch(mx.ones((4, 9), mx.int32), mx.ones((4, 8), mx.bool_), ())
    mx.reset_peak_memory()
    for seed in range(2):
        outputs = step(batch, 1e-3, seed)
        mx.eval(outputs, step.parameters, step.optimizer.state)
    peak = mx.get_peak_memory() - start
    cost = training_cost(shapes, config, BatchShape(8, 32, 32), 4).memory
    # At the end, the fused model is loaded.
    assert cost["step"] == 4 * dense.parameters
    # Before, the backward pass needs the inputs and outputs of 32 tokens.
    matrices = tree_flatten(dense.model().parameters())
    values = sum(sum(value.shape) for _, value in matrices if value.ndim == 2)
    estimate = cost["weights"] + cost["optimizer"] + 4 * 32 * values
    assert 0.8 < estimate / peak < 1.2
    # Dequantized weights that stay would take 4 bytes per weight.
    assert peak < 2.5 * dense.parameters


@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_training_cost_counts_8_bit_moments(name):
    shape = ScratchModelConfig(
        vocab_size=2048, hidden_size=128, intermediate_size=250, num_hidden_layers=2
    )
    estimates, moments = [], []
    for optimizer in (name, f"{name}_8bit"):
        config = TrainConfig(steps=1, batch_size=1, optimizer=optimizer)
        cost = training_cost(model_shape(shape), config, BatchShape(8, 8, 8), 4)
        estimates.append(cost.memory["optimizer"] - 4 * cost.trained)
        state = tree_flatten(make_step(shape, config).optimizer.state)
        moments.append(sum(value.nbytes for _, value in state if value.ndim))
    assert estimates == moments
    assert moments[1] < 0.26 * moments[0]


def make_step(shape, config) -> TrainStep:
    network = build_model(from_scratch.llama_config(shape))
    if config.adapter:
        lora_model.attach(network, config.adapter, seed=0)
    chunk = config.loss_chunk_tokens
    return TrainStep(
        network,
        OptimizerConfig(config.optimizer),
        gradient_checkpointing=config.gradient_checkpointing,
        chunked_loss=ChunkedLoss(network, chunk) if chunk else None,
    )


def test_training_cost_of_options():
    def estimate(**settings):
        config = TrainConfig(steps=1, batch_size=8, **settings)
        return training_cost(model_shape(SHAPE), config, BatchShape(64, 512, 512), 4)

    plain, checkpointed, accumulated = (
        estimate(),
        estimate(gradient_checkpointing=True),
        estimate(gradient_accumulation_steps=4),
    )
    assert 1.2 < checkpointed.step.trained / plain.step.trained < 1.4
    assert accumulated.step == plain.step * 4
    added = sum(accumulated.memory.values()) - sum(plain.memory.values())
    assert added == 4 * plain.trained
    assert estimate(optimizer="sgd").memory["optimizer"] == 8 * plain.trained
    online, offline = (
        estimate(teacher=TeacherConfig()),
        estimate(teacher=TeacherConfig(offline=True)),
    )
    assert online.memory == plain.memory | {"teacher": 4 * plain.parameters}
    # In every second step.
    rollouts = {"num_generations": 4, "max_tokens": 16, "num_iterations": 2}
    sampling = estimate(teacher=TeacherConfig(), rollouts=rollouts)
    assert online.step == plain.step + Work(forward=online.step.forward)
    assert 0.25 < online.step.forward / plain.step.trained < 0.4
    per_token = online.step.forward / 512
    assert sampling.step.generated == pytest.approx(per_token * 8 * 4 * 16 / 2)
    assert offline == plain


def test_training_cost_with_fsdp_divides_shards(monkeypatch):
    def estimate(shard):
        config = TrainConfig(steps=1, batch_size=8, fsdp=shard)
        return training_cost(model_shape(SHAPE), config, BatchShape(64, 512, 512), 2)

    plain, single = estimate(False), estimate(True)
    assert single.memory == plain.memory
    monkeypatch.setattr("lmx.pipeline.train.estimate.process_count", lambda: 4)
    assert estimate(False).memory == plain.memory
    sharded = estimate(True).memory
    assert sharded["optimizer"] == plain.memory["optimizer"] // 4
    stored = model_shape(SHAPE).bytes + 4 * plain.trained
    saved = plain.memory["weights"] - sharded["weights"]
    assert saved == pytest.approx(0.75 * stored, abs=1)


def test_loss_chunk_auto_depends_on_logits():
    config = TrainConfig(steps=1, batch_size=8)
    assert config.chunk(vocabulary=32768, tokens=4096, on_cpu=False) == 512
    assert config.chunk(vocabulary=32768, tokens=4095, on_cpu=False) is None
    assert config.chunk(vocabulary=1 << 20, tokens=4096, on_cpu=False) == 64
    explicit = TrainConfig(steps=1, batch_size=8, loss_chunk_tokens=7)
    assert explicit.chunk(vocabulary=8, tokens=8, on_cpu=False) == 7
    disabled = TrainConfig(steps=1, batch_size=8, loss_chunk_tokens=None)
    assert disabled.chunk(vocabulary=1 << 20, tokens=1 << 20, on_cpu=False) is None
    # Small chunks stay in the CPU caches.
    assert config.chunk(vocabulary=32768, tokens=64, on_cpu=True) == 128


def test_training_cost_is_six_operations_per_parameter_and_token():
    shape = ScratchModelConfig(
        vocab_size=320,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=64,
    )
    estimate = training_cost(
        model_shape(shape), TrainConfig(steps=1, batch_size=1), BatchShape(8, 8, 8.0), 4
    )
    norms = 3 * 64
    attention = 12 * 8 * 64
    assert estimate.step.trained == (6 * (estimate.parameters - norms) + attention) * 8


def test_quantize_stage_has_time_memory_and_disk(model, tmp_path, capsys):
    times = {}
    for effort in ("fast", "standard"):
        path = tmp_path / f"{effort}.yaml"
        recipe = {
            "model": str(model),
            "stages": [{"quantize": {"method": "gptq", "effort": effort}}],
        }
        path.write_text(json.dumps(recipe))
        loaded = load(path, [])
        check = resources.ResourceCheck(
            loaded, plan(loaded), resources.model_shape(loaded), [], 1.0
        )
        (needs,) = check.stages.values()
        times[effort] = needs.work
        assert needs.disk > 0 < sum(needs.memory.values())
        lines = [f"{topic}: {text}" for topic, text in check.lines()]
        assert [line.partition(":")[0] for line in lines[:3]] == [
            "memory",
            "time",
            "disk",
        ]
    assert times["fast"].forward < times["standard"].forward


def test_quantize_time_counts_the_experts_that_a_token_sees():
    network = build_model(QWEN3_MOE)
    specs = select_layers(network, QuantizationConfig(bits=4, group_size=32)).specs
    config = GPTQConfig(bits=4, group_size=32)
    one, every = (
        QuantizeCost(config, network, specs, mx.float16, experts).work.forward
        for experts in (1, 0)
    )
    assert one < 0.9 * every


@pytest.mark.slow
def test_memory_of_scale_tuning_is_near_the_measured_peak(model, tmp_path):
    """Most of it is that of logits."""
    shape = from_scratch.llama_config(
        ScratchModelConfig(
            vocab_size=4096, hidden_size=512, intermediate_size=768, num_hidden_layers=2
        )
    )
    folder, weights = tmp_path / "model", from_scratch.initial_weights(shape, 0)
    folder.mkdir()
    checkpoint_writer.write_checkpoint(
        folder, weights, shape, companions=model.parent / "tokenizer"
    )
    calibration = {"dataset": "builtin:stdlib", "max_seq_length": 256}
    calibration |= {"num_tokens": 1024, "num_eval_tokens": 256}
    tuning = {"steps": 1, "batch_tokens": 1024, "learning_rate": 1e-3}
    block = {"method": "gptq", "effort": "fast", "scale_tuning": tuning}
    quantize = block | {"bits": 4, "calibration": calibration}
    recipe = {"model": str(folder), "stages": [{"quantize": quantize}]}
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(recipe | {"output": str(tmp_path / "run")}))
    loaded = load(path, [])
    check = resources.ResourceCheck(
        loaded, plan(loaded), resources.model_shape(loaded), [], 1.0
    )
    (needs,) = check.stages.values()
    gc.collect()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    assert main.train([str(path), "--quiet"]) == 0
    peak = mx.get_peak_memory() - before
    assert 0.67 < sum(needs.memory.values()) / peak < 1.5


@pytest.mark.parametrize(
    ("sizes", "grid"),
    [
        (from_scratch.llama_config(SHAPE), {"bits": 4, "group_size": 32}),
        (QWEN3_MOE, {"mode": "nvfp4", "global_scale": True}),
    ],
    ids=["affine", "global_scale"],
)
def test_quantized_bytes_are_the_bytes_written(sizes, grid):
    shape = ModelShape(sizes, 2 * ModelShape(sizes, 0).parameters)
    grid = QuantizationConfig(**grid)
    network = build_model(shape.config)
    network.set_dtype(mx.float16)
    specs = select_layers(network, grid).specs
    modules = dict(network.named_modules())
    written = sum(
        value.nbytes
        for path, spec in specs.items()
        for value in pack(modules[path].weight, spec, mx.float16).values()
    )
    quantized = {f"{path}.weight" for path in specs}
    remaining = tree_flatten(network.parameters())
    written += sum(value.nbytes for name, value in remaining if name not in quantized)
    assert shape.quantized(specs).bytes == written


def test_epochs_have_as_many_steps_for_every_loss(workspace, model):
    workload = Workload(
        model_shape(SHAPE), mx.float16, [20] * 40, 64, 40, lambda _: None
    )

    def steps(*overrides: str) -> int:
        [first, *_] = plan(load("recipe.yaml", list(overrides))).stages
        return first.stage.resources(workload, workload.shape).steps

    rollouts = "stages.train.rollouts={num_generations: 4}"
    grpo = "stages.train.loss={type: grpo, rewards: [exact_match]}"
    # 40 examples in batches of 2, twice.
    assert steps() == 40
    pairs = "data.train=pairs.jsonl"
    pair = {"prompt": "1 + 1?", "chosen": "2", "rejected": "3"}
    (workspace / "pairs.jsonl").write_text(json.dumps(pair))
    assert steps(pairs, "stages.train.loss={type: dpo}") == 40
    assert steps(rollouts, grpo) == 40


def test_disk_estimate_has_artifacts_and_checkpoints(workspace):
    shape = model_shape(SHAPE)
    workload = Workload(shape, mx.float16, [64], 64, 0, lambda name: None)

    def disk(*overrides: str) -> tuple[int, int]:
        stages = plan(load("recipe.yaml", ["stages.train.qat=null", *overrides])).stages
        needs = [each.stage.resources(workload, shape) for each in stages]
        return sum(need.disk for need in needs), needs[0].training.trained

    # The trained model, its published copy, and 3 checkpoints of 3 tensors each.
    needed, trained = disk()
    assert needed == 2 * shape.bytes + 36 * trained
    needed, _ = disk(
        "stages.train.save_total_limit=5", "stages.train.load_best_at_end=true"
    )
    assert needed == 2 * shape.bytes + 84 * trained


def test_free_bytes_uses_nearest_existing_folder(tmp_path):
    assert free_bytes(tmp_path / "not" / "yet") == free_bytes(tmp_path) > 0
    assert resources.memory_limit() > 1 << 20


def test_largest_batch_is_that_of_a_bucket(monkeypatch):
    """21 and 2 examples: batches of at most 8 are 3 x 7 of 256, and 2 of 512 tokens."""
    shape = model_shape(SHAPE)
    lengths = 21 * [256] + 2 * [512]

    def largest(examples, *sizes):
        workload = Workload(shape, mx.float16, lengths, 512, examples, lambda _: None)
        return workload.largest_batch(*sizes)

    assert largest(23, 8, None) == 7 * 256
    assert largest(23, None, 2048) == 7 * 256
    # Twice as many examples as in the sample: 4 of the longest.
    assert largest(46, 8, None) == 2048
    # Unknown: the longest examples may fill a batch.
    assert largest(0, 8, None) == 8 * 512
    assert largest(0, None, 100) == 512


def test_attention_scores_count_where_they_are_kept(monkeypatch):
    config, batch = TrainConfig(steps=1, batch_tokens=512), BatchShape(64, 512, 512)
    steps = []
    for value in (True, False):
        monkeypatch.setattr(cpu, "replaces_functions", lambda value=value: value)
        cost = training_cost(model_shape(SHAPE), config, batch, 4)
        steps.append(cost.memory["step"])
    heads = SHAPE.num_hidden_layers * SHAPE.num_attention_heads
    assert steps[1] - steps[0] == 4 * 512 * 2 * heads * 64

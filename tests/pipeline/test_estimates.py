"""Estimates of memory, work and disk: near measured peaks, exact where they can be."""

import json
from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from lmx import cpu
from lmx.config.draft import DraftConfig
from lmx.config.model import ScratchModelConfig
from lmx.config.quant_spec import QuantizationConfig
from lmx.config.quantize import AWQConfig, GPTQConfig
from lmx.config.train import TeacherConfig, TrainConfig
from lmx.data.batching import Batch
from lmx.models import from_scratch
from lmx.models.dtypes import set_compute_dtype
from lmx.models.loader import build_model
from lmx.models.lora import lora_model
from lmx.pipeline.draft.stage import DraftStage
from lmx.pipeline.estimate import BatchShape, Estimate, ModelShape, Workload
from lmx.pipeline.plan import load, plan
from lmx.pipeline.quantize.estimate import SOLVER_ARRAYS, estimate_quantization
from lmx.pipeline.train.estimate import training_cost
from lmx.pipeline.work import Work
from lmx.quantization.packing import dequantize, pack
from lmx.quantization.ptq.gptq.solver import MAX_ELEMENTS
from lmx.quantization.qat.fake_quant import FakeQuant
from lmx.quantization.target_layers import select_layers
from lmx.run.progress import readable_size
from lmx.training.chunked_loss import ChunkedLossModel
from lmx.training.optimizers import OptimizerConfig
from lmx.training.step import TrainStep
from memory_at_rest import active_memory
from mlx.utils import tree_flatten
from sized_models import SHAPE, sized
from tiny_checkpoints import QWEN3_MOE

DEEP = ScratchModelConfig(
    vocab_size=2048, hidden_size=128, intermediate_size=256, num_hidden_layers=8
)
RECIPE = """\
model: {from_scratch: {vocab_size: 320}}
data: {train: rows.jsonl, max_seq_length: 64}
stages: [{train: {epochs: 2, batch_size: 2}}, {export: }]
"""


def cost_of(compute: int = 4, processes: int = 1, **settings) -> Estimate:
    config = TrainConfig(**({"steps": 1, "batch_size": 8} | settings))
    batch = BatchShape(64, 512, 512)
    return training_cost(sized(), config, batch, compute, processes)


def train_steps(step: TrainStep, batch) -> None:
    """Two, from where the peak is measured."""
    mx.reset_peak_memory()
    for seed in range(2):
        outputs = step(batch, 1e-3, seed)
        mx.eval(outputs, step.parameters, step.optimizer.state)


def constant_batch(rows: int, length: int) -> Batch:
    tokens, mask = mx.ones((rows, length + 1), mx.int32), mx.ones((rows, length))
    return Batch(tokens, mask.astype(mx.bool_), ())


def make_step(shape: ScratchModelConfig, config: TrainConfig) -> TrainStep:
    network = build_model(from_scratch.llama_config(shape))
    if config.adapter:
        lora_model.attach(network, config.adapter, seed=0)
    chunk = config.loss_chunk_tokens
    return TrainStep(
        network,
        OptimizerConfig(config.optimizer),
        gradient_checkpointing=config.gradient_checkpointing,
        loss_model=ChunkedLossModel(network, chunk) if chunk else None,
    )


LORA = {"rank": 4}
ACCUMULATED = {"gradient_accumulation_steps": 2}
EIGHT_BIT = {"optimizer": "lion_8bit"}
LOW_MEMORY = {"gradient_checkpointing": True, "loss_chunk_tokens": 64}


@pytest.mark.fused
@pytest.mark.parametrize(
    ("adapter", "settings"),
    [
        (None, {"loss_chunk_tokens": None}),
        (LORA, {"loss_chunk_tokens": None, "gradient_checkpointing": True}),
        pytest.param(LORA, LOW_MEMORY | ACCUMULATED, marks=pytest.mark.slow),
        pytest.param(None, LOW_MEMORY | EIGHT_BIT, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_memory_is_near_the_measured_peak(adapter, settings):
    # Estimates assume the CPU functions of loaded models.
    cpu.enable()
    shape = DEEP.model_copy(update={"num_hidden_layers": 4})
    config = TrainConfig(adapter=adapter, steps=1, batch_size=4, **settings)
    estimate = training_cost(sized(shape), config, BatchShape(128, 512, 512), 4)
    step = make_step(shape, config)
    assert sum(v.size for v in step.parameters.values()) == estimate.trained
    tokens = mx.array(np.random.default_rng(0).integers(0, 2048, (4, 129)), mx.int32)
    batch = Batch(tokens, mx.ones((4, 128), mx.bool_), ())
    before = active_memory()
    model_bytes = sum(v.nbytes for _, v in tree_flatten(step.model.parameters()))
    train_steps(step, [batch] * config.gradient_accumulation_steps)
    optimizer_bytes = sum(v.nbytes for _, v in tree_flatten(step.optimizer.state))
    peak = mx.get_peak_memory() - before + optimizer_bytes + model_bytes
    assert 0.6 < estimate.memory / peak < 1.6


@pytest.mark.parametrize(
    ("adapter", "quantizer", "from_codes"),
    [
        ({"rank": 4}, "lsq", False),
        ({"rank": 4}, "fixed_scale", True),
        (None, "fixed_codes", True),
        (None, "minmax", False),
    ],
)
def test_memory_with_fake_quantizers(adapter, quantizer, from_codes):
    """Of so few tokens that most of the memory is weights."""
    cpu.enable()
    # A recipe need not repeat the grid of the codes.
    grid = QuantizationConfig(bits=4, group_size=32 if from_codes else 64)
    qat = {"quantizer": quantizer}
    config = TrainConfig(
        adapter=adapter, qat=qat, steps=1, batch_size=1, loss_chunk_tokens=None
    )
    shapes = sized(
        DEEP,
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
    )
    start = active_memory()
    network = build_model(shapes.config)
    network.set_dtype(mx.float16)
    specs, packed = select_layers(network, grid).specs, None
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
    initial |= fake_quant.codes
    set_compute_dtype(network, mx.float32)
    step = TrainStep(network, OptimizerConfig(), weight_transform=fake_quant)
    train_steps(step, constant_batch(1, 8))
    peak = mx.get_peak_memory() - start
    assert initial
    cost = training_cost(shapes, config, BatchShape(8, 8, 8), 4)
    assert sum(v.size for v in step.parameters.values()) == cost.trained
    assert 0.8 < cost.memory / peak < 1.2


def test_memory_of_an_adapter_on_codes():
    """Of so few tokens that most of the memory is weights."""
    config = TrainConfig(
        adapter={"rank": 4}, steps=1, batch_size=4, loss_chunk_tokens=None
    )
    dense = sized(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=6, vocab_size=320
    )
    start = active_memory()
    network = build_model(dense.config)
    network.set_dtype(mx.float16)
    spec = QuantizationConfig(bits=4)
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
    train_steps(step, constant_batch(4, 8))
    peak = mx.get_peak_memory() - start
    cost = training_cost(shapes, config, BatchShape(8, 32, 32), 4).parts
    # At the end, the fused model is loaded.
    assert cost["step"] == 4 * dense.parameters
    # Before, the backward pass needs the inputs and outputs of 32 tokens.
    matrices = tree_flatten(dense.model().parameters())
    values = sum(sum(value.shape) for _, value in matrices if value.ndim == 2)
    estimate = cost["weights"] + cost["optimizer"] + 4 * 32 * values
    assert 0.8 < estimate / peak < 1.2
    # Dequantized weights that stay would take 4 bytes per weight.
    assert peak < 2.5 * dense.parameters


def test_8_bit_moments_are_counted():
    shape = DEEP.model_copy(update={"intermediate_size": 250, "num_hidden_layers": 2})
    estimates, moments = [], []
    for optimizer in ("adamw", "adamw_8bit"):
        config = TrainConfig(steps=1, batch_size=1, optimizer=optimizer)
        cost = training_cost(sized(shape), config, BatchShape(8, 8, 8), 4)
        estimates.append(cost.parts["optimizer"] - 4 * cost.trained)
        state = tree_flatten(make_step(shape, config).optimizer.state)
        moments.append(sum(value.nbytes for _, value in state if value.ndim))
    # Tensors below the size of a block keep float32 moments.
    assert estimates == pytest.approx(moments, rel=0.02)
    assert moments[1] < 0.26 * moments[0]


def test_cost_of_options():
    plain, checkpointed, accumulated = (
        cost_of(),
        cost_of(gradient_checkpointing=True),
        cost_of(gradient_accumulation_steps=4),
    )
    assert 1.2 < checkpointed.work.trained / plain.work.trained < 1.4
    assert accumulated.work == plain.work * 4
    added = accumulated.memory - plain.memory
    assert added == 4 * plain.trained
    assert cost_of(optimizer="sgd").parts["optimizer"] == 8 * plain.trained
    online, offline = (
        cost_of(teacher=TeacherConfig()),
        cost_of(teacher=TeacherConfig(offline=True)),
    )
    assert online.parts == plain.parts | {"teacher": 4 * plain.parameters}
    # In every second step.
    rollouts = {"num_generations": 4, "max_tokens": 16, "num_iterations": 2}
    sampling = cost_of(teacher=TeacherConfig(), rollouts=rollouts)
    assert online.work == plain.work + Work(forward=online.work.forward)
    assert 0.25 < online.work.forward / plain.work.trained < 0.4
    per_token = online.work.forward / 512
    assert sampling.work.generated == pytest.approx(per_token * 8 * 4 * 16 / 2)
    assert offline == plain


def test_fsdp_divides_shards():
    plain, single = (cost_of(compute=2, fsdp=shard) for shard in (False, True))
    assert single.parts == plain.parts
    assert cost_of(compute=2, processes=4).parts == plain.parts
    sharded = cost_of(compute=2, processes=4, fsdp=True).parts
    assert sharded["optimizer"] == plain.parts["optimizer"] // 4
    stored = sized().bytes + 4 * plain.trained
    saved = plain.parts["weights"] - sharded["weights"]
    assert saved == pytest.approx(0.75 * stored, abs=1)


def test_attention_scores_count_where_they_are_kept(monkeypatch):
    steps = []
    for value in (True, False):
        monkeypatch.setattr(cpu, "replaces_functions", lambda value=value: value)
        steps.append(cost_of().parts["step"])
    heads = SHAPE.num_hidden_layers * SHAPE.num_attention_heads
    assert steps[1] - steps[0] == 4 * 512 * 2 * heads * 64


def test_work_is_six_operations_per_parameter_and_token():
    shape = sized(num_hidden_layers=1, num_attention_heads=1)
    config = TrainConfig(steps=1, batch_size=1)
    cost = training_cost(shape, config, BatchShape(8, 8, 8.0), 4)
    norms, attention = 3 * 64, 12 * 8 * 64
    assert cost.work.trained == (6 * (cost.parameters - norms) + attention) * 8


@pytest.mark.parametrize(
    ("setting", "vocabulary", "tokens", "on_cpu", "chunk"),
    [
        ("auto", 32768, 4096, False, 512),
        ("auto", 32768, 4095, False, None),
        ("auto", 1 << 20, 4096, False, 64),
        (7, 8, 8, False, 7),
        (None, 1 << 20, 1 << 20, False, None),
        # Small chunks stay in the CPU caches.
        ("auto", 32768, 64, True, 128),
    ],
)
def test_loss_chunk_auto_depends_on_logits(setting, vocabulary, tokens, on_cpu, chunk):
    config = TrainConfig(steps=1, batch_size=8, loss_chunk_tokens=setting)
    assert config.chunk(vocabulary=vocabulary, tokens=tokens, on_cpu=on_cpu) == chunk


@pytest.mark.parametrize(
    ("sizes", "grid"),
    [
        (from_scratch.llama_config(SHAPE), {"bits": 4, "group_size": 32}),
        (QWEN3_MOE, {"mode": "nvfp4", "global_scale": True}),
    ],
    ids=["affine", "global_scale"],
)
def test_quantized_bytes_are_the_bytes_written(sizes, grid):
    shape = ModelShape.of_config(sizes | {"torch_dtype": "float16"})
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


def test_quantize_work_counts_tokens_and_the_experts_that_they_see():
    shape = ModelShape.of_config(QWEN3_MOE | {"torch_dtype": "float16"})
    every = replace(shape, config=shape.config | {"num_experts_per_tok": 0})

    def needs(effort: str, shape: ModelShape) -> Estimate:
        config = GPTQConfig(effort=effort, bits=4, group_size=32)
        return estimate_quantization(config, shape)

    standard = needs("standard", shape)
    assert standard.work.forward < 0.9 * needs("standard", every).work.forward
    assert needs("fast", shape).work.forward < standard.work.forward
    assert standard.disk > standard.model.bytes > 0
    # Of the phases, the solver needs most.
    assert standard.memory > 4 * SOLVER_ARRAYS * MAX_ELEMENTS
    # The search of AWQ compares the same outputs, however many tokens there are.
    configs = [AWQConfig(calibration={"num_tokens": n}) for n in (2048, 4096, 6144)]
    first, second, third = (
        estimate_quantization(config, shape).work.forward for config in configs
    )
    assert third - second == second - first
    assert first > 4 * (second - first)


def workload(lengths: list[int], examples: float, longest: int = 64) -> Workload:
    return Workload(sized(), lengths, longest, examples, lambda name: None)


@pytest.fixture
def planned(tmp_path, monkeypatch) -> Callable:
    """The stages of RECIPE with overrides."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    examples = {"rows": {"text": "one"}}
    examples["pairs"] = {"prompt": "1 + 1?", "chosen": "2", "rejected": "3"}
    examples["answers"] = {"prompt": "1 + 1?", "completion": "2"}
    for name, example in examples.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(example))
    return lambda *overrides: [
        each.stage for each in plan(load("recipe.yaml", list(overrides))).stages
    ]


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["data.train=pairs.jsonl", "stages.train.loss={type: dpo}"],
        [
            "data.train=answers.jsonl",
            "stages.train.rollouts={num_generations: 4}",
            "stages.train.loss={type: grpo, rewards: [exact_match]}",
        ],
    ],
)
def test_epochs_have_as_many_steps_for_every_loss(planned, overrides):
    [train, _] = planned(*overrides)
    # 40 examples in batches of 2, twice.
    assert train.estimate(workload([20] * 40, 40), sized()).steps == 40


@pytest.mark.parametrize(
    ("overrides", "checkpoints"),
    [
        ([], 3),
        (["stages.train.save_total_limit=5", "stages.train.load_best_at_end=true"], 7),
    ],
)
def test_disk_has_artifacts_and_checkpoints(planned, overrides, checkpoints):
    """The trained model, its published copy, and checkpoints of 3 tensors each."""
    needs = [
        stage.estimate(workload([64], 0), sized()) for stage in planned(*overrides)
    ]
    disk = 2 * sized().bytes + 12 * checkpoints * needs[0].trained
    assert sum(need.disk for need in needs) == disk


@pytest.mark.parametrize(
    ("examples", "sizes", "tokens"),
    [
        # Shorter examples fill the batch of the longest.
        (23, (8, None), 8 * 512),
        (23, (None, 4096), 8 * 512),
        # There are no more examples.
        (7, (8, None), 7 * 512),
        (23, (None, 100_000), 23 * 512),
        # Unknown: the longest examples may fill a batch.
        (0, (8, None), 8 * 512),
        (0, (None, 100), 512),
    ],
)
def test_largest_batch_is_that_of_a_bucket(examples, sizes, tokens):
    lengths = 21 * [256] + 2 * [512]
    assert workload(lengths, examples, 512).largest_batch(*sizes) == tokens


def draft_needs(find=lambda name: None, **settings) -> Estimate:
    """With prompts of 30 tokens."""
    data = Workload(sized(DEEP), [30], 64, 100, find)
    return DraftStage(DraftConfig(**settings)).estimate(data, sized(DEEP))


@pytest.mark.parametrize(
    ("draft_model", "layers"),
    [({"num_layers": 2}, 2), ({"num_layers": [0, 3, 7]}, 3), ({}, 2)],
    ids=str,
)
def test_a_draft_model_has_the_blocks_that_are_cut(draft_model, layers):
    needs = draft_needs(draft_model=draft_model)
    expected = sized(DEEP, num_hidden_layers=layers).parameters
    assert needs.trained == needs.parameters == expected


def test_draft_work_counts_online_targets_and_prompts_of_the_benchmark():
    prompts = {"num_prompts": 90, "num_eval_prompts": 10, "max_tokens": 20}
    offline, online = (
        draft_needs(
            data_generation=prompts | {"text_tokens": 0, "top_k": top_k},
            benchmark={"num_prompts": count, "max_tokens": tokens},
            batch_tokens=1024,
            steps=1,
        )
        for top_k, count, tokens in ((64, 1, 8), (None, 2, 32))
    )
    # 2 bytes per token id of 2048, 2 per log-probability, 4 for the remaining mass.
    assert f"{readable_size(5000 * (64 * 4 + 4))} in the cache" in offline.data
    assert all(f"at most {5000:,} tokens" in each.data for each in (offline, online))
    assert "predictions: none" in online.data
    per_token = 2 * sized(DEEP).parameters
    assert offline.work.generated == online.work.generated == 2000 * per_token
    # Prompts, then predictions for all tokens, or in the step.
    assert offline.work.forward == (3000 + 5000) * per_token
    assert online.work.forward == (3000 + 1024) * per_token
    assert online.work.decoded == 8 * offline.work.decoded
    # The target is in memory either way.
    assert online.parts == offline.parts
    assert online.parts["target"] == 4 * sized(DEEP).parameters


def test_draft_cost_of_a_hub_model_is_unknown(tmp_path):
    draft_model = {"init_from": "some/sibling"}
    assert draft_needs(draft_model=draft_model).seconds == 0
    sibling = sized(DEEP, num_hidden_layers=12)
    (tmp_path / "config.json").write_text(json.dumps(sibling.config))
    needs = draft_needs(lambda name: tmp_path, draft_model=draft_model)
    assert needs.trained == sized(DEEP, num_hidden_layers=3).parameters

"""Resource estimates from shapes alone: memory, arithmetic and disk of a stage.

With P parameters, T trained parameters, c bytes of the compute dtype, and n tokens in
the largest batch, training takes:

    weights      the checkpoint, c P, and float32 masters of the T; 4 P more if
                 quantization-aware training continues from codes, which are
                 dequantized; for an adapter on a quantized model, c of the values that
                 are no codes in place of c P, and on the CPU a few dequantized matrices
    optimizer    4 T for the gradients and for every moment: AdamW has two, Adafactor
                 practically none, the others one; 4 T more with gradient accumulation;
                 8-bit moments have 1 byte per value and 4 per block of 256
    step         the larger of the backward pass and the update (8 T);
                 the backward pass keeps c n (in + out) of every matrix,
                 2 c n heads length of every attention layer (nothing with the
                 blockwise attention of float32 on a Linux CPU), 16 n vocabulary for
                 the loss, and the weights that `_quantizer_bytes` counts;
                 with gradient checkpointing, n width c of every block and the
                 activations of one block alone; with a chunked loss, the
                 16 n vocabulary of a few chunks, and 8 of every weight of the head;
                 or twice the caches of all rollouts, if that is more; or c P, for the
                 model into which an adapter is fused, which is loaded and measured
    operations   2 P per token forward, 2 P back to the inputs, 2 T to the weights,
                 and 12 length width per attention layer; 2 P more with gradient
                 checkpointing; all that for every batch of a step; with rollouts, 2 P
                 for every token that may be generated, at half the speed

An online teacher is assumed to be as large as the model: c P of memory and 2 P
operations per token more. With fsdp, checkpoint, masters, gradients and moments are
divided by the number of processes.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from .. import cpu
from ..config.base import ConfigModel
from ..config.quant_spec import QuantSpec
from ..config.train import TrainConfig
from ..cpu import on_cpu
from ..models.checkpoint import checkpoint_size, config_int
from ..models.loader import build_model
from ..models.lora import lora_model
from ..quantization.target_layers import QuantizationPlan, select_layers
from ..run.launcher import process_count
from ..training.dynamic_quantization import BLOCK_SIZE
from ..training.optimizers import MIN_8BIT_SIZE, OPTIMIZERS_8BIT

MOMENTS = {
    "adamw": 2,
    "adamw_8bit": 2,
    "adafactor": 0,
    "lion": 1,
    "lion_8bit": 1,
    "muon": 1,
    "sgd": 1,
}
# Matrices whose dequantized weights exist at once: MLX's CPU backend allocates the
# results of this many operations before it computes them.
DEQUANTIZED_AT_ONCE = 8
# Chunks of the loss whose buffers exist at once.
CHUNKS_AT_ONCE = 3
# Per logit, with its exponential and its gradient: on a GPU, and on the CPU, where
# every step of the computation leaves an array.
LOGIT_BYTES = (16, 28)
# Fractions of the target's blocks that `num_layers: auto` compares.
DEPTH_FRACTIONS = (0.125, 0.25, 0.375, 0.5)
# Time of a token that is decoded in a batch, relative to its forward pass.
BATCHED_DECODING = 2.0
# Time of a token that is decoded alone, relative to the products of its forward pass.
DECODE_FACTOR = 40.0
QUANTIZATION_KEYS = ("quantization", "quantization_config")


@dataclass(frozen=True)
class ModelShape:
    """A model's architecture and size, without its weights.

    Attributes:
        config: its config.json.
        bytes: its size on disk.
        float_values: stored floating-point values of a quantized model: parameters that
            are not quantized, and affine scales and biases; None = not quantized.
    """

    config: dict
    bytes: int
    float_values: int | None = None

    @classmethod
    def of_folder(cls, folder: Path, config: dict) -> "ModelShape":
        """From the headers of a checkpoint's files; UserError if they are damaged."""
        size = checkpoint_size(folder)
        is_quantized = "quantization" in config
        return cls(config, size.bytes, size.float_values if is_quantized else None)

    def model(self) -> nn.Module:
        """A model of these shapes; its weights are never computed."""
        return build_model(self.config)

    @property
    def is_quantized(self) -> bool:
        """Whether it is stored as codes."""
        return self.float_values is not None

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return _count(self.model().parameters())

    @property
    def experts(self) -> int:
        """Experts of a mixture that a token sees, else 0."""
        return self.setting("num_experts_per_tok")

    def setting(self, name: str) -> int:
        """An integer of the config, of its language part if it has several; else 0."""
        return config_int(self.config, name)

    def selection(self, quantization: ConfigModel) -> QuantizationPlan:
        """The layers that a quantization block quantizes, and those it leaves."""
        return select_layers(self.model(), quantization)

    def quantized(self, specs: dict[str, QuantSpec]) -> "ModelShape":
        """The model with these layers quantized; the others keep their dtype."""
        model = self.model()
        matrices = matrix_shapes(model)
        total = float_values = _count(model.parameters())
        bits = 8 * self.bytes
        for path, spec in specs.items():
            shape = matrices[f"{path}.weight"]
            size, width = prod(shape), 32.0
            grids = size
            if spec.stored is not None:
                width = spec.bits + spec.scale_bits / spec.group_size
                grids = 2 * size // spec.group_size if spec.scale_bits > 8 else 0
            if spec.global_scale:
                bits += 32 * shape[0]
                grids += shape[0]
            bits += size * (width - 8 * self.bytes / total)
            float_values += grids - size
        return replace(self, bytes=int(bits / 8), float_values=float_values)


@dataclass(frozen=True)
class BatchShape:
    """A batch: tokens of its longest sequence, most tokens, and tokens on average."""

    length: int
    tokens: int
    mean_tokens: float


@dataclass(frozen=True)
class TrainingCost:
    """Cost of a training: parameters, bytes of memory by part, operations per step."""

    parameters: int
    trained: int
    memory: dict[str, int]
    operations: float


@dataclass(frozen=True)
class GenerationCost:
    """Cost of generating the data of a draft model.

    Attributes:
        tokens: of prompts and completions, at most.
        bytes: of the stored predictions; 0 = none are stored.
        state_bytes: of the stored hidden states; 0 = none are stored.
        operations: for completions and predictions.
    """

    tokens: int
    bytes: int
    operations: float
    state_bytes: int = 0


@dataclass(frozen=True)
class Workload:
    """The model and the data that stages are estimated for.

    Attributes:
        shape: the recipe's model.
        dtype: the dtype its checkpoint stores.
        lengths: padded lengths in tokens of a sample of the training examples.
        max_seq_length: of the data block.
        examples: training examples; 0 = unknown.
        find: the path of a file that the recipe names; None if there is none.
    """

    shape: ModelShape
    dtype: mx.Dtype
    lengths: list[int]
    max_seq_length: int
    examples: float
    find: Callable[[str], Path | None]

    @property
    def longest(self) -> int:
        """Tokens of the longest example."""
        return max(self.lengths)

    @property
    def mean_length(self) -> float:
        """Tokens of an example on average."""
        return sum(self.lengths) / len(self.lengths)

    def largest_batch(self, batch_size: int | None, batch_tokens: int | None) -> int:
        """Tokens of the largest batch: a bucket with few examples has smaller ones."""
        # Needs NumPy, which reading a recipe does not load.
        from ..data.batching import balanced_batch_size

        sizes = []
        for length, count in Counter(self.lengths).items():
            limit = batch_size or max(1, batch_tokens // length)
            if self.examples:
                count = math.ceil(count * self.examples / len(self.lengths))
                limit = balanced_batch_size(count, limit)
            sizes.append(length * limit)
        return max(sizes)


@dataclass(frozen=True)
class StageResources:
    """What a stage needs of the machine.

    Attributes:
        model: the checkpoint that the next stage begins with.
        disk: bytes that the stage writes.
        dtype: the dtype it computes in.
        training: cost of its training, if it trains.
        generation: cost of its data, if it generates data.
        steps: optimizer steps; None = unknown before the data is read.
        batch_key: the key of the stage's block that sets the size of its batches.
        is_packed: every sequence has max_seq_length tokens, of several examples.
        remedies: overrides of the recipe that need less memory.
        memory: bytes by part, if it does not train.
        work: operations of large matrix products that take as long, besides training
            and the generation of its data.
    """

    model: ModelShape
    disk: int = 0
    dtype: mx.Dtype = mx.float32
    training: TrainingCost | None = None
    generation: GenerationCost | None = None
    steps: int | None = None
    batch_key: str = ""
    is_packed: bool = False
    remedies: tuple[str, ...] = ()
    memory: dict[str, int] = field(default_factory=dict)
    work: float = 0


def training_cost(
    shape: ModelShape, config: TrainConfig, batch: BatchShape, compute: int
) -> TrainingCost:
    """Cost of a train stage that computes in a dtype of `compute` bytes.

    Raises:
        UserError: a pattern of the adapter matches no layer, or mlx-lm has no such
            architecture.
    """
    if shape.is_quantized and config.qat:
        qat = config.qat.for_quantized_model(adapts=config.adapter is not None)
        config = config.model_copy(update={"qat": qat})
    model = shape.model()
    total = _count(model.parameters())
    matrices = matrix_shapes(model)
    specs = select_layers(model, config.qat).specs if config.qat else {}
    trained_sizes = _trained_sizes(model, config)
    if config.adapter:
        adapted = lora_model.adapted_layers(model)
        specs = {path: spec for path, spec in specs.items() if path in adapted}
    sizes = {path: prod(matrices[f"{path}.weight"]) for path in specs}
    for path, spec in specs.items():
        groups = sizes[path] // spec.group_size
        trained_sizes += config.qat.learned_per_group(spec) * [groups]
    trained = sum(trained_sizes)
    masters_are_weights = _masters_are_weights(config, compute)
    masters = 0 if masters_are_weights else 4 * trained
    computed = compute * total
    if shape.is_quantized:
        mean_size = total // len(matrices)
        computed = _computed_bytes(shape, config, total, mean_size, compute)
    backward = _activations(shape, matrices, batch, compute, config)
    backward += _loss(shape, batch, config)
    if config.qat:
        sizes_and_specs = [(sizes[path], spec) for path, spec in specs.items()]
        backward += _quantizer_bytes(sizes_and_specs, config, compute)
    shards = process_count() if config.fsdp else 1
    memory = {
        "weights": (shape.bytes + masters) // shards + computed,
        "optimizer": _optimizer_bytes(trained_sizes, config) // shards,
        "step": max(backward, 8 * trained // shards),
    }
    if config.adapter and not config.qat:
        memory["step"] = max(memory["step"], compute * total)
    online = config.teacher is not None and not config.teacher.offline
    if online:
        memory["teacher"] = compute * total
    active = active_weights(shape.experts, matrices)
    width = shape.setting("num_hidden_layers") * shape.setting("hidden_size")
    to_weights = trained if config.adapter else active
    per_token = (4 + 2 * config.gradient_checkpointing) * active + 2 * to_weights
    per_token += 12 * batch.length * width + 2 * online * active
    tokens = batch.mean_tokens * config.gradient_accumulation_steps
    operations = config.num_trainings * per_token * tokens
    if config.rollouts:
        values, sampled = _rollouts(shape, config, batch.length)
        memory["step"] = max(memory["step"], 2 * compute * values)
        operations += BATCHED_DECODING * 2 * active * sampled
    return TrainingCost(total, trained, memory, operations)


def _computed_bytes(
    shape: ModelShape, config: TrainConfig, total: int, mean_size: int, compute: int
) -> int:
    """Bytes of the weights that a training on a quantized model computes with.

    Args:
        total: weights of the model.
        mean_size: weights of a matrix.
    """
    if config.qat:
        return (4 + compute) * total
    at_once = DEQUANTIZED_AT_ONCE if on_cpu() else 0
    return compute * (shape.float_values + at_once * mean_size)


def _rollouts(shape: ModelShape, config: TrainConfig, length: int) -> tuple[int, float]:
    """Values in the caches of a batch, and tokens per step that are generated."""
    heads = shape.setting("num_attention_heads") or 1
    head = shape.setting("head_dim") or shape.setting("hidden_size") // heads
    heads = shape.setting("num_key_value_heads") or heads
    width = 2 * shape.setting("num_hidden_layers") * heads * head
    rows, longest = config.batch_size * config.micro_batches, config.rollouts.max_tokens
    steps = config.gradient_accumulation_steps / config.rollouts.num_iterations
    return width * rows * (length + longest), rows * longest * steps


def config_dtype(config: dict) -> mx.Dtype:
    """The dtype that a config.json names; transformers 5 calls it `dtype`."""
    name = config.get("torch_dtype") or config.get("dtype") or "bfloat16"
    return getattr(mx, name, mx.bfloat16)


def _trained_sizes(model: nn.Module, config: TrainConfig) -> list[int]:
    """Weights of each tensor that a train stage trains; attaches its adapter."""
    if config.adapter:
        merged = config.qat is not None
        lora_model.attach(model, config.adapter, seed=0, merged=merged)
    return [value.size for _, value in tree_flatten(model.trainable_parameters())]


def _optimizer_bytes(trained_sizes: list[int], config: TrainConfig) -> int:
    """Bytes of the gradients and the moments of tensors with these sizes."""

    def size_of(values: int) -> int:
        if config.optimizer in OPTIMIZERS_8BIT and values >= MIN_8BIT_SIZE:
            return values + 4 * -(-values // BLOCK_SIZE)
        return 4 * values

    gradients = 4 * sum(trained_sizes) * (1 + config.sums_gradients)
    return gradients + MOMENTS[config.optimizer] * sum(map(size_of, trained_sizes))


def _count(parameters: dict) -> int:
    return sum(value.size for _, value in tree_flatten(parameters))


def matrix_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes [..., out, in] by name."""
    named = tree_flatten(model.parameters())
    return {name: value.shape for name, value in named if value.ndim > 1}


def _active(experts: int, matrices: dict) -> list[tuple[tuple[int, ...], float]]:
    """Every matrix that tokens are multiplied with, and the share of tokens it sees.

    Args:
        experts: of a mixture, that a token sees; 0 = all.
    """
    has_head = any("lm_head" in name for name in matrices)
    return [
        (size, experts / size[0] if experts and len(size) == 3 else 1.0)
        for name, size in matrices.items()
        if not (has_head and "embed" in name)
    ]


def active_weights(experts: int, matrices: dict) -> float:
    """Weights that a token is multiplied with, see `_active`."""
    return sum(prod(size) * share for size, share in _active(experts, matrices))


def inputs_and_outputs(experts: int, matrices: dict) -> float:
    """Values per token that go into and come out of all matrices, see `_active`."""
    return sum(
        (size[-1] + size[-2]) * (share * size[0] if len(size) == 3 else 1)
        for size, share in _active(experts, matrices)
    )


def _activations(
    shape: ModelShape,
    matrices: dict,
    batch: BatchShape,
    compute: int,
    config: TrainConfig,
) -> int:
    """Bytes that the blocks' forward pass keeps for the backward pass."""
    values = inputs_and_outputs(shape.experts, matrices)
    layers, heads = map(shape.setting, ("num_hidden_layers", "num_attention_heads"))
    if not (cpu.replaces_functions() and compute == 4):
        values += 2 * layers * heads * batch.length
    if config.gradient_checkpointing:
        values = layers * shape.setting("hidden_size") + values / max(1, layers)
    return int(batch.tokens * compute * values)


def _masters_are_weights(config: TrainConfig, compute: int) -> bool:
    """Whether a forward pass without quantizers computes with the masters themselves.

    Not those of another type, of shards or of an adapter.
    """
    return config.adapter is None and compute == 4 and not config.fsdp


def _quantizer_bytes(
    layers: list[tuple[int, QuantSpec]], config: TrainConfig, compute: int
) -> int:
    """Bytes that fake quantizers keep for the backward pass.

    The quantized weights replace the weights that are computed with, unless those are
    the masters. A quantizer that is not straight-through also keeps the sum of weight
    and adapter; with trained scales also the gradient of that sum.
    """
    total, of_weight = 0, compute * _masters_are_weights(config, compute)
    for weights, spec in layers:
        size = of_weight
        if config.adapter and not config.qat.is_straight_through(spec):
            size += 8 if config.qat.learned_per_group(spec) else 4
        total += size * weights
    return total


def _loss(shape: ModelShape, batch: BatchShape, config: TrainConfig) -> int:
    """Bytes of the logits, their exponentials and their gradients."""
    vocabulary = shape.setting("vocab_size")
    per_token = LOGIT_BYTES[on_cpu()] * vocabulary
    chunk = config.chunk(vocabulary=vocabulary, tokens=batch.tokens, on_cpu=on_cpu())
    if chunk is None or CHUNKS_AT_ONCE * chunk >= batch.tokens:
        return per_token * batch.tokens
    head = 0 if config.adapter else vocabulary * shape.setting("hidden_size")
    return per_token * CHUNKS_AT_ONCE * chunk + 8 * head


def training_dtype(name: str, stored: mx.Dtype) -> mx.Dtype:
    """The type to compute in.

    "auto" is bfloat16 for a bfloat16 checkpoint on a GPU, else float32: float16 would
    lose small gradients, and bfloat16 the digits that a float16 checkpoint is served
    with.
    """
    if name != "auto":
        return getattr(mx, name)
    return mx.bfloat16 if stored == mx.bfloat16 and not on_cpu() else mx.float32

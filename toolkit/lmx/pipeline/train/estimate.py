"""Memory and work of a training, from shapes alone.

With P parameters, T trained parameters, c bytes of the compute dtype, and n tokens in
the largest batch, training takes:

    weights      the checkpoint, c P, and float32 masters of the T; 4 P more if
                 quantization-aware training continues from codes, which are
                 dequantized; for an adapter on a quantized model, c of the values that
                 are no codes in place of c P, and on the CPU a few dequantized matrices
    optimizer    4 T for the gradients and for every moment: AdamW has two, Adafactor
                 practically none, the others one; 4 T more with gradient accumulation;
                 8-bit moments have 1 byte per value and 4 per block of 256
    step         the largest of
                 the backward pass: c n (in + out) of every matrix, 2 c n heads length
                 of every attention layer (nothing with the blockwise attention of
                 float32 on a Linux CPU), the logits with exponentials and gradients,
                 and the weights that `_quantizer_bytes` counts; with gradient
                 checkpointing, n width c of every block and the activations of one
                 block alone; with a chunked loss, the logits of a few chunks, and 8 of
                 every weight of the head;
                 the update, 8 T; twice the caches of all rollouts;
                 and c P for the fused model of an adapter, which is measured
    operations   2 P per token forward, 2 P back to the inputs, 2 T to the weights,
                 and 12 length width per attention layer; 2 P more with gradient
                 checkpointing; all that for every batch of a step; with rollouts, 2 P
                 for every token that may be generated

If processes hold the model together, checkpoint, weights and fused model count with
the share that one holds; activations and the adapter count as a whole.

An online teacher is assumed to be as large as the model: c P of memory and 2 P
operations per token more. With fsdp, checkpoint, masters, gradients and moments are
divided by the number of processes.
"""

from math import prod

import mlx.nn as nn
from mlx.utils import tree_flatten

from ... import cpu
from ...config.quant_spec import QuantSpec
from ...config.train import TrainConfig
from ...cpu import on_cpu
from ...models.lora import lora_model
from ...quantization.target_layers import select_layers
from ...training.dynamic_quantization import BLOCK_SIZE
from ...training.optimizers import MIN_8BIT_SIZE, OPTIMIZERS_8BIT
from ..estimate import (
    BatchShape,
    ModelShape,
    TrainingCost,
    active_weights,
    inputs_and_outputs,
    logit_bytes,
    matrix_shapes,
)
from ..parallel_cost import Traffic, data_parallel, fsdp
from ..work import Work

# Moments per trained parameter.
MOMENTS = {"adamw": 2, "adamw_8bit": 2, "adafactor": 0}
# Matrices whose dequantized weights exist at once: MLX's CPU backend allocates the
# results of this many operations before it computes them.
DEQUANTIZED_AT_ONCE = 8


def training_cost(
    shape: ModelShape,
    config: TrainConfig,
    batch: BatchShape,
    compute: int,
    processes: int = 1,
    *,
    held: float = 1.0,
) -> TrainingCost:
    """Cost for each process of a train stage.

    Args:
        compute: bytes of the dtype it computes in.
        processes: with FSDP, each holds its part.
        held: the share of the frozen weights that each holds.

    Raises:
        UserError: a pattern of the adapter matches no layer, or mlx-lm has no such
            architecture.
    """
    config = _as_trained(config, shape)
    model = shape.model()
    total = sum(v.size for _, v in tree_flatten(model.parameters()))
    matrices = matrix_shapes(model)
    layers, trained_sizes = _trained(model, matrices, config)
    trained = sum(trained_sizes)
    # The masters of full training; not those of another type or of shards.
    computes_with_masters = config.adapter is None and compute == 4 and not config.fsdp
    masters = 0 if computes_with_masters else 4 * trained
    computed = compute * total
    if shape.is_quantized and config.qat:
        computed += 4 * total
    elif shape.is_quantized:
        at_once = DEQUANTIZED_AT_ONCE if on_cpu() else 0
        mean_size = total // len(matrices)
        computed = compute * (shape.float_values + at_once * mean_size)
    kept = compute if computes_with_masters else 0
    backward = (
        _activations(shape, matrices, batch, compute, config)
        + _loss(shape, batch, config)
        + sum(_quantizer_bytes(size, spec, config, kept) for size, spec in layers)
    )
    shards = processes if config.fsdp else 1
    sampled, caches = _rollouts(shape, config, batch.length)
    fused = int(held * compute * total) if config.adapter and not config.qat else 0
    stored = int(held * shape.bytes) + masters
    memory = {
        "weights": stored // shards + int(held * computed),
        "optimizer": _optimizer_bytes(trained_sizes, config) // shards,
        "step": max(backward, 8 * trained // shards, 2 * compute * caches, fused),
    }
    if config.teacher is not None and not config.teacher.offline:
        memory["teacher"] = compute * total
    active = active_weights(shape.experts, matrices)
    step = _operations(shape, config, batch, active, trained)
    step += Work(generated=2 * active * sampled)
    return TrainingCost(total, trained, memory, step)


def _operations(
    shape: ModelShape,
    config: TrainConfig,
    batch: BatchShape,
    active: float,
    trained: int,
) -> Work:
    """Work of a step, without rollouts."""
    width = shape.setting("num_hidden_layers") * shape.setting("hidden_size")
    to_weights = trained if config.adapter else active
    per_token = (4 + 2 * config.gradient_checkpointing) * active + 2 * to_weights
    per_token += 12 * batch.length * width
    tokens = batch.mean_tokens * config.gradient_accumulation_steps
    online = config.teacher is not None and not config.teacher.offline
    step = Work(per_token * tokens, forward=2 * online * active * tokens)
    return step * config.num_trainings


def training_traffic(
    shape: ModelShape,
    config: TrainConfig,
    cost: TrainingCost,
    compute: int,
) -> Traffic:
    """What each of several processes exchanges in a step."""
    blocks = shape.setting("num_hidden_layers")
    checkpointing = config.gradient_checkpointing
    if not config.fsdp:
        return data_parallel(cost.trained)
    return fsdp(cost.parameters, blocks, compute, checkpointing=checkpointing)


def _as_trained(config: TrainConfig, shape: ModelShape) -> TrainConfig:
    """The block with the quantizer that continues from a quantized model."""
    if not (shape.is_quantized and config.qat):
        return config
    qat = config.qat.for_quantized_model(adapts=config.adapter is not None)
    return config.model_copy(update={"qat": qat})


def _trained(
    model: nn.Module, matrices: dict[str, tuple[int, ...]], config: TrainConfig
) -> tuple[list[tuple[int, QuantSpec]], list[int]]:
    """Attach the adapter.

    Returns:
        Weights and grid of each layer with a fake quantizer, and the weights of each
        tensor that is trained.
    """
    specs = select_layers(model, config.qat).specs if config.qat else {}
    if config.adapter:
        lora_model.attach(model, config.adapter, seed=0, merged=bool(config.qat))
        adapted = lora_model.adapted_layers(model)
        specs = {path: spec for path, spec in specs.items() if path in adapted}
    sizes = [value.size for _, value in tree_flatten(model.trainable_parameters())]
    layers = [(prod(matrices[f"{path}.weight"]), spec) for path, spec in specs.items()]
    for size, spec in layers:
        sizes += config.qat.learned_per_group(spec) * [size // spec.group_size]
    return layers, sizes


def _rollouts(shape: ModelShape, config: TrainConfig, length: int) -> tuple[float, int]:
    """Tokens per step that are generated, and values in the caches of a batch."""
    if not config.rollouts:
        return 0.0, 0
    heads = shape.setting("num_attention_heads") or 1
    head = shape.setting("head_dim") or shape.setting("hidden_size") // heads
    heads = shape.setting("num_key_value_heads") or heads
    width = 2 * shape.setting("num_hidden_layers") * heads * head
    rows, longest = config.batch_size * config.micro_batches, config.rollouts.max_tokens
    steps = config.gradient_accumulation_steps / config.rollouts.num_iterations
    return rows * longest * steps, width * rows * (length + longest)


def _optimizer_bytes(trained_sizes: list[int], config: TrainConfig) -> int:
    """Bytes of the gradients and the moments of tensors with these sizes."""

    def size_of(values: int) -> int:
        if config.optimizer in OPTIMIZERS_8BIT and values >= MIN_8BIT_SIZE:
            return values + 4 * -(-values // BLOCK_SIZE)
        return 4 * values

    gradients = 4 * sum(trained_sizes) * (1 + config.sums_gradients)
    return gradients + MOMENTS.get(config.optimizer, 1) * sum(
        map(size_of, trained_sizes)
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


def _quantizer_bytes(
    weights: int, spec: QuantSpec, config: TrainConfig, kept: int
) -> int:
    """Bytes that a fake quantizer keeps for the backward pass.

    The quantized weights replace the weights that are computed with, unless those are
    the masters: then they take `kept` bytes each. A quantizer that is not
    straight-through also keeps the sum of weight and adapter; with trained scales also
    the gradient of that sum.
    """
    if config.adapter and not config.qat.is_straight_through(spec):
        kept += 8 if config.qat.learned_per_group(spec) else 4
    return kept * weights


def _loss(shape: ModelShape, batch: BatchShape, config: TrainConfig) -> int:
    """Bytes of the logits, their exponentials and their gradients."""
    vocabulary = shape.setting("vocab_size")
    chunk = config.chunk(vocabulary=vocabulary, tokens=batch.tokens, on_cpu=on_cpu())
    size = logit_bytes(vocabulary, batch.tokens, chunk)
    if size < logit_bytes(vocabulary, batch.tokens) and not config.adapter:
        size += 8 * vocabulary * shape.setting("hidden_size")
    return size

"""Memory and work of a training, from shapes alone.

With P parameters and T trained ones, a token takes 2 P operations forward, 2 P back to
the inputs, 2 T to the weights, and 12 length width in every attention layer.
"""

from math import ceil, prod

from mlx.utils import tree_flatten

from ... import cpu
from ...config.lora import LoRAConfig
from ...config.qat import QATConfig
from ...config.train import TrainConfig
from ...cpu import on_cpu
from ...models.lora import lora_model
from ...quantization.target_layers import select_layers
from ..estimate import BatchShape, Estimate, ModelShape, logit_bytes
from ..work import Work

# training/chunked_loss.py: bytes of a weight of the head, for its gradient and its sum.
CHUNKED_HEAD_BYTES = 8
# MLX's CPU backend allocates the results of about so many operations before it computes
# them: matrices whose dequantized weights exist at once.
DEQUANTIZED_AT_ONCE = 8
# training/optimizers.py: bytes of a trained parameter's moments; 4 of the other
# optimizers. With 8 bits, a block of 256 values has a float32 scale.
MOMENT_BYTES = {
    "adamw": 8,
    "adamw_8bit": 2 + 8 / 256,
    "lion_8bit": 1 + 4 / 256,
    "adafactor": 0,
}
# training/step.py: bytes of a trained parameter in an update.
UPDATE_BYTES = 8


def training_cost(
    shape: ModelShape,
    config: TrainConfig,
    batch: BatchShape,
    compute: int,
    processes: int = 1,
) -> Estimate:
    """What each process of a train stage needs, and the work of a step.

    Args:
        compute: bytes of the dtype it computes in.
        processes: with FSDP, each holds its part of weights, gradients and moments.

    Raises:
        UserError: a pattern of the adapter matches no layer, or mlx-lm has no such
            architecture.
    """
    adapter, qat, rollouts = config.adapter, config.qat, config.rollouts
    if qat and shape.is_quantized:
        qat = qat.for_quantized_model(adapts=adapter is not None)
    total, shards = shape.parameters, processes if config.fsdp else 1
    layers, width = map(shape.setting, ("num_hidden_layers", "hidden_size"))
    # Full training in float32 computes with its masters, if they are whole.
    has_no_copies = adapter is None and compute == 4 and not config.fsdp
    trained, kept = _trained(shape, adapter, qat, compute if has_no_copies else 0)
    computed = compute * total
    if shape.is_quantized and qat:
        computed += (1 if qat.quantizer == "fixed_codes" else 4) * total
    elif shape.is_quantized:
        at_once = DEQUANTIZED_AT_ONCE if on_cpu() else 0
        mean_size = total // len(shape.matrices)
        computed = compute * (shape.float_values + at_once * mean_size)
    stored = shape.bytes + (0 if has_no_copies else 4 * trained)
    # At the end, the fused model of an adapter is measured.
    fused = compute * total if adapter and not qat else 0
    sampled = caches = 0
    if rollouts:
        rows = (config.batch_size or 0) * config.micro_batches
        sampled = rows * rollouts.max_tokens / rollouts.num_iterations
        heads = shape.setting("num_attention_heads") or 1
        head = shape.setting("head_dim") or width // heads
        values = 2 * layers * head * (shape.setting("num_key_value_heads") or heads)
        # While caches grow, there are two of each.
        caches = 2 * compute * rows * values * (batch.length + rollouts.max_tokens)
    # Gradients, their sum over several batches, and moments.
    per_trained = 4 * (1 + config.sums_gradients)
    per_trained += MOMENT_BYTES.get(config.optimizer, 4)
    backward = kept + _backward_bytes(shape, batch, compute, config)
    parts = {
        "weights": stored // shards + computed,
        "optimizer": int(per_trained * trained) // shards,
        "step": max(backward, UPDATE_BYTES * trained // shards, caches, fused),
    }
    # A teacher in every step is taken to be as large as the model.
    is_online = config.teacher is not None and not config.teacher.offline
    if is_online:
        parts["teacher"] = compute * total
    active, _ = shape.per_token
    per_token = (4 + 2 * config.gradient_checkpointing) * active
    per_token += 2 * (trained if adapter else active)
    per_token += 12 * batch.length * layers * width
    work = Work(trained=per_token, forward=2 * is_online * active) * batch.mean_tokens
    work += Work(generated=2 * active * sampled)
    work *= config.gradient_accumulation_steps * config.num_trainings
    # Scales and biases that are trained are no parameters of the model before.
    total = max(total, trained)
    return Estimate(shape, parts, work=work, parameters=total, trained=trained)


def measuring_work(
    shape: ModelShape, config: TrainConfig, steps: int, tokens: float
) -> Work:
    """The forward passes beside the steps: validations, and measured models.

    An operation of these takes as long as one of a step, not as one of the plain passes
    that rates are measured with.

    Args:
        tokens: of a validation.
    """
    teacher, baseline = config.teacher, config.compare_full_precision
    # Before the first step, and after the last one.
    evaluations = 1 + ceil(steps / config.eval_steps)
    with_teacher = 1 + (teacher is not None and not teacher.offline)
    # The model before and its new files; with another loss than cross-entropy also the
    # trained one. In a comparison, each of three models beside the baseline.
    measured = 2 + (teacher is not None or config.loss is not None)
    passes = config.num_trainings * (evaluations * with_teacher + measured)
    passes += 6 * baseline
    active, _ = shape.per_token
    return Work(trained=2 * active * passes * tokens)


def _trained(
    shape: ModelShape, adapter: LoRAConfig | None, qat: QATConfig | None, kept: int
) -> tuple[int, int]:
    """Trained parameters, and bytes that fake quantizers keep for the backward pass.

    Quantized weights replace those that are computed with, unless these are masters.

    Args:
        kept: bytes of a quantized weight that replaces none.
    """
    model = shape.model()
    specs = {}
    if qat:
        specs = shape.specs or select_layers(model, qat).specs
    if adapter:
        lora_model.attach(model, adapter, seed=0, merged=bool(qat))
        adapted = lora_model.adapted_layers(model)
        specs = {path: spec for path, spec in specs.items() if path in adapted}
    trained = sum(value.size for _, value in tree_flatten(model.trainable_parameters()))
    size, matrices = 0, shape.matrices
    for path, spec in specs.items():
        weights = prod(matrices[f"{path}.weight"])
        learned = qat.learned_per_group(spec)
        trained += learned * (weights // spec.group_size)
        if qat.quantizer == "fixed_codes":
            trained -= weights
            continue
        size += kept * weights
        if adapter and not qat.is_straight_through(spec):
            # The sum of weight and adapter; with trained scales also its gradient.
            size += (8 if learned else 4) * weights
    return trained, size


def _backward_bytes(
    shape: ModelShape, batch: BatchShape, compute: int, config: TrainConfig
) -> int:
    """Activations that are kept for the backward pass, and logits."""
    layers, heads = map(shape.setting, ("num_hidden_layers", "num_attention_heads"))
    vocabulary, width = map(shape.setting, ("vocab_size", "hidden_size"))
    _, values = shape.per_token
    # Attention weights, which the CPU's blockwise attention in float32 never has whole.
    if not (cpu.replaces_functions() and compute == 4):
        values += 2 * layers * heads * batch.length
    if config.gradient_checkpointing:
        # The inputs of all blocks, and the activations of one.
        values = layers * width + values / max(1, layers)
    chunk = config.chunk(vocabulary=vocabulary, tokens=batch.tokens, on_cpu=on_cpu())
    logits = logit_bytes(vocabulary, batch.tokens, chunk)
    if logits < logit_bytes(vocabulary, batch.tokens) and not config.adapter:
        logits += CHUNKED_HEAD_BYTES * vocabulary * width
    return int(batch.tokens * compute * values) + logits

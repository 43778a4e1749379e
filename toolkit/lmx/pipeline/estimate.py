"""What a run will need, from shapes alone: memory, arithmetic and disk.

The formulas, with P parameters, T trained ones, c bytes of the compute type, and n
tokens in the largest batch:

    weights      the checkpoint, c P, and float32 masters of the T
    optimizer    4 T for the gradient, and for every moment, of which AdamW has two,
                 Adafactor none to speak of and the others one; 4 T more where several
                 batches are added up
    step         the larger of the backward pass and the update (8 T);
                 the backward pass keeps c n (in + out) over all matrices,
                 2 c n heads length per attention layer, 16 n vocabulary for the
                 loss, and (4 + c) for every weight that is rounded in training;
                 with checkpointed blocks, of these n width c per block and the rest of
                 one block alone; with the loss by chunks, the 16 n vocabulary of
                 several chunks alone, and 8 for every trained number of the head
    operations   2 P per token forward, 2 P back to the inputs, 2 T to the weights,
                 and 12 length width per attention layer; 2 P more with checkpointed
                 blocks; all that for every batch of a step

A teacher that runs beside its student is taken to be as large: c P more, and 2 P more
operations per token.

What processes keep a share of is divided by their number, where that is known: the
checkpoint, masters, gradients and moments.

Measured on Llama shapes of 3 to 11 million parameters, full, LoRA and with rounding,
the measured peak is about this sum, and up to 1.5 times it where blocks are
checkpointed and the loss is made by small chunks, too.
"""

from dataclasses import dataclass
from math import prod
from pathlib import Path

import mlx.nn as nn
from mlx.utils import tree_flatten

from ..config.base import ConfigModel
from ..config.quant_spec import QuantSpec
from ..cpu import on_cpu
from ..models.checkpoint import checkpoint_size, config_int
from ..models.loader import build_model
from ..models.lora import lora_model
from ..quantization.target_layers import QuantizationPlan, select_layers
from ..run.launcher import processes

MOMENTS = {"adamw": 2, "adafactor": 0, "lion": 1, "muon": 1, "sgd": 1}
# Buffers of the chunks of the loss that a device has in work at once.
CHUNKS_AT_ONCE = 3
# Per logit, with its exponential and its gradient: on a GPU, and on the CPU, where
# every step of making them leaves an array.
LOGIT_BYTES = (16, 28)


@dataclass(frozen=True)
class ModelShape:
    """What is known of a model without its weights.

    Attributes:
        bytes: its size on disk.
        config: its config.json.
    """

    config: dict
    bytes: int

    @classmethod
    def of_folder(cls, folder: Path, config: dict) -> "ModelShape":
        """From the headers of a checkpoint's files; UserError if they are damaged."""
        return cls(config, checkpoint_size(folder).bytes)

    def model(self) -> nn.Module:
        """A model of these shapes; its weights are never computed."""
        return build_model(self.config)

    @property
    def parameters(self) -> int:
        """Numbers the model has."""
        return _count(self.model().parameters())

    def setting(self, name: str) -> int:
        """A number of the config, of its language part if it has several; else 0."""
        return config_int(self.config, name)

    def selection(self, quantization: ConfigModel) -> QuantizationPlan:
        """The layers a quantization rounds, and those it keeps."""
        return select_layers(self.model(), quantization)


@dataclass(frozen=True)
class BatchShape:
    """A step's batch: the longest rows, the most tokens, and the tokens on average."""

    length: int
    tokens: int
    mean_tokens: float


@dataclass(frozen=True)
class TrainingCost:
    """What a train stage takes: parameters, bytes by part, operations per step."""

    parameters: int
    trained: int
    memory: dict[str, int]
    operations: float


def training(
    anatomy: ModelShape, stage: ConfigModel, batch: BatchShape, compute: int
) -> TrainingCost:
    """What a train stage takes, computing in a type of `compute` bytes.

    Raises:
        UserError: a pattern of the adapter matches no layer, or mlx-lm has no such
            architecture.
    """
    model = anatomy.model()
    total = _count(model.parameters())
    matrices = _matrices(model)
    rounded = grids = 0
    if stage.qat:
        for path, spec in select_layers(model, stage.qat).specs.items():
            size = prod(matrices[f"{path}.weight"])
            rounded += size
            grids += stage.qat.learned_per_group * size // spec.group_size
    trained = _trained(model, stage) + grids
    masters_are_weights = stage.adapter is None and compute == 4 and not stage.fsdp
    masters = 0 if masters_are_weights else 4 * trained
    backward = _activations(anatomy, matrices, batch, compute, stage)
    backward += _loss(anatomy, batch, stage) + (4 + compute) * rounded
    sums = 1 + MOMENTS[stage.optimizer] + (stage.gradient_accumulation_steps > 1)
    parts = processes() if stage.fsdp else 1
    memory = {
        "weights": (anatomy.bytes + masters) // parts + compute * total,
        "optimizer": 4 * sums * trained // parts,
        "step": max(backward, 8 * trained // parts),
    }
    live = stage.teacher is not None and not stage.teacher.offline
    if live:
        memory["teacher"] = compute * total
    seen = sum(prod(s) * share for s, share in _used(anatomy, matrices))
    width = anatomy.setting("num_hidden_layers") * anatomy.setting("hidden_size")
    to_weights = trained if stage.adapter else seen
    per_token = (4 + 2 * stage.gradient_checkpointing) * seen + 2 * to_weights
    per_token += 12 * batch.length * width + 2 * live * seen
    tokens = batch.mean_tokens * stage.gradient_accumulation_steps
    return TrainingCost(
        total, trained, memory, stage.num_trainings * per_token * tokens
    )


def quantized_bytes(anatomy: ModelShape, specs: dict[str, QuantSpec]) -> int:
    """Size on disk with these grids; the rest keeps the type it is stored in."""
    model = anatomy.model()
    matrices = _matrices(model)
    total = _count(model.parameters())
    bits = 8 * anatomy.bytes
    for path, spec in specs.items():
        scales = 32 if spec.mode == "affine" else 8
        size = prod(matrices[f"{path}.weight"])
        bits += size * (
            spec.bits + scales / spec.group_size - 8 * anatomy.bytes / total
        )
    return int(bits / 8)


def disk(
    anatomy: ModelShape, stages: list[ConfigModel], loads: dict[int, TrainingCost]
) -> int:
    """Bytes a run writes, its artefacts and all checkpoints at once.

    Args:
        stages: every stage's config, in order.
        loads: of the train stages, by their position in `stages`.
    """
    size, needed = anatomy.bytes, 0
    for index, stage in enumerate(stages):
        # A draft is small beside the model it is distilled from.
        if hasattr(stage, "draft_model"):
            continue
        quantization = getattr(stage, "qat", None) or getattr(
            stage, "quantization", None
        )
        if load := loads.get(index):
            if "quantization" in anatomy.config:
                # An adapter is fused into expanded weights, of 16 bits as a rule.
                size = 2 * load.parameters
            # One more is written while all others are kept.
            checkpoints = 1 + stage.save_total_limit + stage.load_best_at_end
            own = max(size, anatomy.bytes) + checkpoints * 12 * load.trained
            needed += own * stage.num_trainings
        if hasattr(stage, "method"):
            quantization = stage
        if quantization:
            size = quantized_bytes(anatomy, anatomy.selection(quantization).specs)
            if budget := getattr(quantization, "mixed_precision", None):
                size = budget.max_bytes(anatomy.parameters)
            needed += size
        if hasattr(stage, "formats"):
            # All but model/ may hold every weight in 16 bits.
            others = {"hf", "gguf"} & set(stage.formats)
            needed += size + len(others) * 2 * anatomy.parameters
    return needed


def _trained(model: nn.Module, stage: ConfigModel) -> int:
    """Weights a train stage trains; puts its adapter on the model."""
    if stage.qat and stage.qat.quantizer == "scales_only":
        return 0
    if stage.adapter:
        # Of a model that is yet to be quantized; QA-LoRA's matrices are smaller.
        adapter = stage.adapter
        if stage.keeps_codes:
            adapter = adapter.model_copy(update={"type": "lora"})
        merged = stage.qat is not None or stage.keeps_codes
        lora_model.attach(model, adapter, seed=0, merged=merged)
    return _count(model.trainable_parameters())


def _count(parameters: dict) -> int:
    return sum(value.size for _, value in tree_flatten(parameters))


def _matrices(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes [..., out, in] by name."""
    named = tree_flatten(model.parameters())
    return {name: value.shape for name, value in named if value.ndim > 1}


def _used(anatomy: ModelShape, matrices: dict) -> list[tuple[tuple[int, ...], float]]:
    """Every matrix tokens are multiplied with, and the share of tokens it sees."""
    has_head = any("lm_head" in name for name in matrices)
    chosen = anatomy.setting("num_experts_per_tok")
    return [
        (shape, chosen / shape[0] if chosen and len(shape) == 3 else 1.0)
        for name, shape in matrices.items()
        if not (has_head and "embed" in name)
    ]


def _activations(
    anatomy: ModelShape,
    matrices: dict,
    batch: BatchShape,
    compute: int,
    stage: ConfigModel,
) -> int:
    """Bytes the blocks' forward pass keeps for the backward pass."""
    kept = sum(
        (shape[-1] + shape[-2]) * (share * shape[0] if len(shape) == 3 else 1)
        for shape, share in _used(anatomy, matrices)
    )
    layers, heads = map(anatomy.setting, ("num_hidden_layers", "num_attention_heads"))
    kept += 2 * layers * heads * batch.length
    if stage.gradient_checkpointing:
        kept = layers * anatomy.setting("hidden_size") + kept / max(1, layers)
    return int(batch.tokens * compute * kept)


def _loss(anatomy: ModelShape, batch: BatchShape, stage: ConfigModel) -> int:
    """Bytes of the logits, their exponentials and their gradients."""
    vocabulary = anatomy.setting("vocab_size")
    of_token = LOGIT_BYTES[on_cpu()] * vocabulary
    chunk = stage.chunk(vocabulary=vocabulary, tokens=batch.tokens, on_cpu=on_cpu())
    if chunk is None or CHUNKS_AT_ONCE * chunk >= batch.tokens:
        return of_token * batch.tokens
    head = 0 if stage.adapter else vocabulary * anatomy.setting("hidden_size")
    return of_token * CHUNKS_AT_ONCE * chunk + 8 * head

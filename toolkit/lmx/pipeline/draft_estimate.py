"""Resource estimates of draft stages, from shapes alone.

A draft model is trained in full. With P parameters of the target, D of the draft model,
and at most N tokens of prompts and completions, distillation takes besides:

    target       c P of memory throughout
    data         2 P operations per generated token, 2 P more for its prediction, and
                 k (2 + index) + 4 bytes of disk per token of N
    online       2 P per token of every step if predictions are not stored
"""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from mlx.utils import tree_flatten

from ..config.draft import DraftConfig, DraftModelConfig
from ..config.train import CACHED_LOGITS, CHUNK_LOGITS, TrainConfig
from ..cpu import on_cpu
from ..draft.hidden_states import BYTES_PER_VALUE
from ..draft.pruning import PrunedShape, pruned_config
from ..models.checkpoint import read_config
from ..models.drafters.base import Drafter
from ..models.drafters.io import ARCHITECTURES
from .estimate import (
    CHUNKS_AT_ONCE,
    DECODE_FACTOR,
    DEPTH_FRACTIONS,
    LOGIT_BYTES,
    QUANTIZATION_KEYS,
    BatchShape,
    GenerationCost,
    ModelShape,
    TrainingCost,
    config_dtype,
    training_cost,
)


def draft_training_cost(
    target: ModelShape,
    config: DraftConfig,
    batch: BatchShape,
    compute: int,
    find: Callable[[str], Path | None],
) -> TrainingCost | None:
    """Cost of training a draft model with the target in memory; None = unknown.

    The cost is unknown if the model that the draft model is cut from is on the Hub.

    Args:
        compute: bytes of the compute dtype.

    Raises:
        UserError: no such draft model can be cut.
    """
    draft = _draft_shape(target, config.draft_model, find)
    if draft is None:
        return None
    alone = TrainConfig(steps=config.steps, batch_tokens=config.batch_tokens)
    cost, total = training_cost(draft, alone, batch, compute), target.parameters
    online = 2 * total * (config.data_generation.top_k is None)
    memory = {"target": compute * total} | cost.memory
    operations = cost.operations + online * batch.mean_tokens
    return replace(cost, memory=memory, operations=operations)


def drafter_training_cost(
    target: ModelShape, config: DraftConfig, batch: BatchShape, compute: int
) -> TrainingCost:
    """Cost of training a drafter on hidden states, with the target in memory.

    It processes K + 1 rows for each token of a batch with eagle3, and about one with
    dflash, whose blocks are spread over the text.
    """
    drafter, total = _drafter(target, config), target.parameters
    parameters = sum(value.size for _, value in tree_flatten(drafter.parameters()))
    vocabulary = target.setting("vocab_size")
    count = config.drafter.num_draft_tokens
    if config.architecture == "eagle3":
        vocabulary = config.drafter.draft_vocab_size or vocabulary
        rows, drafted = count + 1, count
        # The embedding is the target's; the head is trained.
        head = vocabulary * target.setting("hidden_size")
        trained = parameters
    else:
        rows = drafted = 1
        head, trained = vocabulary * target.setting("hidden_size"), parameters
    layers = trained - head * (config.architecture == "eagle3")
    matrices = [v.shape for _, v in tree_flatten(drafter.parameters()) if v.ndim == 2]
    widths = sum(sum(shape) for shape in matrices if max(shape) < vocabulary)
    logits = LOGIT_BYTES[on_cpu()] * vocabulary
    chunk = max(64, (CACHED_LOGITS if on_cpu() else CHUNK_LOGITS) // vocabulary)
    step = compute * rows * batch.tokens * widths
    step += logits * min(CHUNKS_AT_ONCE * chunk, drafted * batch.tokens)
    memory = {
        "target": compute * total,
        "weights": (4 + compute) * trained,
        "optimizer": 12 * trained,
        "step": step + batch.tokens * 4 * _state_bytes(target, config) // 2,
    }
    operations = 6 * layers * rows + 8 * head * drafted
    online = config.data_generation.top_k is None
    operations += 2 * total * online
    return TrainingCost(
        total + trained, trained, memory, operations * batch.mean_tokens
    )


def _drafter(target: ModelShape, config: DraftConfig) -> Drafter:
    """A drafter for this target, whose weights are never computed."""
    drafter = config.drafter
    if drafter.mask_token_id is None:
        drafter = drafter.model_copy(update={"mask_token_id": 0})
    return ARCHITECTURES[config.architecture].for_target(
        target.config,
        drafter,
        width=target.setting("hidden_size"),
        vocab_size=target.setting("vocab_size"),
        num_blocks=target.setting("num_hidden_layers"),
    )


def _state_bytes(target: ModelShape, config: DraftConfig) -> int:
    """Bytes on disk of the hidden states of one token."""
    count = len(_drafter(target, config).layer_ids)
    return count * target.setting("hidden_size") * BYTES_PER_VALUE


def generation_cost(
    target: ModelShape, config: DraftConfig, prompt_length: float
) -> GenerationCost:
    """Cost of the data of a draft model.

    Args:
        prompt_length: tokens of a prompt on average.
    """
    data, vocabulary = config.data_generation, target.setting("vocab_size")
    count = data.num_prompts + data.num_eval_prompts
    tokens = int(count * (prompt_length + data.max_tokens))
    from ..training.teacher_targets import bytes_per_token

    size = bytes_per_token(data.top_k, vocabulary) if data.top_k else 0
    states = 0
    if config.architecture != "model":
        states = tokens * _state_bytes(target, config)
        states *= states <= 1e9 * data.max_hidden_states_gb
    passes = 1 + (data.top_k is not None) + (states > 0)
    operations = 2 * target.parameters * passes * tokens
    return GenerationCost(tokens, size * tokens, operations, states)


def draft_benchmark_work(target: ModelShape, config: DraftConfig) -> float:
    """Operations of large matrix products that take as long as the benchmark.

    Every prompt is completed greedily and sampled, each without a draft and with every
    proposer. A proposer is counted as a speed-up of 1.
    """
    benchmark = config.benchmark
    decoders = 3 + (benchmark.baseline_model is not None)
    tokens = 2 * decoders * benchmark.num_prompts * benchmark.max_tokens
    return DECODE_FACTOR * 2 * target.parameters * tokens


def _draft_shape(
    target: ModelShape, draft: DraftModelConfig, find: Callable[[str], Path | None]
) -> ModelShape | None:
    config = target.config
    if draft.init_from:
        folder = find(draft.init_from)
        if folder is None:
            return None
        config = read_config(folder)
    config = {k: value for k, value in config.items() if k not in QUANTIZATION_KEYS}
    count = config.get("num_hidden_layers")
    if not isinstance(count, int):
        return None
    layers = draft.num_layers
    if layers == "auto":
        layers = math.ceil(max(DEPTH_FRACTIONS) * count)
    if draft.from_scratch:
        config["num_hidden_layers"] = count = layers
    numbers = layers if isinstance(layers, list) else range(min(layers, count))
    sizes = (draft.hidden_size, draft.intermediate_size)
    config = pruned_config(config, PrunedShape(tuple(sorted(numbers)), *sizes))
    shape = ModelShape(config, 0)
    return replace(shape, bytes=config_dtype(config).size * shape.parameters)

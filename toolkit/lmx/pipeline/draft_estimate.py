"""What a distill stage will need, beside the target it distils.

The draft is trained in full, which takes what a train stage of its shape takes. With P
parameters of the target, in its compute type, and N tokens of all prompts and answers
at most, there are besides:

    target       c P in memory, all the time
    lessons      operations 2 P for every token of N that is said, and as many for its
                 prediction; on disk k (2 + index) + 4 bytes a token of N
    live         without predictions on disk, 2 P for every token of every step
    on-policy    2 P and 4 D besides for every token of its steps, with D parameters of
                 the draft, which guesses along a lesson and reads it to write on

Of a sibling that is not on this disk nothing is known, nor of its draft.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx

from ..config.base import ConfigModel
from ..config.draft import DraftModelConfig
from ..config.train import TrainConfig as Train
from ..draft.pruning import PrunedShape, pruned_config
from ..models.checkpoint import read_config
from ..training.teacher_targets import bytes_per_token
from .draft_init import SHARES
from .estimate import BatchShape, ModelShape, TrainingCost, training

QUANTIZED = ("quantization", "quantization_config")


@dataclass(frozen=True)
class GenerationCost:
    """What a draft learns from.

    Attributes:
        tokens: of prompts and answers, at most.
        bytes: of their predictions on disk; 0 = there are none.
        operations: of making both.
    """

    tokens: int
    bytes: int
    operations: float


def drafting(
    anatomy: ModelShape,
    stage: ConfigModel,
    batch: BatchShape,
    compute: int,
    find: Callable[[str], Path | None],
) -> TrainingCost | None:
    """What training the draft takes, with the target beside it; None = not known.

    Args:
        compute: bytes of a number.

    Raises:
        UserError: no such student can be cut.
    """
    draft = _draft(anatomy, stage.draft_model, find)
    if draft is None:
        return None
    alone = Train(steps=stage.steps, batch_tokens=stage.batch_tokens)
    load, total = training(draft, alone, batch, compute), anatomy.parameters
    live = 2 * total * (stage.data_generation.top_k is None)
    if stage.on_policy:
        live += stage.on_policy.fraction * (2 * total + 4 * draft.parameters)
    memory = {"target": compute * total} | load.memory
    operations = load.operations + live * batch.mean_tokens
    return replace(load, memory=memory, operations=operations)


def lessons(anatomy: ModelShape, stage: ConfigModel, prompt: float) -> GenerationCost:
    """What is said and predicted before the first step.

    Args:
        prompt: tokens of one, on average.
    """
    answers, vocabulary = stage.data_generation, anatomy.setting("vocab_size")
    count = answers.num_prompts + answers.num_eval_prompts
    tokens = int(count * (prompt + answers.max_tokens))
    size = bytes_per_token(answers.top_k, vocabulary) if answers.top_k else 0
    passes = 2 if answers.top_k else 1
    return GenerationCost(
        tokens, size * tokens, 2 * anatomy.parameters * passes * tokens
    )


def _draft(
    anatomy: ModelShape, student: DraftModelConfig, find: Callable[[str], Path | None]
) -> ModelShape | None:
    config = anatomy.config
    if student.init_from:
        folder = find(student.init_from)
        if folder is None:
            return None
        config = read_config(folder)
    config = {key: value for key, value in config.items() if key not in QUANTIZED}
    count = config.get("num_hidden_layers")
    if not isinstance(count, int):
        return None
    kept = student.num_layers
    if kept == "auto":
        kept = math.ceil(max(SHARES) * count)
    if student.from_scratch:
        config["num_hidden_layers"] = count = kept
    numbers = kept if isinstance(kept, list) else range(min(kept, count))
    sizes = (student.hidden_size, student.intermediate_size)
    config = pruned_config(config, PrunedShape(tuple(sorted(numbers)), *sizes))
    name = config.get("torch_dtype") or config.get("dtype") or "bfloat16"
    draft = ModelShape(config, 0)
    return replace(draft, bytes=getattr(mx, name).size * draft.parameters)

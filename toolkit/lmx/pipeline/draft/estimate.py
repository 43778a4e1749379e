"""Memory and work of a draft stage, from shapes alone."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from mlx.utils import tree_flatten

from ...config.budget import budget_seconds
from ...config.draft import DraftConfig
from ...config.train import TrainConfig, loss_chunk
from ...cpu import on_cpu
from ...draft.pruning import pruned_config
from ...models.checkpoint import read_config
from ...models.drafters.base import Drafter
from ...run.progress import readable_size
from ..estimate import (
    ADAMW_BYTES,
    BatchShape,
    Estimate,
    ModelShape,
    Workload,
    logit_bytes,
    training_dtype,
)
from ..train.estimate import training_cost
from ..work import Work


def estimate_draft(
    config: DraftConfig, workload: Workload, current: ModelShape
) -> Estimate:
    """What a draft stage needs: data, a training with the target, and a benchmark.

    Raises:
        UserError: no such draft model can be cut.
    """
    # These need NumPy, which reading a recipe does not load.
    from ...draft.hidden_states import BYTES_PER_VALUE
    from ...models.drafters.io import ARCHITECTURES
    from ...training.teacher_targets import bytes_per_token

    target, data, benchmark = workload.shape, config.data_generation, config.benchmark
    width, vocabulary = map(target.setting, ("hidden_size", "vocab_size"))
    dtype = training_dtype("auto", target.dtype)
    length = max(workload.lengths) + data.max_tokens
    tokens = max(config.batch_tokens, length)
    batch = BatchShape(length, tokens, tokens)
    if config.architecture == "model":
        layers = 0
        needs = _draft_model_cost(target, config, batch, dtype.size, workload.find)
    else:
        drafter = ARCHITECTURES[config.architecture].for_target(
            target.config,
            config.drafter,
            width=width,
            vocab_size=vocabulary,
            num_blocks=target.setting("num_hidden_layers"),
            mask_token_id=0,
        )
        layers = len(drafter.layer_ids)
        needs = _drafter_cost(drafter, target, config, batch, dtype.size)
    # Only the prompt of an example is used.
    count, prompt = data.num_prompts + data.num_eval_prompts, workload.mean_length
    generated = int(count * (prompt + data.max_tokens))
    stored = generated + data.text_tokens
    predictions = "none"
    if data.top_k:
        size = stored * bytes_per_token(data.top_k, vocabulary)
        predictions = f"{readable_size(size)} in the cache"
    text = f"generates at most {generated:,} tokens, predictions: {predictions}"
    states = stored * layers * width * BYTES_PER_VALUE
    if states > 1e9 * data.max_hidden_states_gb:
        states = 0
    text += f", hidden states: {readable_size(states)}" if states else ""
    # One forward pass gives predictions and hidden states.
    passes = bool(data.top_k or states)
    # Every prompt of the benchmark is completed greedily and sampled, each without a
    # draft and with every proposer, which is counted as a speed-up of 1.
    completed = 2 * 3 * benchmark.num_prompts * benchmark.max_tokens
    forward, steps = 2 * target.parameters, config.num_steps
    if needs is None:
        # The time of the rest would not be that of the stage.
        needs = Estimate(current)
    else:
        step = needs.work
        if data.top_k is None:
            # The target predicts in every step.
            step += Work(forward=forward * tokens)
        steps = steps or round(budget_seconds(config.budget) / step.seconds(dtype)) or 1
        work = Work(
            generated=forward * count * data.max_tokens,
            forward=forward * (count * prompt + passes * stored),
            decoded=forward * completed,
        )
        parts = {"target": dtype.size * target.parameters} | needs.parts
        needs = replace(needs, parts=parts, work=work + step * steps)
    return replace(needs, model=current, dtype=dtype, steps=steps, data=text)


def _draft_model_cost(
    target: ModelShape,
    config: DraftConfig,
    batch: BatchShape,
    compute: int,
    find: Callable[[str], Path | None],
) -> Estimate | None:
    """Training a draft model in full, and the work of a step.

    None = unknown, because the model that it is cut from is on the Hub.
    """
    draft, source = config.draft_model, target.config
    if draft.init_from:
        if (folder := find(draft.init_from)) is None:
            return None
        source = read_config(folder)
    source = {k: value for k, value in source.items() if "quantization" not in k}
    count = source.get("num_hidden_layers")
    if not isinstance(count, int):
        return None
    layers = draft.num_layers
    if not isinstance(layers, list):
        layers = range(draft.depth(count))
    shape = ModelShape.of_config(pruned_config(source, sorted(layers)))
    alone = TrainConfig(steps=1, batch_tokens=config.batch_tokens)
    return training_cost(shape, alone, batch, compute)


def _drafter_cost(
    drafter: Drafter,
    target: ModelShape,
    config: DraftConfig,
    batch: BatchShape,
    compute: int,
) -> Estimate:
    """Training a drafter in full, and the work of a step.

    The head runs on the rows of completions, of which the longest is counted, and of
    text; and once more in the backward pass.
    """
    parameters = dict(tree_flatten(drafter.parameters()))
    trained = sum(value.size for value in parameters.values())
    own_head = parameters.pop("lm_head.weight", None)
    vocabulary = drafter.config.vocab_size if own_head is None else len(own_head)
    width = target.setting("hidden_size")
    matrices = [value for value in parameters.values() if value.ndim == 2]
    rows = drafter.rows_per_token(config.drafter.num_draft_tokens)
    tokens = round(rows * batch.tokens)
    step = compute * tokens * sum(sum(m.shape) for m in matrices)
    step += logit_bytes(vocabulary, tokens, loss_chunk(vocabulary, on_cpu=on_cpu()))
    # The target's hidden states, in float32.
    step += 4 * batch.tokens * len(drafter.layer_ids) * width
    parts = {
        "weights": (4 + compute) * trained,
        "optimizer": ADAMW_BYTES * trained,
        "step": step,
    }
    share = min(1.0, config.data_generation.max_tokens / batch.length)
    if config.data_generation.text_tokens:
        # Half of the steps train all tokens.
        share = (1 + share) / 2
    per_row = 6 * sum(m.size for m in matrices) + 8 * share * vocabulary * width
    work, total = Work(per_row * rows * batch.mean_tokens), target.parameters + trained
    return Estimate(target, parts, work=work, parameters=total, trained=trained)

"""Memory and work of a draft stage, from shapes alone.

A draft model or drafter is trained in full, with the target in memory.
"""

from collections.abc import Callable
from pathlib import Path

from mlx.utils import tree_flatten

from ...config.draft import DraftConfig
from ...config.train import TrainConfig, loss_chunk
from ...cpu import on_cpu
from ...draft.pruning import pruned_config
from ...models.checkpoint import read_config
from ...models.drafters.base import Drafter
from ...run.progress import readable_size
from ..estimate import ADAMW_BYTES, BatchShape, Estimate, ModelShape, logit_bytes
from ..train.estimate import training_cost
from ..work import Work


def draft_training_cost(
    target: ModelShape,
    config: DraftConfig,
    batch: BatchShape,
    compute: int,
    find: Callable[[str], Path | None],
) -> Estimate | None:
    """What the training of a draft model or a drafter needs without the target, and the
    work of a step.

    None = unknown, because the model that the draft model is cut from is on the Hub.

    Args:
        compute: bytes of the compute dtype.

    Raises:
        UserError: no such draft model can be cut.
    """
    if config.architecture != "model":
        return _drafter_training_cost(target, config, batch, compute)
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


def _drafter_training_cost(
    target: ModelShape, config: DraftConfig, batch: BatchShape, compute: int
) -> Estimate:
    """The head runs on the rows of completions, of which the longest is counted, and of
    text; and once more in the backward pass."""
    drafter, width = _drafter(target, config), target.setting("hidden_size")
    parameters = dict(tree_flatten(drafter.parameters()))
    trained = sum(value.size for value in parameters.values())
    own_head = parameters.pop("lm_head.weight", None)
    vocabulary = drafter.config.vocab_size if own_head is None else len(own_head)
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
    work = Work(per_row * rows * batch.mean_tokens)
    total = target.parameters + trained
    return Estimate(target, parts, work=work, parameters=total, trained=trained)


def _drafter(target: ModelShape, config: DraftConfig) -> Drafter:
    """A drafter for this target, whose weights are never computed."""
    # Needs NumPy, which reading a recipe does not load.
    from ...models.drafters.io import ARCHITECTURES

    return ARCHITECTURES[config.architecture].for_target(
        target.config,
        config.drafter,
        width=target.setting("hidden_size"),
        vocab_size=target.setting("vocab_size"),
        num_blocks=target.setting("num_hidden_layers"),
        mask_token_id=0,
    )


def generation_cost(
    target: ModelShape, config: DraftConfig, prompt_length: float
) -> tuple[Work, str]:
    """Work and a description of the data of a draft model.

    Args:
        prompt_length: tokens of a prompt on average.
    """
    # Both need NumPy.
    from ...draft.hidden_states import BYTES_PER_VALUE
    from ...training.teacher_targets import bytes_per_token

    data, predictions, states = config.data_generation, "none", 0
    count = data.num_prompts + data.num_eval_prompts
    generated = int(count * (prompt_length + data.max_tokens))
    tokens = generated + data.text_tokens
    if data.top_k:
        size = tokens * bytes_per_token(data.top_k, target.setting("vocab_size"))
        predictions = f"{readable_size(size)} in the cache"
    text = f"generates at most {generated:,} tokens, predictions: {predictions}"
    if config.architecture != "model":
        layers = len(_drafter(target, config).layer_ids)
        states = tokens * layers * target.setting("hidden_size") * BYTES_PER_VALUE
        states *= states <= 1e9 * data.max_hidden_states_gb
        text += f", hidden states: {readable_size(states)}" if states else ""
    per_token = 2 * target.parameters
    # One forward pass gives predictions and hidden states.
    passes = bool(data.top_k or states)
    work = Work(
        generated=per_token * count * data.max_tokens,
        forward=per_token * (count * prompt_length + passes * tokens),
    )
    return work, text

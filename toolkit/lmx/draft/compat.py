"""What every engine asks of a draft, checked before anything is published.

mlx-lm and LM Studio compare sizes of vocabularies alone, so what is wrong here would be
served without a word and guess badly; tokens are compared by `generate.drafting`.
"""

from ..errors import UserError
from ..models.checkpoint import config_int
from ..models.loader import build_model, make_cache

PLAIN = "KVCache"


def require_servable(config: dict, target: dict, tokens: int, *, place: str) -> None:
    """That stock mlx-lm can draft with a model of this config for the target's.

    Args:
        tokens: of the tokenizer.

    Raises:
        UserError: a cache that cannot take guesses back, too few positions or rows.
    """
    if "model_file" in config:
        raise UserError(
            "a draft with code of its own is not served by mlx-lm", place=place
        )
    kinds = {type(cache).__name__ for cache in make_cache(build_model(config))} - {
        PLAIN
    }
    if kinds:
        raise UserError(
            "a draft needs full attention, for guesses are taken back; this has a "
            f"{sorted(kinds)[0]}",
            place=place,
            hint="student: {from: <a sibling with full attention>}",
        )
    ours, theirs = (config_int(c, "max_position_embeddings") for c in (config, target))
    if ours < theirs:
        raise UserError(
            f"the draft has {ours:,} positions, the target {theirs:,}: beyond the "
            "draft's it would guess wrong",
            place=place,
            hint="take a sibling with as many positions",
        )
    if config_int(config, "vocab_size") < tokens:
        raise UserError(
            f"the draft's head has {config_int(config, 'vocab_size'):,} rows for "
            f"{tokens:,} tokens",
            place=place,
        )

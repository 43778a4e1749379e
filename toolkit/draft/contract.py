"""What every engine asks of a draft, checked before anything is published.

mlx-lm and LM Studio only compare sizes of vocabularies, so what is wrong here would be
served without a word and guess badly.
"""

from typing import Any

from ..errors import UserError
from ..model.folder import setting
from ..model.load import build, make_cache

PLAIN = "KVCache"


def require_same_tokens(draft: Any, target: Any, *, place: str) -> None:
    """That two tokenizers of mlx-lm name the same tokens, special ones too.

    Raises:
        UserError: they do not.
    """
    ours, theirs = draft.get_vocab(), target.get_vocab()
    if ours != theirs:
        words = ours.keys() | theirs.keys()
        other = sorted(word for word in words if ours.get(word) != theirs.get(word))
        raise UserError(
            f"a draft needs the target's tokens; {len(other):,} have another number, "
            f"as {other[0]!r}, or are not in both",
            place=place,
            hint="cut the draft from the target, or from a sibling of its family",
        )
    if sorted(draft.all_special_ids) != sorted(target.all_special_ids):
        raise UserError("a draft needs the target's special tokens", place=place)


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
    kinds = {type(cache).__name__ for cache in make_cache(build(config))} - {PLAIN}
    if kinds:
        raise UserError(
            "a draft needs full attention, for guesses are taken back; this has a "
            f"{sorted(kinds)[0]}",
            place=place,
            hint="student: {from: <a sibling with full attention>}",
        )
    ours, theirs = (setting(c, "max_position_embeddings") for c in (config, target))
    if ours < theirs:
        raise UserError(
            f"the draft has {ours:,} positions, the target {theirs:,}: beyond the "
            "draft's it would guess wrong",
            place=place,
            hint="take a sibling with as many positions",
        )
    if setting(config, "vocab_size") < tokens:
        raise UserError(
            f"the draft's head has {setting(config, 'vocab_size'):,} rows for "
            f"{tokens:,} tokens",
            place=place,
        )

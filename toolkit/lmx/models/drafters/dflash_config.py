"""The config.json of a DFlash drafter, in the format of its authors (z-lab)."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field

from ...config.draft import DrafterConfig
from ...errors import UserError
from .attention_config import (
    AttentionConfig,
    LayerIds,
    Size,
    architectures,
)

ARCHITECTURE = "DFlashDraftModel"
# Drafters of other designs with the same tensors and more: of DFlash 2, DSpark, Domino,
# and of drafters whose blocks see only earlier tokens.
UNSUPPORTED = (
    *("selector_rank", "conv_kernel_size", "markov_rank", "attention_sink_bias"),
    *("causal", "dflash_query_causal", "sample_from_anchor", "shift_label"),
    "attention_bias",
)
DEFAULT_LAYERS = 3


class DFlashConfig(AttentionConfig):
    """Sizes of a DFlash drafter, under the keys of its config.json.

    Attributes:
        block_size: slots of a block: the anchor and the draft tokens.
        mask_token_id: the token in the slots of draft tokens.
        target_layer_ids: the target's blocks, from 0, whose outputs are read.
        num_target_layers: all blocks of the target.
        final_logit_softcapping: of the target, for other programs; here the target's
            own LM head applies it.
    """

    block_size: Annotated[Size, Field(ge=2)]
    mask_token_id: Annotated[int, Field(ge=0)]
    target_layer_ids: LayerIds
    num_target_layers: Size | None = None
    final_logit_softcapping: float | None = None
    # All values of a head are rotated.
    partial_rotary_factor: Annotated[float, Field(ge=1, le=1)] = 1.0
    layer_types: list[Literal["full_attention"]] | None = None
    projector_type: Literal["dflash"] | None = None
    dflash_config: dict[str, Any] | None = None

    @property
    def num_tokens(self) -> int:
        """See `AttentionConfig`."""
        return max(self.vocab_size, self.mask_token_id + 1)

    @classmethod
    def from_json(cls, config: dict, *, place: str) -> Self:
        """The sizes in a config.json.

        Raises:
            UserError: a key is missing, wrong or not supported.
        """
        nested = config.get("dflash_config") or {}
        if isinstance(nested, dict):
            # Both places are in use.
            config = config | nested
        _check_supported(config, place)
        return cls.read(config, place=place)

    @staticmethod
    def own_values(
        target_config: dict, config: DrafterConfig, vocab_size: int, num_blocks: int
    ) -> dict[str, Any]:
        """See `AttentionConfig`."""
        target = target_config | (target_config.get("text_config") or {})
        return {
            "num_hidden_layers": config.num_layers or DEFAULT_LAYERS,
            "block_size": config.num_draft_tokens + 1,
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": config.layer_ids or spread(num_blocks),
            "num_target_layers": num_blocks,
            "final_logit_softcapping": target.get("final_logit_softcapping"),
        }

    def to_json(self) -> dict:
        """The config.json of a folder."""
        layers = list(self.target_layer_ids)
        nested = {
            "block_size": self.block_size,
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": layers,
        }
        return (
            {"architectures": [ARCHITECTURE], "model_type": "qwen3"}
            | self.attention_json()
            | nested
            | {
                "num_target_layers": self.num_target_layers or layers[-1] + 1,
                "final_logit_softcapping": self.final_logit_softcapping,
                "dflash_config": nested,
                "layer_types": ["full_attention"] * self.num_hidden_layers,
                "attention_bias": False,
                "tie_word_embeddings": False,
            }
        )


def spread(num_blocks: int, count: int = 3) -> list[int]:
    """Blocks at equal distances from block 1 to the third-last, as in the paper."""
    last = num_blocks - 1
    first, end = min(1, last), max(min(1, last), num_blocks - 3)
    step = (end - first) / (count - 1)
    return sorted({round(first + index * step) for index in range(count)})


def is_dflash(config: dict) -> bool:
    """Whether a config.json is of a DFlash drafter, of any version."""
    return (
        "dflash_config" in config
        or config.get("speculators_model_type") == "dflash"
        or any(name.startswith("DFlash") for name in architectures(config))
    )


def _check_supported(config: dict, place: str) -> None:
    if "speculators_model_type" in config:
        raise UserError(
            "lmx does not read DFlash drafters in the speculators format: programs "
            "disagree on the numbers of the target's layers in it",
            place=place,
            hint="use a drafter in the z-lab format",
        )
    names = architectures(config) or [ARCHITECTURE]
    faults = [f"architectures: {names}"] * (ARCHITECTURE not in names)
    faults += [f"{key}: {config[key]}" for key in UNSUPPORTED if config.get(key)]
    if faults:
        raise UserError(
            f"lmx does not support this kind of DFlash drafter: {faults[0]}",
            place=place,
        )

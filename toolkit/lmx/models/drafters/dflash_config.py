"""The config.json of a DFlash drafter, in the format of its authors (z-lab)."""

from dataclasses import asdict, dataclass
from typing import Any, Self

from ...config.draft import DrafterConfig
from ...errors import UserError

ARCHITECTURE = "DFlashDraftModel"
# Drafters of other designs with the same tensors and more: of DFlash 2, DSpark, Domino,
# and of drafters whose blocks see only earlier tokens.
UNSUPPORTED = (
    *("selector_rank", "conv_kernel_size", "markov_rank", "attention_sink_bias"),
    *("causal", "dflash_query_causal", "sample_from_anchor", "shift_label"),
    "attention_bias",
)
# Values of a target that has no such key.
HEAD_DIM, WIDTH_RATIO, POSITIONS = 64, 4, 4096
DEFAULT_LAYERS = 3
# Rotary scalings of a target that fit heads of any size.
ROPE_TYPES = ("linear", "llama3", "yarn")


@dataclass(frozen=True)
class DFlashConfig:
    """Sizes of a DFlash drafter, under the keys of its config.json.

    Attributes:
        block_size: slots of a block: the anchor and the draft tokens.
        mask_token_id: the token in the slots of draft tokens.
        target_layer_ids: the target's blocks, from 0, whose outputs are read.
        num_target_layers: all blocks of the target.
        final_logit_softcapping: of the target, for other programs; here the target's
            own LM head applies it.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    final_logit_softcapping: float | None = None

    @classmethod
    def from_json(cls, config: dict, *, place: str) -> Self:
        """The sizes in a config.json.

        Raises:
            UserError: a key is missing, wrong or not supported.
        """
        # Both places are in use.
        config = config | (config.get("dflash_config") or {})
        _check_supported(config, place)
        layers = config.get("target_layer_ids")
        if not isinstance(layers, list) or not _is_ascending(layers):
            raise UserError(
                f"target_layer_ids must be a list of blocks in ascending order, not "
                f"{layers!r}",
                place=place,
            )
        sizes = {name: _integer(config, name, place) for name in SIZES}
        heads = sizes["num_attention_heads"]
        if heads % sizes["num_key_value_heads"] or sizes["head_dim"] % 2:
            raise UserError("the attention heads do not fit together", place=place)
        if sizes["block_size"] < 2:
            raise UserError("block_size must be 2 or more", place=place)
        return cls(
            **sizes,
            mask_token_id=_integer(config, "mask_token_id", place, minimum=0),
            target_layer_ids=tuple(layers),
            num_target_layers=config.get("num_target_layers") or layers[-1] + 1,
            final_logit_softcapping=config.get("final_logit_softcapping"),
            **_shared(config, place),
        )

    @classmethod
    def for_target(
        cls,
        target_config: dict,
        config: DrafterConfig,
        *,
        width: int,
        vocab_size: int,
        num_blocks: int,
    ) -> Self:
        """The sizes of a new drafter; see `Drafter.for_target`."""
        target = target_config | (target_config.get("text_config") or {})
        heads = _size(target, "num_attention_heads")
        head_dim = _size(target, "head_dim") or width // (heads or width)
        if head_dim < 2 or head_dim % 2:
            head_dim = HEAD_DIM
        heads = heads or max(1, width // head_dim)
        groups = _size(target, "num_key_value_heads") or heads
        positions = _size(target, "max_position_embeddings")
        shared = _shared(target, "config.json")
        scaling = shared["rope_scaling"] or {}
        if scaling.get("rope_type", scaling.get("type")) not in ROPE_TYPES:
            shared["rope_scaling"] = None
        return cls(
            hidden_size=width,
            intermediate_size=_size(target, "intermediate_size") or WIDTH_RATIO * width,
            num_hidden_layers=config.num_layers or DEFAULT_LAYERS,
            num_attention_heads=heads,
            num_key_value_heads=groups if heads % groups == 0 else heads,
            head_dim=head_dim,
            vocab_size=vocab_size,
            max_position_embeddings=positions or POSITIONS,
            block_size=config.num_draft_tokens + 1,
            mask_token_id=config.mask_token_id,
            target_layer_ids=tuple(config.layer_ids or spread(num_blocks)),
            num_target_layers=num_blocks,
            final_logit_softcapping=target.get("final_logit_softcapping"),
            **shared,
        )

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
            | asdict(self)
            | nested
            | {
                "dflash_config": nested,
                "layer_types": ["full_attention"] * self.num_hidden_layers,
                "hidden_act": "silu",
                "attention_bias": False,
                "tie_word_embeddings": False,
            }
        )


SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings"),
    "block_size",
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
        or any(name.startswith("DFlash") for name in _architectures(config))
    )


def _architectures(config: dict) -> list[str]:
    names = config.get("architectures")
    return [str(name) for name in names] if isinstance(names, list) else []


def _check_supported(config: dict, place: str) -> None:
    if "speculators_model_type" in config:
        raise UserError(
            "lmx does not read DFlash drafters in the speculators format: programs "
            "disagree on the numbers of the target's layers in it",
            place=place,
            hint="use a drafter in the z-lab format",
        )
    names = _architectures(config) or [ARCHITECTURE]
    faults = [f"architectures: {names}"] * (ARCHITECTURE not in names)
    faults += [f"{key}: {config[key]}" for key in UNSUPPORTED if config.get(key)]
    for key, supported in ("projector_type", "dflash"), ("hidden_act", "silu"):
        if config.get(key) not in (None, supported):
            faults.append(f"{key}: {config[key]}")
    if set(config.get("layer_types") or []) - {"full_attention"}:
        faults.append("layer_types with a sliding window")
    if faults:
        raise UserError(
            f"lmx does not support this kind of DFlash drafter: {faults[0]}",
            place=place,
        )


def _shared(config: dict, place: str) -> dict:
    """Values with defaults: of the norms and the rotary embedding."""
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    scaling = config.get("rope_scaling") or rope
    if scaling.get("rope_type", scaling.get("type", "default")) == "default":
        scaling = None
    theta = rope.get("rope_theta") or config.get("rope_theta")
    numbers = {"rms_norm_eps": config.get("rms_norm_eps"), "rope_theta": theta}
    for name, value in numbers.items():
        if not isinstance(value, int | float | None) or (value or 1) < 0:
            raise UserError(f"{name} must be a number, not {value!r}", place=place)
    given = {name: value for name, value in numbers.items() if value}
    return given | {"rope_scaling": scaling}


def _size(config: dict, name: str) -> int | None:
    """A size of a target; where every block has its own, the largest one."""
    value = config.get(name)
    if isinstance(value, list):
        value = max(value, default=None)
    return value if isinstance(value, int) and value > 0 else None


def _integer(config: dict, name: str, place: str, minimum: int = 1) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise UserError(
            f"{name} must be an integer from {minimum}, not {value!r}", place=place
        )
    return value


def _is_ascending(layers: list) -> bool:
    is_valid = all(isinstance(layer, int) and layer >= 0 for layer in layers)
    return bool(layers) and is_valid and layers == sorted(set(layers))

"""What the config.json of every drafter has: sizes of attention layers, and positions.

Positions are read in both spellings: `rope_theta` and `rope_scaling`, and the
`rope_parameters` of transformers 5, in which each kind of layer may have its own.
"""

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, Field, model_validator

from ...config.draft import DrafterConfig
from ...config.validation import FileConfig

Size = Annotated[int, Field(ge=1, lt=2**31)]
Positive = Annotated[float, Field(gt=0)]
# Rotary scalings with one formula for all lengths and sizes of heads. mlx-lm computes
# "dynamic" for one row only, and "longrope" for long texts only.
RopeType = Literal["linear", "llama3", "yarn"]
# Texts have the same position in all sections of "mrope".
UNSCALED = ("default", "mrope")
# Values of a target that has no such key.
HEAD_DIM, WIDTH_RATIO, POSITIONS = 64, 4, 4096


def _ascending(layers: list[int]) -> tuple[int, ...]:
    if layers != sorted(set(layers)):
        raise ValueError(f"must be a list of blocks in ascending order, got {layers}")
    return tuple(layers)


# Blocks of the target, from 0.
LayerIds = Annotated[
    list[Annotated[int, Field(ge=0, lt=2**31)]],
    Field(min_length=1),
    AfterValidator(_ascending),
]


class RopeScaling(FileConfig):
    """A scaling of rotary positions, under the keys of Hugging Face."""

    rope_type: RopeType
    factor: Positive
    original_max_position_embeddings: Size | None = None
    low_freq_factor: Positive = 1.0
    high_freq_factor: Positive = 4.0
    beta_fast: Positive = 32
    beta_slow: Positive = 1
    mscale: Annotated[float, Field(ge=0)] = 1
    mscale_all_dim: Annotated[float, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _check_factors(self) -> Self:
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError("low_freq_factor must be less than high_freq_factor")
        return self


class AttentionConfig(FileConfig):
    """Sizes of a drafter's layers, under the keys of Hugging Face."""

    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    num_key_value_heads: Size
    head_dim: Size
    vocab_size: Size
    max_position_embeddings: Size = POSITIONS
    rms_norm_eps: Annotated[float, Field(ge=0, lt=1)] = 1e-6
    hidden_act: Literal["silu", None] = None
    rope_theta: Annotated[float, Field(gt=1)] = 10000.0
    rope_scaling: RopeScaling | None = None
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] = 1.0

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
        inner = _size(target, "intermediate_size") or WIDTH_RATIO * width
        positions = _size(target, "max_position_embeddings") or POSITIONS
        # All values of a head are rotated.
        rope = _rope(target) | {"partial_rotary_factor": 1.0}
        if (rope["rope_scaling"] or {}).get("rope_type") not in get_args(RopeType):
            rope["rope_scaling"] = None
        sizes = {
            "hidden_size": width,
            "intermediate_size": inner,
            "num_attention_heads": heads,
            "num_key_value_heads": groups if heads % groups == 0 else heads,
            "head_dim": head_dim,
            "vocab_size": vocab_size,
            "max_position_embeddings": positions,
            "rms_norm_eps": target.get("rms_norm_eps") or 1e-6,
        }
        own = cls.own_values(target_config, config, vocab_size, num_blocks)
        return cls.read(rope | sizes | own, place="the target's config.json")

    @staticmethod
    def own_values(
        target_config: dict, config: DrafterConfig, vocab_size: int, num_blocks: int
    ) -> dict[str, Any]:
        """The values of `for_target` that are not those of other drafters."""
        raise NotImplementedError

    @model_validator(mode="before")
    @classmethod
    def _read_rope(cls, data: Any) -> Any:
        return data | _rope(data) if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        has_groups = self.num_attention_heads % self.num_key_value_heads == 0
        if not has_groups or self.rotary_dim % 2 or self.rotary_dim < 2:
            raise ValueError("the attention heads do not fit together")
        return self

    @property
    def num_tokens(self) -> int:
        """Tokens that the target has at least."""
        return self.vocab_size

    @property
    def rotary_dim(self) -> int:
        """Values of a head that are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def rope(self) -> dict[str, Any]:
        """The keys that `make_rope` reads."""
        scaling = self.rope_scaling
        return {
            "rope_theta": self.rope_theta,
            "rope_scaling": scaling and scaling.model_dump(exclude_unset=True),
            "max_position_embeddings": self.max_position_embeddings,
        }

    def attention_json(self) -> dict[str, Any]:
        """The keys of a config.json, with the positions for transformers 4 and 5."""
        values = self.model_dump(include={*AttentionConfig.model_fields}) | self.rope
        scaling = values["rope_scaling"] or {"rope_type": "default"}
        parameters = scaling | {"rope_theta": self.rope_theta}
        return values | {"rope_parameters": parameters, "hidden_act": "silu"}


def architectures(config: dict) -> list[str]:
    """The names of the classes in a config.json."""
    names = config.get("architectures")
    return [str(name) for name in names] if isinstance(names, list) else []


def _size(config: dict, name: str) -> int | None:
    """A size of a target; where every block has its own, the largest one."""
    value = config.get(name)
    if isinstance(value, list):
        value = max(value, default=None)
    return value if isinstance(value, int) and value > 0 else None


def _rope(config: dict) -> dict[str, Any]:
    """The positions of a config.json in the older spelling, with unchecked values.

    Raises:
        ValueError: `rope_parameters` is no block of keys.
    """
    parameters = config.get("rope_parameters") or {}
    if isinstance(parameters, dict):
        parameters = parameters.get("full_attention", parameters)
    if not isinstance(parameters, dict):
        raise ValueError("rope_parameters must be a block of keys")
    scaling = config.get("rope_scaling") or parameters
    if isinstance(scaling, dict):
        scaling = dict(scaling)
        scaling.setdefault("rope_type", scaling.pop("type", "default"))
        scaling = scaling if scaling["rope_type"] not in UNSCALED else None
    keys: dict[str, Any] = {"rope_scaling": scaling}
    for key in ("rope_theta", "partial_rotary_factor"):
        value = parameters.get(key, config.get(key))
        if value is not None:
            keys[key] = value
    return keys

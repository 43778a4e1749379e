"""Config files of drafters: EAGLE-3 (speculators and SGLang folders) and DFlash.

Positions are read in both spellings: `rope_theta` and `rope_scaling`, and the
`rope_parameters` of transformers 5, in which each kind of layer may have its own.
"""

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, Field, field_validator, model_validator

from ...config.draft import DrafterConfig
from ...config.validation import FileConfig
from ...errors import UserError
from ..config_check import HARMLESS

Size = Annotated[int, Field(ge=1, lt=2**31)]
Positive = Annotated[float, Field(gt=0)]
# Rotary scalings with one formula for all lengths and sizes of heads. mlx-lm computes
# "dynamic" for one row only, and "longrope" for long texts only.
RopeType = Literal["linear", "llama3", "yarn"]
# Texts have the same position in all sections of "mrope".
UNSCALED = ("default", "mrope")
# Values of a target that has no such key.
HEAD_DIM, WIDTH_RATIO, POSITIONS = 64, 4, 4096
# Classes of EAGLE-3 drafters.
SPECULATORS = "Eagle3Speculator"
SGLANG = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
# Values of an EAGLE-3 drafter beside those of its layers.
SHARED_KEYS = ("draft_vocab_size", "target_hidden_size")
SHARED_KEYS += ("norm_before_residual", "norm_before_fc")
# Hidden states that a drafter reads if its files name no blocks.
DEFAULT_STATES = 3
DFLASH = "DFlashDraftModel"
DFLASH_LAYERS = 3


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
        mask_token_id: int | None = None,
    ) -> Self:
        """The sizes of a new drafter.

        Args:
            target_config: the target's config.json.
            width: of the target's hidden states.
            num_blocks: of the target.
            mask_token_id: of a drafter that drafts in one pass: the token that stands
                for tokens to draft.
        """
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
        # Those of the language model alone may differ.
        target |= {"architectures": target_config.get("architectures", [])}
        own = cls.own_values(target, config, vocab_size, num_blocks, mask_token_id)
        return cls.read(rope | sizes | own, place="the target's config.json")

    @staticmethod
    def own_values(
        target: dict, config: DrafterConfig, vocab_size: int, num_blocks: int, mask: int
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


class Eagle3Config(AttentionConfig):
    """Sizes and options of an EAGLE-3 drafter.

    Attributes:
        layer_ids: the target's blocks, from 0; None = the files do not name them.
        num_draft_tokens: of a round in training; None = unknown.
        norm_before_residual: the residual is the normalized state.
        norm_before_fc: the states are normalized before they are joined.
        verifier: name and architectures of the target, for other programs.
    """

    num_hidden_layers: Size = 1
    draft_vocab_size: Size
    layer_ids: LayerIds | None = None
    num_draft_tokens: Size | None = None
    attention_bias: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    verifier: dict[str, Any] | None = None
    target_hidden_size: Size | None = None
    model_type: Literal["llama", None] = None
    mlp_bias: Literal[False, None] = None
    sliding_window: int | None = None
    use_sliding_window: bool = True

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: dict) -> dict:
        """Sizes that a Llama config may leave out."""
        heads, width = data.get("num_attention_heads"), data.get("hidden_size")
        if data.get("num_key_value_heads") is None:
            data = data | {"num_key_value_heads": heads}
        if data.get("head_dim") is None and type(heads) is type(width) is int:
            data = data | {"head_dim": width // max(1, heads)}
        if data.get("draft_vocab_size") is None:
            data = data | {"draft_vocab_size": data.get("vocab_size")}
        return data

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        if self.sliding_window and self.use_sliding_window:
            raise ValueError(f"sliding_window {self.sliding_window} is not supported")
        if self.target_hidden_size not in (None, self.hidden_size):
            raise ValueError("target_hidden_size must be hidden_size")
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError("draft_vocab_size must be at most vocab_size")
        return self

    @property
    def num_states(self) -> int:
        """Hidden states of a token."""
        return len(self.layer_ids or range(DEFAULT_STATES))

    @staticmethod
    def own_values(
        target: dict, config: DrafterConfig, vocab_size: int, num_blocks: int, mask: int
    ) -> dict[str, Any]:
        names = target["architectures"]
        return {
            "num_hidden_layers": config.num_layers or 1,
            "draft_vocab_size": min(config.draft_vocab_size or vocab_size, vocab_size),
            "layer_ids": config.layer_ids or [*default_layer_ids(num_blocks)],
            "num_draft_tokens": config.num_draft_tokens,
            "verifier": {"name_or_path": None, "architectures": names},
        }

    @classmethod
    def from_json(cls, config: dict, *, place: str) -> Self:
        """The config.json of a speculators or SGLang folder.

        Raises:
            UserError: a key is missing or has a value that is not supported.
        """
        file = _Eagle3File.read(config, place=place)
        layer = file.transformer_layer_config
        layer = config if layer is None else layer
        return cls.read(layer | file.options(), place=place)

    def to_json(self) -> dict:
        """The config.json of a speculators folder."""
        proposal = {
            "proposal_type": "greedy",
            "speculative_tokens": self.num_draft_tokens or 5,
            "verifier_accept_k": 1,
            "accept_tolerance": 0.0,
        }
        assert self.layer_ids is not None
        return {
            "architectures": [SPECULATORS],
            "speculators_model_type": "eagle3",
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [proposal],
                "verifier": self.verifier or {},
            },
            "transformer_layer_config": self.attention_json()
            | {
                "model_type": "llama",
                "attention_bias": self.attention_bias,
                "mlp_bias": False,
                "tie_word_embeddings": False,
            },
            **self.model_dump(include={*SHARED_KEYS}),
            "target_hidden_size": None,
            "embed_requires_grad": False,
            "tie_word_embeddings": False,
            # An index of the list `hidden_states` of Hugging Face, whose first entry is
            # the embedding.
            LAYER_IDS: [index + 1 for index in self.layer_ids],
        }


class _EagleConfig(FileConfig):
    """SGLang's keys. Its ids are those of blocks."""

    use_aux_hidden_state: Literal[True] = True
    eagle_aux_hidden_state_layer_ids: list[int] | None = None


class _Proposal(FileConfig):
    speculative_tokens: Size | None = None


class _SpeculatorsConfig(FileConfig):
    proposal_methods: list[_Proposal] | None = None
    verifier: dict[str, Any] | None = None


class _Eagle3File(FileConfig):
    """The keys of a config.json that are not those of its layers."""

    transformer_layer_config: dict[str, Any] | None = None
    eagle_config: _EagleConfig | None = None
    speculators_config: _SpeculatorsConfig | None = None
    # An index of the list `hidden_states` of Hugging Face.
    eagle_aux_hidden_state_layer_ids: list[int] | None = None
    draft_vocab_size: Size | None = None
    target_hidden_size: Size | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    embed_requires_grad: Literal[False, None] = None
    bias: Literal[False, None] = None

    @field_validator(LAYER_IDS)
    @classmethod
    def _check_layers(cls, layers: list[int] | None) -> list[int] | None:
        if layers and min(layers) < 1:
            raise ValueError(f"{min(layers)} is the embedding, no output of a block")
        return layers

    def options(self) -> dict[str, Any]:
        """The values under the keys of `Eagle3Config`."""
        blocks = (
            self.eagle_config and self.eagle_config.eagle_aux_hidden_state_layer_ids
        )
        listed = self.eagle_aux_hidden_state_layer_ids or []
        speculators = self.speculators_config or _SpeculatorsConfig()
        proposals = [*(speculators.proposal_methods or ()), _Proposal()]
        return self.model_dump(include={*SHARED_KEYS}) | {
            "layer_ids": blocks or [index - 1 for index in listed] or None,
            "num_draft_tokens": proposals[0].speculative_tokens,
            "verifier": speculators.verifier,
        }


def default_layer_ids(num_blocks: int) -> tuple[int, ...]:
    """Three blocks near the start, the middle and the end of a model, or fewer.

    With 8 blocks or more they are those of the authors.
    """
    if num_blocks >= 8:
        return 1, num_blocks // 2 - 1, num_blocks - 4
    last = max(0, num_blocks - 2)
    return tuple(sorted({0, last // 2, last}))


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
        if "speculators_model_type" in config:
            raise UserError(
                "lmx does not read DFlash drafters in the speculators format: programs "
                "disagree on the numbers of the target's layers in it",
                place=place,
                hint="use a drafter in the z-lab format",
            )
        names = architectures(config) or [DFLASH]
        faults = [f"architectures: {names}"] * (DFLASH not in names)
        # A key of another version or design, such as DFlash 2, DSpark or Domino.
        known = {*cls.model_fields, "rope_parameters", "tie_word_embeddings"}
        known |= set() if config.get("use_sliding_window") else {"sliding_window"}
        for key, value in config.items():
            is_harmless = HARMLESS.search(key) and not key.startswith("dflash")
            if value and key not in known and not is_harmless:
                faults.append(f"{key[:60]}: {str(value)[:60]}")
        if faults:
            message = f"lmx does not support this kind of DFlash drafter: {faults[0]}"
            raise UserError(message, place=place)
        return cls.read(config, place=place)

    @staticmethod
    def own_values(
        target: dict, config: DrafterConfig, vocab_size: int, num_blocks: int, mask: int
    ) -> dict[str, Any]:
        return {
            "num_hidden_layers": config.num_layers or DFLASH_LAYERS,
            "block_size": config.num_draft_tokens + 1,
            "mask_token_id": mask,
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
            {"architectures": [DFLASH], "model_type": "qwen3"}
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


def spread(num_blocks: int) -> list[int]:
    """Block 1, the third-last and the one between them, as in the paper."""
    last = num_blocks - 1
    first, end = min(1, last), max(min(1, last), num_blocks - 3)
    return sorted({first, round((first + end) / 2), end})

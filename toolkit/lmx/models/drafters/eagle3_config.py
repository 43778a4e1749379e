"""Config files of EAGLE-3 drafters: speculators folders, and those of SGLang."""

from typing import Any, Literal, Self

from pydantic import field_validator, model_validator

from ...config.draft import DrafterConfig
from ...config.validation import FileConfig
from .attention_config import AttentionConfig, LayerIds, Size

SPECULATORS = "Eagle3Speculator"
SGLANG = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
# Hidden states that a drafter reads if its files name no blocks.
DEFAULT_STATES = 3


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
        target_config: dict, config: DrafterConfig, vocab_size: int, num_blocks: int
    ) -> dict[str, Any]:
        """See `AttentionConfig`."""
        names = target_config.get("architectures", [])
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
            "draft_vocab_size": self.draft_vocab_size,
            "target_hidden_size": None,
            "norm_before_residual": self.norm_before_residual,
            "norm_before_fc": self.norm_before_fc,
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
        return {
            "layer_ids": blocks or [index - 1 for index in listed] or None,
            "num_draft_tokens": proposals[0].speculative_tokens,
            "verifier": speculators.verifier,
            "draft_vocab_size": self.draft_vocab_size,
            "target_hidden_size": self.target_hidden_size,
            "norm_before_residual": self.norm_before_residual,
            "norm_before_fc": self.norm_before_fc,
        }


def default_layer_ids(num_blocks: int) -> tuple[int, ...]:
    """Three blocks near the start, the middle and the end of a model, or fewer.

    With 8 blocks or more they are those of the authors.
    """
    if num_blocks >= 8:
        return 1, num_blocks // 2 - 1, num_blocks - 4
    last = max(0, num_blocks - 2)
    return tuple(sorted({0, last // 2, last}))

"""Config files of EAGLE-3 drafters: speculators folders, and those of SGLang."""

from dataclasses import dataclass, field
from typing import Self

from ...config.draft import DrafterConfig
from ...errors import UserError

SPECULATORS = "Eagle3Speculator"
SGLANG = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
# Hidden states that a drafter reads if its files name no blocks.
DEFAULT_STATES = 3
ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings")
# Keys of a layer and of the drafter with the only values that are supported.
LAYER_KEYS = {
    "model_type": ("llama",),
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
}
DRAFTER_KEYS = {"embed_requires_grad": (False,), "bias": (False,)}


@dataclass(frozen=True)
class Eagle3Config:
    """Sizes and options of an EAGLE-3 drafter.

    Attributes:
        layer_ids: the target's blocks, from 0; None = the files do not name them.
        num_draft_tokens: of a round in training; None = unknown.
        rope: the keys of a config.json that `make_rope` reads.
        norm_before_residual: the residual is the normalized state.
        norm_before_fc: the states are normalized before they are joined.
        verifier: name and architectures of the target, for other programs.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    layer_ids: tuple[int, ...] | None
    num_layers: int = 1
    num_draft_tokens: int | None = None
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    rope: dict = field(default_factory=dict)
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    verifier: dict = field(default_factory=dict)

    @property
    def num_states(self) -> int:
        """Hidden states of a token."""
        return len(self.layer_ids or range(DEFAULT_STATES))

    @property
    def rotary_dim(self) -> int:
        """Values of a head that are rotated."""
        parameters = self.rope.get("rope_parameters") or {}
        fraction = parameters.get("partial_rotary_factor", 1.0)
        return int(self.head_dim * fraction)

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
        architectures = target_config.get("architectures", [])
        target = target_config.get("text_config", target_config)
        heads = target.get("num_attention_heads") or max(1, width // 64)
        head_dim = target.get("head_dim") or width // heads
        inner = target.get("intermediate_size")
        return cls(
            hidden_size=width,
            intermediate_size=inner if isinstance(inner, int) else 4 * width,
            num_heads=heads,
            num_kv_heads=target.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            vocab_size=vocab_size,
            draft_vocab_size=min(config.draft_vocab_size or vocab_size, vocab_size),
            layer_ids=tuple(config.layer_ids or default_layer_ids(num_blocks)),
            num_layers=config.num_layers or 1,
            num_draft_tokens=config.num_draft_tokens,
            rms_norm_eps=target.get("rms_norm_eps", 1e-6),
            rope=_target_rope(target),
            verifier={"name_or_path": None, "architectures": architectures},
        )

    @classmethod
    def from_json(cls, config: dict, *, place: str) -> Self:
        """The config.json of a speculators or SGLang folder.

        Raises:
            UserError: a key is missing or has a value that is not supported.
        """
        layer = config.get("transformer_layer_config", config)
        _require_supported(config, layer, place)
        try:
            heads, width = layer["num_attention_heads"], layer["hidden_size"]
            vocab_size = layer["vocab_size"]
            rope = {key: layer[key] for key in ROPE_KEYS if layer.get(key)}
            if fraction := layer.get("partial_rotary_factor"):
                rope["rope_parameters"] = {
                    "rope_theta": layer.get("rope_theta", 10000.0),
                    **(rope.get("rope_parameters") or {}),
                    "partial_rotary_factor": fraction,
                }
            return cls(
                hidden_size=width,
                intermediate_size=layer["intermediate_size"],
                num_heads=heads,
                num_kv_heads=layer.get("num_key_value_heads") or heads,
                head_dim=layer.get("head_dim") or width // heads,
                vocab_size=vocab_size,
                draft_vocab_size=config.get("draft_vocab_size") or vocab_size,
                layer_ids=_layer_ids(config, place),
                num_layers=layer.get("num_hidden_layers", 1),
                num_draft_tokens=_num_draft_tokens(config),
                rms_norm_eps=layer.get("rms_norm_eps", 1e-6),
                attention_bias=layer.get("attention_bias", False),
                rope=rope,
                norm_before_residual=config.get("norm_before_residual", False),
                norm_before_fc=config.get("norm_before_fc", False),
                verifier=config.get("speculators_config", {}).get("verifier", {}),
            )
        except KeyError as error:
            raise UserError(
                f"the drafter's config.json lacks {error.args[0]}", place=place
            ) from error

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
                "verifier": self.verifier,
            },
            "transformer_layer_config": self._layer_json(),
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

    def _layer_json(self) -> dict:
        return {
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "rms_norm_eps": self.rms_norm_eps,
            "hidden_act": "silu",
            "attention_bias": self.attention_bias,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            **self.rope,
        }


def _target_rope(target: dict) -> dict:
    """The rotary positions of a target's full-attention layers."""
    rope = {key: target[key] for key in ROPE_KEYS if target.get(key)}
    parameters = rope.get("rope_parameters", {})
    parameters = parameters.get("full_attention", parameters)
    # All values of a head are rotated, in one dimension.
    parameters = {
        key: value
        for key, value in parameters.items()
        if key != "partial_rotary_factor" and not key.startswith("mrope")
    }
    if "mrope_section" in rope.get("rope_scaling", {}):
        del rope["rope_scaling"]
    return rope | ({"rope_parameters": parameters} if parameters else {})


def _require_supported(config: dict, layer: dict, place: str) -> None:
    def refuse(what: str) -> None:
        raise UserError(f"this EAGLE-3 drafter is not supported: {what}", place=place)

    for keys, allowed in (layer, LAYER_KEYS), (config, DRAFTER_KEYS):
        for key, values in allowed.items():
            value = keys.get(key)
            if value is not None and value not in values:
                refuse(f"{key} is {value}")
    window = layer.get("sliding_window")
    if window and layer.get("use_sliding_window", True):
        refuse(f"sliding_window is {window}")
    width = layer.get("hidden_size")
    if config.get("target_hidden_size") not in (None, width):
        refuse(f"target_hidden_size is not hidden_size, {width}")
    if not config.get("eagle_config", {}).get("use_aux_hidden_state", True):
        refuse("use_aux_hidden_state is False")


def _layer_ids(config: dict, place: str) -> tuple[int, ...] | None:
    """The blocks whose outputs are read.

    At the top level, entry i is an index of the list `hidden_states` of Hugging Face:
    the output of block i - 1. In SGLang's `eagle_config`, it is the block itself.
    """
    if nested := config.get("eagle_config", {}).get(LAYER_IDS):
        return tuple(nested)
    listed = config.get(LAYER_IDS)
    if not listed:
        return None
    if min(listed) < 1:
        raise UserError(
            f"{LAYER_IDS} has {min(listed)}: the embedding is no output of a block",
            place=place,
        )
    return tuple(index - 1 for index in listed)


def _num_draft_tokens(config: dict) -> int | None:
    methods = config.get("speculators_config", {}).get("proposal_methods") or [{}]
    return methods[0].get("speculative_tokens")


def default_layer_ids(num_blocks: int) -> tuple[int, ...]:
    """Three blocks near the start, the middle and the end of a model, or fewer.

    With 8 blocks or more they are those of the authors.
    """
    if num_blocks >= 8:
        return 1, num_blocks // 2 - 1, num_blocks - 4
    last = max(0, num_blocks - 2)
    return tuple(sorted({0, last // 2, last}))

"""What all drafters on hidden states have in common.

Their initial weights are those of the target's last blocks, where they fit: short
trainings end at a lower loss than from random weights.
"""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self

import mlx.core as mx
import mlx.nn as nn

from ...config.draft import DrafterConfig
from ...errors import UserError
from ..blockwise import BlockwiseModel, TrunkHeadSplit
from ..hooks import find_blocks
from ..quantized_layers import dequantized_weight, is_quantized

if TYPE_CHECKING:  # reading a recipe imports this module
    import numpy as np

# Finite, so that a probability of 0 times its logarithm is 0.
MIN_LOGIT = -1e4


# Scale of random weights for inputs that the target's block does not have.
NEW_INPUT_SCALE = 0.1


class SwiGLU(nn.Module):
    """The gated feed-forward layer of Llama and Qwen (arXiv 2002.05202)."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        """Outputs [..., width] of inputs [..., width]."""
        return self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))


class TargetHead:
    """The embedding and the LM head of a target model, which a drafter shares.

    Both are the target's own code, so scales and soft-caps are kept; its weights may be
    quantized.

    Attributes:
        model: the target.

    Raises:
        NoTrunkHeadSplit: the head needs more than the output of the final norm.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self._blocks = BlockwiseModel(model)
        self._split = TrunkHeadSplit(model)
        self.vocab_size = model(mx.zeros((1, 1), mx.int32)).shape[-1]

    def embed(self, tokens: mx.array) -> mx.array:
        """The input [B, L, width] of the first block for tokens [B, L]."""
        return self._blocks.embed(tokens)

    def logits(self, hidden: mx.array) -> mx.array:
        """Logits [..., V] of normalized hidden states [..., width]."""
        logits = self._split.logits(hidden.reshape(-1, hidden.shape[-1]))
        return logits.reshape(*hidden.shape[:-1], -1)


class TrainingRounds(NamedTuple):
    """Rounds of a training step, and the outputs of some of their draft tokens.

    Attributes:
        starts: int [B, M]; see `Drafter`.
        first: the first of these draft tokens, from 0.
        hidden: outputs [B, M, J, width] of J draft tokens.
        weight: rounds that each of these stands for.
    """

    starts: mx.array
    first: int
    hidden: mx.array
    weight: float = 1.0


class Drafter(nn.Module, ABC):
    """A network that drafts tokens from the target's hidden states.

    A round starts at a token `a`: the tokens up to and including position a are known,
    and so are the hidden states of the positions before a. Draft token j, from 1,
    predicts the token at position a + j.

    Attributes:
        architecture: its name in recipes.
        config_class: its sizes, with a class method `for_target` like that below.
        layer_ids: the target's blocks, from 0, whose outputs it reads.
        max_draft_tokens: most draft tokens of a round; None = any number.
        drafts_in_one_pass: whether all draft tokens of a round are drafted at once.
    """

    architecture: ClassVar[str]
    config_class: ClassVar[type]
    layer_ids: tuple[int, ...]
    max_draft_tokens: int | None = None
    drafts_in_one_pass: ClassVar[bool] = False

    # `nn.Module` does not treat names with an underscore as parameters.
    _target: TargetHead | None = None

    @classmethod
    def for_target(
        cls,
        target_config: dict,
        config: DrafterConfig,
        **sizes: int | None,
    ) -> Self:
        """A drafter with random weights, and layers like the target's blocks.

        Args:
            target_config: the target's config.json.
            sizes: see `AttentionConfig.for_target`.
        """
        return cls(cls.config_class.for_target(target_config, config, **sizes))

    def choose_layers(self, num_blocks: int) -> None:
        """Choose `layer_ids` if the files name no blocks.

        Args:
            num_blocks: of the target.
        """

    def initialize(self) -> None:
        """Copy from the target what the training starts with, after `bind`."""

    def choose_vocabulary(self, counts: "np.ndarray") -> None:
        """Choose the tokens that can be drafted, before the training.

        Args:
            counts: how often every token is in the training data, int [V].
        """

    def bind(self, target: TargetHead) -> Self:
        """Use the embedding and the LM head of this target."""
        self._target = target
        return self

    def require_shape(self, width: int, vocab_size: int, *, place: str) -> None:
        """Check that the target has the hidden states and the vocabulary of this one.

        Raises:
            UserError: it does not.
        """
        config, needed = self.config, self.config.num_tokens
        states = self.fc.weight.shape[1] // config.hidden_size
        if states != len(self.layer_ids):
            fault = f"{states} hidden states, not {len(self.layer_ids)}"
        elif config.hidden_size != width:
            fault = f"the width {config.hidden_size}, this one has the width {width}"
        elif needed > vocab_size:
            fault = f"{needed} tokens, the target has {vocab_size} tokens"
        else:
            return
        raise UserError(
            f"the drafter is for a target of {fault}",
            place=place,
            hint="a drafter only works with the target it was trained for",
        )

    @abstractmethod
    def make_cache(self) -> list:
        """New caches of its own layers, for one sequence."""

    @abstractmethod
    def draft_hidden(
        self,
        tokens: mx.array,
        states: mx.array,
        starts: mx.array,
        num_draft_tokens: int,
    ) -> mx.array:
        """Outputs [B, M, K, width] for K draft tokens of M rounds, for `head`.

        Draft tokens are predicted as in a round whose draft tokens were all accepted.

        Args:
            tokens: int [B, L + 1].
            states: the target's hidden states of the first L tokens.
            starts: int [B, M], positions from 1 to L; see the class.
            num_draft_tokens: K. Draft tokens past the end of the text have no meaning.
        """

    def head(self, hidden: mx.array) -> mx.array:
        """Logits [..., N] over the draft vocabulary."""
        return self._target.logits(hidden)

    @abstractmethod
    def sample_starts(self, mask: mx.array) -> mx.array:
        """The starts int [B, M] of the rounds of one training step.

        Args:
            mask: bool [B, L], True where the next token is trained: only from there on
                a round makes sense. Rounds elsewhere are not trained.
        """

    def training_rounds(
        self,
        tokens: mx.array,
        states: mx.array,
        mask: mx.array,
        num_draft_tokens: int,
    ) -> list[TrainingRounds]:
        """The outputs of one training step; arguments as of `draft_hidden`.

        Args:
            mask: as of `sample_starts`.
        """
        starts = self.sample_starts(mask)
        hidden = self.draft_hidden(tokens, states, starts, num_draft_tokens)
        return [TrainingRounds(starts, 0, hidden)]

    def rows_per_token(self, num_draft_tokens: int) -> float:
        """Rows that a training step processes per token of its text, about."""
        return 1.0

    @property
    def draft_ids(self) -> mx.array | None:
        """The draft id of every token, int32 [V], N if it has none; None = all equal.

        N is `draft_vocab_size`.
        """
        return None

    @property
    def draft_vocab_size(self) -> int:
        """Tokens that can be drafted."""
        return self._target.vocab_size

    def target_tokens(self, draft_ids: mx.array) -> mx.array:
        """Token ids of draft ids."""
        return draft_ids

    def target_logits(self, logits: mx.array) -> mx.array:
        """Logits [..., V] of logits [..., N]; tokens without a draft id get -inf."""
        return logits

    # Files

    @classmethod
    @abstractmethod
    def matches(cls, config: dict) -> bool:
        """Whether a config.json belongs to this architecture."""

    @classmethod
    def from_config(cls, config: dict, *, place: str) -> Self:
        """A drafter with random weights.

        Raises:
            UserError: a key is missing or has a value that is not supported.
        """
        return cls(cls.config_class.from_json(config, place=place))

    def to_config(self) -> dict:
        """The config.json that `from_config` and other programs read."""
        return self.config.to_json()

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Stored weights under the names of the parameters."""
        return weights

    @abstractmethod
    def export_weights(self) -> dict[str, mx.array]:
        """The weights as they are stored."""


def initialize_from_target(
    target: nn.Module, fc: nn.Linear, layers: list[nn.Module], norm: nn.Module
) -> None:
    """Copy what has the same name and size in the target; the rest stays as it is.

    Args:
        fc: joins the hidden states of several blocks; at the start it passes on the
            last of them, and little of the others.
        layers: as many of the target's last blocks are copied.
        norm: the norm before the LM head.
    """
    blocks = find_blocks(target)
    last_blocks = blocks.trunk[blocks.name][-len(layers) :]
    for layer, block in zip(layers, last_blocks, strict=False):
        sources = dict(block.named_modules())
        if "hidden_norm" in layer:
            # The other norm is that of the token embeddings, which blocks do not read.
            sources["hidden_norm"] = sources.pop("input_layernorm", None)
        for path, module in layer.named_modules():
            source = sources.get(path)
            if "weight" not in module or source is None or "weight" not in source:
                continue
            is_packed = is_quantized(source)
            weight = dequantized_weight(source) if is_packed else source.weight
            rows, columns = module.weight.shape[0], module.weight.shape[-1]
            if weight.shape == module.weight.shape:
                module.weight = mx.array(weight)
            elif weight.shape == (rows, columns // 2):
                # The first half of the inputs is the token embedding.
                new = NEW_INPUT_SCALE * module.weight[:, : columns // 2]
                weights = [new, weight.astype(new.dtype)]
                module.weight = mx.concatenate(weights, axis=1)
    final_norm = getattr(blocks.trunk, "norm", None)
    if type(final_norm) is type(norm):
        norm.weight = mx.array(final_norm.weight)
    width = len(fc.weight)
    others = fc.weight.shape[1] - width
    scaled = NEW_INPUT_SCALE * fc.weight[:, :others]
    fc.weight = mx.concatenate([scaled, mx.eye(width, dtype=fc.weight.dtype)], axis=1)

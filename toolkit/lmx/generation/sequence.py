"""A request, and its state in the engine."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import mlx.core as mx
import numpy as np

from ..errors import UserError
from ..models.lora.multi_lora import BASE
from .grammar_matcher import CompiledGrammar, GrammarMatcher
from .kv_cache.sequence import CacheState
from .min_tokens import MinTokensMatcher
from .sampler import Sampler
from .sampling import Sampling
from .speculative.proposer import Proposer
from .thinking import Thinking, ThinkingMatcher


@dataclass(eq=False)
class GenerationRequest:
    """A prompt with its generation settings.

    Attributes:
        prompt: token ids, at least one.
        stop_tokens: tokens that end the completion.
        logprobs: which log-probabilities of its tokens are wanted: "raw" under the
            distribution of the model, "processed" under the one that is sampled.
        top_logprobs: of so many most likely tokens they are wanted too.
        prompt_logprobs: "raw" ones of the tokens of the prompt are wanted, too. Its
            first token has none.
        priority: requests with a smaller number start first.
        adapter: the name of one of the engine's adapters; None = the model itself.
        grammar: the completion has to match it, from `GrammarCompiler.compile`.
        min_tokens: no stop token comes before so many others, unless the grammar
            allows nothing else.
        thinking: the chain of thought before what has to match the grammar; None = the
            completion has none, or it is not limited.

    Raises:
        UserError: settings that a grammar does not go with.
    """

    prompt: Sequence[int]
    max_tokens: int = 256
    sampling: Sampling = field(default_factory=Sampling)
    stop_tokens: Collection[int] = frozenset()
    logprobs: Literal["raw", "processed"] | None = None
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    priority: int = 0
    adapter: str | None = None
    grammar: CompiledGrammar | None = None
    thinking: Thinking | None = None
    min_tokens: int = 0

    def __post_init__(self):
        if self.grammar and not self.stop_tokens:
            raise UserError("a completion that follows a grammar needs a stop token")
        if self.grammar and self.sampling.allowed_tokens is not None:
            raise UserError("give either a grammar or allowed_tokens")

    @property
    def max_length(self) -> int:
        """Tokens of the prompt and of the longest completion."""
        return len(self.prompt) + self.max_tokens


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position; see `GenerationRequest.logprobs`.

    Attributes:
        chosen: of the token; None = not requested.
        top: pairs of a token and its log-probability, the most likely first.
    """

    chosen: float | None
    top: tuple[tuple[int, float], ...]


NO_LOGPROBS = TokenLogprobs(None, ())


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """The next token of a request, or the error that ended it.

    Attributes:
        is_draft: whether it is an accepted draft token.
        cached_tokens: tokens of the prompt that the prefix cache had.
        prompt_logprobs: of the tokens of the prompt after the first one, if they are
            wanted, with the first token of the completion.
    """

    request: GenerationRequest
    token: int
    is_last: bool
    logprobs: TokenLogprobs = NO_LOGPROBS
    is_draft: bool = False
    cached_tokens: int = 0
    error: UserError | None = None
    prompt_logprobs: Sequence[TokenLogprobs] = ()

    @property
    def logprob(self) -> float | None:
        """Log-probability of the token; None = not requested."""
        return self.logprobs.chosen


@dataclass(eq=False)
class RunningSequence:
    """A request in the engine.

    Attributes:
        order: in which the requests came.
        adapter: number of its adapter.
        state: its cache until it joins the batch.
        matched: tokens that the prefix cache has too, if those are many more than it
            could give; else 0.
        selected_at: `prompt_end`, if keys are selected there and more tokens have to be
            processed after it; else 0.
        cached_tokens: tokens of the prompt that the prefix cache gave.
        prompt_logprobs: of the tokens of the prompt so far, if they are wanted.
        tokens: of the prompt and the completion so far.
        sampler: None before the first step.
        grammar: how far its completion has come in the grammar of the request.
        launched: tokens that are computed, read or not.
        draft: draft tokens of the next round; None = not proposed yet.
        masks: those of the grammar along the draft, see `GrammarMatcher.masks`.
        failed: whether it ended with an error.
    """

    request: GenerationRequest
    order: int
    adapter: int = BASE
    state: CacheState | None = None
    matched: int = 0
    selected_at: int = 0
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    proposer: Proposer | None = None
    sampler: Sampler | None = None
    grammar: GrammarMatcher | ThinkingMatcher | MinTokensMatcher | None = None
    tokens: list[int] = field(default_factory=list)
    launched: int = 0
    draft: mx.array | None = None
    masks: np.ndarray | None = None
    finished: bool = False
    failed: bool = False

    def __post_init__(self):
        request = self.request
        self.tokens = list(request.prompt)
        if request.grammar:
            self.grammar = request.grammar.start(request.stop_tokens)
        if request.thinking:
            self.grammar = request.thinking.begin(self.grammar, request.stop_tokens)
        if request.min_tokens:
            stop_tokens, count = request.stop_tokens, request.min_tokens
            self.grammar = MinTokensMatcher(self.grammar, stop_tokens, count)

    @property
    def rank(self) -> tuple[int, int]:
        """Requests with a smaller rank start first and are preempted last."""
        return self.request.priority, self.order

    @property
    def prompt_end(self) -> int:
        """Tokens of the prompt but the last one, which is left to decoding."""
        return len(self.request.prompt) - 1

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of its prompt are missing: no cache has them."""
        is_whole = len(self.prompt_logprobs) == self.prompt_end
        return self.request.prompt_logprobs and not is_whole

    @property
    def emitted(self) -> int:
        """Tokens of the completion so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def remaining(self) -> int:
        """Tokens that the completion may still have."""
        return self.request.max_tokens - self.emitted

    def has_prompt_of(self, other: "RunningSequence") -> bool:
        """Whether another request has the same tokens and the same adapter, and its
        cache is all that this one needs."""
        if self.scores_prompt or other.scores_prompt:
            return False
        is_alike = self.tokens == other.tokens and self.adapter == other.adapter
        return is_alike and self.prompt_end == other.prompt_end

    def close(self) -> None:
        """Free what it holds but its tokens, from which it can go on."""
        if self.proposer:
            self.proposer.close()
        self.state = self.proposer = self.draft = None

    def set_draft(self, draft: mx.array) -> None:
        """Take the draft of the next round, as far as the grammar allows it."""
        if self.grammar:
            # This waits for a draft model.
            self.mask_draft(draft.tolist())
            draft = draft[: len(self.masks) - 1]
        self.draft = draft

    def mask_draft(self, draft: Sequence[int]) -> None:
        """Set the masks along a draft, if there is a grammar."""
        if self.grammar:
            self.masks = self.grammar.masks(draft, self.sampler.vocab_size)

    def add(
        self,
        token: int,
        logprobs: TokenLogprobs = NO_LOGPROBS,
        *,
        is_draft: bool = False,
    ) -> TokenOutput:
        """Append the next token of the completion, unless its grammar failed."""
        if self.grammar and (error := self.grammar.advance(token)):
            return self.fail(error)
        if self.grammar and self.grammar.is_free:
            self.grammar = self.masks = None
        prompt_logprobs = () if self.emitted else self.prompt_logprobs
        self.tokens.append(token)
        is_stop = token in self.request.stop_tokens
        self.finished = is_stop or not self.remaining
        return TokenOutput(
            self.request,
            token,
            self.finished,
            logprobs,
            is_draft,
            self.cached_tokens,
            prompt_logprobs=prompt_logprobs,
        )

    def fail(self, error: UserError) -> TokenOutput:
        """End the request with an error."""
        self.finished = self.failed = True
        return TokenOutput(self.request, -1, True, error=error)

"""Grammars on tokens: which tokens may come next (llguidance).

A compiled grammar is shared; every request has a matcher, the state of its own text.
Nothing here uses MLX but `allow_only`, so grammars can be compiled in any thread.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np

from ..errors import UserError, library_errors
from ..installation import install_command
from .grammar import Grammar
from .lark_grammar import LOOSE

Matcher = Any
"""llguidance.LLMatcher. The library is imported when the first grammar is compiled."""
T = TypeVar("T")
STACK_BYTES = 256 << 20
"""llguidance follows what a grammar refers to by recursion, and a native stack that
overflows ends the process. The longest chain of MAX_CHARACTERS fits."""
MAX_COMPILED = 64
"""Compiled grammars that are kept."""
LIMITS = {
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 100_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
"""Limits of llguidance, about half its own: a hostile grammar is refused in a second,
and a step takes milliseconds."""
PROBES = 3
"""Tokens that are tried when a grammar is compiled, as some limits apply later."""
NAMES = {
    "json_schema": "the JSON schema",
    "regex": "the regular expression",
    "lark": "the grammar",
}
ALL = np.uint32(0xFFFFFFFF)


class GrammarCompiler:
    """Compiles grammars for a tokenizer, and keeps those used last. Thread-safe.

    Args:
        tokenizer: mlx-lm's TokenizerWrapper.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._compiled: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, grammar: Grammar) -> "CompiledGrammar":
        """The grammar for this tokenizer.

        Raises:
            UserError: llguidance is not installed, cannot read the tokenizer, or
                refuses the grammar.
        """
        with self._lock:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
                return self._compiled[grammar]
        compiled = _on_large_stack(lambda: self._compile(grammar))
        with self._lock:
            self._compiled[grammar] = compiled
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return compiled

    def _compile(self, grammar: Grammar) -> "CompiledGrammar":
        vocabulary, kind = self._vocabulary, grammar.kind
        from llguidance import LLMatcher, LLParserLimits

        with library_errors(f"{NAMES[kind]} is refused", place="grammar"):
            if kind == "json_schema":
                source = LLMatcher.grammar_from_json_schema(
                    grammar.source, overrides=LOOSE
                )
            elif kind == "regex":
                source = LLMatcher.grammar_from_regex(grammar.source)
            else:
                source = LLMatcher.grammar_from_lark(grammar.source)
            matcher = LLMatcher(
                vocabulary, source, log_level=0, limits=LLParserLimits(**LIMITS)
            )
            _probe(matcher, vocabulary)
        return CompiledGrammar(matcher, tuple(vocabulary.eos_tokens), grammar)

    @cached_property
    def _vocabulary(self) -> Any:
        try:
            from llguidance import LLTokenizer
        except ModuleNotFoundError as error:
            raise UserError(
                "completions that follow a grammar need the package llguidance",
                hint=install_command("serve"),
            ) from error
        if not hasattr(self._tokenizer, "backend_tokenizer"):
            raise UserError("grammars need a tokenizer with a tokenizer.json")
        tokenizer = copy(self._tokenizer.backend_tokenizer)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        ends = sorted(self._tokenizer.eos_token_ids)
        with library_errors("no grammars with this tokenizer", place="tokenizer.json"):
            return LLTokenizer(
                tokenizer.to_str(),
                eos_token=ends or None,
                slices=LLTokenizer.json_slices(),
            )


def _on_large_stack(function: Callable[[], T]) -> T:
    """What a function returns or raises on a thread of its own."""
    pool = ThreadPoolExecutor(1, "grammar")
    # Of all threads; one that starts at the same time has it too, which is no harm.
    before = threading.stack_size(STACK_BYTES)
    try:
        future = pool.submit(function)
    finally:
        threading.stack_size(before)
        pool.shutdown(wait=False)
    return future.result()


def _probe(matcher: Matcher, vocabulary: Any) -> None:
    """Try the first tokens of a grammar.

    Raises:
        ValueError: a limit is exceeded, or no text matches.
    """
    matcher = matcher.deep_copy()
    for _ in range(PROBES):
        allowed = _bits(matcher)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        tokens = np.flatnonzero(
            np.unpackbits(allowed.view(np.uint8), bitorder="little")
        )
        tokens = tokens[~np.isin(tokens, list(vocabulary.eos_tokens))]
        if not len(tokens):
            return
        matcher.consume_token(int(tokens[len(tokens) // 2]))


def _bits(matcher: Matcher) -> np.ndarray:
    """One bit for every token of the tokenizer: whether it may come next."""
    return np.frombuffer(matcher.compute_bitmask(), np.uint32)


@dataclass(frozen=True)
class CompiledGrammar:
    """A grammar for a tokenizer; see `GrammarCompiler`."""

    matcher: Matcher
    eos_tokens: tuple[int, ...]
    grammar: Grammar

    def start(self, stop_tokens: Collection[int]) -> "GrammarMatcher":
        """The state of a completion that has no token yet.

        Args:
            stop_tokens: tokens that may come where the grammar is complete.
        """
        return GrammarMatcher(self, stop_tokens)


class GrammarMatcher:
    """How far the text of one request has come in its grammar.

    Attributes:
        error: what went wrong; the request has to end.
        is_free: whether any token may follow, until the end.
    """

    def __init__(self, grammar: CompiledGrammar, stop_tokens: Collection[int]):
        self.error: UserError | None = None
        self.is_free = False
        self._exit = grammar.grammar.exit  # None after the first token
        self._matcher = grammar.matcher.deep_copy()
        self._eos_tokens = grammar.eos_tokens
        self._stop_tokens = stop_tokens

    def advance(self, token: int) -> UserError | None:
        """Append a token to the text; returns the error, if any."""
        self.is_free = self.is_free or token == self._exit
        self._exit = None
        if not (self.is_free or self.error or token in self._stop_tokens):
            try:
                with _matcher_errors(self._matcher):
                    self._matcher.consume_token(token)
            except UserError as error:
                self.error = error
        return self.error

    def masks(self, draft: Sequence[int], vocab_size: int) -> np.ndarray:
        """The tokens that may come along a draft, as far as the grammar takes it.

        Returns:
            Bits uint32 [k + 1, ceil(V / 32)] after the first 0 to k draft tokens: the
            draft is cut before the first token that is refused. All ones after an
            error and after a stop token.
        """
        everything = np.full(-(-vocab_size // 32), ALL)
        if self.is_free:
            return np.stack([everything] * (len(draft) + 1))
        try:
            masks = [self._mask(self._matcher, vocab_size)]
        except UserError as error:
            self.error = error
            return everything[None]
        if self._exit is not None:
            set_bit(masks[0], self._exit, True)
            if len(draft) and draft[0] == self._exit:
                return np.stack([*masks, *[everything] * len(draft)])
        # An error along the draft must not reach the text, which may go elsewhere.
        matcher = self._matcher.deep_copy() if len(draft) else self._matcher
        for token in draft:
            if not allows(masks[-1], token):
                break
            if token in self._stop_tokens:
                masks.append(everything)
                break
            try:
                with _matcher_errors(matcher):
                    matcher.consume_token(token)
                masks.append(self._mask(matcher, vocab_size))
            except UserError:
                break
        return np.stack(masks)

    def _mask(self, matcher: Matcher, vocab_size: int) -> np.ndarray:
        """Bits uint32 [ceil(V / 32)] of the next token.

        Raises:
            UserError: no token is left, or a limit of llguidance is exceeded.
        """
        mask = np.zeros(-(-vocab_size // 32), np.uint32)
        with _matcher_errors(matcher):
            allowed = _bits(matcher)[: len(mask)]
            is_complete = matcher.is_accepting()
        mask[: len(allowed)] = allowed
        # Only the stop tokens of this request end it.
        for token in self._eos_tokens:
            set_bit(mask, token, False)
        for token in self._stop_tokens if is_complete else ():
            set_bit(mask, token, True)
        if vocab_size % 32:
            mask[-1] &= ALL >> np.uint32(32 - vocab_size % 32)
        if not mask.any():
            raise UserError("no token of the model continues the grammar")
        return mask


@contextmanager
def _matcher_errors(matcher: Matcher) -> Iterator[None]:
    """Raise an error of the matcher, which never leaves that state, as `UserError`."""
    with library_errors("it failed", place="grammar"):
        yield
        if matcher.is_error():
            raise ValueError(matcher.get_error())


def allows(mask: np.ndarray, token: int) -> bool:
    """Whether a mask of `GrammarMatcher.masks` allows a token."""
    return bool(mask[token // 32] >> np.uint32(token % 32) & 1)


def set_bit(mask: np.ndarray, token: int, value: bool) -> None:
    """Let a mask allow or refuse a token, if it has one."""
    word, bit = divmod(token, 32)
    if word < len(mask):
        bits = np.uint32(1 << bit)
        mask[word] = mask[word] | bits if value else mask[word] & ~bits


def allow_only(logits: mx.array, masks: Sequence[np.ndarray | None]) -> mx.array:
    """Logits [B, N, V] where tokens that the grammar of their row refuses are -inf.

    Args:
        masks: of every row, from `GrammarMatcher.masks`, for its first positions; None
            = all tokens are allowed.
    """
    rows, width, vocab_size = logits.shape
    bits = np.full((rows, width, -(-vocab_size // 32)), ALL)
    for row, mask in enumerate(masks):
        if mask is not None:
            bits[row, : len(mask)] = mask
    shifts = mx.arange(32, dtype=mx.uint32)
    allowed = (mx.array(bits)[..., None] >> shifts) & 1
    allowed = allowed.reshape(rows, width, -1)[..., :vocab_size]
    return mx.where(allowed.astype(mx.bool_), logits, -mx.inf)

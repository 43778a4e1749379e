"""An engine in several processes that hold one model together.

All ranks take the same steps. Rank 0 has the requests; before a step it tells the
others which ones came and which were dropped, and the times that choose the length of
drafts. One small all-gather carries this. It is launched before the step that runs
until it is read, so that nobody waits for it: what is new takes effect a step later. It
also carries a checksum of the tokens so far, which must agree.
"""

import json
import struct
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from ..cpu.memory import available_memory
from ..errors import FAILED, UserError
from ..interfaces import Communicator
from ..models.pipeline_parallel import is_divided_by_layers, own_layers
from .engine import Engine
from .grammar import Grammar
from .grammar_matcher import CompiledGrammar
from .kv_cache.prefix import PrefixCache
from .kv_cache.sequence import KVBits
from .sampling import Sampling
from .sequence import GenerationRequest, TokenOutput
from .speculative.draft_length import DraftLengthController

HEADER = struct.Struct("<II")
"""The checksum of the tokens, and the bytes of the message of rank 0."""
TOKEN = struct.Struct("<Ii")
ROW_BYTES = 512
"""What every rank sends for a step. Longer messages follow by themselves."""


BEAT_SECONDS = 0.05
"""Between steps without requests. A rank that waits in a collective takes a whole core,
so none waits there for long, and a dead one is noticed."""


@dataclass
class SharedDraftLength(DraftLengthController):
    """A controller that learns the times of rank 0, when all ranks have them.

    Args:
        measured: gets what to call with the seconds, and the seconds of this rank.
    """

    measured: list[tuple[Callable[[float], None], float]] = field(default_factory=list)

    def like(self) -> "SharedDraftLength":
        """A new controller with these settings."""
        return SharedDraftLength(
            self.max_draft_tokens, self.fixed, measured=self.measured
        )

    def record_standard(self, tokens: int, seconds: float) -> None:
        """Add a measurement of standard decoding."""
        record = partial(super().record_standard, tokens)
        self.measured.append((record, seconds))

    def record_round(
        self, drafted: Sequence[int], accepted: Sequence[int], seconds: float
    ) -> None:
        """Add a measurement of a round."""
        record = partial(super().record_round, drafted, accepted)
        self.measured.append((record, seconds))


class ParallelEngine(Engine):
    """An engine whose model is divided among processes; see `models.tensor_parallel`.

    All ranks make it with the same options. Rank 0 uses it as any engine, and ends with
    `close`; the others call `follow`.

    While it has no requests, rank 0 takes a step every `BEAT_SECONDS`.

    Args:
        ranks: the processes.
        compile_grammar: compiles what the requests of rank 0 have to match.
        kv_memory: bytes for the keys and values that each rank holds. None = what is
            available now on the rank that has least.
        kv_bits: as for `CacheState`, of all layers of the model.
        prefix_cache: None = one of default size.
        options: those of `Engine`.
    """

    def __init__(
        self,
        model: Any,
        ranks: Communicator,
        compile_grammar: Callable[[Grammar], CompiledGrammar],
        *,
        kv_memory: int | None = None,
        kv_bits: KVBits = None,
        prefix_cache: PrefixCache | None = None,
        **options: Any,
    ):
        self._ranks, self._compile = ranks, compile_grammar
        self._measured: list[tuple[Callable[[float], None], float]] = []
        # What rank 0 was asked for and all ranks have not done yet.
        self._outbox: list[list] = []
        self._sent: tuple[mx.array, bytes, int] | None = None
        self._requests: dict[int, GenerationRequest] = {}
        self._numbers: dict[GenerationRequest, int] = {}
        self._last_number = self._checksum = 0
        self._has_ended = self._has_failed = False
        memory = available_memory() if kv_memory is None else kv_memory
        prefix_cache = prefix_cache or PrefixCache()
        memory, prefix_cache.max_bytes = map(
            min, self._of_all([memory, prefix_cache.max_bytes])
        )
        if isinstance(kv_bits, Sequence):
            kv_bits = kv_bits[own_layers(model)]
        super().__init__(
            model,
            kv_memory=memory,
            kv_bits=kv_bits,
            prefix_cache=prefix_cache,
            **options,
        )
        # With KV bits, or layers of one rank each, the model runs: on all ranks now,
        # not on one of them later.
        cache = self.scheduler.new_cache()
        sizes = self._of_all([int(cache.bytes_per_token()), cache.snapshot_bytes])
        # Ranks with different layers agree on what fits.
        self.scheduler.bytes_per_token, per_snapshot = map(max, sizes)
        if is_divided_by_layers(model):
            prefix_cache.sizes = self.scheduler.bytes_per_token, per_snapshot

    @property
    def draft_length(self) -> DraftLengthController:
        """As in `Engine`; all ranks choose the same lengths."""
        return self._draft_length

    @draft_length.setter
    def draft_length(self, given: DraftLengthController) -> None:
        self._draft_length = SharedDraftLength(
            given.max_draft_tokens, given.fixed, measured=self._measured
        )

    @property
    def idle(self) -> bool:
        """Whether all requests are finished."""
        return super().idle and not self._outbox

    def add_request(self, request: GenerationRequest) -> None:
        """Add a request to the queue.

        Raises:
            UserError: it has an adapter.
        """
        if request.adapter is not None:
            raise UserError("adapters do not work with tensor parallelism")
        if request.max_tokens < 1:
            return
        self._last_number += 1
        self._keep(self._last_number, request)
        self._outbox.append(["add", self._last_number, _encoded(request)])

    def abort(self, request: GenerationRequest) -> None:
        """Drop a request, at any time between two steps."""
        if number := self._numbers.get(request):
            self._outbox.append(["abort", number])

    def close(self) -> None:
        """Let the other ranks return from `follow`. Open requests are dropped."""
        self._outbox.append(["end"])
        while not (self._has_ended or self._has_failed):
            self.step()

    def follow(self) -> None:
        """Take the steps of rank 0, until it ends."""
        while not self._has_ended:
            self.step()
            if super().idle:
                time.sleep(BEAT_SECONDS)

    def step(self) -> list[TokenOutput]:
        """One step of all requests, as in `Engine`, on all ranks.

        Raises:
            UserError: the ranks do not agree, or an earlier step failed.
        """
        if self._has_failed:
            raise UserError("a step failed, and the ranks are not in step", code=FAILED)
        try:
            return self._step_together()
        except BaseException:
            self._has_failed = True
            raise

    def _step_together(self) -> list[TokenOutput]:
        message = self._receive(self._sent or self._send())
        self._sent = None
        self._apply(message)
        if self._has_ended:
            return []
        if not super().idle:
            self._sent = self._send()
        outputs = super().step()
        for output in outputs:
            token = TOKEN.pack(self._numbers[output.request], output.token)
            self._checksum = zlib.crc32(token, self._checksum)
            if output.is_last:
                self._forget(output.request)
        return outputs

    # Messages

    def _of_all(self, numbers: list[int]) -> list[list[int]]:
        """The values that each of these numbers has on the ranks."""
        rows = self._ranks.all_gather(mx.array([numbers], mx.int64))
        return rows.T.tolist()

    def _send(self) -> tuple[mx.array, bytes, int]:
        """Launch the exchange for the next step.

        Returns:
            What all ranks send, with this rank's message and its checksum.
        """
        message = b""
        if self._ranks.is_first:
            seconds = [seconds for _, seconds in self._measured]
            if self._outbox or seconds:
                message = json.dumps([self._outbox, seconds]).encode()
        row = HEADER.pack(self._checksum, len(message)) + message[:INLINE_BYTES]
        data = np.frombuffer(row.ljust(ROW_BYTES, b"\0"), np.uint8)
        rows = self._ranks.all_gather(mx.array(data)[None])
        mx.async_eval(rows)
        return rows, message, self._checksum

    def _receive(self, sent: tuple[mx.array, bytes, int]) -> list:
        """The message of rank 0: requests that came or end, and seconds.

        Raises:
            UserError: a rank has other tokens.
        """
        rows, message, checksum = sent
        received = [bytes(row) for row in np.array(rows)]
        headers = [HEADER.unpack_from(row) for row in received]
        different = [rank for rank, (crc, _) in enumerate(headers) if crc != checksum]
        if different:
            raise UserError(
                f"process {self._ranks.rank} generated other tokens than process "
                f"{different[0]}: their results differ by more than rounding",
                hint="use equal machines with equal versions of MLX",
                code=FAILED,
            )
        length = headers[0][1]
        message = received[0][HEADER.size : HEADER.size + length]
        if length > INLINE_BYTES:
            message += self._rest_of(sent[1], length - INLINE_BYTES)
        return json.loads(message) if length else [[], []]

    def _rest_of(self, message: bytes, length: int) -> bytes:
        """What of a message did not fit into its row."""
        rest = message[INLINE_BYTES:].ljust(length, b"\0")
        [data] = self._ranks.broadcast([mx.array(np.frombuffer(rest, np.uint8))])
        return bytes(np.array(data))

    def _apply(self, message: list) -> None:
        """Do what rank 0 was asked for, on all ranks."""
        commands, seconds = message
        # They must not count while the commands are done: other ranks have none.
        later, self._outbox = self._outbox[len(commands) :], []
        for kind, *arguments in commands:
            if kind == "end":
                self._has_ended = True
            elif kind == "abort":
                if request := self._requests.get(*arguments):
                    self._forget(request)
                    super().abort(request)
            else:
                number, encoded = arguments
                if number not in self._requests:
                    self._keep(number, self._decoded(encoded))
                super().add_request(self._requests[number])
        self._outbox = later
        for shared in seconds:
            record, _ = self._measured.pop(0)
            record(shared)

    def _keep(self, number: int, request: GenerationRequest) -> None:
        self._requests[number], self._numbers[request] = request, number

    def _forget(self, request: GenerationRequest) -> None:
        del self._requests[self._numbers.pop(request)]

    def _decoded(self, encoded: dict) -> GenerationRequest:
        """The request that another rank has encoded."""
        sampling, grammar = encoded["sampling"], encoded["grammar"]
        allowed = sampling["allowed_tokens"]
        changes = {
            "logit_bias": tuple(map(tuple, sampling["logit_bias"])),
            "allowed_tokens": None if allowed is None else tuple(allowed),
        }
        return GenerationRequest(
            **encoded
            | {
                "sampling": Sampling(**sampling | changes),
                "stop_tokens": frozenset(encoded["stop_tokens"]),
                "grammar": grammar and self._compile(Grammar(*grammar)),
            }
        )


INLINE_BYTES = ROW_BYTES - HEADER.size


def _encoded(request: GenerationRequest) -> dict:
    """A request as JSON."""
    grammar = request.grammar and request.grammar.grammar
    return {
        "prompt": [*map(int, request.prompt)],
        "max_tokens": request.max_tokens,
        "sampling": asdict(request.sampling),
        "stop_tokens": sorted(map(int, request.stop_tokens)),
        "logprobs": request.logprobs,
        "top_logprobs": request.top_logprobs,
        "priority": request.priority,
        "grammar": grammar and [grammar.kind, grammar.source],
    }

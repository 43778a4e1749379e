"""An engine in several processes that hold one model together.

All ranks take the same steps. Rank 0 has the requests, and sends those that came or
were dropped before a step to the others. One small all-gather tells how many they are.
It is launched before the step that runs until it is read, so that nobody waits for it:
what is new takes effect a step later. It also carries a checksum of the tokens so far,
which must agree.
"""

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import mlx.core as mx
import numpy as np
from pydantic import TypeAdapter

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
from .thinking import Thinking


class ParallelEngine(Engine):
    """An engine whose model is divided among processes; see `models.tensor_parallel`.

    All ranks make it with the same options. Rank 0 uses it as any engine, and ends with
    `close`; the others call `follow`.

    Args:
        ranks: the processes.
        compile_grammar: compiles what the requests of rank 0 have to match.
        kv_memory: bytes for the keys and values that each rank holds. None = what is
            available now on the rank that has least.
        kv_bits: as for `CacheState`, of all layers of the model.
        prefix_cache: None = one of default size.
        options: those of `Engine`.
    """

    # A rank that waits in a collective takes a whole core, so none waits there for
    # long, and a dead one is noticed.
    beat_seconds = 0.05

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
        # What rank 0 was asked for and all ranks have not done yet.
        self._outbox: list[list] = []
        self._sent: mx.array | None = None
        self._open: dict[int, GenerationRequest] = {}
        self._last_number = self._checksum = 0
        self._has_ended = self._has_failed = False
        memory = available_memory() if kv_memory is None else kv_memory
        prefix_cache = prefix_cache or PrefixCache()
        memory, prefix_cache.max_bytes = map(
            min, self._of_all(memory, prefix_cache.max_bytes)
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
        self.scheduler.drafts.agree = self._of_first
        # With KV bits, or layers of one rank each, the model runs: on all ranks now,
        # not on one of them later. Ranks with different layers agree on what fits.
        cache = self.new_cache()
        sizes = self._of_all(int(cache.bytes_per_token()), cache.snapshot_bytes)
        self._facts.bytes_per_token, per_snapshot = map(max, sizes)
        if is_divided_by_layers(model):
            prefix_cache.sizes = self._facts.bytes_per_token, per_snapshot

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
        self._open[self._last_number] = request
        self._outbox.append(["add", self._last_number, _encoded(request)])

    def abort(self, request: GenerationRequest) -> None:
        """Drop a request, at any time between two steps."""
        for number, other in self._open.items():
            if other is request:
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
                time.sleep(self.beat_seconds)

    def step(self) -> list[TokenOutput]:
        """One step of all requests, as in `Engine`, on all ranks.

        Raises:
            UserError: the ranks do not agree, or an earlier step failed.
        """
        if self._has_failed:
            raise UserError("a step failed, and the ranks are not in step", code=FAILED)
        self._has_failed = True
        self._receive(self._send() if self._sent is None else self._sent)
        self._sent, outputs = None, []
        if not self._has_ended:
            if not super().idle:
                self._sent = self._send()
            outputs = super().step()
        tokens = np.array([output.token for output in outputs], np.int32)
        self._checksum = zlib.crc32(tokens.tobytes(), self._checksum)
        ended = {output.request for output in outputs if output.is_last}
        self._open = {n: r for n, r in self._open.items() if r not in ended}
        self._has_failed = False
        return outputs

    def _of_all(self, *numbers: int) -> list[list[int]]:
        """The values that each of these numbers has on the ranks."""
        rows = self._ranks.all_gather(mx.array([numbers], mx.int64))
        return rows.T.tolist()

    def _of_first(self, seconds: float) -> float:
        """The seconds that rank 0 has measured: all ranks choose the same drafts."""
        [shared] = self._ranks.broadcast([mx.array(seconds)])
        return shared.item()

    def _send(self) -> mx.array:
        """Launch the exchange for the next step: checksums, and commands to come."""
        row = mx.array([[self._checksum, len(self._outbox)]], mx.int64)
        rows = self._ranks.all_gather(row)
        mx.async_eval(rows)
        return rows

    def _receive(self, sent: mx.array) -> None:
        """Do on all ranks what rank 0 was asked for.

        Raises:
            UserError: a rank has other tokens.
        """
        checksums, (count, *_) = sent.T.tolist()
        own, rank = checksums[self._ranks.rank], self._ranks.rank
        different = [other for other, crc in enumerate(checksums) if crc != own]
        if different:
            raise UserError(
                f"process {rank} generated other tokens than process {different[0]}: "
                "their results differ by more than rounding",
                hint="use equal machines with equal versions of MLX",
                code=FAILED,
            )
        if not count:
            return
        commands = self._ranks.broadcast_object(self._outbox[:count])
        # They must not count while they are done: other ranks have none.
        later, self._outbox = self._outbox[count:], []
        for kind, *arguments in commands:
            if kind == "end":
                self._has_ended = True
            elif kind == "abort":
                if request := self._open.pop(*arguments, None):
                    super().abort(request)
            else:
                number, encoded = arguments
                if number not in self._open:
                    self._open[number] = self._decoded(encoded)
                super().add_request(self._open[number])
        self._outbox = later

    def _decoded(self, encoded: dict) -> GenerationRequest:
        """The request that another rank has encoded."""
        grammar = encoded["grammar"]
        decoded = {
            name: TypeAdapter(kind).validate_python(encoded[name])
            for name, kind in (("sampling", Sampling), ("thinking", Thinking | None))
        }
        decoded |= {
            "stop_tokens": frozenset(encoded["stop_tokens"]),
            "grammar": grammar and self._compile(Grammar(*grammar)),
        }
        return GenerationRequest(**encoded | decoded)


def _encoded(request: GenerationRequest) -> dict:
    """A request as JSON."""
    grammar = request.grammar and request.grammar.grammar
    return vars(request) | {
        "prompt": [*map(int, request.prompt)],
        "sampling": asdict(request.sampling),
        "stop_tokens": sorted(map(int, request.stop_tokens)),
        "grammar": grammar and [grammar.kind, grammar.source],
        "thinking": request.thinking and asdict(request.thinking),
    }

"""An engine in several processes that hold one model together.

All ranks take the same steps. Rank 0 broadcasts new and aborted requests before a step,
as mlx_lm.server does. A small all-gather says whether there are any. It is launched
before the current step and read after it, so that no rank waits for it. It also carries
a checksum of the tokens so far.
"""

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple
from math import inf
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
from .kv_cache.prefix import PrefixCache, PrefixNode
from .kv_cache.sequence import KVBits
from .sampling import Sampling
from .sequence import GenerationRequest, TokenOutput
from .thinking import Thinking


class ParallelEngine(Engine):
    """An engine whose model is divided among processes; see `models.tensor_parallel`.

    All ranks make it with the same options. Rank 0 uses it as any engine, and ends with
    `close`; the others call `follow`.

    Args:
        compile_grammar: compiles what the requests of rank 0 have to match.
        kv_memory: bytes for the keys and values that each rank holds. None = what is
            available now on the rank that has least.
        kv_bits: as for `CacheState`, of all layers of the model.
        prefix_cache: None = one of default size.
        options: those of `Engine`.
    """

    # A rank that waits in a collective takes a whole core on most backends, so none
    # waits there long.
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
        self._added: list[GenerationRequest] = []
        self._aborted: list[GenerationRequest] = []
        self._is_closing = self._has_ended = self._has_failed = False
        self._exchange: mx.array | None = None
        self._checksum = 0
        prefixes = prefix_cache or PrefixCache()
        if isinstance(kv_bits, Sequence):
            kv_bits = kv_bits[own_layers(model)]
        super().__init__(model, kv_bits=kv_bits, prefix_cache=prefixes, **options)
        # All ranks choose the drafts that are best by the times of rank 0.
        self.scheduler.drafts.agree = lambda seconds: ranks.broadcast(
            [mx.array(seconds)]
        )[0].item()
        # With KV bits, or layers of one rank each, the model runs: on all ranks now,
        # not on one of them later. Ranks with different layers agree on what fits.
        cache = self.new_cache()
        memory = available_memory() if kv_memory is None else kv_memory
        sizes = cache.bytes_by_capacity()
        node = PrefixNode(np.zeros(1), cache.positions(0, 1), snapshot=cache.snapshot())
        own = memory, prefixes.max_bytes, cache.snapshot_bytes, len(node.arrays)
        of_ranks = ranks.gather_objects([*own, *sizes.items()])
        memories, max_bytes, snapshots, arrays = zip(
            *(each[:4] for each in of_ranks), strict=True
        )
        self.scheduler.kv_memory, prefixes.max_bytes = min(memories), min(max_bytes)
        self._facts.capacities = capacities = [dict(each[4:]) for each in of_ranks]
        if is_divided_by_layers(model):
            per_token = max(int(sizes.get(inf, 0)) for sizes in capacities)
            prefixes.sizes = per_token, max(snapshots), max(arrays)

    @property
    def idle(self) -> bool:
        """Whether all requests are finished."""
        return super().idle and not self._has_news

    @property
    def _has_news(self) -> bool:
        return bool(self._added or self._aborted or self._is_closing)

    def add_request(self, request: GenerationRequest) -> None:
        """Add a request to the queue. Parts of a model have no adapters."""
        if request.max_tokens > 0:
            self._added.append(request)

    def abort(self, request: GenerationRequest) -> None:
        """Drop a request, at any time between two steps."""
        if request in self._added:
            self._added.remove(request)
        else:
            self._aborted.append(request)

    def close(self) -> None:
        """Let the other ranks return from `follow`. Open requests are dropped."""
        self._is_closing = True
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
        if self._exchange is None:
            self._launch_exchange()
        checksums, (has_news, *_) = self._exchange.T.tolist()
        self._exchange, rank = None, self._ranks.rank
        for other, checksum in enumerate(checksums):
            if checksum != checksums[rank]:
                raise UserError(
                    f"process {rank} generated other tokens than process {other}: "
                    "their results differ by more than rounding",
                    hint="use equal machines with equal versions of MLX",
                    code=FAILED,
                )
        if has_news:
            self._receive()
        outputs = []
        if not self._has_ended:
            if not super().idle:
                self._launch_exchange()
            outputs = super().step()
        tokens = np.array([output.token for output in outputs], np.int32)
        self._checksum = zlib.crc32(tokens.tobytes(), self._checksum)
        self._has_failed = False
        return outputs

    def _launch_exchange(self) -> None:
        row = mx.array([[self._checksum, self._has_news]], mx.int64)
        self._exchange = self._ranks.all_gather(row)
        mx.async_eval(self._exchange)

    def _receive(self) -> None:
        """Do on all ranks what rank 0 was asked for."""
        sequences, added = self.scheduler.sequences, self._added
        aborted = [s.order for s in sequences if s.request in self._aborted]
        news = [[*map(_encoded, added)], aborted, self._is_closing]
        encoded, aborted, self._has_ended = self._ranks.broadcast_object(news)
        # What comes now must not count as news while it is done.
        self._added, self._aborted, self._is_closing = [], [], False
        for sequence in sequences:
            if sequence.order in aborted:
                super().abort(sequence.request)
        if not self._ranks.is_first:
            added = map(self._decoded, encoded)
        for request in added:
            super().add_request(request)

    def _decoded(self, encoded: dict) -> GenerationRequest:
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
        "grammar": grammar and [*astuple(grammar)],
        "thinking": request.thinking and asdict(request.thinking),
    }

"""Many requests at once: continuous batching, whole completions in their order."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ..errors import UserError
from .batching import BatchGenerator, GenerationRequest
from .detokenizer import StreamingDetokenizer
from .engine import Generator
from .outputs import FinishReason, GenerationResult


@dataclass(eq=False)
class RequestProgress:
    """A request and its output so far.

    Attributes:
        times: of the first and the last token, in seconds.
    """

    request: GenerationRequest
    detokenizer: StreamingDetokenizer
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    times: tuple[float, float] | None = None

    def add(self, token: int, is_last: bool, batcher: BatchGenerator) -> None:
        """Append a token; a stop string ends the request early."""
        if self.finish_reason:
            return
        now = time.perf_counter()
        self.times = (self.times[0] if self.times else now, now)
        text, self.finish_reason = self.detokenizer.add(token, last=is_last)
        self.text += text
        if token not in self.request.stop_tokens:
            self.tokens.append(token)
        if self.finish_reason:
            batcher.cancel(self.request)

    def result(self, start: float) -> GenerationResult:
        """The finished completion. Prefills of a batch are not timed."""
        first, last = self.times or (start, start)
        seconds, steps = last - first, len(self.tokens) - 1
        return GenerationResult(
            text=self.text,
            tokens=self.tokens,
            prompt_tokens=len(self.request.prompt),
            finish_reason=self.finish_reason or "length",
            ttft_ms=1000 * (first - start) if self.times else None,
            prefill_tokens_per_second=None,
            decode_tokens_per_second=steps / seconds if steps > 0 < seconds else None,
        )


def make_request(
    generator: Generator, prompt: Sequence[int], max_tokens: int, sampling
) -> GenerationRequest:
    """A request that ends at the tokenizer's end tokens and the model's positions.

    Raises:
        UserError: the prompt is empty, or longer than the model's positions.
    """
    count = generator.clamp_max_tokens(prompt, max_tokens)
    stop_tokens = generator.resolve_stop_tokens(None)
    return GenerationRequest(prompt, count, sampling, stop_tokens)


def generate_requests(
    generator: Generator,
    requests: Sequence[GenerationRequest],
    *,
    stop: Sequence[str] = (),
) -> Iterator[GenerationResult]:
    """Yield the completions in the order of the requests, each as soon as possible.

    They are decoded together, or one by one with a quantized cache or with a model that
    cannot be batched.

    Args:
        stop: strings that end a completion and are not part of it.

    Raises:
        UserError: the KV caches do not fit in memory.
    """
    batcher = None if generator.kv_bits else _batcher(generator)
    if batcher is None:
        for request in requests:
            yield generator.generate(
                request.prompt,
                max_tokens=request.max_tokens,
                sampling=request.sampling,
                stop_tokens=request.stop_tokens,
                stop=stop,
            )
        return
    lengths = sorted(len(r.prompt) + r.max_tokens for r in requests)
    generator.require_memory(lengths[-batcher.max_batch_size :])
    start, pending = time.perf_counter(), []
    by_request: dict[GenerationRequest, RequestProgress] = {}
    for request in requests:
        detokenizer = StreamingDetokenizer(
            generator.tokenizer, request.prompt, request.stop_tokens, stop
        )
        pending.append(RequestProgress(request, detokenizer))
        by_request[request] = pending[-1]
        batcher.submit(request)
        if request.max_tokens <= 0:
            pending[-1].finish_reason = "length"
    pending.reverse()
    while pending:
        while pending and pending[-1].finish_reason:
            yield pending.pop().result(start)
        for request, token, is_last in batcher.step():
            by_request[request].add(token, is_last, batcher)


def _batcher(generator: Generator) -> BatchGenerator | None:
    """None if the model cannot be batched."""
    try:
        return BatchGenerator(
            generator.model, prefill_step_size=generator.prefill_step_size
        )
    except UserError:
        return None

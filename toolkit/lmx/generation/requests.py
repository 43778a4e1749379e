"""Many requests at once: continuous batching, whole completions in their order."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..errors import UserError
from .batching import BatchGenerator, GenerationRequest
from .detokenizer import StreamingDetokenizer
from .engine import Generator
from .outputs import CompletionOutput, GenerationResponse, GenerationResult


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
    outputs: dict[GenerationRequest, CompletionOutput] = {}
    detokenizers: dict[GenerationRequest, StreamingDetokenizer] = {}
    for request in requests:
        detokenizers[request] = StreamingDetokenizer(
            generator.tokenizer, request.prompt, request.stop_tokens, stop
        )
        outputs[request] = CompletionOutput(len(request.prompt), request.stop_tokens)
        batcher.submit(request)
    for request in requests:
        output = outputs[request]
        while not output.finish_reason and request.max_tokens > 0:
            for other, token, is_last in batcher.step():
                text, reason = detokenizers[other].add(token, last=is_last)
                outputs[other].add(GenerationResponse(text, token, None, reason))
                if reason:  # a stop string ends the request early
                    batcher.cancel(other)
        # Prefills of a batch are not timed.
        yield replace(output.result(), prefill_tokens_per_second=None)


def _batcher(generator: Generator) -> BatchGenerator | None:
    """None if the model cannot be batched."""
    try:
        return BatchGenerator(
            generator.model, prefill_step_size=generator.prefill_step_size
        )
    except UserError:
        return None

"""What each optimization of generation gains on this machine, with a roofline.

    python benchmarks/speed_ablation.py MODEL

The steps: a KV cache, 4-bit weights, an 8-bit cache, a static batch, continuous
batching and speculative decoding. The roofline is the memory bandwidth over the bytes
that a token reads: weights and KV cache.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from lmx import cpu
from lmx.convert.importers import load_model
from lmx.errors import UserError
from lmx.evaluation.latency import cut_prompts, sample_text
from lmx.evaluation.memory_bandwidth import measure_memory_bandwidth, weight_bytes
from lmx.generation.batching import BatchGenerator, GenerationRequest
from lmx.generation.decode_loop import prefill
from lmx.generation.engine import Generator
from lmx.generation.kv_cache import CacheState
from lmx.generation.prompt import encode_text
from lmx.generation.speculative.draft_length import DraftLengthController
from lmx.generation.speculative.factory import (
    PROMPT_LOOKUP,
    proposer_factory,
)
from lmx.generation.speculative.proposer import MakeProposer
from lmx.models.checkpoint import model_folder
from lmx.models.loader import LoadedModel

WITHOUT_CACHE_TOKENS = 8
"""Tokens decoded without a cache; each of them reads the whole text again."""
BITS, GROUP_SIZE, KV_BITS = 4, 64, 8
ROW = "{:<26}{:>10}{:>10}{:>12}{:>17}{:>15}"
HEADER = (
    "optimization",
    "tokens/s",
    "speed-up",
    "cumulative",
    "roofline, tok/s",
    "% of roofline",
)


def main() -> None:
    arguments = _arguments()
    cpu.enable()
    loaded = load_model(model_folder(arguments.model))
    tokens = encode_text(loaded.tokenizer, sample_text(arguments.corpus))
    prompts = cut_prompts(tokens, arguments.prompt_length, arguments.batch_size)
    bandwidth = measure_memory_bandwidth()
    rows = SpeedAblation(
        loaded,
        prompts,
        arguments.max_tokens,
        proposer_factory(arguments.draft_model, loaded, tokens, load_draft=load_model),
        arguments.repeats,
    ).run(bandwidth)
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"memory bandwidth {bandwidth / 1e9:,.1f} GB/s")
    for cells in [HEADER, *map(_cells, rows)]:
        print(ROW.format(*cells).rstrip())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="model folder, run folder or Hub id")
    parser.add_argument("--prompt-length", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=64, help="per prompt")
    parser.add_argument("--repeats", type=int, default=3, help="the fastest counts")
    parser.add_argument("--draft-model", default=PROMPT_LOOKUP)
    parser.add_argument("--corpus", type=Path, help="file that prompts are cut from")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def _cells(row: dict) -> tuple[str, ...]:
    if row["note"]:
        return row["step"], "-", "-", "-", "-", f"  {row['note']}"
    ratios = (row[name] for name in ("speedup", "cumulative"))
    return (
        row["step"],
        f"{row['tokens_per_second']:,.1f}",
        *("-" if ratio is None else f"{ratio:.2f}x" for ratio in ratios),
        f"{row['roofline_tokens_per_second']:,.0f}",
        f"{row['roofline_share']:.0%}",
    )


@dataclass(frozen=True)
class AblationStep:
    """One optimization and its speed.

    Attributes:
        compared_with: the step that this optimization is added to.
        rate: tokens per second of all requests together.
        bytes: read per token: weights, shared by a batch, and the KV cache.
        note: why the step was not measured.
    """

    name: str
    compared_with: str | None
    rate: float | None = None
    bytes: float | None = None
    note: str | None = None


class SpeedAblation:
    """Measures all steps on the same prompts.

    Args:
        loaded: an unquantized model is quantized to 4 bits on the way, in place.
        prompts: one per sequence of the batch; steps without a batch use the first.
        max_tokens: decoded per prompt.
        make_proposer: for the last step; None = no drafting.
        repeats: runs per step; the fastest counts.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        make_proposer: MakeProposer | None,
        repeats: int,
    ):
        self.loaded, self.model = loaded, loaded.model
        self.prompts, self.max_tokens = prompts, max_tokens
        self.make_proposer = make_proposer
        self.repeats = repeats

    def run(self, bandwidth: float) -> list[dict]:
        """Measure all steps.

        Args:
            bandwidth: bytes per second that this machine reads.

        Returns:
            Per step: `step`, `tokens_per_second`, `compared_with`, `speedup` over that
            one, `cumulative` over the first, `roofline_tokens_per_second` (bandwidth
            over the bytes of a token), `roofline_share`, and `note`.
        """
        rates, rows = {}, []
        for step in self._steps():
            rates[step.name] = step.rate
            roofline = bandwidth / step.bytes if step.bytes else None
            rows.append(
                {
                    "step": step.name,
                    "tokens_per_second": step.rate,
                    "compared_with": step.compared_with,
                    "speedup": _ratio(step.rate, rates.get(step.compared_with)),
                    "cumulative": _ratio(step.rate, next(iter(rates.values()))),
                    "roofline_tokens_per_second": roofline,
                    "roofline_share": _ratio(step.rate, roofline),
                    "note": step.note,
                }
            )
        return rows

    def _steps(self) -> Iterator[AblationStep]:
        rate = self._best(self._without_cache, WITHOUT_CACHE_TOKENS)
        yield AblationStep("no cache", None, rate, self._bytes(1))
        yield AblationStep("cache", "no cache", *self._single())
        best = "cache"
        if self._quantize():
            best = "4-bit weights"
            yield AblationStep(best, "cache", *self._single())
        try:
            yield AblationStep("8-bit cache", best, *self._single(kv_bits=KV_BITS))
        except UserError as error:
            yield AblationStep("8-bit cache", best, note=error.message)
        size = len(self.prompts)
        static, useful = f"batch of {size}, static", sum(self._lengths())
        rate = self._best(self._static, useful)
        yield AblationStep(static, best, rate, self._bytes(size))
        try:
            rate = self._best(self._continuous, useful)
            name = f"batch of {size}, continuous"
            yield AblationStep(name, static, rate, self._bytes(size))
        except UserError as error:
            yield AblationStep("batch, continuous", static, note=error.message)
        if self.make_proposer is None:
            note = "no speed-up from this draft model on this machine"
            yield AblationStep("speculative", best, note=note)
            return
        rate = self._single(
            make_proposer=self.make_proposer, draft_length=DraftLengthController()
        )
        yield AblationStep("speculative", best, *rate)

    def _single(self, **options) -> tuple[float, float]:
        """Tokens per second of one request, and the bytes read per token."""
        generator = Generator(self.model, self.loaded.tokenizer, **options)
        runs = [
            generator.generate(
                self.prompts[0], max_tokens=self.max_tokens, stop_tokens=()
            )
            for _ in self._runs()
        ]
        rate = max(run.decode_tokens_per_second for run in runs[1:])
        return rate, self._bytes(1, kv_bits=options.get("kv_bits"))

    def _runs(self) -> range:
        return range(self.repeats + 1)

    def _best(self, work: Callable[[], float], tokens: int) -> float:
        """Tokens per second of the fastest run after the first."""
        return tokens / min([work() for _ in self._runs()][1:])

    def _without_cache(self) -> float:
        text = mx.array([self.prompts[0]], mx.int32)
        start = time.perf_counter()
        for _ in range(WITHOUT_CACHE_TOKENS):
            token = mx.argmax(self.model(text)[:, -1], axis=-1).astype(mx.int32)
            text = mx.concatenate([text, token[:, None]], axis=1)
            mx.eval(text)
        return time.perf_counter() - start

    def _lengths(self) -> list[int]:
        """Lengths of a batch's completions: equally spaced, up to `max_tokens`."""
        size = len(self.prompts)
        return [max(1, self.max_tokens * (n + 1) // size) for n in range(size)]

    def _static(self) -> float:
        """Seconds of decoding until the longest completion ends; none leaves before."""
        cache, prompts = CacheState(self.model), mx.array(self.prompts)
        prefill(cache, prompts[:, :-1], step_size=512)
        tokens = self._next(cache, prompts[:, -1:])
        mx.eval(tokens)
        start = time.perf_counter()
        for _ in range(self.max_tokens - 1):
            # The next step runs while the tokens of this one are read.
            following = self._next(cache, tokens)
            tokens.tolist()
            tokens = following
        tokens.tolist()
        return time.perf_counter() - start

    def _next(self, cache: CacheState, tokens: mx.array) -> mx.array:
        tokens = mx.argmax(cache.forward(tokens)[:, -1], axis=-1)[:, None]
        mx.async_eval(tokens)
        return tokens

    def _continuous(self) -> float:
        """Seconds of decoding the same completions; each one leaves when it ends."""
        generator = BatchGenerator(self.model, max_batch_size=len(self.prompts))
        for prompt, length in zip(self.prompts, self._lengths(), strict=True):
            generator.submit(GenerationRequest(prompt, length))
        waiting = {id(prompt) for prompt in self.prompts}
        start = time.perf_counter()
        while not generator.idle:
            started = {id(request.prompt) for request, *_ in generator.step()}
            if waiting:
                waiting -= started
                start = time.perf_counter()
        return time.perf_counter() - start

    def _quantize(self) -> bool:
        """Quantize a float model to 4 bits, except layers with partial groups."""
        if "quantization" in self.loaded.config:
            return False

        def fits(_: str, module: nn.Module) -> bool:
            has_weight = hasattr(module, "to_quantized") and "weight" in module
            return has_weight and module.weight.shape[-1] % GROUP_SIZE == 0

        nn.quantize(self.model, GROUP_SIZE, BITS, class_predicate=fits)
        mx.eval(self.model.parameters())
        cpu.enable(self.model)
        return True

    def _bytes(self, batch_size: int, kv_bits: int | None = None) -> float:
        """Bytes read per token: its share of the weights, and its own KV cache."""
        cache = CacheState(self.model, kv_bits=kv_bits)
        length = len(self.prompts[0]) + self.max_tokens // 2
        cache.forward(mx.zeros((1, length), mx.int32))
        cache.evaluate()
        cache_bytes = sum(map(_bytes_read, cache.layer_caches))
        return weight_bytes(self.model, self.loaded.config) / batch_size + cache_bytes


def _bytes_read(cache: Any) -> float:
    """Bytes of a layer's cache that the next token reads; buffers may be larger."""
    keys = getattr(cache, "keys", None)
    if keys is None:
        return cache.nbytes
    capacity = (keys if isinstance(keys, mx.array) else keys[0]).shape[-2]
    positions = min(cache.offset, getattr(cache, "max_size", cache.offset))
    return cache.nbytes * positions / capacity


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None


if __name__ == "__main__":
    main()

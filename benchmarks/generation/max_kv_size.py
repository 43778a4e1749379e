"""What is lost with keys and values of at most N tokens, beside KV bits.

N is a share of the prompt. The KL is that of the next token to the same weights with
all keys and values in the model's dtype, on the true continuation of the prompt: the
answers of GSM8K after solved examples, and text. The needle is a number in a long text,
which the model is asked for. Errors are those of the mean over prompts.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
from lmx import cpu, load
from lmx.config.quant_spec import KV_POLICIES, MIN_KV_SIZE
from lmx.generation.kv_cache.eviction import OBSERVED, KVLimit
from lmx.generation.kv_cache.sequence import UNQUANTIZED, CacheState
from mlx_lm.models import base

ANSWERS, TEXTS, NEEDLES = "GSM8K", "text", "needles"
STEP = 512
# Tokens of a forward pass over a continuation.
SCORED = 32
QUESTION = "What is the pass key of the vault?"
NEEDLE = "The pass key of the vault is"


@dataclass(frozen=True)
class Row:
    """Bits of the cache, and a share of the prompt with a policy; None = all of it."""

    bits: int
    policy: str | None = None
    share: float = 1.0

    def limit(self, prompt: int) -> KVLimit | None:
        """The limit for a prompt of so many tokens."""
        size = max(MIN_KV_SIZE, int(self.share * prompt))
        return KVLimit(size, self.policy) if self.policy else None


def main() -> None:
    arguments = _arguments()
    loaded = load(arguments.model).loaded
    cpu.keep_dequantized(loaded.model)
    _replace_quantized_attention()
    rows = [Row(bits) for bits in arguments.bits]
    rows += [
        Row(bits, policy, share)
        for policy in KV_POLICIES
        for share in arguments.shares
        for bits in getattr(arguments, f"{policy}_bits")
    ]
    file = Path(arguments.records)
    lines = file.read_text().splitlines() if file.exists() else []
    records = {tuple(key): values for key, values in map(json.loads, lines)}
    for key, prompt, answer in _prompts(loaded.tokenizer, arguments):
        if key not in records:
            measure = _found if key[0] == NEEDLES else _divergences
            records[key] = measure(loaded, prompt, answer, rows)
            with file.open("a") as stream:
                stream.write(json.dumps([key, records[key]]) + "\n")
            print(*key, f"{len(prompt)} tokens", flush=True)
    print("| bits | tokens | bytes | GSM8K | text | needles |")
    print("|---|---|---:|---:|---:|---:|")
    for index, row in enumerate(rows):
        size = row.share * _stored_bits(loaded.model, row.bits) / UNQUANTIZED
        kept = f"{row.policy}, {row.share:.1%}" if row.policy else "all"
        values = {name: [] for name in (ANSWERS, TEXTS, NEEDLES)}
        for (name, _), measured in records.items():
            values[name].append(measured[index])
        found = values.pop(NEEDLES)
        cells = [*map(_cell, values.values()), f"{sum(found)} of {len(found)}"]
        print(f"| {row.bits} | {kept} | {size:.1%} |", " | ".join(cells), "|")


def _replace_quantized_attention() -> None:
    """Compute with rounded numbers. A CPU takes much longer to multiply their codes."""

    def attention(queries, keys, values, *, group_size, bits, **options):
        spec = {"group_size": group_size, "bits": bits}
        pair = (mx.dequantize(*part, **spec) for part in (keys, values))
        return mx.fast.scaled_dot_product_attention(queries, *pair, **options)

    base.quantized_scaled_dot_product_attention = attention


def _divergences(loaded, prompt: list[int], answer: list[int], rows) -> list[float]:
    """KL of every row to the first one, in nats per token of the answer."""
    kls: list[float] = []
    target = None
    for state in _states(loaded.model, prompt[:-1], rows):
        log_p = _log_p(state, [prompt[-1], *answer[:-1]])
        target = log_p if target is None else target
        kls.append((mx.exp(target) * (target - log_p)).sum(axis=-1).mean().item())
    return kls


def _found(loaded, prompt: list[int], answer: list[int], rows) -> list[bool]:
    """Whether greedy decoding gives the answer, by row."""
    return [
        _greedy(state, prompt[-1], len(answer)) == answer
        for state in _states(loaded.model, prompt[:-1], rows)
    ]


def _states(model, prompt: list[int], rows) -> Iterator[CacheState]:
    """The cache of a prompt in every row. All but windows begin with the same keys."""
    stored, start = {}, len(prompt) - OBSERVED
    for row in rows:
        limit = row.limit(len(prompt))
        state = CacheState(model, kv_bits=row.bits, kv_limit=limit)
        if row.policy != "window":
            if row.bits not in stored:
                first = CacheState(model, kv_bits=row.bits)
                first.prefill(mx.array([prompt[:start]]), step_size=STEP)
                stored[row.bits] = first.positions(0, start)
            state.restore(stored[row.bits], [], start)
        state.prefill(mx.array([prompt[state.length :]]), step_size=STEP)
        state.end_prompt()
        yield state


def _log_p(state: CacheState, tokens: list[int]) -> mx.array:
    parts = []
    for start in range(0, len(tokens), SCORED):
        logits = state.forward(mx.array([tokens[start : start + SCORED]]))
        parts.append(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        mx.eval(parts)
    return mx.concatenate(parts, axis=1)


def _greedy(state: CacheState, token: int, count: int) -> list[int]:
    tokens = []
    for _ in range(count):
        token = mx.argmax(state.forward(mx.array([[token]]))[0, -1]).item()
        tokens.append(token)
    return tokens


def _prompts(tokenizer, arguments) -> Iterator[tuple[tuple, list[int], list[int]]]:
    """A name and a number, a prompt and what follows; the kinds alternate."""
    sets = {
        ANSWERS: _problems(Path(arguments.gsm8k), tokenizer.encode, arguments),
        TEXTS: _texts(Path(arguments.text), tokenizer.encode, arguments),
        NEEDLES: _needles(tokenizer, arguments),
    }
    for number in range(max(arguments.prompts, arguments.needles)):
        for name, pairs in sets.items():
            if number < len(pairs):
                yield (name, number), *pairs[number]


def _problems(file: Path, encode, arguments) -> list[tuple[list[int], list[int]]]:
    """Prompts with solved problems, and the answers of the last ones."""
    problems = [json.loads(line) for line in file.read_text().splitlines()]
    pairs, shots = [], arguments.shots
    for number in range(arguments.prompts):
        *solved, last = problems[number * (shots + 1) :][: shots + 1]
        parts = [f"Question: {p['question']}\nAnswer: {p['answer']}" for p in solved]
        prompt = "\n\n".join([*parts, f"Question: {last['question']}\nAnswer:"])
        pairs.append((encode(prompt), encode(f" {last['answer']}")))
    return pairs


def _texts(file: Path, encode, arguments) -> list[tuple[list[int], list[int]]]:
    """Places that are spread over the text, and the tokens that follow."""
    tokens, count = encode(file.read_text()), arguments.length + arguments.continued
    starts = np.linspace(0, len(tokens) - count, arguments.prompts).astype(int)
    places = [tokens[start : start + count] for start in starts]
    return [(p[: arguments.length], p[arguments.length :]) for p in places]


def _needles(tokenizer, arguments) -> list[tuple[list[int], list[int]]]:
    """Prompts with a number at a depth of the text, and the number."""
    draw, pairs = np.random.default_rng(0), []
    lines = Path(arguments.text).read_text().replace("\n", " ").split(". ")
    for depth in np.linspace(0.1, 0.9, arguments.needles):
        key, start = (
            f" {draw.integers(10_000, 100_000)}",
            draw.integers(len(lines) // 2),
        )
        text, length = [], 0
        for line in lines[start:]:
            text.append(line)
            length += len(tokenizer.encode(line)) + 2
            if length > arguments.needle_length:
                break
        text.insert(int(depth * len(text)), f"{NEEDLE}{key}")
        content = f"{'. '.join(text)}\n\n{QUESTION}"
        message = [{"role": "user", "content": content}]
        prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True)
        pairs.append(([*prompt, *tokenizer.encode(NEEDLE)], tokenizer.encode(key)))
    return pairs


def _stored_bits(model, bits: int) -> float:
    """Bits of a number in the cache of a 16-bit model, with scales and biases."""
    if bits == UNQUANTIZED:
        return bits
    return bits + 2 * UNQUANTIZED / CacheState(model, kv_bits=bits).caches[0].group_size


def _cell(values: list[float]) -> str:
    error = np.std(values, ddof=1) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return f"{np.mean(values):.4f} ± {error:.4f}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--model", required=True, help="folder or GGUF file")
    add("--gsm8k", required=True, help="test.jsonl: question and answer")
    add("--text", required=True, help="a long text, such as that of WikiText-2")
    add("--records", required=True, help="JSONL; what is there is not measured again")
    add("--bits", nargs="+", type=int, default=[UNQUANTIZED, 4, 2])
    add("--window-bits", nargs="*", type=int, default=[UNQUANTIZED, 4])
    add("--snapkv-bits", nargs="*", type=int, default=[UNQUANTIZED, 4])
    add("--shares", nargs="+", type=float, default=[0.5, 0.25, 0.125])
    add("--prompts", type=int, default=8, help="of GSM8K, and of text")
    add("--shots", type=int, default=6, help="solved problems of a prompt")
    add("--length", type=int, default=1024, help="tokens of a prompt of text")
    add("--continued", type=int, default=128, help="tokens that follow")
    add("--needles", type=int, default=5)
    add("--needle-length", type=int, default=4000, help="tokens of its text")
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""Divergence of quantized KV caches: mlx-lm's rounding and that of lmx, by bits.

The KL is that of the next token between the same weights with and without a quantized
cache, on every fourth position. All tokens read rounded keys and values. Errors are
those of the mean over sequences.
"""

import argparse
from pathlib import Path

import mlx.core as mx
import numpy as np
from lmx.models.loader import load, make_cache
from lmx.quantization.mixed_precision.kv_bits import (
    RoundedCache,
    TokenRounding,
    quantizable_layers,
)


class PlainRounding(TokenRounding):
    """Rounds as mlx-lm's QuantizedKVCache does."""

    def __init__(self, layer, bits: int):
        self._spec = {"bits": bits, "group_size": layer.rotation.group_size}

    def keys(self, x: mx.array) -> mx.array:
        return mx.dequantize(*mx.quantize(x, **self._spec), **self._spec)

    values = keys


def main() -> None:
    arguments = _arguments()
    loaded = load(arguments.model)
    model, layers = loaded.model, quantizable_layers(loaded.model)
    texts = {
        name: _sequences(Path(file), loaded.tokenizer, arguments)
        for name, file in (text.split("=", 1) for text in arguments.text)
    }
    targets = {name: [_log_p(model, s) for s in text] for name, text in texts.items()}
    print("| bits | cache |", " | ".join(texts), "| all |")
    print("|---|---|" + "---:|" * (len(texts) + 1))
    for bits in arguments.bits:
        for name, rounding in (("mlx-lm", PlainRounding), ("lmx", TokenRounding)):
            kls = {
                key: [
                    _kl(model, layers, rounding, bits, *pair)
                    for pair in zip(text, targets[key], strict=True)
                ]
                for key, text in texts.items()
            }
            columns = [*kls.values(), [kl for text in kls.values() for kl in text]]
            print(f"| {bits} | {name} |", " | ".join(map(_cell, columns)), "|")


def _kl(model, layers, rounding, bits: int, tokens: mx.array, target) -> float:
    caches = make_cache(model)
    for layer in layers:
        rounded = RoundedCache(caches[layer.index], rounding(layer, bits))
        caches[layer.index] = rounded
    predicted = _log_p(model, tokens, caches)
    return (mx.exp(target) * (target - predicted)).sum(axis=-1).mean().item()


def _log_p(model, tokens: mx.array, caches=None) -> mx.array:
    logits = model(tokens, cache=caches or make_cache(model))[:, 4::4]
    log_p = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    mx.eval(log_p)
    return log_p


def _sequences(file: Path, tokenizer, arguments) -> list[mx.array]:
    """Sequences [1, length], from places that are spread over the text."""
    tokens = tokenizer.encode(file.read_text(), add_special_tokens=False)
    starts = np.linspace(0, len(tokens) - arguments.length, arguments.sequences)
    return [mx.array([tokens[int(s) : int(s) + arguments.length]]) for s in starts]


def _cell(kls: list[float]) -> str:
    return f"{np.mean(kls):.3g} ± {np.std(kls, ddof=1) / len(kls) ** 0.5:.2g}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", nargs="+", required=True, metavar="NAME=FILE")
    parser.add_argument("--bits", nargs="+", type=int, default=[2, 3, 4, 6, 8])
    parser.add_argument("--sequences", type=int, default=4, help="of every text")
    parser.add_argument("--length", type=int, default=512)
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""Generating by lmx and by mlx-lm: prefill, decoding, batches, and speculation.

The same checkpoint, made up here, the same prompts, the same BLAS. Every run is a
process of its own; the sides alternate. The last table is of counts, not of times.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import random_llama
from generate_sides import SIDES
from lmx.models import checkpoint_writer

CASES = {
    "prefill": "prompt tokens/s, one request",
    "decode": "tokens/s, one request",
    "batch": "tokens/s, a batch with its prompts",
}
ROW = "{:9}{:9}{:>12}{:>12}{:>9}  {}"
GUESSES = (1, 2, 4)
# Deviation of the logits, which makes the model sure of some tokens, as trained ones.
SHARPNESS = 4.0


def main() -> None:
    arguments = _arguments()
    if arguments.side:
        print(json.dumps(measure(SIDES[arguments.side], arguments)))
        return
    with tempfile.TemporaryDirectory() as folder:
        arguments.folder = Path(folder)
        prepare(arguments)
        runs = compare(arguments)
        _print_times(runs, arguments)
        if arguments.sampled:
            found = (runs[side][0]["speculation"] for side in SIDES)
            _print_speculation(*found, arguments)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--bits", type=int, choices=(4, 8), help="absent = float32")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=96, help="decoded of a prompt")
    parser.add_argument("--rows", type=int, default=16, help="of the batch")
    parser.add_argument("--noise", type=float, default=0.1, help="of the draft")
    parser.add_argument(
        "--sampled", type=int, default=600, help="with a draft; 0 = none"
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of every side")
    parser.add_argument("--threads", type=int, help="of the BLAS; absent = all cores")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def prepare(arguments: argparse.Namespace) -> None:
    """Write a model, and a draft: the same weights with noise added to them."""
    import mlx.core as mx
    import mlx.nn as nn
    from lmx.config.quant_spec import QuantSpec
    from lmx.models import from_scratch
    from lmx.models.loader import build_model
    from mlx.utils import tree_flatten, tree_unflatten

    config = random_llama.configuration(arguments, tied=False, dtype="float32")
    tokenizer = arguments.folder / "tokenizer"
    tokenizer.mkdir()
    from_scratch.train_tokenizer([Path(__file__).read_text()], 512, tokenizer)
    weights = from_scratch.initial_weights(config, 0)
    weights["model.norm.weight"] *= SHARPNESS / (0.02 * arguments.hidden**0.5)
    key = mx.random.key(1)
    noisy = {}
    for path, value in weights.items():
        key, now = mx.random.split(key)
        noise = mx.random.normal(value.shape, key=now) * mx.std(value)
        noisy[path] = value + arguments.noise * noise if value.ndim > 1 else value
    for name, parameters in (("model", weights), ("draft", noisy)):
        specs = None
        if arguments.bits:
            model = build_model(config)
            model.update(tree_unflatten(list(parameters.items())))
            nn.quantize(model, 64, arguments.bits)
            parameters = dict(tree_flatten(model.parameters()))
            spec = QuantSpec(bits=arguments.bits)
            names = (k.removesuffix(".scales") for k in parameters if "scales" in k)
            specs = dict.fromkeys(names, spec)
        (arguments.folder / name).mkdir()
        checkpoint_writer.write_checkpoint(
            arguments.folder / name,
            parameters,
            config,
            companions=tokenizer,
            specs=specs,
        )


def compare(arguments: argparse.Namespace) -> dict[str, list[dict]]:
    """What every run of every side measured."""
    runs: dict[str, list[dict]] = {side: [] for side in SIDES}
    for number in range(arguments.rounds):
        # Who goes first alternates, so that a machine that warms up favours nobody.
        for side in list(SIDES)[:: -1 if number % 2 else 1]:
            # Counts are the same every time.
            sampled = 0 if number else arguments.sampled
            runs[side].append(_run(side, sampled, arguments))
    return runs


def _run(side: str, sampled: int, arguments: argparse.Namespace) -> dict:
    command = [sys.executable, __file__, "--side", side, "--sampled", str(sampled)]
    for name in ("folder", "vocabulary", "prompt", "tokens", "rows"):
        command += [f"--{name}", str(getattr(arguments, name))]
    environment = dict(os.environ)
    environment.pop("LMX_CPU", None)
    if arguments.threads:
        environment["LMX_BLAS_THREADS"] = str(arguments.threads)
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure(kind: type, arguments: argparse.Namespace) -> dict:
    """One run of one side."""
    side = kind(arguments.folder)
    draw = random.Random(0)

    def prompt(length: int) -> list[int]:
        return [draw.randrange(3, arguments.vocabulary) for _ in range(length)]

    alone = prompt(arguments.prompt)
    rows = [prompt(draw.randrange(16, 129)) for _ in range(arguments.rows)]
    side.alone(alone, arguments.tokens)
    side.batch(rows, 4)
    first, last, said = side.alone(alone, arguments.tokens)
    seconds, answers = side.batch(rows, arguments.tokens)
    return {
        "prefill": len(alone) / first,
        "decode": (arguments.tokens - 1) / (last - first),
        "batch": arguments.rows * arguments.tokens / seconds,
        "said": [said, *answers],
        "blas": side.blas,
        "speculation": {
            str(guesses): side.speculate(alone[:16], arguments.sampled, guesses)
            for guesses in (GUESSES if arguments.sampled else [])
        },
    }


def _print_times(runs: dict[str, list[dict]], arguments: argparse.Namespace) -> None:
    weights = f"{arguments.bits} bits" if arguments.bits else "float32"
    print(
        f"Llama of {arguments.layers} layers, hidden size {arguments.hidden}, "
        f"vocabulary {arguments.vocabulary}, {weights}; prompt of {arguments.prompt} "
        f"tokens, {arguments.tokens} decoded,\nbatch of {arguments.rows} prompts of 16 "
        f"to 128 tokens. Medians of {arguments.rounds} alternating runs; ratio = "
        "tokens/s of lmx / tokens/s."
    )
    print(ROW.format("case", "side", "tokens/s", "fastest", "ratio", "").rstrip())
    for case, title in CASES.items():
        rates = {side: [run[case] for run in found] for side, found in runs.items()}
        ours = statistics.median(rates["lmx"])
        for side, found in rates.items():
            median = statistics.median(found)
            cells = f"{median:,.1f}", f"{max(found):,.1f}", f"{ours / median:.2f}x"
            print(ROW.format(case, side, *cells, title))
    texts = [found[0]["said"] for found in runs.values()]
    same = sum(a == b for a, b in zip(*texts, strict=True))
    print(f"{same} of {len(texts[0])} answers are the same, token by token;", end=" ")
    print(" / ".join(sorted({run["blas"] for f in runs.values() for run in f})))


def _print_speculation(ours: dict, theirs: dict, arguments) -> None:
    print(
        f"\nTokens for every forward pass of the model at temperature 1 "
        f"({arguments.sampled} tokens); the draft is the model\nwith noise of "
        f"{arguments.noise} deviations. Closed forms: a guess stands with probability "
        "sum min(p, q) by rejection\n(lmx), sum pq by matching (mlx-lm)."
    )
    form = "{:>8}{:>8}{:>9}{:>8}{:>14}{:>8}{:>11}{:>8}"
    names = ("guesses", "lmx", "mlx-lm", "ratio", "sum min(p,q)", "gives")
    print(form.format(*names, "sum pq", "gives"))
    for guesses in map(str, GUESSES):
        run, count = ours[guesses], int(guesses)
        a, b = run["sum_min"], run["sum_product"]
        cells = [run["tokens"], theirs[guesses]["tokens"]]
        cells += [f"{cells[0] / cells[1]:.2f}x", a, expected(a, count), b]
        cells = [c if isinstance(c, str) else f"{c:.3f}" for c in cells]
        print(form.format(guesses, *cells, f"{expected(b, count):.3f}"))


def expected(rate: float, guesses: int) -> float:
    """Tokens of a round if every guess stands with this probability."""
    return sum(rate**place for place in range(guesses + 1))


if __name__ == "__main__":
    main()

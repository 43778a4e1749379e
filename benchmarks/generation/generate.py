"""Compare generation with lmx and mlx-lm: prefill, decoding, batches, speculation.

Both use the same checkpoint, prompts and BLAS. Each run is a separate process; the
libraries alternate. The last table has counts, not times. The checkpoint is random, or
that of `--model`, which is compared without a draft.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
import programs
import random_llama
from generate_runners import LIBRARIES
from lmx.models import checkpoint_writer

# Options of every run.
SHARED = ("folder", "vocab_size", "prompt_length", "max_tokens", "batch_size")
CASES = {
    "prefill": "prompt tokens/s, one request",
    "decode": "tokens/s, one request",
    "batch": "tokens/s, a batch, prompts included",
    "ragged": "tokens/s, a batch of prompts of very different lengths",
    "kv": "tokens per MB of KV cache, the ragged batch at its largest",
}
ROW = "{:9}{:9}{:>12}{:>12}{:>9}  {}"
NUM_DRAFT_TOKENS = (1, 2, 4)
# Standard deviation of the logits, so that some tokens are likely, as after training.
LOGIT_SCALE = 4.0


def main() -> None:
    arguments = _arguments()
    if arguments.runner:
        print(json.dumps(measure(LIBRARIES[arguments.runner], arguments)))
        return
    with tempfile.TemporaryDirectory() as folder:
        arguments.folder = Path(folder)
        if arguments.model:
            prepare_model(arguments)
        else:
            prepare(arguments)
        runs = compare(arguments)
        _print_times(runs, arguments)
        if arguments.sampled_tokens:
            results = (runs[library][0]["speculation"] for library in LIBRARIES)
            _print_speculation(*results, arguments)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="folder of a dense model; default: random")
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--num-layers", type=int, default=8)
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--bits", type=int, choices=(4, 8), help="default: dense")
    parser.add_argument("--prompt-length", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=96, help="per prompt")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument(
        "--noise", type=float, default=0.1, help="on the draft model's weights"
    )
    parser.add_argument(
        "--sampled-tokens", type=int, default=600, help="with a draft; 0 = skip"
    )
    parser.add_argument("--repeats", type=int, default=3, help="runs per library")
    parser.add_argument("--threads", type=int, help="BLAS threads; default: all cores")
    parser.add_argument("--runner", choices=LIBRARIES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def prepare(arguments: argparse.Namespace) -> None:
    """Write the target and the draft model: the same weights with added noise."""
    import mlx.core as mx
    import mlx.nn as nn
    from lmx.config.quant_spec import QuantSpec
    from lmx.models import from_scratch
    from lmx.models.loader import build_model
    from mlx.utils import tree_flatten, tree_unflatten

    config = random_llama.configuration(
        arguments, tie_word_embeddings=False, dtype="float32"
    )
    tokenizer = arguments.folder / "tokenizer"
    tokenizer.mkdir()
    from_scratch.train_tokenizer([Path(__file__).read_text()], 512, tokenizer)
    weights = from_scratch.initial_weights(config, 0)
    weights["model.norm.weight"] *= LOGIT_SCALE / (0.02 * arguments.hidden_size**0.5)
    key = mx.random.key(1)
    noisy = {}
    for path, value in weights.items():
        key, subkey = mx.random.split(key)
        noise = mx.random.normal(value.shape, key=subkey) * mx.std(value)
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


def prepare_model(arguments: argparse.Namespace) -> None:
    """Write the given model as the target, in its own dtype or quantized."""
    from mlx_lm import convert

    convert(
        arguments.model,
        str(arguments.folder / "model"),
        quantize=arguments.bits is not None,
        q_bits=arguments.bits,
        q_group_size=64,
    )
    config = json.loads((arguments.folder / "model" / "config.json").read_text())
    arguments.vocab_size = config["vocab_size"]
    arguments.hidden_size = config["hidden_size"]
    arguments.num_layers = config["num_hidden_layers"]
    arguments.sampled_tokens = 0


def compare(arguments: argparse.Namespace) -> dict[str, list[dict]]:
    """The results of all runs, by library."""
    # The counts are the same in every run.
    sampled = dict.fromkeys(LIBRARIES, arguments.sampled_tokens)

    def run(library: str) -> dict:
        command = [__file__, "--runner", library]
        command += ["--sampled-tokens", str(sampled[library])]
        for name in SHARED:
            command += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
        sampled[library] = 0
        return programs.measure(command, arguments.threads)

    return programs.alternate(LIBRARIES, arguments.repeats, run)


def measure(kind: type, arguments: argparse.Namespace) -> dict:
    """One run of one library."""
    library = kind(arguments.folder)
    rng = random.Random(0)

    def random_prompt(length: int) -> list[int]:
        return [rng.randrange(3, arguments.vocab_size) for _ in range(length)]

    prompt = random_prompt(arguments.prompt_length)
    rows = range(arguments.batch_size)
    prompts = [random_prompt(rng.randrange(16, 129)) for _ in rows]
    longest = 2 * arguments.prompt_length
    ragged = [random_prompt(rng.randrange(longest // 32, longest + 1)) for _ in rows]
    # Warm up.
    library.generate(prompt, arguments.max_tokens)
    first, last, output = library.generate(prompt, arguments.max_tokens)
    library.generate_batch(ragged, 4)
    seconds, _, outputs = library.generate_batch(prompts, arguments.max_tokens)
    decoded = arguments.batch_size * arguments.max_tokens
    ragged_seconds, kv, ragged_outputs = library.generate_batch(
        ragged, arguments.max_tokens
    )
    return {
        "prefill": len(prompt) / first,
        "decode": (arguments.max_tokens - 1) / (last - first),
        "batch": decoded / seconds,
        "ragged": decoded / ragged_seconds,
        "kv": (sum(map(len, ragged)) + decoded) / kv / 1e3,
        "outputs": [output, *outputs, *ragged_outputs],
        "blas": library.blas,
        "speculation": {
            str(count): library.speculate(prompt[:16], arguments.sampled_tokens, count)
            for count in (NUM_DRAFT_TOKENS if arguments.sampled_tokens else [])
        },
    }


def _print_times(runs: dict[str, list[dict]], arguments: argparse.Namespace) -> None:
    weights = f"{arguments.bits} bits" if arguments.bits else "dense"
    print(
        f"Llama, {arguments.num_layers} layers, hidden size {arguments.hidden_size}, "
        f"vocabulary {arguments.vocab_size}, {weights}; prompt of "
        f"{arguments.prompt_length} tokens, {arguments.max_tokens} decoded,\nbatch of "
        f"{arguments.batch_size} prompts of 16 to 128 tokens, ragged: of "
        f"{arguments.prompt_length // 16} to {2 * arguments.prompt_length}. Medians of "
        f"{arguments.repeats} alternating runs;\nratio = lmx / library."
    )
    print(ROW.format("case", "library", "tokens/s", "fastest", "ratio", "").rstrip())
    for case, title in CASES.items():
        rates = {name: [run[case] for run in entries] for name, entries in runs.items()}
        lmx_rate = statistics.median(rates["lmx"])
        for library, values in rates.items():
            median = statistics.median(values)
            cells = f"{median:,.1f}", f"{max(values):,.1f}", f"{lmx_rate / median:.2f}x"
            print(ROW.format(case, library, *cells, title))
    texts = [entries[0]["outputs"] for entries in runs.values()]
    same = sum(a == b for a, b in zip(*texts, strict=True))
    print(f"{same} of {len(texts[0])} outputs have the same tokens;", end=" ")
    print(
        " / ".join(
            sorted({run["blas"] for entries in runs.values() for run in entries})
        )
    )


def _print_speculation(lmx: dict, mlx_lm: dict, arguments) -> None:
    print(
        f"\nTokens per forward pass of the target at temperature 1 "
        f"({arguments.sampled_tokens} tokens); the draft is the target\nwith noise of "
        f"{arguments.noise} standard deviations. Expected: a draft token is accepted "
        "with probability\nsum min(p, q) at most by shared noise (lmx), sum pq by "
        "matching (mlx-lm)."
    )
    form = "{:>8}{:>8}{:>9}{:>8}{:>14}{:>8}{:>11}{:>8}"
    names = ("draft", "lmx", "mlx-lm", "ratio", "sum min(p,q)", "<=")
    print(form.format(*names, "sum pq", "expect"))
    for count in NUM_DRAFT_TOKENS:
        run = lmx[str(count)]
        a, b = run["sum_min"], run["sum_product"]
        cells = [run["tokens_per_pass"], mlx_lm[str(count)]["tokens_per_pass"]]
        cells += [f"{cells[0] / cells[1]:.2f}x", a, expected(a, count), b]
        cells = [c if isinstance(c, str) else f"{c:.3f}" for c in cells]
        print(form.format(count, *cells, f"{expected(b, count):.3f}"))


def expected(acceptance: float, count: int) -> float:
    """Expected tokens per round with `count` draft tokens."""
    return sum(acceptance**position for position in range(count + 1))


if __name__ == "__main__":
    main()

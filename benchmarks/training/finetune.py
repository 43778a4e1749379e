"""Compare fine-tuning with lmx, mlx_lm.lora and transformers + peft: speed and memory.

All train the same examples, weights, LoRA layers, Adam settings and tokens per step.
Each run is a separate process. It trains one epoch to warm up and times the next one.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
import programs
import random_llama
from finetune_runners import LEARNING_RATE, LIBRARIES, PROGRAM, RANK, SCALE
from lmx.models import checkpoint_writer

SKILLS = programs.DATA / "skills" / "train.jsonl"
MERGES = 8192
COLUMNS = (
    *(
        "library",
        "tokens/s",
        "fastest",
        "ratio",
        "s/epoch",
        "CPU s",
        "steps",
        "padding",
    ),
    *("peak GB", "RSS GB", "first loss", "last loss", "threads"),
)
ROW = "{:8}{:>10}{:>9}{:>8}{:>9}{:>8}{:>7}{:>9}{:>9}{:>8}{:>12}{:>11}  {}"


@dataclass(frozen=True)
class Case:
    """A training job: model size, examples, and the steps of mlx-lm.

    Attributes:
        batch_size: examples per step of mlx-lm.
        length: longest sequence in tokens.
        joined: make each example from many, so that it has about `length` tokens.
    """

    title: str
    vocab_size: int
    num_examples: int
    batch_size: int
    length: int = 1024
    joined: bool = False
    checkpointing: bool = False


CASES = {
    "chat": Case("ragged chats", 8192, 160, 8),
    "chat-32k": Case("ragged chats, vocabulary 32k", 32768, 160, 8),
    "long": Case("sequences of 2048 tokens", 32768, 4, 2, 2048, joined=True),
    "long-checkpointed": Case(
        "sequences of 2048 tokens, gradient checkpointing",
        *(32768, 4, 2, 2048),
        joined=True,
        checkpointing=True,
    ),
}


def main() -> None:
    arguments = _arguments()
    print(
        f"Llama, {arguments.num_layers} layers, hidden size {arguments.hidden_size}, "
        "float32; "
        f"LoRA of rank {RANK}, scale {SCALE}, on every linear layer.\n"
        "No loss on prompts; tokens/s counts only trained tokens. Each run warms up "
        "for one epoch\nand times the next; medians of "
        f"{arguments.repeats} alternating runs; ratio = tokens/s of lmx / tokens/s.\n"
        "stock = mlx-lm with the BLAS of MLX's wheel, two steps of one run."
    )
    if not arguments.hf_python:
        print("No --hf-python: transformers + peft is not measured.")
    for name in [arguments.case] if arguments.case else CASES:
        with tempfile.TemporaryDirectory() as folder:
            case = CASES[name]
            if arguments.vocab_size:
                case = replace(case, vocab_size=arguments.vocab_size)
            prepare(case, arguments, Path(folder))
            _print_case(case, compare(Path(folder), arguments))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="JSONL; default: random chats")
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--num-layers", type=int, default=6)
    parser.add_argument("--vocab-size", type=int, help="default: of the case")
    parser.add_argument("--max-samples", type=int, help="default: of the case")
    parser.add_argument("--repeats", type=int, default=3, help="runs per library")
    parser.add_argument("--threads", type=int, help="default: all cores")
    parser.add_argument(
        "--hf-python", help="a Python that has torch, transformers and peft"
    )
    parser.add_argument(
        "--no-stock", action="store_true", help="skip mlx-lm with MLX's own BLAS"
    )
    parser.add_argument("--case", choices=CASES, help="default: all")
    return parser.parse_args()


def prepare(case: Case, arguments: argparse.Namespace, folder: Path) -> None:
    """Write the inputs of all runs: model, dataset, tokens, settings."""
    from lmx.data import dataset
    from lmx.models import from_scratch

    path = arguments.data or _random_chats(folder / "random.jsonl")
    source = list(dataset.RecordReader(str(path)))
    config = random_llama.configuration(
        arguments, vocab_size=case.vocab_size, dtype="float32"
    )
    tokenizer, model = folder / "tokenizer", folder / "model"
    tokenizer.mkdir()
    model.mkdir()
    texts = (row.as_text() for row in source)
    from_scratch.train_tokenizer(texts, min(MERGES, case.vocab_size), tokenizer)
    weights = from_scratch.initial_weights(config, 0)
    checkpoint_writer.write_checkpoint(model, weights, config, companions=tokenizer)
    count = arguments.max_samples or case.num_examples
    chats = _chats(source, count, 16 if case.joined else 1)
    text = "".join(json.dumps({"messages": chat}) + "\n" for chat in chats)
    (folder / "train.jsonl").write_text(text)
    write_tokens(folder, model, case.length)
    settings = {
        "full": False,
        "learning_rate": LEARNING_RATE,
        "num_layers": arguments.num_layers,
        "vocab_size": case.vocab_size,
        "batch_size": case.batch_size,
        "length": case.length,
        "checkpointing": case.checkpointing,
    }
    (folder / "settings.json").write_text(json.dumps(settings))


def write_tokens(folder: Path, model: Path, length: int) -> None:
    """Write tokens and masks of train.jsonl to tokens.json."""
    from lmx.data.dataset import RecordReader
    from lmx.data.tokenization import encode_all
    from lmx.models.loader import load_tokenizer

    rows = list(RecordReader(str(folder / "train.jsonl")))
    examples = encode_all(rows, load_tokenizer(model), max_seq_length=length).examples
    assert len(examples) == len(rows), "an example was skipped"
    tokens = [[e.tokens.tolist(), e.mask.tolist()] for e in examples]
    (folder / "tokens.json").write_text(json.dumps(tokens))


def _random_chats(path: Path) -> Path:
    """Chats of lognormal lengths with the words of data/skills."""
    words = sorted(set(SKILLS.read_text().replace('"', " ").split()))
    rng = random.Random(0)

    def text(median: int, spread: float) -> str:
        count = min(600, 1 + int(median * rng.lognormvariate(0, spread)))
        return " ".join(rng.choices(words, k=count))

    with path.open("w") as file:
        for _ in range(2000):
            example = {"prompt": text(30, 0.5), "completion": text(40, 0.7)}
            file.write(json.dumps(example) + "\n")
    return path


def _chats(source, count: int, joined: int) -> list[list[dict]]:
    """Chats with one question and one answer, each from `joined` examples."""
    chats = []
    for start in range(0, count * joined, joined):
        pairs = [_pair(row) for row in source[start : start + joined]]
        question = pairs[0][0]
        answer = "\n".join(part for pair in pairs for part in pair)[len(question) + 1 :]
        chats.append(
            [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
        )
    return chats


def _pair(row) -> tuple[str, str]:
    if row.messages is None:
        return row.prompt, row.completion
    texts = {m["role"]: m["content"] for m in row.messages}
    return texts["user"], texts["assistant"]


def compare(folder: Path, arguments: argparse.Namespace) -> dict[str, list[dict]]:
    """Alternating runs by library; mlx-lm with the BLAS of MLX's wheel runs once."""

    def run(library: str) -> dict:
        assert library in LIBRARIES
        python = arguments.hf_python if library == "hf" else sys.executable
        command = [PROGRAM, library, folder]
        return programs.measure(
            command, arguments.threads, python=python, stock=library == "stock"
        )

    libraries = ["lmx", "mlx-lm"] + ["hf"] * bool(arguments.hf_python)
    runs = programs.alternate(libraries, arguments.repeats, run)
    if runs["lmx"][0]["replaced"] and not arguments.no_stock:
        runs["stock"] = [run("stock")]
    return runs


def _print_case(case: Case, runs: dict[str, list[dict]]) -> None:
    reference = runs["lmx"][0]
    trained = reference["trained"]
    lmx_rate = statistics.median(_rates(runs["lmx"]))
    print(
        f"\n{case.title}: vocabulary {case.vocab_size}, {trained:,} trained tokens, "
        f"{reference['parameters']:,} trained parameters"
    )
    print(ROW.format(*COLUMNS))
    for library, entries in runs.items():
        first = entries[0]
        assert first["parameters"] == reference["parameters"], "unequal models"
        rates = _rates(entries, None if library == "stock" else trained)
        median = statistics.median(rates)
        peaks = [first["peak"] / 1e9] if first["peak"] else []
        cells = (
            f"{median:,.0f}",
            f"{max(rates):,.0f}",
            f"{lmx_rate / median:.2f}x",
            f"{statistics.median(run['seconds'] for run in entries):,.1f}",
            f"{statistics.median(run['processor_seconds'] for run in entries):,.1f}",
            f"{first['steps']}",
            f"{100 * (1 - first['filled'] / first['positions']):.1f}%",
            "".join(f"{peak:.2f}" for peak in peaks) or "-",
            f"{statistics.median(run['rss'] for run in entries) / 1e9:.2f}",
            f"{first['first_loss']:.4f}",
            f"{first['last_loss']:.4f}",
            first["engine"],
        )
        print(ROW.format(library, *cells))


def _rates(runs: list[dict], trained: int | None = None) -> list[float]:
    """Trained tokens per second.

    The epochs have the same examples, but mlx-lm also trains on the template's text
    after the end of the answer and on the first padding token. `trained` replaces its
    token count.
    """
    return [(trained or run["trained"]) / run["seconds"] for run in runs]


if __name__ == "__main__":
    main()

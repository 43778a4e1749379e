"""Fine-tuning by lmx, by mlx_lm.lora and by transformers with peft: speed and memory.

The same rows, weights, LoRA layers, Adam and trained tokens per step. Every run is a
process of its own; it trains one epoch to warm up and times the next one.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import random_llama
from finetune_sides import PROGRAM, RANK, SCALE, SIDES
from lmx.models import checkpoint_writer

SKILLS = Path(__file__).parents[1] / "data" / "skills" / "train.jsonl"
MERGES = 8192
COLUMNS = (
    *("side", "tokens/s", "fastest", "ratio", "s/epoch", "CPU s", "steps", "padding"),
    *("peak GB", "RSS GB", "first loss", "last loss", "threads"),
)
ROW = "{:8}{:>10}{:>9}{:>8}{:>9}{:>8}{:>7}{:>9}{:>9}{:>8}{:>12}{:>11}  {}"


@dataclass(frozen=True)
class Case:
    """What is trained: `rows` rows, `batch` in a step of mlx-lm, cut at `length`."""

    title: str
    vocabulary: int
    rows: int
    batch: int
    length: int = 1024
    joined: bool = False
    checkpointing: bool = False


CASES = {
    "chat": Case("ragged chat rows", 8192, 160, 8),
    "chat-32k": Case("ragged chat rows, vocabulary 32k", 32768, 160, 8),
    "long": Case("rows of 2048 tokens", 32768, 4, 2, 2048, joined=True),
    "long-checkpointed": Case(
        "rows of 2048 tokens, gradient checkpointing",
        *(32768, 4, 2, 2048),
        joined=True,
        checkpointing=True,
    ),
}


def main() -> None:
    arguments = _arguments()
    print(
        f"Llama of {arguments.layers} layers, hidden size {arguments.hidden}, float32; "
        f"LoRA of rank {RANK}, scale {SCALE}, on every linear layer.\n"
        "Prompts are not trained; tokens/s counts trained tokens alone. Every run "
        "warms up for an epoch\nand times the next; medians of "
        f"{arguments.rounds} alternating runs; ratio = tokens/s of lmx / tokens/s.\n"
        "stock = mlx-lm with the BLAS of MLX's wheel, two steps of one run."
    )
    if not arguments.hf_python:
        print("No --hf-python: transformers with peft is left out.")
    for name in [arguments.case] if arguments.case else CASES:
        with tempfile.TemporaryDirectory() as folder:
            case = CASES[name]
            if arguments.vocabulary:
                case = replace(case, vocabulary=arguments.vocabulary)
            prepare(case, arguments, Path(folder))
            _print_case(case, compare(Path(folder), arguments))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, help="JSONL; absent = made-up chat rows")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocabulary", type=int, help="absent = the case's")
    parser.add_argument("--limit", type=int, help="rows trained; absent = the case's")
    parser.add_argument("--rounds", type=int, default=3, help="runs of every side")
    parser.add_argument("--threads", type=int, help="of every side; absent = all")
    parser.add_argument("--hf-python", help="a Python with torch, transformers, peft")
    parser.add_argument(
        "--no-stock", action="store_true", help="not with MLX's own BLAS"
    )
    parser.add_argument("--case", choices=CASES, help="absent = all")
    return parser.parse_args()


def prepare(case: Case, arguments: argparse.Namespace, folder: Path) -> None:
    """Write into `folder` what every side reads: model, rows, tokens, settings."""
    from lmx.data import dataset
    from lmx.data.tokenization import encode_all
    from lmx.models import from_scratch
    from lmx.models.loader import load

    path = arguments.rows or _made_up(folder / "made-up.jsonl")
    found = list(dataset.RowReader(str(path)))
    config = random_llama.configuration(
        arguments, vocabulary=case.vocabulary, dtype="float32"
    )
    tokenizer, model = folder / "tokenizer", folder / "model"
    tokenizer.mkdir()
    model.mkdir()
    texts, most = (row.as_text() for row in found), min(MERGES, case.vocabulary)
    from_scratch.train_tokenizer(texts, most, tokenizer)
    weights = from_scratch.initial_weights(config, 0)
    checkpoint_writer.write_checkpoint(model, weights, config, companions=tokenizer)
    count = arguments.limit or case.rows
    rows = _chats(found, count, 16 if case.joined else 1)
    text = "".join(json.dumps({"messages": row}) + "\n" for row in rows)
    (folder / "train.jsonl").write_text(text)
    rows = list(dataset.RowReader(str(folder / "train.jsonl")))
    encoded = encode_all(rows, load(model).tokenizer, max_seq_length=case.length)
    assert len(encoded.examples) == count, "a row was dropped"
    tokens = [[e.tokens.tolist(), e.mask.tolist()] for e in encoded.examples]
    (folder / "tokens.json").write_text(json.dumps(tokens))
    settings = {"num_hidden_layers": arguments.layers, "vocab_size": case.vocabulary}
    settings |= {"batch": case.batch, "length": case.length}
    settings |= {"checkpointing": case.checkpointing}
    (folder / "settings.json").write_text(json.dumps(settings))


def _made_up(path: Path) -> Path:
    """Chat rows of lognormal lengths, in words of the skills."""
    words = sorted(set(SKILLS.read_text().replace('"', " ").split()))
    draw = random.Random(0)

    def text(median: int, spread: float) -> str:
        count = min(600, 1 + int(median * draw.lognormvariate(0, spread)))
        return " ".join(draw.choices(words, k=count))

    with path.open("w") as file:
        for _ in range(2000):
            row = {"prompt": text(30, 0.5), "completion": text(40, 0.7)}
            file.write(json.dumps(row) + "\n")
    return path


def _chats(rows, count: int, joined: int) -> list[list[dict]]:
    """The first rows as one question and one answer each, or many joined to one."""
    chats = []
    for start in range(0, count * joined, joined):
        pairs = [_pair(row) for row in rows[start : start + joined]]
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
    """The runs of every side, alternating; with the BLAS of MLX's wheel only once."""
    sides = ["lmx", "mlx-lm"] + ["hf"] * bool(arguments.hf_python)
    runs: dict[str, list[dict]] = {side: [] for side in sides}
    for number in range(arguments.rounds):
        # Who goes first alternates, so that a machine that warms up favours nobody.
        for side in sides[:: -1 if number % 2 else 1]:
            runs[side].append(_run(side, folder, arguments))
    if runs["lmx"][0]["replaced"] and not arguments.no_stock:
        runs["stock"] = [_run("stock", folder, arguments)]
    return runs


def _run(side: str, folder: Path, arguments: argparse.Namespace) -> dict:
    assert side in SIDES
    python = arguments.hf_python if side == "hf" else sys.executable
    environment = dict(os.environ)
    environment.pop("LMX_CPU", None)
    if side == "stock":
        environment["LMX_CPU"] = "off"
    if arguments.threads:
        for name in ("LMX_BLAS_THREADS", "OMP_NUM_THREADS"):
            environment[name] = str(arguments.threads)
    command = [python, str(PROGRAM), side, str(folder)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    # mlx-lm writes its own report before it.
    return json.loads(done.stdout.splitlines()[-1])


def _print_case(case: Case, runs: dict[str, list[dict]]) -> None:
    reference = runs["lmx"][0]
    trained = reference["trained"]
    ours = statistics.median(_rates(runs["lmx"]))
    print(
        f"\n{case.title}: vocabulary {case.vocabulary}, {trained:,} trained tokens, "
        f"{reference['parameters']:,} parameters trained"
    )
    print(ROW.format(*COLUMNS))
    for side, found in runs.items():
        first = found[0]
        assert first["parameters"] == reference["parameters"], "unequal work"
        rates = _rates(found) if side == "stock" else _rates(found, trained)
        median = statistics.median(rates)
        peaks = [first["peak"] / 1e9] if first["peak"] else []
        cells = (
            f"{median:,.0f}",
            f"{max(rates):,.0f}",
            f"{ours / median:.2f}x",
            f"{statistics.median(run['seconds'] for run in found):,.1f}",
            f"{statistics.median(run['processor_seconds'] for run in found):,.1f}",
            f"{first['steps']}",
            f"{100 * (1 - first['filled'] / first['positions']):.1f}%",
            "".join(f"{peak:.2f}" for peak in peaks) or "-",
            f"{statistics.median(run['rss'] for run in found) / 1e9:.2f}",
            f"{first['first_loss']:.4f}",
            f"{first['last_loss']:.4f}",
            first["engine"],
        )
        print(ROW.format(side, *cells))


def _rates(runs: list[dict], trained: int | None = None) -> list[float]:
    """Trained tokens per second.

    An epoch has the same rows on every side, but mlx-lm also trains what its template
    writes after the end of the answer and the first token of padding.
    """
    return [(trained or run["trained"]) / run["seconds"] for run in runs]


if __name__ == "__main__":
    main()

"""Compare DPO and GRPO with lmx and mlx-lm-lora: speed and memory.

Both train the same examples, weights, LoRA layers and Adam settings in float32, with
the same BLAS. Each run is a separate process. Warm-up steps do not count.
"""

import argparse
import importlib.util
import json
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
import programs
from finetune_runners import RANK, SCALE
from preference_runners import LIBRARIES, PROGRAM

DATA = programs.DATA
COLUMNS = {
    "dpo": ("pairs/s", "reference CPU s", "later epochs"),
    "grpo": (
        *("completions/s", "tokens/s", "tokens/completion"),
        *("first reward", "reward"),
    ),
}
SHARED = ("ratio", "CPU ratio", "s", "CPU s", "steps", "peak MB", "RSS MB")
LOSSES = ("first loss", "last loss")
# Validation examples of a run of lmx, which are not measured.
NUM_VALID = 4


@dataclass(frozen=True)
class Case:
    """A training job.

    Attributes:
        num_examples: of the dataset.
        batch_size: pairs, or prompts.
        warm_epochs: passes over the pairs before the one that counts.
        warm_steps, steps: of GRPO, before the measurement and in it.
        accumulation: parts of a batch that lmx processes one after the other.
    """

    loss: str
    data: str
    num_examples: int
    batch_size: int
    max_seq_length: int
    learning_rate: float
    beta: float = 0.1
    warm_epochs: int = 3
    warm_steps: int = 3
    steps: int = 8
    num_generations: int = 8
    max_tokens: int = 24
    temperature: float = 1.0
    accumulation: int = 1


CASES = {
    "dpo": Case("dpo", "preferences", 512, 32, 96, 5e-4),
    "grpo": Case("grpo", "skills", 1024, 16, 64, 1e-3),
}
OPTIONS = (
    "num_examples",
    "batch_size",
    "beta",
    "steps",
    "num_generations",
    "max_tokens",
    "accumulation",
)


def main() -> None:
    arguments = _arguments()
    if importlib.util.find_spec("mlx_lm_lora") is None:
        sys.exit('mlx-lm-lora is not installed: pip install "lmx-toolkit[bench]"')
    print(
        f"{arguments.model.name}, float32; LoRA of rank {RANK}, scale {SCALE}, on "
        "every linear layer.\n"
        f"Medians of {arguments.repeats} alternating runs; ratio = speed of lmx / "
        "speed, CPU ratio = the same by\nprocessor time; later epochs = CPU ratio "
        "without the reference's log-probabilities."
    )
    for name in [arguments.case] if arguments.case else CASES:
        changes = {key: getattr(arguments, key) for key in OPTIONS}
        changes = {k: v for k, v in changes.items() if v is not None}
        case = replace(CASES[name], **changes)
        with tempfile.TemporaryDirectory() as folder:
            prepare(case, arguments.model.resolve(), Path(folder))
            runs = programs.alternate(
                LIBRARIES,
                arguments.repeats,
                lambda library, folder=folder: programs.measure(
                    [PROGRAM, library, folder], arguments.threads
                ),
            )
            _print_case(case, runs)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES, help="default: both")
    parser.add_argument(
        "--model", type=Path, default=DATA / "tiny-base", help="a chat model"
    )
    parser.add_argument("--repeats", type=int, default=3, help="runs per library")
    parser.add_argument("--threads", type=int, help="default: all cores")
    for option in OPTIONS:
        kind = float if option == "beta" else int
        parser.add_argument(
            f"--{option.replace('_', '-')}", type=kind, help="default: of the case"
        )
    return parser.parse_args()


def prepare(case: Case, model: Path, folder: Path) -> None:
    """Write the inputs of all runs: the rows for both libraries, and the settings."""
    source = DATA / case.data / "train.jsonl"
    lines = source.read_text().splitlines()[: case.num_examples]
    assert len(lines) == case.num_examples, f"{source} has fewer examples"
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "valid.jsonl").write_text("\n".join(lines[:NUM_VALID]) + "\n")
    rows = [json.loads(line) for line in lines]
    if case.loss == "dpo":
        keys = ("prompt", "chosen", "rejected")
        rows = [{key: row[key][0]["content"] for key in keys} for row in rows]
    else:
        rows = _prompt_rows(folder, model, case.max_seq_length, rows)
    (folder / "peer.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    settings = asdict(case) | {"model": str(model)}
    (folder / "settings.json").write_text(json.dumps(settings))


def _prompt_rows(
    folder: Path, model: Path, max_seq_length: int, rows: list[dict]
) -> list[dict]:
    """Questions with the tokens that lmx makes of them, and their answers."""
    from lmx.data.dataset import RecordReader
    from lmx.data.tokenization import encode_all
    from lmx.generation.completions import prompt_tokens
    from lmx.models.loader import load_tokenizer

    tokenizer = load_tokenizer(model)
    records = list(RecordReader(str(folder / "train.jsonl")))
    examples = encode_all(records, tokenizer, max_seq_length=max_seq_length).examples
    assert len(examples) == len(rows), "an example was skipped"
    result = []
    for example, row in zip(examples, rows, strict=True):
        question, answer = (turn["content"] for turn in row["messages"])
        text = tokenizer.apply_chat_template(
            row["messages"][:1], add_generation_prompt=True, tokenize=False
        )
        assert tokenizer.encode(text) == prompt_tokens(example), "unequal prompts"
        result.append({"prompt": question, "answer": answer, "text": text})
    return result


def _print_case(case: Case, runs: dict[str, list[dict]]) -> None:
    unit = "pairs" if case.loss == "dpo" else "completions"
    reference = runs["lmx"][0]
    columns = ("library", *COLUMNS[case.loss], *SHARED, *LOSSES)
    widths = [max(11, len(name)) + 2 for name in columns]
    if case.loss == "dpo":
        detail = f"{case.num_examples:,} pairs, {case.batch_size} per step"
    else:
        detail = (
            f"{case.batch_size} prompts per step, {case.num_generations} completions "
            f"of up to {case.max_tokens} tokens, temperature {case.temperature:g}"
        )
    print(
        f"\n{case.loss.upper()}: {detail}, beta {case.beta:g}, "
        f"{reference['parameters']:,} trained parameters"
    )
    _print_row(columns, widths)
    fastest = _median(runs["lmx"], unit, "seconds")
    cheapest = _median(runs["lmx"], unit, "processor_seconds")
    for library, entries in runs.items():
        first = entries[0]
        assert first["parameters"] == reference["parameters"], "unequal models"
        rate = _median(entries, unit, "seconds")
        cells = [library, f"{rate:,.1f}"]
        if case.loss == "dpo":
            later = _later_rate(runs["lmx"]) / _later_rate(entries)
            cells += [f"{_middle(entries, 'reference_seconds'):.2f}", f"{later:.2f}x"]
        else:
            cells += [
                f"{_median(entries, 'tokens', 'seconds'):,.0f}",
                f"{first['tokens'] / first['completions']:.1f}",
                f"{first['first_reward']:.3f}",
                f"{first['last_reward']:.3f}",
            ]
        cells += [
            f"{fastest / rate:.2f}x",
            f"{cheapest / _median(entries, unit, 'processor_seconds'):.2f}x",
            f"{_middle(entries, 'seconds'):.2f}",
            f"{_middle(entries, 'processor_seconds'):.2f}",
            f"{first['steps']}",
            f"{_middle(entries, 'peak') / 1e6:.0f}",
            f"{_middle(entries, 'rss') / 1e6:.0f}",
            f"{first['first_loss']:.4f}",
            f"{first['last_loss']:.4f}",
        ]
        _print_row(cells, widths)


def _print_row(cells, widths: list[int]) -> None:
    first, *others = zip(cells, widths, strict=True)
    text = "".join(f"{cell:>{width}}" for cell, width in others)
    print(f"{first[0]:{first[1]}}{text}")


def _middle(runs: list[dict], key: str) -> float:
    return statistics.median(run[key] for run in runs)


def _later_rate(runs: list[dict]) -> float:
    """Median of pairs per processor second, without those of the reference."""
    return statistics.median(
        run["pairs"] / (run["processor_seconds"] - run["reference_seconds"])
        for run in runs
    )


def _median(runs: list[dict], unit: str, seconds: str) -> float:
    """Median of units per second."""
    return statistics.median(run[unit] / run[seconds] for run in runs)


if __name__ == "__main__":
    main()

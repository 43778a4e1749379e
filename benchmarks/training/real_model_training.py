"""Fine-tune a real model on GSM8K with lmx, mlx_lm.lora and transformers + peft.

All train the same examples with their chat template, without loss on prompts, for two
epochs of equal batches at a constant learning rate, in float32. The second epoch is
timed. Held out are the loss on test answers and the exact match of the final number.

Each row is a separate process. Its record stays in `--folder`: a second call runs only
what is missing, and `--print-only` runs nothing.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import finetune_runners
import real_model_training_runners as runners
from finetune import write_tokens

sys.path.append(str(Path(__file__).parents[1]))
import gsm8k
from programs import measure

GROUP_SIZE = 64
# Full fine-tuning needs a lower rate than LoRA.
FULL_RATE_RATIO = 0.05
COLUMNS = (
    *("row", "loss", "exact match", "tokens/s", "peak GB", "dry-run GB", "ratio"),
    *("RSS GB", "seconds", "CPU s"),
)


@dataclass(frozen=True)
class Row:
    """A way to make a model.

    Attributes:
        runner: lmx, mlx-lm or hf train; the others are in
            `real_model_training_runners.py`.
        options: keys of the recipe's stage for lmx, else of the runner.
        start: name of the row whose model this one continues from.
        full: full fine-tuning with gradient checkpointing, for time and memory only.
    """

    name: str
    runner: str
    options: dict
    start: str | None = None
    full: bool = False


def main() -> None:
    arguments = _arguments()
    rows = rows_for(arguments)
    selected = [r for r in rows if arguments.rows is None or r.name in arguments.rows]
    if not arguments.print_only:
        _prepare(arguments)
        for row in selected:
            _run_row(row, {r.name: r for r in rows}, arguments)
    name = arguments.title or arguments.model
    print(
        f"Reference: {name}. {arguments.num_examples:,} examples, batches of "
        f"{arguments.batch_size}, two epochs, rank {finetune_runners.RANK}, learning "
        f"rate {arguments.learning_rate:g} (full: {FULL_RATE_RATIO:g} of it)."
    )
    if not arguments.hf_python:
        print("No --hf-python: transformers + peft is not measured.")
    print_table({row.name: _record(row, arguments) for row in selected})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", required=True, type=Path, help="keeps all records")
    parser.add_argument("--model", required=True, help="folder of a dense model")
    parser.add_argument("--title", help="of the model in the output; default: --model")
    parser.add_argument(
        "--gsm8k",
        required=True,
        type=Path,
        help="folder with train.jsonl and test.jsonl: question and answer",
    )
    parser.add_argument("--rows", nargs="+", help="names in the table; default: all")
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 3])
    parser.add_argument("--num-examples", type=int, default=256, help="to train on")
    parser.add_argument("--batch-size", type=int, default=8, help="examples per step")
    parser.add_argument("--seq-length", type=int, default=512, help="tokens at most")
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--num-answers", type=int, default=64, help="for the loss")
    parser.add_argument("--num-questions", type=int, default=64, help="to answer")
    parser.add_argument("--max-tokens", type=int, default=200, help="per answer")
    parser.add_argument(
        "--hf-python", help="a Python that has torch, transformers and peft"
    )
    parser.add_argument("--threads", type=int, help="default: all cores")
    parser.add_argument("--print-only", action="store_true")
    return parser.parse_args()


def rows_for(arguments: argparse.Namespace) -> list[Row]:
    """All rows, in the order of the table."""
    lora = {"adapter": {"rank": finetune_runners.RANK, "alpha": runners.ALPHA}}
    rows = [
        Row("untrained", "copy", {}),
        Row("lmx LoRA", "lmx", lora),
        Row("mlx-lm LoRA, fuse", "mlx-lm", {}),
    ]
    if arguments.hf_python:
        rows.append(Row("peft LoRA, merge", "hf", {}))
    for bits in arguments.bits:
        grid = {"bits": bits, "group_size": GROUP_SIZE}
        name = f"mlx-lm LoRA, fuse, quantize, {bits} bits"
        rows.append(Row(name, "quantize", grid, "mlx-lm LoRA, fuse"))
        rows.append(Row(f"lmx QAT-LoRA, {bits} bits", "lmx", lora | {"qat": grid}))
    grid = {"bits": min(arguments.bits), "group_size": GROUP_SIZE}
    gptq = f"lmx gptq, {grid['bits']} bits"
    rows.append(Row(gptq, "gptq", grid))
    qlora = f"lmx gptq, QLoRA, {grid['bits']} bits"
    rows.append(Row(qlora, "lmx", lora | {"qat": grid}, gptq))
    rows.append(Row("lmx full", "lmx", {}, full=True))
    rows.append(Row("mlx-lm full", "mlx-lm", {}, full=True))
    if arguments.hf_python:
        rows.append(Row("transformers full", "hf", {}, full=True))
    return rows


def _prepare(arguments: argparse.Namespace) -> None:
    """Write the examples as chats, and their tokens."""
    folder = arguments.folder
    if (folder / "tokens.json").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model").symlink_to(Path(arguments.model).resolve())
    rows = _chats(arguments.gsm8k / "train.jsonl", arguments.num_examples + 8)
    _write_jsonl(folder / "valid.jsonl", rows[arguments.num_examples :])
    _write_jsonl(folder / "train.jsonl", rows[: arguments.num_examples])
    count = max(arguments.num_answers, arguments.num_questions)
    _write_jsonl(folder / "test.jsonl", _chats(arguments.gsm8k / "test.jsonl", count))
    write_tokens(folder, folder / "model", arguments.seq_length)


def _chats(path: Path, count: int) -> list[dict]:
    with path.open() as lines:
        return [gsm8k.chat(json.loads(line)) for line in islice(lines, count)]


def _write_jsonl(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _run_row(row: Row, rows: dict[str, Row], arguments: argparse.Namespace) -> None:
    """Train and evaluate, unless the record is there."""
    if _record(row, arguments):
        return
    print(row.name, file=sys.stderr, flush=True)
    job = _job(row, arguments)
    job.mkdir(parents=True, exist_ok=True)
    start = _job(rows[row.start], arguments) / "result" if row.start else None
    _link(job / "model", start or arguments.folder / "model")
    for name in ("train.jsonl", "valid.jsonl", "tokens.json"):
        _link(job / name, arguments.folder / name)
    (job / "settings.json").write_text(json.dumps(_settings(row, arguments)))
    program = runners.PROGRAM
    if row.runner in finetune_runners.LIBRARIES and row.runner != "lmx":
        program = finetune_runners.PROGRAM
    python = arguments.hf_python if row.runner == "hf" else sys.executable
    command = [program, row.runner, job]
    record = measure(command, arguments.threads, python=python)
    if "trained" in record:
        record["trained"] = _trained_tokens(arguments.folder)
    if row.runner == "mlx-lm" and not row.full:
        measure([runners.PROGRAM, "fuse", job], arguments.threads)
    if not row.full:
        sizes = {
            "test": str(arguments.folder / "test.jsonl"),
            "length": arguments.seq_length,
            "answers": arguments.num_answers,
            "questions": arguments.num_questions,
            "max_tokens": arguments.max_tokens,
        }
        command = [runners.PROGRAM, "measure", job, json.dumps(sizes)]
        record |= measure(command, arguments.threads)
    (job / "record.json").write_text(json.dumps(record))


def _trained_tokens(folder: Path) -> int:
    """Tokens with a loss in an epoch. mlx-lm's own count includes others."""
    examples = json.loads((folder / "tokens.json").read_text())
    return sum(sum(mask[1:]) for _, mask in examples)


def _settings(row: Row, arguments: argparse.Namespace) -> dict:
    config = json.loads(Path(arguments.model, "config.json").read_text())
    rate = arguments.learning_rate * (FULL_RATE_RATIO if row.full else 1)
    return {
        "num_layers": config["num_hidden_layers"],
        "vocab_size": config["vocab_size"],
        "batch_size": arguments.batch_size,
        "length": arguments.seq_length,
        "checkpointing": row.full,
        "full": row.full,
        "learning_rate": rate,
        "options": row.options,
    }


def _link(path: Path, target: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(target.resolve())


def _job(row: Row, arguments: argparse.Namespace) -> Path:
    return arguments.folder / row.name.replace(",", "").replace(" ", "-")


def _record(row: Row, arguments: argparse.Namespace) -> dict | None:
    file = _job(row, arguments) / "record.json"
    return json.loads(file.read_text()) if file.is_file() else None


def print_table(records: dict[str, dict | None]) -> None:
    """Print a Markdown table of the rows that have a record.

    tokens/s counts trained tokens of the timed epoch. ratio is the estimate of
    `lmx-train --dry-run` divided by the measured peak memory.
    """
    print()
    _print_row(COLUMNS)
    _print_row(["---"] + ["---:"] * (len(COLUMNS) - 1))
    for name, record in records.items():
        if record:
            _print_row([name, *_cells(record)])


def _cells(record: dict) -> list[str]:
    def cell(key: str, form: str, unit: float = 1) -> str:
        value = record.get(key)
        return "-" if value is None else form.format(value / unit)

    loss, match = cell("loss", "{:.4f}"), cell("exact_match", "{:.1%}")
    if "loss" in record:
        loss += f" ± {record['loss_error']:.4f}"
        match += f" ± {record['exact_match_error']:.1%}"
    peak, estimate = record.get("peak"), record.get("estimate")
    rate = record.get("trained") and record["trained"] / record["seconds"]
    return [
        loss,
        match,
        f"{rate:,.0f}" if rate else "-",
        cell("peak", "{:.2f}", 1e9),
        cell("estimate", "{:.2f}", 1e9),
        f"{estimate / peak:.2f}" if peak and estimate else "-",
        cell("rss", "{:.2f}", 1e9),
        cell("seconds", "{:,.1f}"),
        cell("processor_seconds", "{:,.1f}"),
    ]


def _print_row(cells) -> None:
    print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()

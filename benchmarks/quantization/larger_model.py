"""Time and memory of lmx's stages on a model as large as Qwen3-0.6B.

A Qwen3 with random weights (bfloat16, tied embeddings, a vocabulary of 151,936) goes
through import from GGUF, GPTQ with `effort: fast`, LoRA with QAT from the codes, and
export. Each stage is a separate process; the table has its peak resident memory.
Finished stages stay in `--folder`: a second call runs only what is missing.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
import programs
import random_llama

GRID = {"bits": 4, "group_size": 64}
ROW = "{:10}{:>9}{:>9}{:>9}{:>9}"


def main() -> None:
    arguments = _arguments()
    folder = arguments.folder.resolve()
    if arguments.write:
        write_model(folder, arguments)
        return
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "source").is_dir():
        programs.call([__file__, *sys.argv[1:], "--write"])
    stages = {
        "import": lambda: _convert(folder),
        "quantize": lambda: _run(folder, "quantize", "import", _quantize(arguments)),
        "train": lambda: _run(folder, "train", "quantize/model", _train(arguments)),
        "export": lambda: _run(folder, "export", "train/model", _export()),
    }
    print(ROW.format("stage", "seconds", "CPU s", "RSS GB", "disk GB"))
    for name, command in stages.items():
        record = folder / f"{name}.json"
        if not record.is_file():
            record.write_text(json.dumps(_measure(command(), folder / name)))
        _print(name, json.loads(record.read_text()))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", required=True, type=Path, help="keeps all files")
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--intermediate-size", type=int, default=3072)
    parser.add_argument("--num-layers", type=int, default=28)
    parser.add_argument("--num-heads", type=int, default=16)
    parser.add_argument("--num-key-value-heads", type=int, default=8)
    parser.add_argument("--vocab-size", type=int, default=151936)
    parser.add_argument("--num-tokens", type=int, default=4096, help="calibration")
    parser.add_argument("--steps", type=int, default=2, help="of training")
    parser.add_argument("--batch-tokens", type=int, default=1024, help="per step")
    parser.add_argument("--seq-length", type=int, default=512)
    parser.add_argument("--write", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def write_model(folder: Path, arguments: argparse.Namespace) -> None:
    """Write the model as GGUF. Weights are computed one at a time."""
    config = random_llama.configuration(
        arguments,
        intermediate_size=arguments.intermediate_size,
        num_attention_heads=arguments.num_heads,
        num_key_value_heads=arguments.num_key_value_heads,
        max_position_embeddings=4096,
        dtype="bfloat16",
    )
    config |= {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    config |= {"head_dim": 128, "tie_word_embeddings": True}
    random_llama.write(folder, config)
    stages = [{"export": {"formats": ["gguf"]}}]
    recipe = {"model": str(folder / "model"), "stages": stages}
    partial = programs.run_recipe(recipe, folder / "source.partial")
    partial.rename(folder / "source")


def _quantize(arguments: argparse.Namespace) -> list[dict]:
    calibration = {
        "dataset": "builtin:stdlib",
        "num_tokens": arguments.num_tokens,
        "max_seq_length": arguments.seq_length,
    }
    stage = {"method": "gptq", "effort": "fast", "calibration": calibration} | GRID
    return [{"quantize": stage}, {"export": None}]


def _train(arguments: argparse.Namespace) -> list[dict]:
    stage = {
        "adapter": {"rank": 16},
        "qat": GRID,
        "gradient_checkpointing": True,
        "steps": arguments.steps,
        "batch_tokens": arguments.batch_tokens,
        "learning_rate": 1e-4,
        "eval_steps": arguments.steps,
        "eval_batches": 1,
    }
    return [{"train": stage}, {"export": None}]


def _export() -> list[dict]:
    return [{"export": {"formats": ["mlx", "hf", "gguf"]}}]


def _run(folder: Path, name: str, model: str, stages: list[dict]) -> list[str]:
    """The command of a recipe."""
    data = {"train": ["builtin:stdlib"], "valid": ["builtin:stdlib"]}
    recipe = {
        "model": str(folder / model),
        "output": str(folder / name),
        "data": data | {"max_seq_length": 512, "max_samples": 200},
        "stages": stages,
    }
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(recipe))
    return ["-c", programs.TRAIN, str(path), "--quiet"]


def _convert(folder: Path) -> list[str]:
    [source] = (folder / "source").glob("**/*.gguf")
    return ["-c", programs.LMX, "convert", str(source), str(folder / "import")]


def _measure(command: list[str], target: Path) -> dict[str, float]:
    """Run a process; its time and memory are those of the kernel's accounting."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"exit code {process.returncode}: {' '.join(command)}")
    files = [file for file in target.rglob("*") if file.is_file()]
    return {
        "seconds": time.perf_counter() - start,
        "processor_seconds": usage.ru_utime + usage.ru_stime,
        "rss": usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024),
        "disk": sum(file.stat().st_size for file in files),
    }


def _print(name: str, record: dict[str, float]) -> None:
    times = (f"{record[key]:,.0f}" for key in ("seconds", "processor_seconds"))
    sizes = (f"{record[key] / 1e9:.2f}" for key in ("rss", "disk"))
    print(ROW.format(name, *times, *sizes), flush=True)


if __name__ == "__main__":
    main()

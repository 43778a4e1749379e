"""One run of `real_model_training.py`, as a separate process; it prints JSON.

    real_model_training_runners.py RUNNER FOLDER
    real_model_training_runners.py measure FOLDER SIZES

FOLDER has model, train.jsonl, valid.jsonl, tokens.json and settings.json. A runner
writes the model FOLDER/result; `measure` evaluates it.
"""

import json
import math
import resource
import shutil
import sys
import time
from pathlib import Path

import finetune_runners
from finetune_runners import BETAS, RANK, SCALE

PROGRAM = Path(__file__)
ALPHA = RANK * SCALE


def main() -> None:
    from lmx import cpu

    cpu.enable()
    runner, folder, *sizes = sys.argv[1:]
    if runner == "measure":
        result = measure(Path(folder, "result"), json.loads(sizes[0]))
    else:
        settings = json.loads(Path(folder, "settings.json").read_text())
        start, cpu_start = time.perf_counter(), time.process_time()
        result = RUNNERS[runner](Path(folder), settings)
        usage = resource.getrusage(resource.RUSAGE_SELF)
        result = {
            "seconds": time.perf_counter() - start,
            "processor_seconds": time.process_time() - cpu_start,
            "rss": 1024 * usage.ru_maxrss,
        } | result
    print(json.dumps(result))


def _copy(folder: Path, settings: dict) -> dict:
    _link_result(folder, folder / "model")
    return {}


def _lmx(folder: Path, settings: dict) -> dict:
    """Train with a recipe; time and tokens of the second epoch."""
    epoch = _steps_per_epoch(folder, settings)
    stage = {
        "steps": 2 * epoch,
        "batch_size": settings["batch_size"],
        "learning_rate": settings["learning_rate"],
        "lr_schedule": "constant",
        "warmup_ratio": 0,
        "weight_decay": 0,
        "max_grad_norm": None,
        "beta1": BETAS[0],
        "beta2": BETAS[1],
        "gradient_checkpointing": settings["checkpointing"],
        "logging_steps": epoch,
        "eval_steps": 2 * epoch,
        "eval_batches": 1,
    }
    recipe, output = _run_recipe(
        folder, settings, [{"train": stage | settings["options"]}, {"export": None}]
    )
    lines = (output / "metrics.jsonl").read_text().splitlines()
    records = [record for line in lines if (record := json.loads(line))]
    records = [record for record in records if record["kind"] == "train"]
    first, last = (_at_step(records, step) for step in (epoch, 2 * epoch))
    return {
        "seconds": last["seconds"] - first["seconds"],
        "trained": last["trained_tokens"] - first["trained_tokens"],
        "processor_seconds": None,
        "peak": 1e9 * last["peak_memory_gb"],
        "first_loss": first["loss"],
        "last_loss": last["loss"],
        "estimate": _estimate(folder, recipe),
    }


def _steps_per_epoch(folder: Path, settings: dict) -> int:
    examples = json.loads((folder / "tokens.json").read_text())
    return len(examples) // settings["batch_size"]


def _at_step(records: list[dict], step: int) -> dict:
    return next(record for record in records if record["step"] == step)


def _run_recipe(folder: Path, settings: dict, stages: list) -> tuple[Path, Path]:
    """Run or resume a recipe; returns its file and the run directory."""
    from lmx.cli import main

    output = folder / "run"
    recipe = {
        "model": str((folder / "model").resolve()),
        "data": {
            "train": str(folder / "train.jsonl"),
            "valid": str(folder / "valid.jsonl"),
            "max_seq_length": settings["length"],
        },
        "seed": 0,
        "output": str(output),
        "stages": stages,
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(recipe))
    code = main.train([str(path), "--quiet", "--ignore-limits"])
    assert code == 0, "lmx-train failed"
    _link_result(folder, output / "model")
    return path, output


def _estimate(folder: Path, recipe: Path) -> int:
    """Bytes of memory that `lmx-train --dry-run` expects for the train stage."""
    from lmx.pipeline.plan import load, plan
    from lmx.pipeline.resources import ResourceCheck, model_shape

    examples = json.loads((folder / "tokens.json").read_text())
    lengths = [len(tokens) for tokens, _ in examples]
    # In another run directory: finished stages need no memory.
    fresh = recipe.with_name("estimate.yaml")
    values = json.loads(recipe.read_text()) | {"output": str(folder / "estimate")}
    fresh.write_text(json.dumps(values))
    loaded = load(fresh)
    check = ResourceCheck(loaded, plan(loaded), model_shape(loaded), lengths)
    (needs,) = (needs for needs in check.stages.values() if needs.trained)
    return sum(needs.parts.values())


def _gptq(folder: Path, settings: dict) -> dict:
    """GPTQ on the training examples; QLoRA trains its scales later."""
    import mlx.core as mx

    length = settings["length"]
    examples = json.loads((folder / "tokens.json").read_text())
    tokens = sum(len(row) for row, _ in examples) // length * length
    options = settings["options"] | {"method": "gptq", "effort": "fast"}
    options["calibration"] = {"max_seq_length": length, "num_tokens": tokens}
    _run_recipe(folder, settings, [{"quantize": options}, {"export": None}])
    return {"peak": mx.get_peak_memory()}


def _fuse(folder: Path, settings: dict) -> dict:
    """`mlx_lm.fuse` of the adapter that `finetune_runners.py` trained."""
    from mlx_lm import fuse

    lora = {"rank": RANK, "scale": SCALE, "dropout": 0.0}
    config = {"fine_tune_type": "lora", "lora_parameters": lora}
    config |= {"num_layers": settings["num_layers"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    model = str((folder / "model").resolve())
    adapter, target = str(folder), str(folder / "result")
    sys.argv = ["fuse", "--model", model, "--adapter-path", adapter]
    sys.argv += ["--save-path", target]
    fuse.main()
    return {}


def _quantize(folder: Path, settings: dict) -> dict:
    """`mlx_lm.convert --quantize`, which is round-to-nearest."""
    import mlx.core as mx
    from mlx_lm import convert

    target = folder / "result"
    shutil.rmtree(target, ignore_errors=True)
    options = settings["options"]
    convert(
        str((folder / "model").resolve()),
        str(target),
        quantize=True,
        q_bits=options["bits"],
        q_group_size=options["group_size"],
    )
    return {"peak": mx.get_peak_memory()}


def _link_result(folder: Path, model: Path) -> None:
    result = folder / "result"
    result.unlink(missing_ok=True)
    result.symlink_to(model.resolve())


def measure(model: Path, sizes: dict) -> dict[str, float]:
    """Loss on test answers, in nats per token, and exact match of the final number."""
    import mlx.core as mx
    from mlx_lm import load
    from mlx_lm.utils import dequantize_model

    network, tokenizer = load(str(model.resolve()))
    # On a CPU quantized matmuls are many times slower than BLAS.
    network = dequantize_model(network)
    network.set_dtype(mx.float32)
    with Path(sizes["test"]).open() as lines:
        chats = [json.loads(line)["messages"] for line in lines]
    losses, counts = _losses(network, tokenizer, chats[: sizes["answers"]], sizes)
    mean = sum(losses) / sum(counts)
    pairs = zip(losses, counts, strict=True)
    # First-order error of a ratio of sums.
    error = math.sqrt(sum((loss - mean * n) ** 2 for loss, n in pairs)) / sum(counts)
    right = _answers(network, tokenizer, chats[: sizes["questions"]], sizes)
    rate = sum(right) / len(right)
    return {
        "loss": mean,
        "loss_error": error,
        "exact_match": rate,
        "exact_match_error": math.sqrt(rate * (1 - rate) / len(right)),
    }


def _losses(network, tokenizer, chats: list, sizes: dict) -> tuple[list, list]:
    """Summed losses and numbers of answer tokens by chat."""
    import mlx.core as mx
    import mlx.nn as nn

    losses, counts = [], []
    for chat in chats:
        prompt = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True)
        tokens = tokenizer.apply_chat_template(chat)[: sizes["length"]]
        first = len(prompt) - 1
        row = mx.array(tokens)[None]
        logits = network(row[:, :-1])[:, first:]
        loss = nn.losses.cross_entropy(logits, row[:, first + 1 :], reduction="sum")
        losses.append(loss.item())
        counts.append(len(tokens) - len(prompt))
    return losses, counts


def _answers(network, tokenizer, chats: list, sizes: dict) -> list[bool]:
    """Whether the last number of a greedy answer is that of the test answer."""
    from lmx.data.answer_filters import last_number
    from mlx_lm import batch_generate

    prompts = [
        tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True)
        for chat in chats
    ]
    texts = batch_generate(
        network, tokenizer, prompts, max_tokens=sizes["max_tokens"]
    ).texts
    expected = [last_number(chat[1]["content"]) for chat in chats]
    numbers = [last_number(text) for text in texts]
    return [a is not None and a == b for a, b in zip(numbers, expected, strict=True)]


RUNNERS = {
    "copy": _copy,
    "lmx": _lmx,
    "gptq": _gptq,
    "fuse": _fuse,
    "quantize": _quantize,
}
# The other libraries train with the runners of `finetune.py`.
assert set(RUNNERS).isdisjoint(set(finetune_runners.LIBRARIES) - {"lmx"})


if __name__ == "__main__":
    main()

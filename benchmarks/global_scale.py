"""The global scale of experts in mode nvfp4: KL with and without it.

A mixture is made of a dense Llama, whose feed-forward layers become experts, and
trained. `small` is the same function with the weights of large models: powers of two
move from the experts to the norm before them, and from down_proj to up_proj. The
experts are quantized, and nothing else.

Each seed has other noise, other training and other tokens. Its record stays in
`--folder`: a second call measures only what is missing.
"""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev
from tempfile import TemporaryDirectory

CALL = "import sys; from lmx.cli import main; sys.exit(main.train(sys.argv[1:]))"
LAYERS = ("gate_proj", "up_proj", "down_proj")
NORM_FACTOR, UP_FACTOR = 8, 4
# Of the experts, relative to the standard deviation of the weights.
NOISE = 0.3
SEQ_LENGTH = 128
METHODS = {"rtn": {"method": "rtn"}, "gptq": {"method": "gptq", "effort": "fast"}}
ROW = "{:<10}{:<8}{:>22}{:>22}{:>16}"
COLUMNS = ("weights", "method", "KL without", "KL with", "ratio")


def main() -> None:
    arguments = _arguments()
    records = [_record(seed, arguments) for seed in arguments.seeds]
    print(ROW.format(*COLUMNS))
    for weights in ("trained", "small"):
        for method in METHODS:
            results = [record[weights][method] for record in records]
            ratios = [after / before for before, after in results]
            cells = map(_mean_and_error, (*zip(*results, strict=True), ratios))
            print(ROW.format(weights, method, *cells))
    for weights in ("trained", "small"):
        print(f"standard deviations, {weights}: {records[0][weights]['deviations']}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", required=True, type=Path, help="keeps all records")
    parser.add_argument("--model", default="data/tiny-base", help="folder of a Llama")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--num-experts", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60, help="of training")
    parser.add_argument("--num-tokens", type=int, default=4096, help="for calibration")
    parser.add_argument("--num-eval-tokens", type=int, default=4096)
    return parser.parse_args()


def _mean_and_error(values: list[float]) -> str:
    error = stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return f"{mean(values):.4g} ± {error:.2g}"


def _record(seed: int, arguments: argparse.Namespace) -> dict:
    """By weights and method, the KL without and with the global scale."""
    folder = arguments.folder.resolve() / str(seed)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "record.json"
    if not file.is_file():
        models = {"trained": _mixture(folder, seed, arguments)}
        models["small"] = folder / "small"
        if not models["small"].is_dir():
            _write_small(models["trained"], models["small"])
        record = {k: measure(path, seed, arguments) for k, path in models.items()}
        file.write_text(json.dumps(record))
    return json.loads(file.read_text())


def measure(path: Path, seed: int, arguments: argparse.Namespace) -> dict:
    """KL of a mixture by method, without and with the global scale."""
    import mlx.core as mx
    from lmx.models.loader import load

    loaded = load(path)
    sequences = _tokens(loaded.tokenizer, "train", seed, arguments.num_tokens)
    held_out = mx.array(
        _tokens(loaded.tokenizer, "valid", 0, arguments.num_eval_tokens)
    )
    expected = _log_probabilities(loaded.model, held_out)
    results = {}
    for method in METHODS:
        results[method] = []
        for has_scale in (False, True):
            model = _quantized(loaded, method, has_scale, sequences)
            q = _log_probabilities(model, held_out)
            kl = (mx.exp(expected) * (expected - q)).sum(axis=-1).mean()
            results[method].append(kl.item())
            print(f"{path}: {method}, {has_scale}: {kl.item():.5f}", file=sys.stderr)
    experts = loaded.model.layers[0].block_sparse_moe.switch_mlp
    deviations = {layer: mx.std(experts[layer].weight).item() for layer in LAYERS}
    text = ", ".join(f"{layer} {value:.3f}" for layer, value in deviations.items())
    return results | {"deviations": text}


def _tokens(tokenizer, split: str, seed: int, count: int):
    """Sequences [n, SEQ_LENGTH] of documents in a random order."""
    import random

    import numpy as np
    from lmx.data.builtin import read

    texts, tokens = [text for _, text in read("stdlib", split)], []
    random.Random(seed).shuffle(texts)
    for text in texts:
        if len(tokens) >= count:
            break
        tokens += tokenizer.encode(text)[: 4 * SEQ_LENGTH]
    count = count // SEQ_LENGTH * SEQ_LENGTH
    return np.array(tokens[:count], np.int32).reshape(-1, SEQ_LENGTH)


def _log_probabilities(model, tokens):
    import mlx.core as mx
    import mlx.nn as nn

    parts = [nn.log_softmax(model(part[None])) for part in tokens]
    mx.eval(parts)
    return mx.concatenate(parts)


def _quantized(loaded, method: str, has_scale: bool, sequences):
    """A copy of the model with the weights of quantized experts."""
    import numpy as np
    from lmx.config.quantize import GPTQConfig, RTNConfig
    from lmx.data.calibration import CalibrationBatch
    from lmx.quantization.packing import dequantize
    from lmx.quantization.ptq.base import PTQContext
    from lmx.quantization.ptq.methods import METHODS as CLASSES
    from lmx.quantization.target_layers import select_layers
    from lmx.run.logger import RunLogger
    from mlx.utils import tree_flatten

    grid = {"mode": "nvfp4", "global_scale": has_scale}
    kinds = {"rtn": RTNConfig, "gptq": GPTQConfig}
    overrides = {"*switch_mlp*": grid, "*": "skip"}
    config = kinds[method](**METHODS[method], overrides=overrides)
    model, batch = loaded.reread(), CalibrationBatch(sequences, np.ones_like(sequences))
    specs = select_layers(model, config).specs
    with TemporaryDirectory() as folder:
        context = PTQContext(
            model,
            specs,
            loaded.dtype,
            lambda tokens: batch,
            Path(folder),
            RunLogger(None, quiet=True),
        )
        tensors = CLASSES[method](config, context).quantize()
        quantized, weights = loaded.reread(), {}
        for path, spec in specs.items():
            names = ("weight", "scales", "global_scale")
            stored = {
                n: tensors.pop(f"{path}.{n}") for n in names if f"{path}.{n}" in tensors
            }
            weights[f"{path}.weight"] = dequantize(stored, spec, loaded.dtype)
        parameters = dict(tree_flatten(quantized.parameters()))
        quantized.load_weights([*(parameters | tensors | weights).items()])
    return quantized


def _run(output: Path, model: Path, seed: int, stages: list[dict]) -> None:
    """Run a recipe."""
    data = {"train": "builtin:stdlib", "valid": "builtin:stdlib"}
    recipe = {
        "model": str(model),
        "data": data | {"max_seq_length": SEQ_LENGTH, "max_samples": 2000},
        "seed": seed,
        "output": str(output),
        "stages": stages,
    }
    path = output.with_suffix(".yaml")
    path.write_text(json.dumps(recipe))
    command = [sys.executable, "-c", CALL, str(path), "--quiet", "--ignore-limits"]
    subprocess.run(command, check=True, stdout=sys.stderr)


def _mixture(folder: Path, seed: int, arguments: argparse.Namespace) -> Path:
    """The folder of the trained mixture of a seed."""
    start, trained = folder / "start", folder / "run" / "model"
    if not start.is_dir():
        _write_mixture(start, seed, arguments)
    if arguments.steps == 0:
        return start
    if not trained.is_dir():
        stage = {
            "steps": arguments.steps,
            "batch_tokens": 512,
            "learning_rate": 1e-4,
            "eval_steps": arguments.steps,
            "eval_batches": 2,
        }
        _run(folder / "run", start, seed, [{"train": stage}, {"export": None}])
    return trained


def _write_mixture(target: Path, seed: int, arguments: argparse.Namespace) -> None:
    """The model with copies of its feed-forward layers as experts, plus noise, and a
    random router: sparse upcycling (arXiv 2212.05055)."""
    import mlx.core as mx

    source, key = Path(arguments.model), mx.random.key(seed)
    tensors = {}
    for name, value in mx.load(str(source / "model.safetensors")).items():
        value, (key, draw) = value.astype(mx.float32), mx.random.split(key)
        block, _, layer = name.removesuffix(".weight").rpartition(".mlp.")
        if layer not in LAYERS:
            tensors[name] = value
            continue
        shape = (arguments.num_experts, *value.shape)
        noise = mx.random.normal(shape, key=draw) * mx.std(value)
        name = f"{block}.block_sparse_moe.switch_mlp.{layer}.weight"
        tensors[name] = value + NOISE * noise
        if layer == "up_proj":
            router = mx.random.normal((arguments.num_experts, value.shape[-1]), key=key)
            tensors[f"{block}.block_sparse_moe.gate.weight"] = 0.05 * router
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    config = json.loads((source / "config.json").read_text()) | {
        "model_type": "mixtral",
        "num_local_experts": arguments.num_experts,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    _write(target, source, tensors, config)


def _write_small(source: Path, target: Path) -> None:
    """The same function with smaller weights of experts."""
    import mlx.core as mx

    factors = {
        "post_attention_layernorm": NORM_FACTOR,
        "block_sparse_moe.gate": 1 / NORM_FACTOR,
        "switch_mlp.gate_proj": 1 / NORM_FACTOR,
        "switch_mlp.up_proj": UP_FACTOR / NORM_FACTOR,
        "switch_mlp.down_proj": 1 / UP_FACTOR,
    }
    tensors = mx.load(str(source / "model.safetensors"))
    for name in tensors:
        for layer, factor in factors.items():
            if name.endswith(f"{layer}.weight"):
                tensors[name] = tensors[name] * factor
    config = json.loads((source / "config.json").read_text())
    _write(target, source, tensors, config)


def _write(target: Path, source: Path, tensors: dict, config: dict) -> None:
    import mlx.core as mx

    target.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, target / name)
    file = str(target / "model.safetensors")
    mx.save_safetensors(file, tensors, {"format": "mlx"})
    (target / "config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    main()

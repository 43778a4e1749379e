"""One run of `real_model.py` or `gguf_blocks.py`, as a separate process.

`ptq_runners.py RUNNER FOLDER TARGET OPTIONS` quantizes the model named in FOLDER,
writes it to TARGET, and prints JSON: time and memory, or the reason of a failure.
"""

import copy
import importlib
import json
import resource
import shutil
import sys
import time
from contextlib import contextmanager
from pathlib import Path

PROGRAM = Path(__file__)
# Errors of mlx-lm's methods for models or options that they do not support.
UNSUPPORTED = (
    AssertionError,
    AttributeError,
    KeyError,
    NotImplementedError,
    ValueError,
)
# A group size that divides every width, so that no layer is skipped.
ANY_WIDTH = 8


def main() -> None:
    runner, folder, target, options = sys.argv[1:]
    print(json.dumps(run(runner, Path(folder), Path(target), json.loads(options))))


def run(runner: str, folder: Path, target: Path, options: dict) -> dict:
    """Quantize and return time and memory, without the imports."""
    from lmx.cpu import blas

    used = blas.use_openblas()
    import mlx.core as mx
    import mlx_lm  # noqa: F401

    settings = json.loads((folder / "settings.json").read_text())
    start, cpu_start = time.perf_counter(), time.process_time()
    # A run of lmx that fails is a fault and not a row.
    unsupported = () if runner in ("lmx", "qat") else UNSUPPORTED
    try:
        RUNNERS[runner](folder, target, settings, options)
    except unsupported as error:
        reason = str(error) or f"it fails with {type(error).__name__}"
        return {"failed": reason.splitlines()[0]}
    return {
        "seconds": time.perf_counter() - start,
        "processor_seconds": time.process_time() - cpu_start,
        "peak": mx.get_peak_memory(),
        "rss": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "engine": f"{used.threads or ''} {used.name}".strip(),
        "failed": None,
    }


def _lmx(folder: Path, target: Path, settings: dict, options: dict) -> None:
    """Quantize with a recipe."""
    if options["method"] == "rtn" and not options.get("smoothing_strength"):
        _run_recipe(target, settings, [{"quantize": options}])
        return
    for name, value in options.pop("patches", {}).items():
        module, _, constant = name.rpartition(".")
        setattr(importlib.import_module(module), constant, value)
    calibration = _calibration(settings["calibration"], options)
    stage = {"quantize": options | {"calibration": calibration}}
    with _used_calibration_tokens() as used:
        _run_recipe(target, settings, [stage])
    _require_equal(used, folder)


def _qat(folder: Path, target: Path, settings: dict, options: dict) -> None:
    """Train with the unquantized model as teacher: from the codes of the quantized
    model `start`, else from the unquantized weights."""
    train, config = options["qat"], settings["calibration"]
    start = options.get("start")
    spec = {k: v for k, v in options.items() if k in ("mode", "bits", "group_size")}
    if start:
        # Training continues from the grid that the checkpoint names, which for a GGUF
        # type may depend on the width of a layer.
        stored = json.loads(Path(start, "config.json").read_text())["quantization"]
        spec = {name: stored[name] for name in ("mode", "bits", "group_size")}
        spec |= {"quantizer": "fixed_scale"}
    teacher = {"model": settings["model"], "loss": "forward_kl", "ce_weight": 0.0}
    train |= {"qat": spec, "teacher": teacher, "packing": True}
    data = {"train": config["dataset"], "max_seq_length": config["max_seq_length"]}
    model = settings | {"model": start or settings["model"]}
    _run_recipe(target, model, [{"train": train}], data)


@contextmanager
def _used_calibration_tokens():
    """All calibration tokens that lmx makes meanwhile."""
    from lmx.pipeline.quantize import calibration

    used: list = []
    original = calibration.concatenated_sequences

    def recorded(*args, **kwargs):
        sequences = original(*args, **kwargs)
        used.append(sequences.tokens)
        return sequences

    calibration.concatenated_sequences = recorded
    yield used
    calibration.concatenated_sequences = original


def _require_equal(used: list, folder: Path) -> None:
    import numpy as np

    expected = _calibration_tokens(folder)
    assert any(np.array_equal(tokens, expected) for tokens in used), (
        "unequal calibration tokens"
    )


def _run_recipe(
    target: Path, settings: dict, stages: list[dict], data: dict | None = None
) -> None:
    """Run a recipe with `lmx-train` and move the model of its last stage."""
    from lmx.cli import main

    recipe = {
        "model": settings["model"],
        "seed": settings["seed"],
        "output": str(target.with_suffix(".run")),
        "stages": stages,
    }
    if data:
        recipe["data"] = data
    path = target.with_suffix(".yaml")
    path.write_text(json.dumps(recipe))
    assert main.train([str(path), "--quiet", "--ignore-limits"]) == 0, (
        "lmx-train failed"
    )
    (config,) = Path(recipe["output"]).glob(f"stages/{len(stages)}-*/model/config.json")
    config.parent.rename(target)


def _calibration(config: dict, options: dict) -> dict:
    """All tokens for calibration if the options hold out none."""
    from lmx.config.quantize import QuantizeConfig
    from pydantic import TypeAdapter

    quantize = TypeAdapter(QuantizeConfig).validate_python(options)
    if quantize.rollback_if_worse:
        return config
    return config | {
        "num_tokens": config["num_tokens"] + config.get("num_eval_tokens", 0)
    }


def remove_results(target: Path) -> None:
    """Delete what a run wrote."""
    for folder in (target, target.with_suffix(".run")):
        shutil.rmtree(folder, ignore_errors=True)


def _calibration_tokens(folder: Path):
    import numpy as np

    return np.load(folder / "calibration.npy")


class MlxLmModel:
    """A model to quantize with mlx-lm.

    It computes in float32, as lmx does on a CPU and because second moments overflow in
    float16. It is saved in the dtype of the checkpoint.

    Attributes:
        skipped: layers whose width is not a multiple of the group size; no method
            quantizes them.
    """

    def __init__(self, folder: Path, settings: dict, group_size: int):
        import mlx.core as mx
        import mlx.nn as nn
        from mlx.utils import tree_unflatten
        from mlx_lm import load

        class UnquantizedLinear(nn.Module):
            """A linear layer that mlx-lm does not quantize."""

            def __init__(self, layer: nn.Linear):
                super().__init__()
                self.weight = layer.weight

            def __call__(self, x):
                return x @ self.weight.T

        self.path = settings["model"]
        self.model, self.tokenizer, self.config = load(self.path, return_config=True)
        self.stored = self.model.layers[0].input_layernorm.weight.dtype
        skipped = [
            (path, UnquantizedLinear(module))
            for path, module in self.model.named_modules()
            if hasattr(module, "to_quantized") and module.weight.shape[-1] % group_size
        ]
        self.model.update_modules(tree_unflatten(skipped))
        self.skipped = [path for path, _ in skipped]
        self.tokens = mx.array(_calibration_tokens(folder))

    def compute_in_float32(self) -> None:
        import mlx.core as mx

        self.model.set_dtype(mx.float32)

    def save(self, target: Path) -> None:
        from mlx_lm.utils import save

        self.model.set_dtype(self.stored)
        save(str(target), self.path, self.model, self.tokenizer, self.config)


def _rtn(folder: Path, target: Path, settings: dict, options: dict) -> None:
    from mlx_lm.utils import quantize_model

    quantized = MlxLmModel(folder, settings, options["group_size"])
    quantized.model, quantized.config = quantize_model(
        quantized.model, quantized.config, **options
    )
    quantized.save(target)


def _gptq(folder: Path, target: Path, settings: dict, options: dict) -> None:
    from mlx_lm.quant.gptq import gptq_quantize

    bits, group = options["bits"], options["group_size"]
    quantized = MlxLmModel(folder, settings, group)
    quantized.compute_in_float32()
    quantized.model, quantized.config["quantization"] = gptq_quantize(
        *(quantized.model, quantized.tokens, bits, group),
        # Embeddings have the same bits as all other layers, as with lmx.
        fallback_bits=bits,
        fallback_group_size=group,
    )
    quantized.save(target)


def _awq(folder: Path, target: Path, settings: dict, options: dict) -> None:
    from mlx_lm.quant import awq

    bits, group = options["bits"], options["group_size"]
    quantized = MlxLmModel(folder, settings, group)
    quantized.compute_in_float32()
    kind = quantized.config["model_type"]
    if kind not in awq.AWQ_MODEL_CONFIGS:
        raise NotImplementedError(f"no AWQ for {kind} models")
    if quantized.skipped:
        raise NotImplementedError(
            f"AWQ needs a multiple of {group} as width of {quantized.skipped[0]}"
        )
    awq.awq_quantize(
        *(quantized.model, quantized.tokens, awq.AWQ_MODEL_CONFIGS[kind]),
        bits=bits,
        group_size=group,
        embed_bits=bits,
        embed_group_size=group,
    )
    quantized.config = awq.update_config(quantized.model, quantized.config)
    quantized.save(target)


def _dynamic(folder: Path, target: Path, settings: dict, options: dict) -> None:
    from mlx_lm.quant import dynamic_quant
    from mlx_lm.utils import quantize_model

    group = options["group_size"]
    quantized = MlxLmModel(folder, settings, group)
    quantized.compute_in_float32()
    widths = {"low_bits": options["low"], "high_bits": options["high"]}
    widths |= {"low_group_size": group, "high_group_size": group}
    scores = dict(
        dynamic_quant.estimate_sensitivities(
            quantized.model, quantized.tokens, **widths
        )
    )
    quantized.model.set_dtype(quantized.stored)
    threshold = dynamic_quant.estimate_threshold(
        quantized.model, scores, options["target"], **widths
    )

    def choose(path, module):
        if hasattr(module, "to_quantized") and scores[path] > threshold:
            return {"bits": options["high"], "group_size": group}
        return hasattr(module, "to_quantized")

    quantized.model, quantized.config = quantize_model(
        *(quantized.model, quantized.config, group, options["low"]),
        quant_predicate=choose,
    )
    quantized.save(target)


def _dwq(folder: Path, target: Path, settings: dict, options: dict) -> None:
    """Tune the scales of the model in `options["start"]`, else of an RTN model."""
    import mlx.core as mx
    import mlx.optimizers as optimizers
    from mlx_lm.quant.dwq import dwq_quantize
    from mlx_lm.utils import quantize_model

    quantized = MlxLmModel(folder, settings, options["group_size"])
    teacher = copy.deepcopy(quantized.model)
    teacher.set_dtype(mx.float32)
    if options.get("start"):
        quantized = MlxLmModel(
            folder, settings | {"model": options["start"]}, ANY_WIDTH
        )
    else:
        grid = {k: options[k] for k in ("bits", "group_size")}
        quantized.model, quantized.config = quantize_model(
            quantized.model, quantized.config, **grid
        )
    quantized.compute_in_float32()
    quantized.model.freeze()
    if mx.default_device().type == mx.cpu:
        _use_dense_matmul()
    examples = [(tokens, 0) for tokens in _calibration_tokens(folder).tolist()]
    batch = min(options["batch"], len(examples))
    steps = options["steps"] or len(examples) // batch
    # dwq trains for one epoch, so repeat the examples for `steps` steps.
    repeats = 1 + steps * batch // len(examples)
    train = (examples * repeats)[: steps * batch]
    dwq_quantize(
        *(quantized.model, lambda tokens, *_, **__: teacher(tokens)),
        optimizers.Adam(options["learning_rate"], bias_correction=True),
        *(train, examples[:batch]),
        batch_size=batch,
        max_seq_length=1 + len(examples[0][0]),
        seed=settings["seed"],
        dtype=mx.float32,
    )
    quantized.save(target)


def _use_dense_matmul() -> None:
    """On a CPU MLX's quantized matmul is many times slower than BLAS."""
    import mlx.core as mx
    import mlx.nn as nn

    codes: dict[int, mx.array] = {}

    def dense(layer):
        scales, biases = layer.scales, layer.biases
        if id(layer) not in codes:
            identity = mx.ones_like(scales), mx.zeros_like(scales)
            values = mx.dequantize(
                layer.weight, *identity, layer.group_size, layer.bits
            )
            codes[id(layer)] = mx.stop_gradient(values.reshape(*scales.shape, -1))
        weight = codes[id(layer)] * scales[..., None] + biases[..., None]
        return weight.reshape(len(scales), -1)

    def linear(layer, x):
        y = x @ dense(layer).T
        return y + layer.bias if "bias" in layer else y

    nn.QuantizedLinear.__call__ = linear
    nn.QuantizedEmbedding.__call__ = lambda layer, x: dense(layer)[x]
    nn.QuantizedEmbedding.as_linear = linear


RUNNERS = {
    "lmx": _lmx,
    "qat": _qat,
    "rtn": _rtn,
    "gptq": _gptq,
    "awq": _awq,
    "dynamic": _dynamic,
    "dwq": _dwq,
}


if __name__ == "__main__":
    main()

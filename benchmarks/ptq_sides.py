"""One run of one side of `ptq_quality.py` or `ptq_time.py`, a process of its own.

`ptq_sides.py SIDE FOLDER TARGET OPTIONS` quantizes the model that FOLDER describes into
TARGET and prints JSON: seconds and peak memory, or why it failed.
"""

import copy
import json
import resource
import sys
import time
from pathlib import Path

PROGRAM = Path(__file__)
# What a method of mlx-lm fails with where it cannot do what is asked.
FAULTS = (AssertionError, AttributeError, KeyError, NotImplementedError, ValueError)
WIDEST = 8


def main() -> None:
    side, folder, target, options = sys.argv[1:]
    print(json.dumps(run(side, Path(folder), Path(target), json.loads(options))))


def run(side: str, folder: Path, target: Path, options: dict) -> dict:
    """Quantize, and say what it took; the imports are not part of it."""
    from lmx.cpu import blas

    used = blas.use_openblas()
    import mlx.core as mx
    import mlx_lm  # noqa: F401

    settings = json.loads((folder / "settings.json").read_text())
    start, busy = time.perf_counter(), time.process_time()
    try:
        SIDES[side](folder, target, settings, options)
    except FAULTS as error:
        reason = str(error) or f"it fails with {type(error).__name__}"
        return {"failed": reason.splitlines()[0]}
    return {
        "seconds": time.perf_counter() - start,
        "processor_seconds": time.process_time() - busy,
        "peak": mx.get_peak_memory(),
        "rss": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "engine": f"{used.threads or ''} {used.name}".strip(),
        "failed": None,
    }


def _lmx(folder: Path, target: Path, settings: dict, options: dict) -> None:
    """A recipe by `lmx-train`, as a user has it."""
    import numpy as np
    from lmx.cli import main
    from lmx.pipeline import calibration

    made: list = []
    make = calibration.concatenated_sequences

    def noted(*arguments, **more):
        found = make(*arguments, **more)
        made.append(found.tokens)
        return found

    calibration.concatenated_sequences = noted
    recipe = {
        "model": settings["model"],
        "seed": settings["seed"],
        "output": str(target.with_suffix(".run")),
        "stages": [{"quantize": options | {"calibration": settings["windows"]}}],
    }
    path = target.with_suffix(".yaml")
    path.write_text(json.dumps(recipe))
    assert main.train([str(path), "--quiet", "--ignore-limits"]) == 0, (
        "lmx-train failed"
    )
    whole = _windows(folder)
    assert any(np.array_equal(m, whole) for m in made), "unequal calibration tokens"
    (config,) = Path(recipe["output"]).glob("**/model/config.json")
    config.parent.rename(target)


def _windows(folder: Path):
    import numpy as np

    return np.load(folder / "calibration.npy")


class Peer:
    """A model in the hands of mlx-lm.

    It computes in float32, as lmx does on a CPU and because second moments overflow in
    float16; what is saved has the type that the checkpoint stores.

    Attributes:
        model: layers whose width no group divides are out of reach of every method.
    """

    def __init__(self, folder: Path, settings: dict, group_size: int):
        import mlx.core as mx
        import mlx.nn as nn
        from mlx.utils import tree_unflatten
        from mlx_lm import load

        class Kept(nn.Module):
            """A linear layer that nothing quantizes."""

            def __init__(self, layer: nn.Linear):
                super().__init__()
                self.weight = layer.weight

            def __call__(self, x):
                return x @ self.weight.T

        self.path = settings["model"]
        self.model, self.tokenizer, self.config = load(self.path, return_config=True)
        self.stored = self.model.layers[0].input_layernorm.weight.dtype
        kept = [
            (path, Kept(module))
            for path, module in self.model.named_modules()
            if hasattr(module, "to_quantized") and module.weight.shape[-1] % group_size
        ]
        self.model.update_modules(tree_unflatten(kept))
        self.kept = [path for path, _ in kept]
        self.tokens = mx.array(_windows(folder))

    def compute_in_float32(self) -> None:
        import mlx.core as mx

        self.model.set_dtype(mx.float32)

    def save(self, target: Path) -> None:
        from mlx_lm.utils import save

        self.model.set_dtype(self.stored)
        save(str(target), self.path, self.model, self.tokenizer, self.config)


def _rtn(folder: Path, target: Path, settings: dict, options: dict) -> None:
    from mlx_lm.utils import quantize_model

    peer = Peer(folder, settings, options["group_size"])
    peer.model, peer.config = quantize_model(peer.model, peer.config, **options)
    peer.save(target)


def _gptq(folder: Path, target: Path, settings: dict, options: dict) -> None:
    from mlx_lm.quant.gptq import gptq_quantize

    bits, group = options["bits"], options["group_size"]
    peer = Peer(folder, settings, group)
    if not options.get("stored"):
        peer.compute_in_float32()
    peer.model, peer.config["quantization"] = gptq_quantize(
        *(peer.model, peer.tokens, bits, group),
        # Embeddings, as wide as all else: every side has the same bits.
        fallback_bits=bits,
        fallback_group_size=group,
    )
    peer.save(target)


def _awq(folder: Path, target: Path, settings: dict, options: dict) -> None:
    from mlx_lm.quant import awq

    bits, group = options["bits"], options["group_size"]
    peer = Peer(folder, settings, group)
    peer.compute_in_float32()
    kind = peer.config["model_type"]
    if kind not in awq.AWQ_MODEL_CONFIGS:
        raise NotImplementedError(f"no AWQ for {kind} models")
    if peer.kept:
        raise NotImplementedError(
            f"its scales want groups of {group} in {peer.kept[0]}"
        )
    awq.awq_quantize(
        *(peer.model, peer.tokens, awq.AWQ_MODEL_CONFIGS[kind]),
        bits=bits,
        group_size=group,
        embed_bits=bits,
        embed_group_size=group,
    )
    peer.config = awq.update_config(peer.model, peer.config)
    peer.save(target)


def _dynamic(folder: Path, target: Path, settings: dict, options: dict) -> None:
    from mlx_lm.quant import dynamic_quant
    from mlx_lm.utils import quantize_model

    group = options["group_size"]
    peer = Peer(folder, settings, group)
    peer.compute_in_float32()
    levels = {"low_bits": options["low"], "high_bits": options["high"]}
    levels |= {"low_group_size": group, "high_group_size": group}
    found = dynamic_quant.estimate_sensitivities(peer.model, peer.tokens, **levels)
    scores = dict(found)
    peer.model.set_dtype(peer.stored)
    edge = dynamic_quant.estimate_threshold(
        peer.model, scores, options["target"], **levels
    )

    def choose(path, module):
        if hasattr(module, "to_quantized") and scores[path] > edge:
            return {"bits": options["high"], "group_size": group}
        return hasattr(module, "to_quantized")

    peer.model, peer.config = quantize_model(
        *(peer.model, peer.config, group, options["low"]), quant_predicate=choose
    )
    peer.save(target)


def _dwq(folder: Path, target: Path, settings: dict, options: dict) -> None:
    """From what `options["start"]` holds, else from plain rounding."""
    import mlx.core as mx
    import mlx.optimizers as optimizers
    from mlx_lm.quant.dwq import dwq_quantize
    from mlx_lm.utils import quantize_model

    peer = Peer(folder, settings, options["group_size"])
    teacher = copy.deepcopy(peer.model)
    teacher.set_dtype(mx.float32)
    if options.get("start"):
        peer = Peer(folder, settings | {"model": options["start"]}, WIDEST)
    else:
        grid = {k: options[k] for k in ("bits", "group_size")}
        peer.model, peer.config = quantize_model(peer.model, peer.config, **grid)
    peer.compute_in_float32()
    peer.model.freeze()
    if mx.default_device().type == mx.cpu:
        _multiply_dense()
    rows = [(tokens, 0) for tokens in _windows(folder).tolist()]
    batch = min(options["batch"], len(rows))
    steps = options["steps"] or len(rows) // batch
    # An epoch of its data set is all it does.
    train = (rows * (1 + steps * batch // len(rows)))[: steps * batch]
    dwq_quantize(
        *(peer.model, lambda tokens, *_, **__: teacher(tokens)),
        optimizers.Adam(options["rate"], bias_correction=True),
        *(train, rows[:batch]),
        batch_size=batch,
        max_seq_length=1 + len(rows[0][0]),
        seed=settings["seed"],
        dtype=mx.float32,
    )
    peer.save(target)


def _multiply_dense() -> None:
    """On a CPU MLX's product with a packed matrix is many times slower than BLAS."""
    import mlx.core as mx
    import mlx.nn as nn

    codes: dict[int, mx.array] = {}

    def dense(layer):
        scales, biases = layer.scales, layer.biases
        if id(layer) not in codes:
            unit = mx.ones_like(scales), mx.zeros_like(scales)
            found = mx.dequantize(layer.weight, *unit, layer.group_size, layer.bits)
            codes[id(layer)] = mx.stop_gradient(found.reshape(*scales.shape, -1))
        whole = codes[id(layer)] * scales[..., None] + biases[..., None]
        return whole.reshape(len(scales), -1)

    def linear(layer, x):
        y = x @ dense(layer).T
        return y + layer.bias if "bias" in layer else y

    nn.QuantizedLinear.__call__ = linear
    nn.QuantizedEmbedding.__call__ = lambda layer, x: dense(layer)[x]
    nn.QuantizedEmbedding.as_linear = linear


SIDES = {
    "lmx": _lmx,
    "rtn": _rtn,
    "gptq": _gptq,
    "awq": _awq,
    "dynamic": _dynamic,
    "dwq": _dwq,
}


if __name__ == "__main__":
    main()

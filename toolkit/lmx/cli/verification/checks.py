"""Checks of `lmx doctor --verify`: each returns a measured error and its tolerance."""

import io
import json
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ... import cpu
from ...api.jobs import train
from ...config.model import ScratchModelConfig
from ...config.quant_spec import FLOAT_MODES, QuantizationConfig, QuantSpec
from ...data.batching import Batch
from ...evaluation.latency import sample_text
from ...generation.engine import Engine
from ...generation.kv_cache.prefix import PrefixCache
from ...generation.sampling import Sampling
from ...generation.sequence import GenerationRequest
from ...generation.speculative.draft_length import DraftLengthController
from ...generation.speculative.draft_model import draft_model_proposer
from ...models import from_scratch
from ...models.checkpoint_writer import write_checkpoint
from ...models.float_formats import MODES
from ...models.loader import load
from ...models.quantized_layers import dequantized_weight
from ...quantization import affine_grid, gpu_kernels, packing
from ...quantization.bit_packing import pack_codes, unpack_codes
from ...quantization.gguf_grid import FORMATS
from ...quantization.ptq.gptq import column_updates, gguf_solver
from ...quantization.ptq.hessian import damped
from ...quantization.qat.fake_quant import FakeQuant
from ...quantization.target_layers import select_layers
from ...run.callbacks import Callback, RunState
from ...training.step import TrainStep

# One operation; a model; a model where the GPU rounds products to TF32.
OPERATION, MODEL, TF32 = 1e-5, 1e-4, 3e-2
# Keys and values of other rounding get other codes now and then.
KV_CACHE = 1e-3
# Share of the weights that a resumed run has otherwise: a GPU adds in any order.
RESUMED_ON_GPU = 0.05
TINY = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512}
TINY |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
GRIDS = [QuantSpec(bits=bits, group_size=32) for bits in (2, 3, 4, 5, 6, 8)]
GRIDS += [QuantSpec(bits=4, group_size=128)]
GRIDS += [QuantSpec(mode=mode) for mode in FLOAT_MODES]
LARGER = TINY | {"num_hidden_layers": 4, "intermediate_size": 1024}
LARGE = {"vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 2816}
LARGE |= {"num_hidden_layers": 8, "num_attention_heads": 16}
GROUP, ROWS, LEVELS = 64, 128, 16.0
MAX_TOKENS, STOP_AFTER = 24, 3
Measured = tuple[float, float]


class Lab:
    """What checks and measurements share: a folder, and a tiny model of random weights.

    Attributes:
        exact: whether products of float32 matrices keep float32's digits.
        data: a file of a few texts to train on.
    """

    def __init__(self, folder: Path, *, quick: bool):
        cpu.enable()
        self.folder, self.quick = folder, quick
        self.exact = cpu.multiplies_exactly()
        texts = sample_text().splitlines()
        self.tokenizer = folder / "tokenizer"
        self.tokenizer.mkdir()
        from_scratch.train_tokenizer(texts, TINY["vocab_size"], self.tokenizer)
        self.tiny = self.write_model("tiny", "float32", seed=0, **TINY)
        self.model = load(self.tiny, compute="stored").model
        lines = (json.dumps({"text": text}) for text in texts if text)
        self.data = folder / "texts.jsonl"
        self.data.write_text("\n".join(lines))

    def write_model(self, name: str, dtype: str, *, seed: int, **sizes: int) -> Path:
        """Write a model of random weights with its tokenizer."""
        folder = self.folder / name
        folder.mkdir()
        config = from_scratch.llama_config(ScratchModelConfig(dtype=dtype, **sizes))
        weights = from_scratch.initial_weights(config, seed)
        write_checkpoint(folder, weights, config, companions=self.tokenizer)
        return folder

    @cached_property
    def measured(self) -> Path:
        """A model that fills the device; the tiny one if it is to be quick."""
        if self.quick:
            return self.tiny
        dtype, sizes = ("float32", LARGER) if cpu.on_cpu() else ("bfloat16", LARGE)
        return self.write_model("measured", dtype, seed=0, **sizes)

    def tolerance(self, exact: float) -> float:
        """A tolerance, wider where the GPU rounds products."""
        return exact if self.exact else TF32


def _random(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def _relative(found: mx.array, expected: Any) -> float:
    """The largest difference from a NumPy array, relative to its largest value."""
    mx.eval(found)
    difference = np.abs(np.array(found, np.float64) - expected).max()
    return float(difference / np.abs(expected).max())


def _largest(errors: Sequence[float]) -> float:
    """The largest error; NaN if there is one, which `max` may pass over."""
    return float(np.max(errors))


def attention(lab: Lab) -> Measured:
    """Causal attention with grouped heads, prompts and single tokens."""
    keys, values = _random(2, 2, 128, 64, seed=1), _random(2, 2, 128, 64, seed=2)
    errors = []
    for length in (128, 1):
        queries = _random(2, 4, length, 64)
        mask = "causal" if length > 1 else None
        attend = mx.fast.scaled_dot_product_attention
        found = attend(queries, keys, values, scale=0.125, mask=mask)
        q, k, v = (np.array(x, np.float64) for x in (queries, keys, values))
        k, v = (np.repeat(x, 2, axis=1) for x in (k, v))
        scores = 0.125 * q @ k.transpose(0, 1, 3, 2)
        hidden = np.triu(np.ones((length, 128), bool), 129 - length)
        weights = np.exp(np.where(hidden, -np.inf, scores))
        errors.append(_relative(found, weights / weights.sum(-1, keepdims=True) @ v))
    return _largest(errors), lab.tolerance(OPERATION)


def activations(lab: Lab) -> Measured:
    """SiLU and GELU."""
    x = 4 * _random(256, 256)
    exact = np.array(x, np.float64)
    silu = exact / (1 + np.exp(-exact))
    inner = math.sqrt(2 / math.pi) * (exact + 0.044715 * exact**3)
    gelu = 0.5 * exact * (1 + np.tanh(inner))
    errors = _relative(nn.silu(x), silu), _relative(nn.gelu_approx(x), gelu)
    return _largest(errors), OPERATION


def quantized_products(lab: Lab) -> Measured:
    """Quantized layers, as lmx leaves them, for one token and for many."""
    errors = []
    for spec in GRIDS:
        dense = nn.Linear(512, 256, bias=False)
        dense.weight = _random(256, 512)
        layer = dense.to_quantized(spec.group_size, spec.bits, spec.mode)
        cpu.enable(nn.Sequential(layer))
        weight = np.array(dequantized_weight(layer), np.float64)
        for rows in (1, 64):
            x = _random(rows, 512, seed=rows)
            errors.append(_relative(layer(x), np.array(x, np.float64) @ weight.T))
    return _largest(errors), lab.tolerance(OPERATION)


def _kernel(function: Callable, inputs: Callable[[], tuple]) -> Callable:
    """A check of a kernel of GPTQ; on a CPU, of the fused operations in its place."""

    def check(lab: Lab) -> Measured:
        arguments = inputs()
        own = function.kernel if gpu_kernels.on_gpu() else function
        found = own(*arguments)
        mx.eval(found)
        plain = [np.array(a) if isinstance(a, mx.array) else a for a in arguments]
        expected = function.__wrapped__(*plain)
        parts = expected if isinstance(expected, tuple) else (expected,)
        expected = tuple(map(mx.array, parts))
        found = found if isinstance(found, tuple) else (found,)
        share = gpu_kernels.share_of_differences(expected, found)
        return share, gpu_kernels.SHARE

    return check


def _columns() -> tuple:
    rows, inputs = _random(GROUP, ROWS), _random(4 * GROUP, GROUP, seed=1)
    low = rows.min(axis=0)
    scale = (rows.max(axis=0) - low) / (LEVELS - 1)
    hessian = damped(inputs.T @ inputs, GROUP, 0.01)
    return rows, hessian, scale, low, 0 * scale + LEVELS - 1


def _gptq_inputs() -> tuple:
    rows, hessian, *grid = _columns()
    return rows, hessian.factor, *grid


def _descent_inputs() -> tuple:
    rows, hessian, scale, low, top = _columns()
    codes = mx.clip(mx.round((rows - low) / scale), 0, LEVELS - 1)
    descent = hessian.matrix @ (0.3 * _random(GROUP, ROWS, seed=2))
    return descent, hessian.matrix, codes, scale, scale, top


def _search_inputs(*others: Any) -> tuple:
    return _random(GROUP, ROWS), 0.1 + mx.abs(_random(GROUP, seed=1)), *others


def packed_codes(lab: Lab) -> Measured:
    """Words of MLX's packed codes that differ after unpacking and packing."""
    wrong = 0
    for spec in GRIDS:
        words = packing.pack(_random(64, 256), spec, mx.float32)["weight"]
        again = pack_codes(unpack_codes(words, spec.bits), spec.bits)
        wrong += (again != words).sum().item()
    return wrong, 0


def dequantized_weights(lab: Lab) -> Measured:
    """Weights of codes, compared with the formula of their grid."""
    errors = []
    for spec in GRIDS:
        tensors = packing.pack(_random(64, 256), spec, mx.float32)
        codes = unpack_codes(tensors["weight"], spec.bits)
        if spec.mode == "affine":
            scales, biases = tensors["scales"], tensors["biases"]
        else:
            mode = MODES[spec.mode]
            codes = mode.elements.values(codes)
            scales, biases = mode.scales.values(tensors["scales"]), mx.zeros(1)
        codes, scales, biases = (
            np.array(x, np.float64) for x in (codes, scales, biases)
        )
        groups = codes.reshape(*scales.shape, -1) * scales[..., None]
        expected = (groups + biases[..., None]).reshape(codes.shape)
        found = packing.dequantize(tensors, spec, mx.float32)
        errors.append(_relative(found, expected))
    return _largest(errors), OPERATION


def exported_codes(lab: Lab) -> Measured:
    """Share of weights in which the last forward pass of QAT and the export differ."""
    model = load(lab.tiny, compute="stored").model
    specs = select_layers(model, QuantizationConfig(bits=4, group_size=64)).specs
    step = TrainStep(model, weight_transform=FakeQuant(model, specs, mx.float16))
    tokens = mx.random.randint(0, 512, (2, 33), key=mx.random.key(0))
    batch = Batch(tokens, mx.ones((2, 32), mx.bool_), ("",) * 2)
    for number in range(3):
        mx.eval(step(batch, 1e-3, number), step.parameters)
    transform = step.weight_transform
    # Fused, as in the step.
    forward = mx.compile(partial(transform.forward_weights, compute=mx.float32))
    trained = forward(step.parameters)
    exported = transform.export_tensors(step.parameters)
    wrong = total = 0
    for path, spec in specs.items():
        names = ("weight", "scales", "biases")
        tensors = {name: exported[f"{path}.{name}"] for name in names}
        stored = packing.dequantize(tensors, spec, mx.float16).astype(mx.float32)
        wrong += (stored != trained[f"{path}.weight"]).sum().item()
        total += stored.size
    return wrong / total, 0


Outputs = list[list[tuple[int, float]]]


def _prompts() -> list[list[int]]:
    lengths = np.random.default_rng(0).integers(4, 100, 6)
    return [
        np.random.default_rng(n).integers(3, 512, length).tolist()
        for n, length in enumerate(lengths)
    ]


def _generate(engine: Engine, prompts: Iterable[Sequence[int]], first=0) -> Outputs:
    """Sampled tokens and their log-probabilities; prompt n has the seed first + n."""
    requests = [
        GenerationRequest(
            prompt, MAX_TOKENS, Sampling(temperature=1.0, seed=n), logprobs="raw"
        )
        for n, prompt in enumerate(prompts, first)
    ]
    outputs: dict[GenerationRequest, list] = {request: [] for request in requests}
    for output in engine.run(requests):
        outputs[output.request].append((output.token, output.logprob))
    return [*outputs.values()]


def _alone(lab: Lab, prompts: Sequence[Sequence[int]], **options: Any) -> Outputs:
    return [
        _generate(Engine(lab.model, **options), [prompt], number)[0]
        for number, prompt in enumerate(prompts)
    ]


def _difference(lab: Lab, found: Outputs, expected: Outputs) -> float:
    """The largest difference of log-probabilities; infinite for another token, if
    rounding does not explain it."""
    differences = [0.0]
    for one, other in zip(found, expected, strict=True):
        for (token, logprob), (right, value) in zip(one, other, strict=True):
            if token != right:
                differences += [math.inf] * lab.exact
                break
            differences.append(abs(logprob - value))
    return _largest(differences)


def batches(lab: Lab) -> Measured:
    """Requests of different lengths in a batch, and each alone."""
    found = _generate(Engine(lab.model), _prompts())
    return _difference(lab, found, _alone(lab, _prompts())), lab.tolerance(MODEL)


def drafts(lab: Lab) -> Measured:
    """Requests with draft tokens, in a batch, and each alone without."""
    draft = load(lab.write_model("draft", "float32", seed=1, **TINY)).model
    engine = Engine(
        lab.model,
        make_proposer=draft_model_proposer(draft),
        draft_length=DraftLengthController(fixed=3),
    )
    found = _generate(engine, _prompts())
    return _difference(lab, found, _alone(lab, _prompts())), lab.tolerance(MODEL)


def prefixes(lab: Lab) -> Measured:
    """Requests whose prompts begin with kept ones, and the same from the start."""
    prompts = _prompts()
    longer = [[*prompt, *prompts[0][:5]] for prompt in prompts]
    engine = Engine(lab.model, prefix_cache=PrefixCache(1 << 28))
    _generate(engine, prompts)
    found = _generate(engine, longer)
    return _difference(lab, found, _alone(lab, longer)), lab.tolerance(MODEL)


def kv_bits(lab: Lab) -> Measured:
    """Requests with an 8-bit KV cache in a batch, and each alone."""
    found = _generate(Engine(lab.model, kv_bits=8), _prompts())
    alone = _alone(lab, _prompts(), kv_bits=8)
    return _difference(lab, found, alone), lab.tolerance(KV_CACHE)


def resume(lab: Lab) -> Measured:
    """Share of the values in which an interrupted training ends with other weights."""

    class Stop(Callback):
        def on_step(self, state: RunState) -> bool:
            return state.step < STOP_AFTER

    settings = {"steps": 6, "batch_size": 2, "learning_rate": 1e-3, "save_steps": 2}
    recipe = {
        "model": str(lab.tiny),
        "data": {"train": str(lab.data), "valid": str(lab.data), "max_seq_length": 64},
        "stages": [{"train": settings | {"qat": {"bits": 4}}}],
    }
    run = partial(train, recipe, quiet=True)
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        whole = run(output=lab.folder / "whole")
        run(output=lab.folder / "parts", callbacks=[Stop()])
        parts = run(output=lab.folder / "parts")
    tensors = (
        mx.load(str(Path(each.model_path) / "model.safetensors"))
        for each in (whole, parts)
    )
    expected, found = tensors
    wrong = sum((expected[k] != found[k]).sum().item() for k in expected)
    size = sum(value.size for value in expected.values())
    return wrong / size, 0 if cpu.on_cpu() else RESUMED_ON_GPU


CHECKS: dict[str, Callable[[Lab], Measured]] = {
    "attention": attention,
    "activations": activations,
    "quantized products": quantized_products,
    "GPTQ: columns": _kernel(column_updates.gptq_columns, _gptq_inputs),
    "GPTQ: coordinate descent": _kernel(
        column_updates.descent_columns, _descent_inputs
    ),
    "GPTQ: search of affine grids": _kernel(
        affine_grid.fit_grid, lambda: _search_inputs(LEVELS, mx.float16)
    ),
    "GPTQ: search of GGUF scales": _kernel(
        gguf_solver.fit_scale, lambda: _search_inputs(FORMATS["q4_0"])
    ),
    "packed codes, bit for bit": packed_codes,
    "dequantized weights": dequantized_weights,
    "QAT: exported codes, last weights": exported_codes,
    "a batch, single requests": batches,
    "draft tokens, single requests": drafts,
    "kept prefixes, single requests": prefixes,
    "8-bit KV cache, single requests": kv_bits,
    "a resumed training, a whole one": resume,
}
"""In the order of the table."""

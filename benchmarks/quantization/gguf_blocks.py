"""Compare GPTQ inside GGUF's block types with llama.cpp's own quantizer.

Both start from the same model and make the same block types, so that the files have the
same bits per weight. llama.cpp quantizes with and without an importance matrix (mean
squares of the inputs of every layer) of the calibration tokens that lmx uses. The
`gguf` package dequantizes all files; then one program measures the divergence with MLX.
`run` is the difference of llama.cpp's logits from those of MLX with the same weights:
llama.cpp rounds the inputs of a product with a quantized matrix to 8 bits.
`--qat-steps` adds QAT with the model itself as teacher: from its weights, and from the
codes of GPTQ with fixed scales.
"""

import argparse
import ctypes
import json
import re
from functools import cache
from itertools import product
from pathlib import Path

import mlx.core as mx
import numpy as np
from inputs import SETTINGS, call_runner, prepare
from programs import DATA

# llama.cpp's file type for each mode; `pure` leaves no layer with another type.
FILE_TYPES = {
    "q3_k": "Q3_K_S",
    "q4_0": "Q4_0",
    "q4_k": "Q4_K_S",
    "q5_k": "Q5_K_S",
    "q6_k": "Q6_K",
    "q8_0": "Q8_0",
}
# llama.cpp's names by mlx-lm's.
LINEAR = {f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"}
LINEAR |= {"self_attn.o_proj": "attn_output"}
LINEAR |= {f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")}
NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
BATCH_SIZE = 4


def main() -> None:
    arguments = _arguments()
    from lmx import cpu

    cpu.enable()
    root = Path(arguments.folder)
    folders = [root / f"seed-{seed}" for seed in range(arguments.seeds)]
    for seed, folder in enumerate(folders):
        folder.mkdir(parents=True, exist_ok=True)
        prepare(folder, arguments, seed)
    judge = Judge(folders[0])
    dense = root / "dense.gguf"
    _write_gguf(dense, judge.path)
    floor = judge.measure(dense)
    print(
        f"{arguments.model}: {arguments.num_tokens:,} calibration tokens of "
        f"{arguments.calibration_data}, {arguments.seeds} seeds; {judge.tokens.size:,} "
        f"evaluation tokens. KL in nats per token;\nratios of KL to llama.cpp without "
        f"and with an importance matrix. ± is one standard error by sequences, then by "
        f"seeds.\nThe float16 file has a KL of {floor['kl'].mean():.1e}; llama.cpp's "
        f"logits of it differ by {floor['run']:.1e} of their deviation.\n\n"
        f"{'mode':6}{'method':26}{'bits':>7}{'KL':>10}{'±':>9}{'±':>9}{'top-1':>8}"
        f"{'run':>9}  ratios"
    )
    importances = [
        judge.importance(np.load(folder / "calibration.npy")) for folder in folders
    ]
    for mode in arguments.modes:
        results: dict[str, list[dict]] = {}
        for name, matrices in (
            ("llama.cpp", [None]),
            ("llama.cpp imatrix", importances),
        ):
            results[name] = []
            for folder, matrix in zip(folders, matrices, strict=False):
                file = folder / f"{mode}-{re.sub('[. ]', '-', name)}.gguf"
                if not file.is_file():
                    _llama_quantize(dense, file, FILE_TYPES[mode], matrix)
                results[name].append(judge.measure(file))
        for name, (runner, options) in _lmx_methods(arguments).items():
            results[f"lmx {name}"] = [
                _run_lmx(judge, runner, folder, f"{mode}-{name}", options, arguments)
                for folder in folders
            ]
        _print_rows(mode, results)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(DATA / "tiny-base"))
    parser.add_argument("--calibration-data", default="builtin:stdlib")
    parser.add_argument("--eval-data", help="default: its valid split")
    parser.add_argument("--num-tokens", type=int, default=32768, help="calibration")
    parser.add_argument("--num-eval-tokens", type=int, default=16384)
    parser.add_argument("--seq-length", type=int, default=256)
    parser.add_argument("--seeds", type=int, default=1, help="of calibration tokens")
    parser.add_argument("--modes", nargs="+", choices=FILE_TYPES, default=FILE_TYPES)
    parser.add_argument("--efforts", nargs="+", default=["standard"])
    parser.add_argument(
        "--qat-steps", type=int, help="with this model as teacher; default: no QAT"
    )
    parser.add_argument("--qat-batch-size", type=int, default=8, help="sequences")
    parser.add_argument("--qat-learning-rates", type=float, nargs="*", default=[1e-4])
    parser.add_argument(
        "--codes-learning-rates",
        type=float,
        nargs="*",
        default=[5e-4],
        help="from gptq",
    )
    parser.add_argument("--threads", type=int, help="default: all cores")
    parser.add_argument("--folder", required=True, help="keeps all files")
    return parser.parse_args()


def _lmx_methods(arguments: argparse.Namespace) -> dict[str, tuple[str, dict]]:
    """Runner and options of every method: GPTQ; QAT, also from the codes of GPTQ."""
    gptq = {
        effort: {"method": "gptq", "effort": effort} for effort in arguments.efforts
    }
    methods = {effort: ("lmx", options) for effort, options in gptq.items()}
    if not arguments.qat_steps:
        return methods
    train = {"steps": arguments.qat_steps, "batch_size": arguments.qat_batch_size}
    for rate in arguments.qat_learning_rates:
        qat = {"qat": train | {"learning_rate": rate}}
        methods[f"QAT {rate:g}"] = "qat", qat
    for effort, rate in product(gptq, arguments.codes_learning_rates):
        qat = {"qat": train | {"learning_rate": rate}, "start": effort}
        methods[f"{effort}, QAT {rate:g}"] = "qat", qat
    return methods


def _print_rows(mode: str, results: dict[str, list[dict]]) -> None:
    plain, weighted = (
        np.stack([run["kl"].mean(axis=1) for run in results[name]])
        for name in ("llama.cpp", "llama.cpp imatrix")
    )
    for name, runs in results.items():
        kl = np.stack([run["kl"].mean(axis=1) for run in runs])
        cells = (
            f"{np.mean([run['bits'] for run in runs]):>7.3f}{kl.mean():>10.5f}"
            f"{_error(kl.mean(axis=0)):>9.5f}{_seed_error(kl.mean(axis=1)):>9}"
            f"{100 * np.mean([run['agrees'].mean() for run in runs]):>7.2f}%"
            f"{np.mean([run['run'] for run in runs]):>9.1e}"
        )
        ratios = ", ".join(_ratio(kl, other) for other in (plain, weighted))
        shown = f"  {ratios}" if name.startswith("lmx") else ""
        print(f"{mode:6}{name:26}{cells}{shown}", flush=True)


def _error(values: np.ndarray) -> float:
    return values.std(ddof=1) / len(values) ** 0.5


def _seed_error(values: np.ndarray) -> str:
    return f"{_error(values):.5f}" if len(values) > 1 else "-"


def _ratio(values: np.ndarray, others: np.ndarray) -> str:
    """The ratio of means of paired values [seeds, sequences], with the standard errors
    by sequences and by seeds."""
    ratio = values.mean() / others.mean()
    differences = values.mean(axis=0) - ratio * others.mean(axis=0)
    by_seed = values.mean(axis=1) / others.mean(axis=1)
    text = f"{ratio:.3f} ± {_error(differences) / others.mean():.3f}"
    return f"{text} ± {_error(by_seed):.3f}" if len(by_seed) > 1 else text


def _run_lmx(
    judge, runner: str, folder: Path, name: str, options: dict, arguments
) -> dict:
    """Quantize with lmx, write the file and measure it."""
    stem = name.replace(", ", "-").replace(" ", "-").replace(".", "_")
    if train := options.get("qat"):
        stem += f"-{train['steps']}x{train['batch_size']}"
    target = folder / stem
    if not target.is_dir():
        mode = name.partition("-")[0]
        options = options | {"mode": mode}
        if start := options.get("start"):
            options["start"] = str(folder / f"{mode}-{start}")
        result = call_runner(runner, folder, target, options, arguments.threads)
        assert not result["failed"], result
        print(f"{name}: {result['processor_seconds']:.0f} s of processor time")
    file = target.with_suffix(".gguf")
    _write_gguf(file, target)
    return judge.measure(file)


def _write_gguf(file: Path, model: Path) -> None:
    from lmx.convert.gguf.writer import write
    from lmx.models.loader import load

    if not file.is_file():
        write(file, load(model, compute="stored", lazy=True), name=file.stem)


@cache
def _silent():
    """A log function for llama.cpp, which else prints a line for every tensor."""
    import llama_cpp

    silent = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(silent, None)
    return silent


def _llama_quantize(source: Path, target: Path, kind: str, importance) -> None:
    """llama.cpp's quantizer with the same type for all matrices that it fits."""
    import llama_cpp

    _silent()
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    params.pure, params.nthread = True, 1
    if importance:
        data_type = llama_cpp.llama_model_imatrix_data
        entries = (data_type * (len(importance) + 1))()
        floats = ctypes.POINTER(ctypes.c_float)
        for entry, (name, values) in zip(entries, importance.items(), strict=False):
            entry.name = f"{name}.weight".encode()
            entry.data, entry.size = values.ctypes.data_as(floats), values.size
        params.imatrix = ctypes.cast(entries, ctypes.POINTER(data_type))
    names = str(source).encode(), str(target).encode()
    code = llama_cpp.llama_model_quantize(*names, ctypes.byref(params))
    assert code == 0, f"llama.cpp's quantizer fails with code {code}"


class Judge:
    """Measures the divergence of GGUF files from the model in float32."""

    def __init__(self, folder: Path):
        from mlx_lm import load

        self.path = Path(json.loads((folder / SETTINGS).read_text())["model"])
        self.tokens = np.load(folder / "eval.npy")
        self.model, self.reference = (load(str(self.path))[0] for _ in range(2))
        self.config = json.loads((self.path / "config.json").read_text())
        for model in (self.model, self.reference):
            model.set_dtype(mx.float32)

    def measure(self, file: Path) -> dict:
        """kl and agrees by sequence and position [n, L - 1]; bits per weight; and
        `run`, the relative difference of llama.cpp's logits. Kept beside the file."""
        result = file.with_suffix(".npz")
        if not result.is_file():
            np.savez(result, **self._measure(file))
        with np.load(result) as values:
            return dict(values)

    def _measure(self, file: Path) -> dict:
        facts = self._load(file)
        facts["run"] = self._difference(file)
        kl, agrees = [], []
        # One sequence at a time: logits of a real vocabulary are large in float64.
        for row in self.tokens:
            p, q = (
                _log_probabilities(model, row) for model in (self.reference, self.model)
            )
            kl.append((np.exp(p) * (p - q)).sum(axis=-1))
            agrees.append(p.argmax(axis=-1) == q.argmax(axis=-1))
        return {"kl": np.stack(kl), "agrees": np.stack(agrees)} | facts

    def importance(self, tokens: np.ndarray) -> dict[str, np.ndarray]:
        """Mean squares of the inputs of every layer, float32, by llama.cpp's name."""
        sums: dict[str, np.ndarray] = {}
        modules = dict(self.reference.named_modules())
        layers = {
            f"model.layers.{index}.{path}": f"blk.{index}.{name}"
            for index in range(self.config["num_hidden_layers"])
            for path, name in LINEAR.items()
        }
        kinds = {type(modules[path]) for path in layers}
        names = {id(modules[path]): name for path, name in layers.items()}
        originals = {kind: kind.__call__ for kind in kinds}

        def recorded(kind):
            def call(layer, x):
                if name := names.get(id(layer)):
                    squares = (x * x).reshape(-1, x.shape[-1]).sum(axis=0)
                    sums[name] = sums.get(name, 0) + np.array(squares)
                return originals[kind](layer, x)

            return call

        for kind in kinds:
            kind.__call__ = recorded(kind)
        for start in range(0, len(tokens), BATCH_SIZE):
            mx.eval(self.reference(mx.array(tokens[start : start + BATCH_SIZE])))
        for kind, original in originals.items():
            kind.__call__ = original
        return {k: (v / tokens.size).astype(np.float32) for k, v in sums.items()}

    def _load(self, file: Path) -> dict:
        """Set the weights of a file, dequantized by the gguf package; bits per
        weight of its matrices."""
        import gguf

        paths = {name: path for path, name in LINEAR.items()} | NORMS
        weights, size, count = [], 0, 0
        for tensor in gguf.GGUFReader(file).tensors:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            if values.ndim > 1:
                size, count = size + tensor.n_bytes, count + values.size
            prefix, _, rest = tensor.name.removesuffix(".weight").partition(".")
            if prefix != "blk":
                weights.append((f"{OUTER[prefix]}.weight", values))
                continue
            number, _, leaf = rest.partition(".")
            weights.append(
                (
                    f"model.layers.{number}.{paths[leaf]}.weight",
                    self._rows(leaf, values),
                )
            )
        self.model.load_weights([(k, mx.array(v)) for k, v in weights], strict=False)
        return {"bits": 8 * size / count}

    def _rows(self, leaf: str, values: np.ndarray) -> np.ndarray:
        """Rows of q and k of Llama models in the order of the two halves of a head."""
        if leaf not in ("attn_q", "attn_k") or self.config["model_type"] != "llama":
            return values
        heads = "num_attention_heads" if leaf == "attn_q" else "num_key_value_heads"
        pairs = values.reshape(self.config[heads], -1, 2, values.shape[-1])
        return pairs.swapaxes(1, 2).reshape(values.shape)

    def _difference(self, file: Path) -> float:
        """Root mean square of the difference of llama.cpp's logits of a file from those
        of the model that `_load` made, divided by the deviation of the logits."""
        from llama_cpp import Llama

        row = self.tokens[0].tolist()
        ours = np.array(self.model(mx.array([row]))[0]).astype(np.float64)
        llama = Llama(
            str(file), n_ctx=len(row), n_threads=1, logits_all=True, verbose=False
        )
        llama.eval(row)
        theirs = np.array(llama.scores[: len(row), : ours.shape[-1]], np.float64)
        difference = theirs - ours
        # A shift of all logits changes no probability.
        difference -= difference.mean(axis=-1, keepdims=True)
        return float(difference.std() / ours.std(axis=-1).mean())


def _log_probabilities(model, tokens: np.ndarray) -> np.ndarray:
    """Float64 [L - 1, vocabulary] of a sequence."""
    logits = np.array(model(mx.array(tokens[None, :-1]))[0]).astype(np.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


if __name__ == "__main__":
    main()

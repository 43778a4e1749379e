"""Time a training step of lmx and of mlx-lm: same model, weights, batch, optimizer.

Each run is a separate process, because a process keeps its first BLAS. The libraries
alternate. mlx-lm runs its own `train` and reports its own times.
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
import programs
import random_llama

LIBRARIES = ("lmx", "mlx-lm", "stock")
CASES = {"full": "full", "lora": "LoRA rank 16"}
RANK, SCALE, LEARNING_RATE, BETAS = 16, 2.0, 1e-4, (0.9, 0.95)
ROW = "{:8}{:>9}{:>10}{:>10}{:>9}{:>8}  {:>10}{:>11}{:>12}  {}"
# mlx-lm traces its step twice: before and after its optimizer has state.
WARMUP_STEPS = 2
# With the reference BLAS a step takes many seconds and hardly varies.
STOCK_STEPS = 2


def main() -> None:
    arguments = _arguments()
    if arguments.runner:
        run = _lmx if arguments.runner == "lmx" else _mlx_lm
        print(json.dumps(run(arguments)))
        return
    _print_header(arguments)
    for case in [arguments.case] if arguments.case else CASES:
        _print_case(case, compare(case, arguments), arguments)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--num-layers", type=int, default=8)
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=6, help="timed steps per run")
    parser.add_argument("--repeats", type=int, default=3, help="runs per library")
    parser.add_argument("--threads", type=int, help="BLAS threads; default: all cores")
    parser.add_argument("--case", choices=CASES, help="default: all")
    parser.add_argument("--runner", choices=LIBRARIES, help=argparse.SUPPRESS)
    return parser.parse_args()


def compare(case: str, arguments: argparse.Namespace) -> dict[str, list[dict]]:
    """All runs by library; mlx-lm with the BLAS of MLX's wheel runs once."""

    def run(library: str) -> dict:
        return _run(library, case, arguments)

    runs = programs.alternate(("lmx", "mlx-lm"), arguments.repeats, run)
    if runs["lmx"][0]["replaced"]:
        runs["stock"] = [run("stock")]
    return runs


def _run(library: str, case: str, arguments: argparse.Namespace) -> dict:
    is_stock = library == "stock"
    steps = min(arguments.steps, STOCK_STEPS) if is_stock else arguments.steps
    command = [__file__, "--runner", library, "--case", case, "--steps", str(steps)]
    for name in ("hidden_size", "num_layers", "vocab_size", "batch_size", "seq_length"):
        command += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    return programs.measure(command, arguments.threads, stock=is_stock)


def _print_header(arguments: argparse.Namespace) -> None:
    per_sequence = arguments.seq_length + 1 - _prompt_length(arguments)
    trained = arguments.batch_size * per_sequence
    print(
        f"Llama, {arguments.num_layers} layers, hidden size {arguments.hidden_size}, "
        f"vocabulary {arguments.vocab_size}, float32; batch {arguments.batch_size} x "
        f"{arguments.seq_length}, {trained} trained tokens.\n"
        "Adam without weight decay or clipping; lmx also computes the gradient norm.\n"
        "Both train the same parameters (the command mlx_lm.lora omits embedding and "
        "head).\n"
        f"Medians of the steps after the first {WARMUP_STEPS}; {arguments.repeats} "
        "alternating runs. ratio = time / time of lmx.\n"
        "stock = mlx-lm with the BLAS of MLX's wheel, one run.\n"
    )


def _print_case(case: str, runs: dict[str, list[dict]], arguments) -> None:
    reference = runs["lmx"][0]
    lmx_median = statistics.median(_seconds(runs["lmx"]))
    print(f"{CASES[case]}: {reference['parameters']:,} trained parameters")
    times = ("ms/step", "fastest", "tokens/s", "peak GB", "ratio")
    print(ROW.format("library", *times, "first loss", "last loss", "max diff", "BLAS"))
    for library, entries in runs.items():
        first = entries[0]
        assert first["parameters"] == reference["parameters"], "unequal models"
        median = statistics.median(_seconds(entries))
        losses = first["losses"]
        pairs = zip(losses, reference["losses"], strict=False)
        cells = (
            f"{1000 * median:,.1f}",
            f"{1000 * min(_seconds(entries)):,.1f}",
            f"{arguments.batch_size * arguments.seq_length / median:,.0f}",
            f"{first['peak'] / 1e9:.2f}",
            f"{median / lmx_median:.2f}x",
            f"{losses[0]:.6f}",
            f"{losses[-1]:.6f}",
            f"{max(abs(loss - expected) for loss, expected in pairs):.1e}",
            first["blas"],
        )
        print(ROW.format(library, *cells))
    print()


def _seconds(runs: list[dict]) -> list[float]:
    return [second for run in runs for second in run["seconds"][WARMUP_STEPS:]]


def _model(arguments: argparse.Namespace):
    """The model that both libraries train; its weights depend only on the sizes."""
    return random_llama.model(random_llama.configuration(arguments, dtype="float32"))


def _set_adapters(model) -> None:
    """Give both libraries the same adapter weights; they initialise differently."""
    import mlx.core as mx
    from mlx.utils import tree_flatten, tree_unflatten

    key, weights = mx.random.key(1), []
    for path, value in sorted(tree_flatten(model.trainable_parameters())):
        if path.endswith("lora_a"):
            bound = 1 / math.sqrt(value.shape[0])
            key, subkey = mx.random.split(key)
            weights.append(
                (path, mx.random.uniform(-bound, bound, value.shape, key=subkey))
            )
    model.update(tree_unflatten(weights))


def _tokens(arguments: argparse.Namespace):
    """Random tokens, int32 [batch_size, seq_length + 1]."""
    import numpy as np

    shape = (arguments.batch_size, arguments.seq_length + 1)
    generator = np.random.default_rng(0)
    return generator.integers(0, arguments.vocab_size, shape).astype(np.int32)


def _prompt_length(arguments: argparse.Namespace) -> int:
    """Tokens at the start of each sequence that are not trained."""
    return max(1, arguments.seq_length // 8)


def _result(seconds: list[float], losses: list[float], blas, count: int) -> dict:
    import mlx.core as mx

    threads = f", threads: {blas.threads}" if blas.threads else ""
    return {
        "seconds": seconds,
        "losses": losses,
        "blas": blas.name + threads,
        "replaced": blas.path is not None,
        "peak": mx.get_peak_memory(),
        "parameters": count,
    }


def _lmx(arguments: argparse.Namespace) -> dict:
    from lmx import cpu

    used = cpu.enable().blas
    import mlx.core as mx
    import numpy as np
    from lmx.config.lora import LoRAConfig
    from lmx.data.batching import Batch
    from lmx.models.lora import lora_model
    from lmx.training.optimizers import OptimizerConfig
    from lmx.training.step import TrainStep

    model = _model(arguments)
    if arguments.case == "lora":
        lora_model.attach(model, LoRAConfig(rank=RANK, alpha=RANK * SCALE), seed=0)
        _set_adapters(model)
    step = TrainStep(model, OptimizerConfig(beta1=BETAS[0], beta2=BETAS[1]))
    tokens = _tokens(arguments)
    trained = np.arange(1, tokens.shape[1]) >= _prompt_length(arguments)
    mask = np.broadcast_to(trained, (len(tokens), len(trained)))
    batch = Batch(mx.array(tokens), mx.array(mask), ())
    seconds, losses = [], []
    for number in range(WARMUP_STEPS + arguments.steps):
        start = time.perf_counter()
        loss, count, norm, *_ = step(batch, LEARNING_RATE, number)
        mx.eval(loss, count, norm, step.parameters, step.optimizer.state)
        seconds.append(time.perf_counter() - start)
        losses.append((loss / count).item())
    size = sum(value.size for value in step.parameters.values())
    return _result(seconds, losses, used, size)


def _mlx_lm(arguments: argparse.Namespace) -> dict:
    from lmx.cpu import blas

    used = blas.use_openblas()
    import mlx.optimizers as optimizers
    from mlx.utils import tree_flatten
    from mlx_lm.tuner import trainer
    from mlx_lm.tuner.callbacks import TrainingCallback
    from mlx_lm.tuner.utils import linear_to_lora_layers

    class Record(TrainingCallback):
        seconds, losses = [], []

        def on_train_loss_report(self, train_info):
            self.seconds.append(1 / train_info["iterations_per_second"])
            self.losses.append(train_info["train_loss"])

    model = _model(arguments)
    if arguments.case == "lora":
        model.freeze()
        settings = {"rank": RANK, "scale": SCALE, "dropout": 0.0}
        linear_to_lora_layers(model, arguments.num_layers, settings)
        _set_adapters(model)
    trained = tree_flatten(model.trainable_parameters())
    optimizer = optimizers.Adam(LEARNING_RATE, betas=list(BETAS), bias_correction=True)
    with tempfile.TemporaryDirectory() as folder:
        steps = WARMUP_STEPS + arguments.steps
        settings = trainer.TrainingArgs(
            batch_size=arguments.batch_size,
            iters=steps,
            steps_per_report=1,
            steps_per_save=steps + 1,
            max_seq_length=arguments.seq_length + 1,
            adapter_file=f"{folder}/adapters.safetensors",
        )
        prompt = _prompt_length(arguments)
        examples = [(tokens, prompt) for tokens in _tokens(arguments).tolist()]
        record = Record()
        trainer.train(
            model, optimizer, examples, args=settings, training_callback=record
        )
    size = sum(value.size for _, value in trained)
    return _result(record.seconds, record.losses, used, size)


if __name__ == "__main__":
    main()

"""Our training step against mlx-lm's: same model, weights, batch and optimizer.

Every run is a process of its own, because a process keeps the BLAS it began with; the
sides alternate over the rounds. mlx-lm's side is its own `train`, timed by itself.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time

import random_llama

SIDES = ("lmx", "mlx-lm", "stock")
CASES = {"full": "full", "lora": "LoRA rank 16"}
RANK, SCALE, RATE, BETAS = 16, 2.0, 1e-4, (0.9, 0.95)
ROW = "{:8}{:>9}{:>10}{:>10}{:>9}{:>8}  {:>10}{:>11}{:>12}  {}"
# mlx-lm traces its step twice: before and after its optimizer has a state.
WARM = 2
# A step takes many seconds there, and hardly varies.
STOCK_STEPS = 2


def main() -> None:
    arguments = _arguments()
    if arguments.side:
        side = _lmx if arguments.side == "lmx" else _mlx_lm
        print(json.dumps(side(arguments)))
        return
    _print_head(arguments)
    for case in [arguments.case] if arguments.case else CASES:
        _print_case(case, compare(case, arguments), arguments)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=8, help="rows")
    parser.add_argument("--length", type=int, default=256, help="tokens a row")
    parser.add_argument("--steps", type=int, default=6, help="timed in every run")
    parser.add_argument("--rounds", type=int, default=3, help="runs of every side")
    parser.add_argument("--threads", type=int, help="of the BLAS; absent = all cores")
    parser.add_argument("--case", choices=CASES, help="absent = all")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    return parser.parse_args()


def compare(case: str, arguments: argparse.Namespace) -> dict[str, list[dict]]:
    """The runs of every side; mlx-lm with the BLAS of MLX's wheel only once."""
    runs: dict[str, list[dict]] = {side: [] for side in SIDES}
    for number in range(arguments.rounds):
        # Who goes first alternates, so that a machine that warms up favours nobody.
        sides = ["lmx", "mlx-lm"][:: -1 if number % 2 else 1]
        for side in sides:
            runs[side].append(_run(side, case, arguments))
    if runs["lmx"][0]["replaced"]:
        runs["stock"] = [_run("stock", case, arguments)]
    return {side: found for side, found in runs.items() if found}


def _run(side: str, case: str, arguments: argparse.Namespace) -> dict:
    steps = min(arguments.steps, STOCK_STEPS) if side == "stock" else arguments.steps
    command = [sys.executable, __file__, "--side", side, "--case", case]
    for name in ("hidden", "layers", "vocabulary", "batch", "length"):
        command += [f"--{name}", str(getattr(arguments, name))]
    environment = dict(os.environ)
    environment.pop("LMX_CPU", None)
    if side == "stock":
        environment["LMX_CPU"] = "off"
    if arguments.threads:
        environment["LMX_BLAS_THREADS"] = str(arguments.threads)
    command += ["--steps", str(steps)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    # mlx-lm writes its own report before it.
    return json.loads(done.stdout.splitlines()[-1])


def _print_head(arguments: argparse.Namespace) -> None:
    trained = arguments.batch * (arguments.length + 1 - _offset(arguments))
    print(
        f"Llama of {arguments.layers} layers, hidden size {arguments.hidden}, "
        f"vocabulary {arguments.vocabulary}, float32; "
        f"batch {arguments.batch} x {arguments.length}, {trained} tokens trained.\n"
        "Adam alike, no weight decay, no clipping; lmx also computes the gradient norm."
        "\nBoth train the same parameters (mlx-lm's command leaves out embedding and "
        "head).\n"
        f"Medians of the steps after the first {WARM}; {arguments.rounds} alternating "
        "runs. ratio = time / time of lmx.\n"
        "stock = mlx-lm with the BLAS of MLX's wheel, one run.\n"
    )


def _print_case(case: str, runs: dict[str, list[dict]], arguments) -> None:
    reference = runs["lmx"][0]
    ours = statistics.median(_seconds(runs["lmx"]))
    print(f"{CASES[case]}: {reference['parameters']:,} parameters trained")
    times = ("ms/step", "fastest", "tokens/s", "peak GB", "ratio")
    print(ROW.format("side", *times, "first loss", "last loss", "most apart", "BLAS"))
    for side, found in runs.items():
        first = found[0]
        assert first["parameters"] == reference["parameters"], "unequal work"
        median = statistics.median(_seconds(found))
        losses = first["losses"]
        pairs = zip(losses, reference["losses"], strict=False)
        cells = (
            f"{1000 * median:,.1f}",
            f"{1000 * min(_seconds(found)):,.1f}",
            f"{arguments.batch * arguments.length / median:,.0f}",
            f"{first['peak'] / 1e9:.2f}",
            f"{median / ours:.2f}x",
            f"{losses[0]:.6f}",
            f"{losses[-1]:.6f}",
            f"{max(abs(theirs - our) for theirs, our in pairs):.1e}",
            first["blas"],
        )
        print(ROW.format(side, *cells))
    print()


def _seconds(runs: list[dict]) -> list[float]:
    return [second for run in runs for second in run["seconds"][WARM:]]


def _model(arguments: argparse.Namespace):
    """The model both sides train, with weights that are a function of the sizes."""

    return random_llama.model(random_llama.configuration(arguments, dtype="float32"))


def _same_adapters(model) -> None:
    """Both libraries draw theirs differently, though under the same names."""
    import mlx.core as mx
    from mlx.utils import tree_flatten, tree_unflatten

    key, weights = mx.random.key(1), []
    for path, value in sorted(tree_flatten(model.trainable_parameters())):
        if path.endswith("lora_a"):
            bound = 1 / math.sqrt(value.shape[0])
            key, draw = mx.random.split(key)
            weights.append(
                (path, mx.random.uniform(-bound, bound, value.shape, key=draw))
            )
    model.update(tree_unflatten(weights))


def _tokens(arguments: argparse.Namespace):
    """Random tokens, int32 [batch, length + 1]."""
    import numpy as np

    shape = (arguments.batch, arguments.length + 1)
    generator = np.random.default_rng(0)
    return generator.integers(0, arguments.vocabulary, shape).astype(np.int32)


def _offset(arguments: argparse.Namespace) -> int:
    """The first token of a row that is trained; a prompt lies before it."""
    return max(1, arguments.length // 8)


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
    from lmx.training.step import TrainStep

    model = _model(arguments)
    if arguments.case == "lora":
        lora_model.attach(model, LoRAConfig(rank=RANK, alpha=RANK * SCALE), seed=0)
        _same_adapters(model)
    step = TrainStep(model, beta1=BETAS[0], beta2=BETAS[1])
    tokens = _tokens(arguments)
    trained = np.arange(1, tokens.shape[1]) >= _offset(arguments)
    mask = np.broadcast_to(trained, (len(tokens), len(trained)))
    batch = Batch(mx.array(tokens), mx.array(mask), ())
    seconds, losses = [], []
    for number in range(WARM + arguments.steps):
        start = time.perf_counter()
        loss, count, norm = step(batch, RATE, number)
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
        linear_to_lora_layers(model, arguments.layers, settings)
        _same_adapters(model)
    trained = tree_flatten(model.trainable_parameters())
    optimizer = optimizers.Adam(RATE, betas=list(BETAS), bias_correction=True)
    with tempfile.TemporaryDirectory() as folder:
        steps = WARM + arguments.steps
        settings = trainer.TrainingArgs(
            batch_size=arguments.batch,
            iters=steps,
            steps_per_report=1,
            steps_per_save=steps + 1,
            max_seq_length=arguments.length + 1,
            adapter_file=f"{folder}/adapters.safetensors",
        )
        offset = _offset(arguments)
        rows = [(row, offset) for row in _tokens(arguments).tolist()]
        record = Record()
        trainer.train(model, optimizer, rows, args=settings, training_callback=record)
    size = sum(value.size for _, value in trained)
    return _result(record.seconds, record.losses, used, size)


if __name__ == "__main__":
    main()

"""A quantization-aware step of every grid beside the plain one of the same batch.

Both steps live in one process and take turns, so that whatever else the machine does
meets both. Without a checkpoint the model is a Llama of random weights.
"""

import argparse
import statistics
import time

import random_llama

GRIDS = {"minmax": 4, "learned": 4, "frozen": 4, "balanced": 2, "ternary": 2}
GROUP, RANK, RATE = 64, 16, 1e-4
# The first step traces, and the second is the first with warm caches.
WARM = 2
HEAD = """\
{model}, batch {batch} x {length}, float32; medians of {steps} steps of either, in turn,
after {warm}; groups of {group}; ratio = by the plain step; CPU ms = processor time;
BLAS: {blas}"""
RANDOM = "random Llama"
COLUMNS = ("grid", "bits", "ms/step", "plain", "ratio", "CPU ms", "plain", "ratio")
ROW = "{:10}{:>5}{:>11}{:>10}{:>8}{:>11}{:>10}{:>8}  {}"


def main() -> None:
    from lmx import cpu

    arguments = _arguments()
    used = cpu.enable().blas
    print(HEAD.format(**vars(arguments), warm=WARM, group=GROUP, blas=used.name))
    for case in arguments.cases:
        _print_case(case, arguments)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=RANDOM, help="a checkpoint")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=8, help="rows")
    parser.add_argument("--length", type=int, default=256, help="tokens a row")
    parser.add_argument("--steps", type=int, default=7, help="timed of either")
    parser.add_argument("--grids", nargs="+", choices=GRIDS, default=GRIDS)
    cases = ("full", "lora")
    parser.add_argument("--cases", nargs="+", choices=cases, default=cases)
    return parser.parse_args()


def _print_case(case: str, arguments: argparse.Namespace) -> None:
    print(f"\n{'full' if case == 'full' else f'LoRA rank {RANK}'}")
    print(ROW.format(*COLUMNS, "first loss, plain"))
    for grid in arguments.grids:
        # A frozen grid trains no weights, so no adapters of them either.
        if (case, grid) == ("lora", "frozen"):
            continue
        sides = {"plain": None, "rounded": grid}
        steps = {side: _step(case, kind, arguments) for side, kind in sides.items()}
        print(ROW.format(grid, GRIDS[grid], *_cells(compare(steps, arguments))))


def compare(steps: dict, arguments) -> dict[str, list[tuple[float, ...]]]:
    """Seconds by the clock and of the processor, and the loss, of every step."""
    import mlx.core as mx

    batch, found = _batch(steps["plain"], arguments), {side: [] for side in steps}
    for number in range(WARM + arguments.steps):
        # Who goes first alternates.
        for side in list(steps)[:: -1 if number % 2 else 1]:
            step, clock, busy = steps[side], time.perf_counter(), time.process_time()
            loss, count, *_ = step(batch, RATE, number)
            mx.eval(loss, step.parameters, step.optimizer.state)
            spent = time.perf_counter() - clock, time.process_time() - busy
            found[side].append((*spent, (loss / count).item()))
    return found


def _cells(runs: dict[str, list[tuple[float, ...]]]) -> list[str]:
    cells = []
    for column in range(2):
        plain, rounded = (
            statistics.median(run[column] for run in runs[side][WARM:])
            for side in ("plain", "rounded")
        )
        cells += [f"{1000 * rounded:,.1f}", f"{1000 * plain:,.1f}"]
        cells.append(f"{rounded / plain:.2f}x")
    losses = (f"{runs[side][0][2]:.4f}" for side in ("rounded", "plain"))
    return [*cells, ", ".join(losses)]


def _step(case: str, grid: str | None, arguments: argparse.Namespace):
    """A step as a train stage makes it."""
    import mlx.core as mx
    from lmx.config.lora import LoRAConfig
    from lmx.config.qat import QATConfig
    from lmx.models.loader import set_compute_dtype
    from lmx.models.lora import lora_model
    from lmx.quantization.qat.fake_quant import FakeQuant
    from lmx.quantization.target_layers import select_layers
    from lmx.training.optimizers import OptimizerConfig
    from lmx.training.step import TrainStep

    model, dtype = _model(arguments)
    rounding = grid and QATConfig(bits=GRIDS[grid], group_size=GROUP, quantizer=grid)
    specs = select_layers(model, rounding).specs if rounding else {}
    if grid == "frozen":
        model.freeze()
    if case == "lora":
        lora_model.attach(model, LoRAConfig(rank=RANK), seed=0, merged=bool(rounding))
    fake_quant = FakeQuant(model, specs, dtype, rounding) if rounding else None
    optimizer = OptimizerConfig(
        weight_decay=0.01,
        max_grad_norm=1.0,
        lr_multipliers=fake_quant.lr_multipliers() if fake_quant else {},
    )
    step = TrainStep(model, optimizer, fake_quant=fake_quant)
    set_compute_dtype(model, mx.float32)
    return step


def _model(arguments: argparse.Namespace):
    """A model as stored, and the type that its checkpoint has."""
    from lmx.models.loader import load

    if arguments.model != RANDOM:
        loaded = load(arguments.model, compute="stored")
        return loaded.model, loaded.dtype
    config = random_llama.configuration(arguments)
    model = random_llama.model(config)
    return model, model.layers[0].input_layernorm.weight.dtype


def _batch(step, arguments: argparse.Namespace):
    """Random tokens, all of them trained."""
    import mlx.core as mx
    import numpy as np
    from lmx.data.batching import Batch

    vocabulary = step.model.args.vocab_size
    shape = (arguments.batch, arguments.length + 1)
    tokens = np.random.default_rng(0).integers(0, vocabulary, shape).astype(np.int32)
    mask = np.ones((arguments.batch, arguments.length), bool)
    return Batch(mx.array(tokens), mx.array(mask), ())


if __name__ == "__main__":
    main()

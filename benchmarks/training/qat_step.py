"""Time a QAT step of every quantizer and a plain step on the same batch.

Both steps alternate in one process, so that other load on the machine affects both. The
default model is a Llama with random weights. With a teacher, both learn from the
unquantized model in place of the tokens.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
import random_llama

BITS = {"minmax": 4, "lsq": 4, "fixed_codes": 4, "fixed_scale": 4, "ternary": 2}
GROUP_SIZE, RANK, LEARNING_RATE = 64, 16, 1e-4
CASES = {"full": "full", "lora": f"LoRA rank {RANK}", "teacher": "full, with a teacher"}
# The first step is traced; the second is the first with warm caches.
WARMUP_STEPS = 2
HEADER = """\
{model}, batch {batch_size} x {seq_length}, float32; medians of {steps} alternating
steps after {warmup}; groups of {group_size}; ratio = QAT / plain; CPU ms = processor
time; BLAS: {blas}"""
RANDOM = "random Llama"
COLUMNS = ("quantizer", "bits", "ms/step", "plain", "ratio", "CPU ms", "plain", "ratio")
ROW = "{:12}{:>5}{:>11}{:>10}{:>8}{:>11}{:>10}{:>8}  {}"


def main() -> None:
    from lmx import cpu

    arguments = _arguments()
    used = cpu.enable().blas
    print(
        HEADER.format(
            **vars(arguments),
            warmup=WARMUP_STEPS,
            group_size=GROUP_SIZE,
            blas=used.name,
        )
    )
    for case in arguments.cases:
        _print_case(case, arguments)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=RANDOM, help="a checkpoint")
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--num-layers", type=int, default=8)
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-length", type=int, default=256)
    parser.add_argument(
        "--documents", type=int, default=1, help="packed into each sequence"
    )
    parser.add_argument("--steps", type=int, default=7, help="timed steps of each")
    parser.add_argument(
        "--quantizers", nargs="+", choices=BITS, default=["minmax", "lsq"]
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES])
    return parser.parse_args()


def _print_case(case: str, arguments: argparse.Namespace) -> None:
    print(f"\n{CASES[case]}")
    print(ROW.format(*COLUMNS, "first loss, plain"))
    for name in arguments.quantizers:
        if case == "lora" and name == "fixed_codes":
            continue
        steps = {
            "plain": _step(case, None, arguments),
            "qat": _step(case, name, arguments),
        }
        print(ROW.format(name, BITS[name], *_cells(compare(steps, arguments))))


def compare(steps: dict, arguments) -> dict[str, list[tuple[float, ...]]]:
    """Wall-clock seconds, processor seconds and loss of every step."""
    import mlx.core as mx

    batch, results = _batch(steps["plain"], arguments), {name: [] for name in steps}
    for number in range(WARMUP_STEPS + arguments.steps):
        # The order alternates.
        for name in list(steps)[:: -1 if number % 2 else 1]:
            step, start, cpu = steps[name], time.perf_counter(), time.process_time()
            loss, count, *_ = step(batch, LEARNING_RATE, number)
            mx.eval(loss, step.parameters, step.optimizer.state)
            seconds = time.perf_counter() - start, time.process_time() - cpu
            results[name].append((*seconds, (loss / count).item()))
    return results


def _cells(runs: dict[str, list[tuple[float, ...]]]) -> list[str]:
    cells = []
    for column in range(2):
        plain, qat = (
            statistics.median(run[column] for run in runs[name][WARMUP_STEPS:])
            for name in ("plain", "qat")
        )
        cells += [f"{1000 * qat:,.1f}", f"{1000 * plain:,.1f}"]
        cells.append(f"{qat / plain:.2f}x")
    losses = (f"{runs[name][0][2]:.4f}" for name in ("qat", "plain"))
    return [*cells, ", ".join(losses)]


def _step(case: str, quantizer: str | None, arguments: argparse.Namespace):
    """A step with the settings of a train stage."""
    import mlx.core as mx
    from lmx.config.lora import LoRAConfig
    from lmx.config.qat import QATConfig
    from lmx.config.train import TeacherConfig, loss_chunk
    from lmx.cpu import on_cpu
    from lmx.models.dtypes import set_compute_dtype
    from lmx.models.lora import lora_model
    from lmx.quantization.packing import pack
    from lmx.quantization.qat.fake_quant import FakeQuant
    from lmx.quantization.target_layers import select_layers
    from lmx.training.chunked_loss import ChunkedLossModel
    from lmx.training.distillation import DistillationLoss, OnlineTeacher
    from lmx.training.document_mask import DocumentCaches
    from lmx.training.optimizers import OptimizerConfig
    from lmx.training.step import TrainStep

    model, dtype = _model(arguments)
    qat = quantizer and QATConfig(
        bits=BITS[quantizer], group_size=GROUP_SIZE, quantizer=quantizer
    )
    specs = select_layers(model, qat).specs if qat else {}
    packed, modules = None, dict(model.named_modules())
    if quantizer == "fixed_codes":
        packed = {
            path: pack(modules[path].weight, s, dtype) for path, s in specs.items()
        }
    if case == "lora":
        lora_model.attach(model, LoRAConfig(rank=RANK), seed=0, merged=bool(qat))
    fake_quant = FakeQuant(model, specs, dtype, qat, packed) if qat else None
    optimizer = OptimizerConfig(
        weight_decay=0.01,
        max_grad_norm=1.0,
        lr_multipliers=fake_quant.lr_multipliers() if fake_quant else {},
    )
    loss = caches = None
    if arguments.documents > 1:
        caches = DocumentCaches(model)
    if case == "teacher":
        teacher, _ = _model(arguments)
        set_compute_dtype(teacher, mx.float32)
        online = OnlineTeacher(teacher)
        online.document_caches = caches
        loss = DistillationLoss(TeacherConfig(), online)
    chunk = loss_chunk(model.args.vocab_size, on_cpu=on_cpu())
    step = TrainStep(
        model,
        optimizer,
        weight_transform=fake_quant,
        loss_model=ChunkedLossModel(model, chunk),
        loss=loss,
        document_caches=caches,
    )
    set_compute_dtype(model, mx.float32)
    return step


def _model(arguments: argparse.Namespace):
    """The model and the dtype of its checkpoint."""
    from lmx.models.loader import load

    if arguments.model != RANDOM:
        loaded = load(arguments.model, compute="stored")
        return loaded.model, loaded.dtype
    config = random_llama.configuration(arguments)
    model = random_llama.model(config)
    return model, model.layers[0].input_layernorm.weight.dtype


def _batch(step, arguments: argparse.Namespace):
    """Random tokens; all of them are trained."""
    import mlx.core as mx
    import numpy as np
    from lmx.data.batching import Batch

    vocab_size = step.model.args.vocab_size
    shape = (arguments.batch_size, arguments.seq_length + 1)
    tokens = np.random.default_rng(0).integers(0, vocab_size, shape).astype(np.int32)
    mask = np.ones((arguments.batch_size, arguments.seq_length), bool)
    documents = None
    if arguments.documents > 1:
        numbers = np.arange(mask.shape[1]) * arguments.documents // mask.shape[1]
        documents = mx.array(np.broadcast_to(numbers, mask.shape).astype(np.int32))
    return Batch(mx.array(tokens), mx.array(mask), (), documents)


if __name__ == "__main__":
    main()

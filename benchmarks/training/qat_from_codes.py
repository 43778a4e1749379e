"""QAT from the codes of a quantized model, by bit width and learning rate.

GPTQ quantizes the model once for each bit width. LoRA then trains for a few steps: with
QAT, which continues from the codes, and without rounding, on the dequantized weights.
Both get the same examples, seed and learning rates. The table has the validation loss
before and after, and the codes that have changed.

Each training is a separate process. Its record stays in `--folder`: a second call runs
only what is missing.
"""

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
import programs

GROUP_SIZE = 64
MAX_SAMPLES = 512
ROW = "{:>4}{:>9}{:>9}{:>11}{:>9}{:>13}{:>10}"
COLUMNS = ("bits", "rate", "before", "unrounded", "QAT", "changed", "share")


def main() -> None:
    arguments = _arguments()
    if arguments.job:
        print(json.dumps(train(json.loads(arguments.job), arguments)))
        return
    print(
        f"{arguments.model}: {arguments.steps} steps of {arguments.batch_size} "
        f"examples, LoRA of rank {arguments.rank}, groups of {GROUP_SIZE}, seed "
        f"{arguments.seed}."
    )
    print(ROW.format(*COLUMNS))
    for bits in arguments.bits:
        _quantize(bits, arguments)
        for rate in arguments.learning_rates:
            unrounded, qat = (
                _record({"bits": bits, "rate": rate, "qat": has_qat}, arguments)
                for has_qat in (False, True)
            )
            _print_row(bits, rate, unrounded, qat)


def _print_row(bits: int, rate: float, unrounded: dict, qat: dict) -> None:
    losses = (qat["before"], unrounded["after"], qat["after"])
    cells = [bits, f"{rate:g}", *(f"{loss:.4f}" for loss in losses)]
    share = qat["changed"] / qat["codes"]
    print(ROW.format(*cells, f"{qat['changed']:,}", f"{share:.4%}"), flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", required=True, type=Path, help="keeps all records")
    parser.add_argument("--model", required=True, help="folder of an unquantized model")
    parser.add_argument(
        "--data", required=True, type=Path, help="folder with train and valid .jsonl"
    )
    parser.add_argument(
        "--gsm8k", action="store_true", help="--data has train and test .jsonl of GSM8K"
    )
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 3, 2])
    parser.add_argument(
        "--learning-rates", type=float, nargs="+", default=[1e-5, 1e-4, 1e-3]
    )
    parser.add_argument("--rank", type=int, default=8, help="of LoRA")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=2, help="examples per step")
    parser.add_argument("--eval-batches", type=int, default=4)
    parser.add_argument("--seq-length", type=int, default=160, help="tokens at most")
    parser.add_argument("--num-tokens", type=int, default=4096, help="for calibration")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    return parser.parse_args()


def _quantize(bits: int, arguments: argparse.Namespace) -> None:
    """Quantize the model with GPTQ, unless that has been done."""
    folder = _folder(bits, arguments)
    if (folder / "run/report.html").is_file():
        return
    calibration = {
        "num_tokens": arguments.num_tokens,
        "max_seq_length": arguments.seq_length,
        "num_eval_tokens": max(8, arguments.num_tokens // 4),
    }
    grid = {"bits": bits, "group_size": GROUP_SIZE}
    stage = {"method": "gptq", "effort": "fast", "calibration": calibration} | grid
    recipe = {
        "model": str(Path(arguments.model).resolve()),
        "data": _data(arguments),
        "seed": arguments.seed,
        "stages": [{"quantize": stage}],
    }
    folder.mkdir(parents=True, exist_ok=True)
    programs.run_recipe(recipe, folder / "run")


def _folder(bits: int, arguments: argparse.Namespace) -> Path:
    return arguments.folder.resolve() / f"{bits}-bit"


def _data(arguments: argparse.Namespace) -> dict:
    names = ("train.jsonl", "test.jsonl" if arguments.gsm8k else "valid.jsonl")
    train, valid = (str(arguments.data.resolve() / name) for name in names)
    columns = {"prompt": "question", "completion": "answer"}
    return {
        "train": train,
        "valid": valid,
        "max_seq_length": arguments.seq_length,
        "max_samples": MAX_SAMPLES,
        "columns": columns if arguments.gsm8k else {},
    }


def _record(job: dict, arguments: argparse.Namespace) -> dict:
    """The result of a training, which runs as a process unless its record is there."""
    name = "qat" if job["qat"] else "unrounded"
    file = _folder(job["bits"], arguments) / f"{name}-{job['rate']:g}.json"
    if not file.is_file():
        print(f"{job['bits']} bits: {file.stem}", file=sys.stderr, flush=True)
        command = [__file__, *sys.argv[1:], "--job", json.dumps(job)]
        file.write_text(json.dumps(programs.measure(command)))
    return json.loads(file.read_text())


def train(job: dict, arguments: argparse.Namespace) -> dict[str, float]:
    """Train from the quantized model.

    Returns:
        Validation losses before and after; with QAT, the number of codes and of those
        that have changed; processor seconds.
    """
    from lmx import cpu
    from lmx.config.train import TrainConfig
    from lmx.pipeline.train.run import TrainRun

    cpu.enable()
    start = time.process_time()
    qat = {"bits": job["bits"], "group_size": GROUP_SIZE}
    config = TrainConfig(
        adapter={"rank": arguments.rank},
        qat=qat if job["qat"] else None,
        steps=arguments.steps,
        batch_size=arguments.batch_size,
        eval_batches=arguments.eval_batches,
        learning_rate=job["rate"],
        eval_steps=arguments.steps,
        # No checkpoints.
        save_steps=arguments.steps + 1,
    )
    training = TrainRun(config, _context(job, arguments))
    before = training.step.evaluate(training.trainer.eval_batches)
    training.run()
    result = {
        "before": before.loss_sum / before.loss_count,
        "after": training.eval_loss,
    }
    if fake_quant := training.fake_quant:
        tensors = fake_quant.export_tensors(training.parameters)
        packed = training.model.packed
        changed, codes = fake_quant.count_changed_codes(packed, tensors)
        result |= {"changed": changed, "codes": codes}
    return result | {"processor_seconds": time.process_time() - start}


def _context(job: dict, arguments: argparse.Namespace):
    """The `StageContext` of a train stage after the quantize stage."""
    from lmx.config.data import DataConfig
    from lmx.config.model import ModelConfig
    from lmx.data.splits import Splits
    from lmx.pipeline.context import ModelArtifact, StageContext
    from lmx.run.logger import RunLogger

    run = _folder(job["bits"], arguments) / "run"
    manifest = json.loads((run / "manifest.json").read_text())
    quantized = manifest["stages"]["1-quantize"]["result"]
    data, seed, find = DataConfig(**_data(arguments)), arguments.seed, Path
    logger = RunLogger(None, quiet=True)
    rows = Splits(data, find=find, seed=seed, info=logger.info, warning=logger.warning)
    return StageContext(
        folder=run.parent,
        output=run.parent,
        name="qat_from_codes",
        source=ModelConfig(path=arguments.model),
        data=data,
        seed=seed,
        current=ModelArtifact.from_json(quantized, run, Path(arguments.model)),
        logger=logger,
        find=find,
        rows=rows,
    )


if __name__ == "__main__":
    main()

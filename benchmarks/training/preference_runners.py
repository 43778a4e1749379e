"""One run of `preference.py`: `preference_runners.py LIBRARY FOLDER` prints JSON."""

import json
import os
import resource
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from finetune_runners import BETAS, RANK, SCALE, StepClock

PROGRAM = Path(__file__)
LIBRARIES = ("lmx", "mlx-lm-lora")


def main() -> None:
    library, folder = sys.argv[1], Path(sys.argv[2])
    settings = json.loads((folder / "settings.json").read_text())
    run = {
        ("lmx", "dpo"): _lmx_dpo,
        ("lmx", "grpo"): _lmx_grpo,
        ("mlx-lm-lora", "dpo"): _peer_dpo,
        ("mlx-lm-lora", "grpo"): _peer_grpo,
    }[library, settings["loss"]]
    print(json.dumps(run(folder, settings)))


class Clock(StepClock):
    """Times and memory of a run; steps after the last one do not count.

    Attributes:
        extra: seconds and processor seconds of work before the steps that counts, too.
    """

    def __init__(self, warm: int, timed: int):
        super().__init__(warm, timed)
        self.extra = 0.0, 0.0
        self._peak = self._rss = 0

    def start(self) -> None:
        """Count the peak memory from now on."""
        import mlx.core as mx

        mx.reset_peak_memory()

    def step(self) -> None:
        """Record the end of a step."""
        import mlx.core as mx

        if len(self._ends) == self.total:
            return
        self.end_step()
        self._peak = mx.get_peak_memory()
        self._rss = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def timed(self, values: list) -> list:
        """The values of the timed steps from those of all steps."""
        return values[self.warm : self.total]

    def result(self, parameters: int, **more) -> dict:
        """Results for the comparison."""
        assert len(self._ends) == self.total
        times = self.times()
        return times | {
            "seconds": times["seconds"] + self.extra[0],
            "processor_seconds": times["processor_seconds"] + self.extra[1],
            "reference_seconds": self.extra[1],
            "peak": self._peak,
            "rss": self._rss,
            "parameters": parameters,
            **more,
        }


def _lmx_dpo(folder: Path, settings: dict) -> dict:
    from lmx import cpu

    cpu.enable()
    import mlx.core as mx
    from lmx.config.preference import PreferenceLossConfig
    from lmx.training.optimizers import OptimizerConfig
    from lmx.training.preference_loss import PreferenceLoss
    from lmx.training.step import TrainStep

    model, chunked, batches = _lmx_pairs(folder, settings)
    clock = Clock(settings["warm_epochs"] * batches.per_epoch, batches.per_epoch)
    clock.start()
    batches, clock.extra = _with_reference(chunked, batches)
    step = TrainStep(
        model,
        OptimizerConfig(beta1=BETAS[0], beta2=BETAS[1]),
        loss_model=chunked,
        loss=PreferenceLoss(PreferenceLossConfig(beta=settings["beta"])),
    )
    losses, pending = [], None
    for number in range(clock.total):
        outputs = step(batches(number), settings["learning_rate"], number)
        mx.async_eval(outputs, step.parameters, step.optimizer.state)
        # Like the trainer: read the results of a step while the next one runs.
        if pending:
            _record(clock, losses, pending)
        pending = outputs
    _record(clock, losses, pending)
    return clock.result(
        sum(value.size for value in step.parameters.values()),
        pairs=len(batches.examples) // 2,
        first_loss=losses[0],
        last_loss=_mean(clock.timed(losses)),
    )


def _lmx_pairs(folder: Path, settings: dict) -> tuple:
    """The model with LoRA, how losses run it, and the batches of pairs."""
    import mlx.core as mx
    from lmx.config.lora import LoRAConfig
    from lmx.config.train import TrainConfig
    from lmx.cpu import on_cpu
    from lmx.data.batching import BucketBatchSampler
    from lmx.data.dataset import RecordReader
    from lmx.data.preference import encode_pairs
    from lmx.data.tokenization import encode_all
    from lmx.models.dtypes import set_compute_dtype
    from lmx.models.loader import load
    from lmx.models.lora import lora_model
    from lmx.training.chunked_loss import ChunkedLossModel

    loaded = load(Path(settings["model"]))
    model = loaded.model
    examples = encode_all(
        list(RecordReader(str(folder / "train.jsonl"))),
        loaded.tokenizer,
        max_seq_length=settings["max_seq_length"],
        encode=encode_pairs,
    ).examples
    batches = BucketBatchSampler(
        examples,
        max_seq_length=settings["max_seq_length"],
        batch_size=settings["batch_size"],
        sequences_per_example=2,
    )
    lora_model.attach(model, LoRAConfig(rank=RANK, alpha=RANK * SCALE), seed=0)
    set_compute_dtype(model, mx.float32)
    longest = max(length * sequences for length, sequences in batches.shapes)
    chunk = TrainConfig(steps=1, batch_size=1).chunk(
        vocabulary=loaded.config["vocab_size"], tokens=longest, on_cpu=on_cpu()
    )
    return model, ChunkedLossModel(model, chunk), batches


def _with_reference(chunked, batches) -> tuple:
    """Batches with the reference's log-probabilities; wall and processor seconds."""
    from lmx.data.batching import TargetBatches, example_indices
    from lmx.run.logger import RunLogger
    from lmx.training.reference_log_probs import (
        Reference,
        reference_log_probs,
        with_preference_target,
    )

    start = time.perf_counter(), time.process_time()
    # The adapter changes nothing yet, so this is the reference.
    reference = Reference(lambda: chunked, "", RunLogger(None, quiet=True))
    indices = example_indices(batches, batches.per_epoch)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["LMX_CACHE"] = cache
        values = reference_log_probs(batches.examples, indices, reference)
    times = time.perf_counter() - start[0], time.process_time() - start[1]
    target = partial(with_preference_target, log_probs=values, labels=None)
    return TargetBatches(batches, "", target), times


def _record(clock: Clock, losses: list[float], outputs) -> None:
    losses.append(outputs.loss_sum.item() / outputs.loss_count.item())
    clock.step()


def _lmx_grpo(folder: Path, settings: dict) -> dict:
    import lmx
    import mlx.core as mx

    clock = Clock(settings["warm_steps"], settings["steps"])
    trained: list[int] = []

    class Record(lmx.Callback):
        def on_evaluate(self, state):
            if state.step == 0:
                clock.start()

        def on_step(self, state):
            trained.append(state.trained_tokens)
            clock.step()

    with tempfile.TemporaryDirectory() as output:
        run = lmx.train(
            _grpo_recipe(folder, settings, clock.total),
            output=output,
            callbacks=[Record()],
            quiet=True,
        )
        samples = (Path(output) / "samples.jsonl").read_text().splitlines()
        rows = [row for row in run.history if row["kind"] == "train"]
        adapter = mx.load(str(run.adapter_path / "adapters.safetensors"))
        parameters = sum(value.size for value in adapter.values())
    counts = [0] * (clock.total + 1)
    for sample in samples:
        counts[json.loads(sample)["step"] - 1] += 1
    return clock.result(
        parameters,
        completions=sum(clock.timed(counts)),
        tokens=sum(clock.timed(trained)),
        first_reward=rows[0]["reward"],
        last_reward=_mean([row["reward"] for row in clock.timed(rows)]),
        first_loss=rows[0]["loss"],
        last_loss=_mean([row["loss"] for row in clock.timed(rows)]),
    )


def _grpo_recipe(folder: Path, settings: dict, num_steps: int) -> dict:
    stage = {
        "adapter": {"rank": RANK, "alpha": RANK * SCALE},
        "loss": {
            "type": "grpo",
            "rewards": ["exact_match"],
            "beta": settings["beta"],
        },
        "rollouts": {
            "num_generations": settings["num_generations"],
            "max_tokens": settings["max_tokens"],
            "temperature": settings["temperature"],
        },
        "batch_size": settings["batch_size"] // settings["accumulation"],
        "gradient_accumulation_steps": settings["accumulation"],
        # The end of a step is seen when the next one has begun: one step more.
        "steps": num_steps + 1,
        "learning_rate": settings["learning_rate"],
        "lr_schedule": "constant",
        "warmup_ratio": 0.0,
        "weight_decay": 0.0,
        "max_grad_norm": None,
        "beta1": BETAS[0],
        "beta2": BETAS[1],
        "compute_dtype": "float32",
        "eval_steps": 10**6,
        "eval_batches": 1,
        "save_steps": 10**6,
        "logging_steps": 1,
    }
    return {
        "model": settings["model"],
        "data": {
            "train": str(folder / "train.jsonl"),
            "valid": str(folder / "valid.jsonl"),
            "max_seq_length": settings["max_seq_length"],
        },
        "stages": [{"train": stage}],
    }


def _peer_model(settings: dict) -> tuple:
    """The model with LoRA, its tokenizer, and the reference: a second model.

    mlx_lm_lora.train also loads the reference from the disk.
    """
    import mlx.core as mx
    import numpy as np
    from mlx_lm import load
    from mlx_lm.tuner.utils import linear_to_lora_layers

    np.random.seed(0)
    mx.random.seed(0)
    model, tokenizer = load(settings["model"])
    reference, _ = load(settings["model"])
    for network in (model, reference):
        # As lmx; half precision is slower on a CPU.
        network.set_dtype(mx.float32)
        network.freeze()
    lora = {"rank": RANK, "scale": SCALE, "dropout": 0.0}
    linear_to_lora_layers(model, len(model.layers), lora)
    mx.eval(model.parameters(), reference.parameters())
    return model, reference, tokenizer


def _peer_parts(settings: dict, model, clock: Clock) -> tuple:
    """Optimizer, callback, the reports that it gets, and the trained parameters."""
    import mlx.optimizers as optimizers
    from mlx.utils import tree_flatten
    from mlx_lm.tuner.callbacks import TrainingCallback

    reports: list[dict] = []

    class Record(TrainingCallback):
        def on_train_loss_report(self, info):
            reports.append(info)
            clock.step()

    optimizer = optimizers.Adam(
        settings["learning_rate"], betas=list(BETAS), bias_correction=True
    )
    size = sum(value.size for _, value in tree_flatten(model.trainable_parameters()))
    return optimizer, Record(), reports, size


def _peer_arguments(folder: Path, settings: dict, clock: Clock) -> dict:
    """Arguments of both of its trainers."""
    return {
        "batch_size": settings["batch_size"],
        "iters": clock.total,
        "steps_per_report": 1,
        "steps_per_save": clock.total + 1,
        "max_seq_length": settings["max_seq_length"],
        "adapter_file": str(folder / "adapters.safetensors"),
        "beta": settings["beta"],
    }


def _rows(folder: Path) -> list[dict]:
    lines = (folder / "peer.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def _peer_dpo(folder: Path, settings: dict) -> dict:
    from lmx.cpu import blas

    blas.use_openblas()
    from mlx_lm_lora.trainer.datasets import DPODataset
    from mlx_lm_lora.trainer.dpo_trainer import DPOTrainingArgs, train_dpo

    _add_working_set_size()
    rows, size = _rows(folder), settings["batch_size"]
    steps = len(rows) // size
    clock = Clock(settings["warm_epochs"] * steps, steps)
    model, reference, tokenizer = _peer_model(settings)
    optimizer, callback, reports, parameters = _peer_parts(settings, model, clock)
    clock.start()
    train_dpo(
        model,
        reference,
        optimizer,
        DPODataset(rows, tokenizer),
        args=DPOTrainingArgs(**_peer_arguments(folder, settings, clock)),
        training_callback=callback,
    )
    losses = [report["train_loss"] for report in reports]
    return clock.result(
        parameters,
        pairs=steps * size,
        first_loss=losses[0],
        last_loss=_mean(clock.timed(losses)),
    )


def _add_working_set_size() -> None:
    """`train_dpo` reads a property that MLX's CPU device does not have."""
    import mlx.core as mx

    key, info = "max_recommended_working_set_size", mx.device_info()
    if key not in info:
        mx.device_info = lambda *_: info | {key: 0}


def _peer_grpo(folder: Path, settings: dict) -> dict:
    from lmx.cpu import blas

    blas.use_openblas()
    from mlx_lm_lora.trainer.datasets import GRPODataset
    from mlx_lm_lora.trainer.grpo_trainer import GRPOTrainingArgs, train_grpo

    def exact_match(prompts, completions, answer, types=None):
        pairs = zip(completions, answer, strict=True)
        return [float(text.strip() == right.strip()) for text, right in pairs]

    clock = Clock(settings["warm_steps"], settings["steps"])
    model, reference, tokenizer = _peer_model(settings)
    optimizer, callback, reports, parameters = _peer_parts(settings, model, clock)
    clock.start()
    train_grpo(
        model,
        reference,
        tokenizer,
        optimizer,
        GRPODataset(_rows(folder), tokenizer, text_completion_key="text"),
        reward_funcs=[exact_match],
        args=GRPOTrainingArgs(
            **_peer_arguments(folder, settings, clock),
            group_size=settings["num_generations"],
            max_completion_length=settings["max_tokens"],
            # All of the distribution, as lmx samples.
            temperature=settings["temperature"],
            top_p=1.0,
            top_k=0,
            epsilon=0.2,
        ),
        training_callback=callback,
        end_answer_token="",
    )
    totals = [0, *(report["trained_tokens"] for report in reports)]
    timed = clock.timed(reports)
    return clock.result(
        parameters,
        completions=len(timed) * settings["batch_size"] * settings["num_generations"],
        tokens=int(totals[clock.total] - totals[clock.warm]),
        first_reward=reports[0]["train_total_rewards_mean"],
        last_reward=_mean([report["train_total_rewards_mean"] for report in timed]),
        first_loss=reports[0]["train_loss"],
        last_loss=_mean([report["train_loss"] for report in timed]),
    )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    main()

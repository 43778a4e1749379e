"""One run of `finetune.py`: `finetune_runners.py LIBRARY FOLDER` prints JSON.

mlx-lm and hf also train for `real_model_training.py`, LoRA or all weights.
"""

import json
import resource
import shutil
import sys
import time
from pathlib import Path

PROGRAM = Path(__file__)
LIBRARIES = ("lmx", "mlx-lm", "hf", "stock")
RANK, SCALE, LEARNING_RATE, BETAS = 16, 2.0, 1e-3, (0.9, 0.95)
# With MLX's own BLAS a step takes many seconds: warm-up steps, timed steps.
STOCK_STEPS = (1, 2)


def main() -> None:
    library, folder = sys.argv[1], Path(sys.argv[2])
    settings = json.loads((folder / "settings.json").read_text())
    run = {"lmx": _lmx, "hf": _hf}.get(library, _mlx_lm)
    print(json.dumps(run(folder, settings, library)))


class StepClock:
    """Times of a run: `warm` steps, then `timed` steps that count."""

    def __init__(self, warm: int, timed: int):
        self.warm, self.total = warm, warm + timed
        self._ends: list[tuple[float, float]] = []

    def end_step(self) -> None:
        """Record the end of a step."""
        self._ends.append((time.perf_counter(), time.process_time()))

    def times(self) -> dict:
        """Seconds, processor seconds and number of the steps that count."""
        (start, cpu_start), (end, cpu_end) = self._ends[self.warm - 1], self._ends[-1]
        return {
            "seconds": end - start,
            "processor_seconds": cpu_end - cpu_start,
            "steps": self.total - self.warm,
        }


class Clock(StepClock):
    """Measurements of a run: times, losses and padding."""

    def __init__(self, warm: int, timed: int):
        super().__init__(warm, timed)
        self.positions = self.filled = 0
        self._losses: list[float] = []
        self._trained: list[int] = []

    def batch(self, number: int, positions: int, filled: int) -> None:
        """Count the positions of a batch and those that are not padding."""
        if number >= self.warm:
            self.positions += positions
            self.filled += filled

    def step(self, mean_loss: float, trained: int) -> None:
        """Record the end of a step."""
        self.end_step()
        self._losses.append(mean_loss * trained)
        self._trained.append(trained)

    def result(self, parameters: int, engine: str, **more) -> dict:
        """Results for the comparison. Losses are means over the tokens of an epoch."""
        warm = self.warm
        return self.times() | {
            "trained": sum(self._trained[warm:]),
            "positions": self.positions,
            "filled": self.filled,
            "first_loss": sum(self._losses[:warm]) / sum(self._trained[:warm]),
            "last_loss": sum(self._losses[warm:]) / sum(self._trained[warm:]),
            "rss": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
            "parameters": parameters,
            "engine": engine,
            "peak": None,
            "replaced": False,
            **more,
        }


def _tokens(folder: Path) -> list[tuple[list[int], list[bool]]]:
    return json.loads((folder / "tokens.json").read_text())


def _mlx_facts(blas) -> dict:
    import mlx.core as mx

    return {"peak": mx.get_peak_memory(), "replaced": blas.path is not None}


def _engine(blas) -> str:
    return f"{blas.threads or ''} {blas.name}".strip()


def _lmx(folder: Path, settings: dict, _: str) -> dict:
    from lmx import cpu

    used = cpu.enable().blas
    import mlx.core as mx
    import numpy as np
    from lmx.config.lora import LoRAConfig
    from lmx.config.train import TrainConfig
    from lmx.cpu import on_cpu
    from lmx.data.batching import BucketBatchSampler
    from lmx.data.tokenization import Example
    from lmx.models.loader import load
    from lmx.models.lora import lora_model
    from lmx.training.chunked_loss import ChunkedLossModel
    from lmx.training.optimizers import OptimizerConfig
    from lmx.training.step import TrainStep

    examples = [
        Example(np.array(tokens, np.int32), np.array(mask), "")
        for tokens, mask in _tokens(folder)
    ]
    length, steps = settings["length"], len(examples) // settings["batch_size"]
    batches = _batches_of_steps(BucketBatchSampler, examples, length, steps)
    model = load(folder / "model").model
    lora_model.attach(model, LoRAConfig(rank=RANK, alpha=RANK * SCALE), seed=0)
    largest = max(size * length for length, size in batches.shapes)
    chunk = TrainConfig(steps=1, batch_size=1).chunk(
        vocabulary=settings["vocab_size"], tokens=largest, on_cpu=on_cpu()
    )
    step = TrainStep(
        model,
        OptimizerConfig(beta1=BETAS[0], beta2=BETAS[1]),
        gradient_checkpointing=settings["checkpointing"],
        loss_model=ChunkedLossModel(model, chunk),
    )
    clock = Clock(batches.per_epoch, batches.per_epoch)
    pending = None
    for number in range(clock.total):
        batch = batches(number)
        clock.batch(number, batch.mask.size, _filled(batch.tokens))
        outputs = step(batch, settings["learning_rate"], number)
        mx.async_eval(outputs, step.parameters, step.optimizer.state)
        # Like the trainer: read the results of a step while the next one runs.
        _record(clock, pending)
        pending = outputs
    _record(clock, pending)
    size = sum(value.size for value in step.parameters.values())
    return clock.result(size, _engine(used), **_mlx_facts(used))


def _batches_of_steps(sampler, examples, length: int, steps: int):
    """The smallest batches, in tokens, with at most `steps` steps per epoch."""
    tokens = length
    while True:
        batches = sampler(examples, max_seq_length=length, batch_tokens=tokens)
        if batches.per_epoch <= steps:
            return batches
        tokens += 16


def _filled(tokens) -> int:
    # Token 0 occurs only as padding.
    return (tokens[:, :-1] != 0).sum().item()


def _record(clock: Clock, outputs) -> None:
    if outputs:
        loss, count = (output.item() for output in outputs[:2])
        clock.step(loss / count, int(count))


def _mlx_lm(folder: Path, settings: dict, library: str) -> dict:
    from lmx.cpu import blas

    used = blas.use_openblas()
    import mlx.optimizers as optimizers
    from mlx.utils import tree_flatten
    from mlx_lm.tuner import trainer
    from mlx_lm.tuner.callbacks import TrainingCallback
    from mlx_lm.tuner.datasets import CacheDataset

    class Record(TrainingCallback):
        trained = 0

        def on_train_loss_report(self, info):
            clock.step(info["train_loss"], info["trained_tokens"] - self.trained)
            self.trained = info["trained_tokens"]

    def iterate(*arguments, **more):
        batches = trainer.iterate_batches(*arguments, **more)
        for number, (tokens, spans) in enumerate(batches):
            clock.batch(number, tokens[:, :-1].size, _filled(tokens))
            yield tokens, spans

    model, examples = _mlx_lm_inputs(folder, settings)
    steps = len(examples) // settings["batch_size"]
    clock = Clock(*(STOCK_STEPS if library == "stock" else (steps, steps)))
    options = trainer.TrainingArgs(
        batch_size=settings["batch_size"],
        iters=clock.total,
        steps_per_report=1,
        steps_per_save=clock.total + 1,
        max_seq_length=settings["length"],
        adapter_file=str(folder / "adapters.safetensors"),
        grad_checkpoint=settings["checkpointing"],
    )
    optimizer = optimizers.Adam(
        settings["learning_rate"], betas=list(BETAS), bias_correction=True
    )
    trainer.train(
        model,
        optimizer,
        CacheDataset(examples),
        args=options,
        iterate_batches=iterate,
        training_callback=Record(),
    )
    size = sum(value.size for _, value in tree_flatten(model.trainable_parameters()))
    return clock.result(size, _engine(used), **_mlx_facts(used))


def _mlx_lm_inputs(folder: Path, settings: dict) -> tuple:
    """The model, with LoRA unless all weights are trained, and its dataset."""
    from types import SimpleNamespace

    import mlx.core as mx
    from mlx_lm import load
    from mlx_lm.tuner.datasets import load_dataset
    from mlx_lm.tuner.utils import linear_to_lora_layers

    model, tokenizer = load(str(folder / "model"))
    # As lmx; half precision is slower on a CPU.
    model.set_dtype(mx.float32)
    if not settings["full"]:
        model.freeze()
        lora = {"rank": RANK, "scale": SCALE, "dropout": 0.0}
        linear_to_lora_layers(model, settings["num_layers"], lora)
    dataset = SimpleNamespace(
        data=str(folder), train=True, test=False, mask_prompt=True
    )
    examples, *_ = load_dataset(dataset, tokenizer)
    return model, examples


def _hf(folder: Path, settings: dict, _: str) -> dict:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM
    from transformers.trainer_pt_utils import LengthGroupedSampler

    torch.manual_seed(0)
    # As MLX multiplies float32 on such GPUs.
    torch.set_float32_matmul_precision("high")
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    model.to(device).config.use_cache = False
    if settings["checkpointing"]:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if not settings["full"]:
        lora = LoraConfig(r=RANK, lora_alpha=RANK * SCALE, target_modules="all-linear")
        model = get_peft_model(model, lora)
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=settings["learning_rate"], betas=BETAS, weight_decay=0.0
    )
    examples, size = _tokens(folder), settings["batch_size"]
    clock = Clock(len(examples) // size, len(examples) // size)
    lengths = [len(tokens) for tokens, _ in examples]
    for number in range(clock.total):
        if number % clock.warm == 0:
            order = list(LengthGroupedSampler(size, lengths=lengths))
        start = number % clock.warm * size
        batch = _padded([examples[i] for i in order[start : start + size]])
        batch = {name: values.to(device) for name, values in batch.items()}
        mask = batch["attention_mask"]
        clock.batch(number, mask.numel(), int(mask.sum()))
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        clock.step(loss.item(), int((batch["labels"][:, 1:] >= 0).sum()))
    if settings.get("options") is not None and not settings["full"]:
        _merge(model, folder)
    size = sum(value.numel() for value in trained)
    threads = torch.get_num_threads()
    peak = torch.cuda.max_memory_allocated() if on_gpu else None
    return clock.result(size, f"{threads} torch {torch.__version__}", peak=peak)


def _merge(model, folder: Path) -> None:
    """Write the merged model with the configuration and tokenizer of the original."""
    result = folder / "result"
    model.merge_and_unload().save_pretrained(result)
    for path in (folder / "model").iterdir():
        if ".safetensors" not in path.name:
            shutil.copy(path, result)


def _padded(examples) -> dict:
    """A batch padded to its longest example, as transformers' collators do."""
    import torch

    shape = len(examples), max(len(tokens) for tokens, _ in examples)
    inputs, attention = torch.zeros(shape, dtype=torch.long), torch.zeros(shape).long()
    labels = torch.full(shape, -100)
    for row, (tokens, mask) in enumerate(examples):
        ids, trained = torch.tensor(tokens), torch.tensor(mask)
        inputs[row, : len(ids)] = ids
        attention[row, : len(ids)] = 1
        labels[row, : len(ids)] = torch.where(trained, ids, -100)
    return {"input_ids": inputs, "attention_mask": attention, "labels": labels}


if __name__ == "__main__":
    main()

"""Time evaluation and rollouts of two processes, one core each, and of one on one core.

The model is random. Both sides do the same work, and compare what they measured: the
perplexity, the answers and the completions. They alternate. The processor time is that
of the process that ends last, because others keep a core busy while they wait for it; a
busy machine changes it less than wall-clock time.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
import programs
import random_llama

WORK = ("perplexity", "exact match", "rollouts")
ROW = "{:14}{:>13}{:>15}{:>9}{:>16}"
SETTINGS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "LMX_BLAS_THREADS")


def main() -> None:
    arguments = _arguments()
    if arguments.folder:
        # Before the libraries start their threads.
        if arguments.core is not None:
            os.sched_setaffinity(0, {arguments.core})
        print(json.dumps(measure(arguments)))
        return
    with tempfile.TemporaryDirectory() as folder:
        arguments.folder = folder
        config = random_llama.configuration(arguments)
        random_llama.write(Path(folder), config)
        runs = programs.alternate(
            ("1", "2"), arguments.repeats, lambda name: _run(int(name), arguments)
        )
    _print(runs, arguments)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--num-layers", type=int, default=8)
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument("--num-tokens", type=int, default=16384, help="of perplexity")
    parser.add_argument("--questions", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=16, help="of the rollouts")
    parser.add_argument("--num-generations", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=64, help="of all completions")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--core", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def _run(count: int, arguments: argparse.Namespace) -> dict:
    """What the first of so many processes measures."""
    cores = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
    environment = os.environ | dict.fromkeys(SETTINGS, "1")
    if count > 1:
        hosts = Path(arguments.folder) / "hosts.json"
        hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in _ports(count)]))
        environment["MLX_HOSTFILE"] = str(hosts)
    processes = []
    for rank in range(count):
        command = [sys.executable, __file__]
        for name, value in vars(arguments).items():
            if value is not None:
                command += [f"--{name.replace('_', '-')}", str(value)]
        if cores:
            command += ["--core", str(cores[rank % len(cores)])]
        process = subprocess.Popen(
            command,
            env=environment | {"MLX_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        sys.exit("a process failed")
    return json.loads(outputs[0].splitlines()[-1])


def _ports(count: int) -> list[int]:
    """Ports that no program uses."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def measure(arguments: argparse.Namespace) -> dict:
    """Seconds by work, and what was computed; on the ranks of a run together."""
    from lmx import cpu

    cpu.enable()
    from lmx.models.loader import load
    from lmx.run.distributed import join

    ranks, loaded = join(), load(Path(arguments.folder) / "model")
    works = dict(zip(WORK, _works(loaded, arguments, ranks), strict=True))
    seconds, busy, results = {}, {}, {}
    for name, work in works.items():
        # The first time compiles kernels.
        for _ in range(2):
            ranks.gather_objects(None)
            start, start_busy = time.perf_counter(), time.process_time()
            results[name] = work()
            busy[name] = min(ranks.gather_objects(time.process_time() - start_busy))
            seconds[name] = time.perf_counter() - start
    return {"seconds": seconds, "busy": busy, "results": results}


def _works(loaded, arguments: argparse.Namespace, ranks) -> list:
    """Functions that do the work and return its result."""
    import numpy as np
    from lmx.data.batching import BucketBatchSampler
    from lmx.data.record_formats import DataRecord
    from lmx.data.tokenization import Example
    from lmx.evaluation.perplexity import measure_perplexity
    from lmx.generation.generator import Generator
    from lmx.generation.rollouts import sample_completions
    from lmx.pipeline.evaluate.questions import Questions

    draw = np.random.default_rng(0)

    def tokens(length: int) -> np.ndarray:
        return draw.integers(3, 320, length).astype(np.int32)

    lengths = draw.integers(64, 257, max(1, arguments.num_tokens // 160))
    examples = [Example(tokens(n), np.ones(n, bool), "random") for n in lengths]
    sampler = BucketBatchSampler(examples, max_seq_length=256, batch_tokens=4096)
    batches = list(sampler.in_order())
    texts = [" ".join(map(str, tokens(8))) for _ in range(arguments.questions)]
    records = [
        DataRecord("random", prompt=text, completion="1", skill="one") for text in texts
    ]
    prompts = [tokens(32).tolist() for _ in range(arguments.prompts)]
    max_tokens = arguments.max_tokens

    def answer() -> list[str]:
        questions = Questions.choose(records, 0, len(records), "none")
        generator = Generator(loaded.model, loaded.tokenizer)
        questions.answer("model", generator, max_tokens, lambda work: None, ranks)
        return [question.answers["model"] for question in questions.exact]

    def roll_out() -> list[list[int]]:
        groups = sample_completions(
            loaded.model,
            prompts,
            num_generations=arguments.num_generations,
            max_tokens=max_tokens,
            temperature=1.0,
            stop_tokens=frozenset(),
            seed=0,
            ranks=ranks,
        )
        return [completion.tokens for group in groups for completion in group]

    return [
        lambda: measure_perplexity(loaded.model, batches, ranks).loss,
        answer,
        roll_out,
    ]


def _print(runs: dict[str, list[dict]], arguments: argparse.Namespace) -> None:
    print(
        f"Llama, {arguments.num_layers} layers, hidden size {arguments.hidden_size}, "
        f"vocabulary {arguments.vocab_size}, float32; medians of {arguments.repeats} "
        "alternating runs, one core per process"
    )
    print(ROW.format("seconds", "1 process", "2 processes", "ratio", "processor"))
    wall, busy = (
        [_medians(runs[name], kind) for name in ("1", "2")]
        for kind in ("seconds", "busy")
    )
    for work in wall[0]:
        one, two = (each[work] for each in wall)
        ratios = one / two, busy[0][work] / busy[1][work]
        cells = [f"{one:.2f}", f"{two:.2f}", *(f"{ratio:.2f}x" for ratio in ratios)]
        print(ROW.format(work, *cells))
    one, two = (runs[name][0]["results"] for name in ("1", "2"))
    difference = abs(two["perplexity"] / one["perplexity"] - 1)
    print(f"the losses differ by {difference:.1g}")
    for work in ("exact match", "rollouts"):
        same = sum(a == b for a, b in zip(one[work], two[work], strict=True))
        print(f"{work}: {same} of {len(one[work])} completions have the same tokens")


def _medians(runs: list[dict], kind: str) -> dict[str, float]:
    medians = {w: statistics.median(run[kind][w] for run in runs) for w in WORK}
    total = medians["perplexity"] + medians["exact match"]
    return medians | {"evaluation": total}


if __name__ == "__main__":
    main()

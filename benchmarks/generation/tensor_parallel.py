"""One process on one core beside processes that hold the model together, one core each.

The model is random. The runs alternate; every run is a new set of processes. Memory is
the largest of all ranks: what MLX allocated at most, and the growth of the process from
before the model was loaded.
"""

import argparse
import json
import os
import resource
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

ROW = "{:14}{:>12}{:>12}{:>12}{:>14}{:>14}"
ONE = "1 process"
PEAKS = "weights", "peak", "growth"


def main() -> None:
    arguments = _arguments()
    if arguments.folder:
        print(json.dumps(_measure(arguments)))
        return
    many = f"{arguments.processes} processes"
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        config = random_llama.configuration(arguments, max_position_embeddings=4096)
        random_llama.write(folder, config)
        runs = programs.alternate(
            [ONE, many],
            arguments.repeats,
            lambda name: _run(
                folder, 1 if name == ONE else arguments.processes, arguments
            ),
        )
    _print(runs, many, arguments)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--num-layers", type=int, default=8)
    parser.add_argument("--vocab-size", type=int, default=6656)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--prompt-length", type=int, default=1024)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--requests", type=int, default=3, help="timed in a run")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def _run(folder: Path, count: int, arguments: argparse.Namespace) -> dict:
    """What some processes measure, each on a core of its own."""
    environment = os.environ | dict.fromkeys(
        ("LMX_BLAS_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"
    )
    hosts = folder / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in _free_ports(count)]))
    names = ("max_tokens", "prompt_length", "requests")
    options = [f"--{n.replace('_', '-')}={getattr(arguments, n)}" for n in names]
    command = [sys.executable, __file__, f"--folder={folder}", *options]
    started = []
    for rank in range(count):
        ring = {"MLX_HOSTFILE": str(hosts), "MLX_RANK": str(rank)} if count > 1 else {}
        started.append(
            subprocess.Popen(
                command, env=environment | ring, stdout=subprocess.PIPE, text=True
            )
        )
    outputs = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        sys.exit(f"{count} processes failed")
    results = [json.loads(output.splitlines()[-1]) for output in outputs]
    return results[0] | {name: max(r[name] for r in results) for name in PEAKS}


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _measure(arguments: argparse.Namespace) -> dict:
    """Tokens per second and memory of this rank."""
    cores = sorted(os.sched_getaffinity(0))
    rank = int(os.environ.get("MLX_RANK", 0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    import mlx.core as mx
    from lmx.generation.generator import Generator
    from lmx.generation.kv_cache.prefix import PrefixCache
    from lmx.models.loader import load, load_tokenizer
    from lmx.run.distributed import join
    from mlx.utils import tree_flatten

    ranks = join()
    load_tokenizer(arguments.folder / "model")  # imports the libraries
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    loaded = load(arguments.folder / "model", group=ranks)
    weights = sum(v.nbytes for _, v in tree_flatten(loaded.model.parameters()))
    options = {"ranks": ranks, "prefix_cache": PrefixCache(0)}
    generator = Generator(loaded.model, loaded.tokenizer, **options)
    if ranks.is_first:
        _request(generator, arguments, 2)  # compiles the kernels
        timed = [
            _request(generator, arguments, 3 + number)
            for number in range(arguments.requests)
        ]
        generator.engine.close()
    else:
        generator.engine.follow()
        timed = []
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "prefill": statistics.median([prefill for prefill, _ in timed] or [0]),
        "decode": statistics.median([decode for _, decode in timed] or [0]),
        "weights": weights,
        "peak": mx.get_peak_memory(),
        "growth": 1024 * (after - before),
    }


def _request(generator, arguments: argparse.Namespace, first: int) -> tuple:
    """Prefilled and decoded tokens per second of a prompt of its own."""
    from lmx.generation.sequence import GenerationRequest

    prompt = [first + n % 100 for n in range(arguments.prompt_length)]
    generator.engine.add_request(GenerationRequest(prompt, arguments.max_tokens))
    start, times = time.perf_counter(), []
    while not generator.engine.idle:
        times += [time.perf_counter() for _ in generator.engine.step()]
    decoded = (len(times) - 1) / (times[-1] - times[0])
    return len(prompt) / (times[0] - start), decoded


def _print(runs: dict[str, list[dict]], many: str, arguments) -> None:
    print(
        f"hidden size {arguments.hidden_size}, {arguments.num_layers} blocks, "
        f"vocabulary {arguments.vocab_size}; a prompt of {arguments.prompt_length} "
        f"tokens, {arguments.max_tokens} decoded; float32, medians of "
        f"{arguments.repeats} runs"
    )
    names = "prefill", "decode", *PEAKS
    print(
        ROW.format(
            "", "prefill t/s", "decode t/s", "weights MB", "MLX peak MB", "growth MB"
        )
    )
    medians = {}
    for name, results in runs.items():
        values = [statistics.median(r[key] for r in results) for key in names]
        medians[name] = values
        rates = [f"{value:,.1f}" for value in values[:2]]
        print(
            ROW.format(name, *rates, *(f"{value / 1e6:,.1f}" for value in values[2:]))
        )
    ratios = [b / a for a, b in zip(medians[ONE], medians[many], strict=True)]
    print(ROW.format("ratio", *(f"{ratio:.2f}" for ratio in ratios)))


if __name__ == "__main__":
    main()

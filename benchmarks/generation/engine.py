"""What requests of one engine share: a system prompt, rounds of draft tokens, a model.

The checkpoints are random: a target, and a draft model that is the target with noise.
The counts do not depend on the machine. mlx-lm has no counterpart: its batches take no
draft model, and its batch generator stores no prefixes.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
import generate
from lmx import cpu

TEMPERATURES = (0.0, 0.7, 1.0)
ROW = "{:34}{:>12}{:>12}{:>12}{:>12}"


def main() -> None:
    arguments = _arguments()
    cpu.enable()
    from lmx.models.loader import load

    with tempfile.TemporaryDirectory() as folder:
        arguments.folder = Path(folder)
        generate.prepare(arguments)
        target, draft = (
            load(arguments.folder / name).model for name in ("model", "draft")
        )
        shared_prompt(target, draft, arguments)
        drafts_of_a_batch(target, draft, arguments)
        adapters_of_a_batch(arguments)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--shared", type=int, default=1000, help="tokens")
    parser.add_argument("--max-tokens", type=int, default=16, help="of a request")
    parser.add_argument("--decoded", type=int, default=200, help="with drafts")
    parser.add_argument("--num-draft-tokens", type=int, default=3)
    parser.add_argument("--noise", type=float, default=0.1)
    parser.add_argument("--adapters", type=int, default=4)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3, help="of the adapters")
    arguments = parser.parse_args()
    arguments.bits = None
    return arguments


class Counted:
    """A model that counts the tokens [B, L] of its passes."""

    def __init__(self, model):
        self.model, self.positions, self.passes = model, 0, 0

    def __getattr__(self, name: str):
        return getattr(self.model, name)

    def __call__(self, tokens, cache=None):
        self.positions += tokens.size
        self.passes += 1
        return self.model(tokens, cache=cache)


def run(engine, requests) -> tuple[float, list[float], dict]:
    """Seconds, seconds to the first token of every request, and their tokens."""
    start, first = time.perf_counter(), {}
    tokens: dict = {request: [] for request in requests}
    for request in requests:
        engine.add_request(request)
    while not engine.idle:
        for output in engine.step():
            first.setdefault(output.request, time.perf_counter() - start)
            tokens[output.request].append(output.token)
    return time.perf_counter() - start, list(first.values()), tokens


def shared_prompt(target, draft, arguments: argparse.Namespace) -> None:
    """Many requests that begin alike."""
    from lmx.generation.engine import Engine
    from lmx.generation.kv_cache.batch import batch_error
    from lmx.generation.kv_cache.prefix import PrefixCache
    from lmx.generation.sequence import GenerationRequest
    from lmx.generation.speculative.draft_length import DraftLengthController
    from lmx.generation.speculative.draft_model import draft_model_proposer

    rng = random.Random(0)

    def some(count: int) -> list[int]:
        return [rng.randrange(3, arguments.vocab_size) for _ in range(count)]

    system = some(arguments.shared)
    prompts = [system + some(rng.randrange(8, 25)) for _ in range(arguments.requests)]
    print(
        f"{arguments.requests} requests with one system prompt of {arguments.shared:,} "
        f"tokens and 8 to 24 of their own, {arguments.max_tokens} decoded, 16 at once"
    )
    print(ROW.format("", "prefilled", "passes", "TTFT p50 s", "seconds"))
    texts = []
    for name, has_prefixes, has_draft in (
        ("without a prefix cache", False, False),
        ("prefix cache", True, False),
        ("prefix cache, draft model", True, True),
    ):
        model = Counted(target)
        batch_error(model)  # kept with the model
        engine = Engine(
            model,
            max_batch_size=16,
            prefix_cache=PrefixCache() if has_prefixes else None,
            make_proposer=draft_model_proposer(draft) if has_draft else None,
            draft_length=DraftLengthController(fixed=arguments.num_draft_tokens),
        )
        requests = [GenerationRequest(p, arguments.max_tokens) for p in prompts]
        prefill, counted = engine._prefill, [0, 0]

        def counting(prompts, prefill=prefill, counted=counted, model=model):
            before = model.positions, model.passes
            prefill(prompts)
            counted[0] += model.positions - before[0]
            counted[1] += model.passes - before[1]

        engine._prefill = counting
        seconds, first, tokens = run(engine, requests)
        texts.append([*tokens.values()])
        times = statistics.median(first), seconds
        cells = [f"{n:,}" for n in counted] + [f"{time:.1f}" for time in times]
        print(ROW.format(name, *cells))
    same = sum(a == b == c for a, b, c in zip(*texts, strict=True))
    print(f"{same} of {arguments.requests} requests have the same tokens\n")


def drafts_of_a_batch(target, draft, arguments: argparse.Namespace) -> None:
    """Four requests with and without a draft model."""
    from lmx.generation.engine import Engine
    from lmx.generation.sampling import Sampling
    from lmx.generation.sequence import GenerationRequest
    from lmx.generation.speculative.draft_length import DraftLengthController
    from lmx.generation.speculative.draft_model import draft_model_proposer

    rng = random.Random(1)
    prompts = [
        [rng.randrange(3, arguments.vocab_size) for _ in range(16)] for _ in range(4)
    ]
    print(
        f"4 requests of {arguments.decoded} tokens, {arguments.num_draft_tokens} draft "
        "tokens at most; tokens per target pass are those of one request"
    )
    print(ROW.format("", "plain", "with drafts", "per pass", "").rstrip())
    for temperature in TEMPERATURES:
        rates, texts = [], []
        for make_proposer in (None, draft_model_proposer(draft)):
            engine = Engine(
                target,
                make_proposer=make_proposer,
                draft_length=DraftLengthController(fixed=arguments.num_draft_tokens),
            )
            for count in (4, arguments.decoded):
                requests = [
                    GenerationRequest(prompt, count, Sampling(temperature, seed=seed))
                    for seed, prompt in enumerate(prompts)
                ]
                seconds, _, tokens = run(engine, requests)
            rates.append(4 * arguments.decoded / seconds)
            texts.append([*tokens.values()])
        cells = [f"{rate:,.0f} /s" for rate in rates]
        same = sum(a == b for a, b in zip(*texts, strict=True))
        name = f"temperature {temperature}, {same} of 4 the same"
        print(
            ROW.format(name, *cells, f"{engine.stats.accepted_length:.2f}", "").rstrip()
        )


def adapters_of_a_batch(arguments: argparse.Namespace) -> None:
    """Two requests for every adapter: together, and one adapter after the other."""
    from lmx.generation.engine import Engine
    from lmx.generation.sequence import GenerationRequest
    from lmx.models.loader import load

    def model():
        return load(arguments.folder / "model").model

    engine = Engine(model())
    names = [f"adapter {number}" for number in range(arguments.adapters)]
    for seed, name in enumerate(names):
        engine.adapters.add(name, _with_adapter(model(), arguments, seed))
    rng = random.Random(2)
    prompts = [
        [rng.randrange(3, arguments.vocab_size) for _ in range(16)]
        for _ in range(2 * len(names))
    ]

    def requests(adapters: list, count: int = arguments.decoded) -> list:
        pairs = zip(prompts, 2 * adapters, strict=False)
        return [GenerationRequest(p, count, adapter=name) for p, name in pairs]

    together, base = requests(names), requests([None] * len(names))
    alone = [r for name in names for r in [[q for q in together if q.adapter == name]]]
    runs = {"base": [base], "adapters together": [together], "one by one": alone}
    run(engine, requests(names, 4))
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    texts: dict[str, dict] = {}
    for _ in range(arguments.repeats):
        for name, groups in runs.items():
            done = [run(engine, group) for group in groups]
            seconds[name].append(sum(each[0] for each in done))
            texts[name] = {r: t for *_, tokens in done for r, t in tokens.items()}
    same = sum(
        texts["one by one"][r] == t for r, t in texts["adapters together"].items()
    )
    print(
        f"\n{len(together)} requests of {arguments.decoded} tokens, "
        f"{len(names)} adapters of rank {arguments.rank}; {same} of {len(together)} "
        "have the same tokens together and alone"
    )
    for name, times in seconds.items():
        rate = len(together) * arguments.decoded / statistics.median(times)
        print(ROW.format(name, f"{rate:,.0f} /s", "", "", "").rstrip())


def _with_adapter(model, arguments: argparse.Namespace, seed: int):
    """The model with a random adapter on all linear layers of its blocks."""
    import mlx.core as mx
    from lmx.config.lora import LoRAConfig
    from lmx.models.lora import lora_model

    lora_model.attach(model, LoRAConfig(rank=arguments.rank), seed=seed)
    layers = lora_model.adapted_layers(model).values()
    for layer, key in zip(
        layers, mx.random.split(mx.random.key(seed), 4096), strict=False
    ):
        layer.lora_b = 0.1 * mx.random.normal(layer.lora_b.shape, key=key)
    return model


if __name__ == "__main__":
    main()

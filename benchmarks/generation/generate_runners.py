"""The generators that `generate.py` compares: lmx and mlx-lm, with token ids."""

import time
from collections.abc import Iterator
from pathlib import Path


class Lmx:
    """The engine of `lmx generate`."""

    def __init__(self, folder: Path):
        from lmx import cpu

        self.blas = _name(cpu.enable().blas)
        from lmx.models.loader import load

        self._folder = folder
        self._model = load(folder / "model").model

    def generate(self, prompt: list[int], count: int) -> tuple[float, float, list[int]]:
        """Seconds to the first and to the last token, and the tokens."""
        from lmx.generation.sequence import GenerationRequest

        start = time.perf_counter()
        steps = self._outputs([GenerationRequest(prompt, count)])
        return _timed((output.token for output in steps), start)

    def generate_batch(
        self, prompts: list[list[int]], count: int
    ) -> tuple[float, float, list]:
        """Seconds of the batch, its largest KV cache in GB, and all tokens."""
        from lmx.generation.engine import Engine
        from lmx.generation.sequence import GenerationRequest

        start, largest = time.perf_counter(), 0
        requests = [GenerationRequest(prompt, count) for prompt in prompts]
        tokens: dict = {request: [] for request in requests}
        engine = Engine(self._model)
        for output in self._outputs(requests, engine):
            tokens[output.request].append(output.token)
            largest = max(largest, engine.nbytes)
        return time.perf_counter() - start, largest / 1e9, list(tokens.values())

    def _outputs(self, requests: list, engine=None) -> Iterator:
        """The outputs of an engine; None = of a new one."""
        from lmx.generation.engine import Engine

        engine = engine or Engine(self._model)
        for request in requests:
            engine.add_request(request)
        while not engine.idle:
            yield from engine.step()

    def speculate(self, prompt: list[int], count: int, num_draft_tokens: int) -> dict:
        """Tokens per forward pass of the target, and the overlap of the models."""
        import mlx.core as mx
        from lmx.generation.engine import Engine
        from lmx.generation.sampling import Sampling
        from lmx.generation.sequence import GenerationRequest
        from lmx.generation.speculative.draft_length import DraftLengthController
        from lmx.generation.speculative.draft_model import draft_model_proposer
        from lmx.models.loader import load

        draft = load(self._folder / "draft").model
        engine = Engine(
            self._model,
            make_proposer=draft_model_proposer(draft),
            draft_length=DraftLengthController(fixed=num_draft_tokens),
        )
        request = GenerationRequest(prompt, count, Sampling(temperature=1.0))
        output = [output.token for output in self._outputs([request], engine)]
        text = mx.array([[*prompt, *output]])
        p, q = (mx.softmax(m(text)[0, 16:], axis=-1) for m in (self._model, draft))
        return {
            "tokens_per_pass": engine.stats.accepted_length,
            "sum_min": mx.minimum(p, q).sum(axis=-1).mean().item(),
            "sum_product": (p * q).sum(axis=-1).mean().item(),
        }


class MlxLm:
    """mlx-lm's own generators."""

    def __init__(self, folder: Path):
        from lmx.cpu import blas

        self.blas = _name(blas.use_openblas())
        from mlx_lm import load

        self._folder = folder
        self._model = load(str(folder / "model"))[0]

    def generate(self, prompt: list[int], count: int) -> tuple[float, float, list[int]]:
        """Seconds to the first and to the last token, and the tokens."""
        import mlx.core as mx
        from mlx_lm.generate import generate_step

        start = time.perf_counter()
        steps = generate_step(mx.array(prompt), self._model, max_tokens=count)
        return _timed((int(token) for token, _ in steps), start)

    def generate_batch(
        self, prompts: list[list[int]], count: int
    ) -> tuple[float, float, list]:
        """Seconds of the batch, its largest KV cache in GB, and all tokens."""
        from mlx_lm.generate import BatchGenerator

        start, largest = time.perf_counter(), 0
        generator = BatchGenerator(self._model, max_tokens=count)
        outputs: dict[int, list[int]] = {n: [] for n in generator.insert(prompts)}
        while responses := generator.next_generated():
            for response in responses:
                outputs[response.uid].append(response.token)
            caches = generator._generation_batch.prompt_cache
            largest = max(largest, sum(cache.nbytes for cache in caches))
        return time.perf_counter() - start, largest / 1e9, list(outputs.values())

    def speculate(self, prompt: list[int], count: int, num_draft_tokens: int) -> dict:
        """Tokens per forward pass of the target: each pass samples one token."""
        import mlx.core as mx
        from mlx_lm import load
        from mlx_lm.generate import speculative_generate_step
        from mlx_lm.sample_utils import make_sampler

        mx.random.seed(0)
        draft = load(str(self._folder / "draft"))[0]
        steps = speculative_generate_step(
            mx.array(prompt),
            self._model,
            draft,
            num_draft_tokens=num_draft_tokens,
            max_tokens=count,
            sampler=make_sampler(temp=1.0),
        )
        from_target = [not from_draft for *_, from_draft in steps]
        return {"tokens_per_pass": len(from_target) / sum(from_target)}


def _timed(tokens, start: float) -> tuple[float, float, list[int]]:
    output = [next(tokens)]
    first = time.perf_counter() - start
    output += tokens
    return first, time.perf_counter() - start, output


def _name(blas) -> str:
    return blas.name + (f", threads: {blas.threads}" if blas.threads else "")


LIBRARIES = {"lmx": Lmx, "mlx-lm": MlxLm}

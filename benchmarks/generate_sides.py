"""What `generate.py` compares: lmx and mlx-lm, below the text."""

import time
from pathlib import Path


class Lmx:
    """What `lmx generate` runs."""

    def __init__(self, folder: Path):
        from lmx import cpu

        self.blas = _name(cpu.enable().blas)
        from lmx.models.loader import load

        self._folder = folder
        self._model = load(folder / "model").model

    def alone(self, prompt: list[int], count: int) -> tuple[float, float, list[int]]:
        """Seconds to the first token and to the last, and the tokens."""
        from lmx.generation.decode_loop import BatchSampler, decode
        from lmx.generation.engine import GREEDY
        from lmx.generation.kv_cache import CacheState

        start = time.perf_counter()
        chooser = BatchSampler(GREEDY, [prompt])
        steps = decode(
            CacheState(self._model), [prompt], count, chooser, prefill_step_size=512
        )
        return _timed((tokens.item() for tokens, _ in steps), start)

    def batch(self, prompts: list[list[int]], count: int) -> tuple[float, list]:
        """Seconds of the whole batch, and the answers."""
        from lmx.generation.batching import BatchGenerator, GenerationRequest

        start = time.perf_counter()
        batcher = BatchGenerator(self._model)
        requests = [GenerationRequest(prompt, count) for prompt in prompts]
        answers: dict = {request: [] for request in requests}
        for request in requests:
            batcher.submit(request)
        while not batcher.idle:
            for request, token, _ in batcher.step():
                answers[request].append(token)
        return time.perf_counter() - start, list(answers.values())

    def speculate(self, prompt: list[int], count: int, guesses: int) -> dict:
        """Tokens for every forward pass of the model, and their closed forms."""
        import mlx.core as mx
        from lmx.generation.kv_cache import CacheState
        from lmx.generation.sampling import Sampling
        from lmx.generation.speculative.decoder import SpeculativeDecoder
        from lmx.generation.speculative.draft_length import DraftLengthController
        from lmx.generation.speculative.draft_model import DraftModelProposer
        from lmx.models.loader import load

        draft = load(self._folder / "draft").model
        speculator = SpeculativeDecoder(
            CacheState(self._model),
            DraftModelProposer(draft),
            draft_length=DraftLengthController(max_draft_tokens=guesses, fixed=guesses),
            sampling=Sampling(temperature=1.0),
        )
        said = list(speculator.decode(prompt, count))
        text = mx.array([[*prompt, *said]])
        p, q = (mx.softmax(m(text)[0, 16:], axis=-1) for m in (self._model, draft))
        return {
            "tokens": speculator.stats.accepted_length,
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

    def alone(self, prompt: list[int], count: int) -> tuple[float, float, list[int]]:
        """Seconds to the first token and to the last, and the tokens."""
        import mlx.core as mx
        from mlx_lm.generate import generate_step

        start = time.perf_counter()
        steps = generate_step(mx.array(prompt), self._model, max_tokens=count)
        return _timed((int(token) for token, _ in steps), start)

    def batch(self, prompts: list[list[int]], count: int) -> tuple[float, list]:
        """Seconds of the whole batch, and the answers."""
        from mlx_lm.generate import BatchGenerator

        start = time.perf_counter()
        generator = BatchGenerator(self._model, max_tokens=count)
        answers: dict[int, list[int]] = {n: [] for n in generator.insert(prompts)}
        while found := generator.next_generated():
            for response in found:
                answers[response.uid].append(response.token)
        return time.perf_counter() - start, list(answers.values())

    def speculate(self, prompt: list[int], count: int, guesses: int) -> dict:
        """Tokens for every forward pass of the model: each has one of its own."""
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
            num_draft_tokens=guesses,
            max_tokens=count,
            sampler=make_sampler(temp=1.0),
        )
        own = [not from_draft for *_, from_draft in steps]
        return {"num_tokens": len(own) / sum(own)}


def _timed(tokens, start: float) -> tuple[float, float, list[int]]:
    said = [next(tokens)]
    first = time.perf_counter() - start
    said += tokens
    return first, time.perf_counter() - start, said


def _name(blas) -> str:
    return blas.name + (f", threads: {blas.threads}" if blas.threads else "")


SIDES = {"lmx": Lmx, "mlx-lm": MlxLm}

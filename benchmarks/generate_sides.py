"""What `generate.py` compares: lmx and mlx-lm, below the text."""

import time
from pathlib import Path


class Lmx:
    """What `lmx generate` runs."""

    def __init__(self, folder: Path):
        from toolkit import allocator, blas

        allocator.keep()
        self.blas = _name(blas.use())
        from toolkit.model.load import load

        self._folder = folder
        self._model = load(folder / "model").model

    def alone(self, prompt: list[int], count: int) -> tuple[float, float, list[int]]:
        """Seconds to the first token and to the last, and the tokens."""
        from toolkit.generate.engine import GREEDY
        from toolkit.generate.session import Session
        from toolkit.generate.steps import Chooser, decode

        start = time.perf_counter()
        chooser = Chooser(GREEDY, [prompt])
        steps = decode(Session(self._model), [prompt], count, chooser, prefill_step=512)
        return _timed((tokens.item() for tokens, _ in steps), start)

    def batch(self, prompts: list[list[int]], count: int) -> tuple[float, list]:
        """Seconds of the whole batch, and the answers."""
        from toolkit.generate.batching import Batcher, Request

        start = time.perf_counter()
        batcher = Batcher(self._model)
        requests = [Request(prompt, count) for prompt in prompts]
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

        from toolkit.generate.controller import Controller
        from toolkit.generate.proposers.draft import Draft
        from toolkit.generate.sampling import Sampling
        from toolkit.generate.session import Session
        from toolkit.generate.speculate import Speculator
        from toolkit.model.load import load

        draft = load(self._folder / "draft").model
        speculator = Speculator(
            Session(self._model),
            Draft(draft),
            controller=Controller(longest=guesses, fixed=guesses),
            sampling=Sampling(temperature=1.0),
        )
        said = list(speculator.decode(prompt, count))
        text = mx.array([[*prompt, *said]])
        p, q = (mx.softmax(m(text)[0, 16:], axis=-1) for m in (self._model, draft))
        return {
            "tokens": speculator.report.tokens_per_round,
            "sum_min": mx.minimum(p, q).sum(axis=-1).mean().item(),
            "sum_product": (p * q).sum(axis=-1).mean().item(),
        }


class MlxLm:
    """mlx-lm's own generators."""

    def __init__(self, folder: Path):
        from toolkit import blas

        self.blas = _name(blas.use())
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
        return {"tokens": len(own) / sum(own)}


def _timed(tokens, start: float) -> tuple[float, float, list[int]]:
    said = [next(tokens)]
    first = time.perf_counter() - start
    said += tokens
    return first, time.perf_counter() - start, said


def _name(blas) -> str:
    return blas.name + (f", threads: {blas.threads}" if blas.threads else "")


SIDES = {"lmx": Lmx, "mlx-lm": MlxLm}

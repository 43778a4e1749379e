"""Requests, and the tokens that an engine or a generator gives them."""

import mlx.core as mx
import numpy as np
from lmx.generation.engine import Engine
from lmx.generation.generator import Generator
from lmx.generation.kv_cache.batch import batch_error
from lmx.generation.sequence import GenerationRequest
from lmx.generation.speculative.draft_length import DraftLengthController
from mlx.utils import tree_map
from test_kv_cache import tiny as family_model
from tiny_families import VOCABULARY, WINDOW
from tiny_generators import byte_tokenizer

LONG = 5 * WINDOW
PROMPT = [5, 9, 11, 5, 9, 2, 7, 5, 9]


def noisy(model, scale, seed=1):
    """The model with noise on its weights."""
    mx.random.seed(seed)

    def changed(weight):
        return weight + scale * mx.random.normal(weight.shape).astype(weight.dtype)

    model.update(tree_map(changed, model.parameters()))
    mx.eval(model.parameters())
    return model


def sharpened(family, seed=0, **changes):
    """Random weights, scaled up so that the next token varies."""
    return noisy(family_model(family, **changes), 0.25, seed + 1)


def tokens_of(generator, prompt=PROMPT, **options):
    options = {"max_tokens": LONG, "stop_tokens": ()} | options
    return generator.generate(prompt, **options).tokens


def speculative(model, make_proposer, length=None, **options):
    """A generator with draft tokens; None = of adaptive number."""
    return Generator(
        model,
        byte_tokenizer(),
        make_proposer=make_proposer,
        draft_length=DraftLengthController(max_draft_tokens=8, fixed=length),
        **options,
    )


class Recorder:
    """A model that records the shapes of its inputs."""

    def __init__(self, model):
        self.model, self.shapes = model, []
        batch_error(self)  # kept with the model
        self.shapes.clear()

    def __getattr__(self, name):
        return getattr(self.model, name)

    def __getitem__(self, name):
        return self.model[name]

    def __call__(self, tokens, cache=None):
        if cache is not None:
            self.shapes.append(tokens.shape)
        return self.model(tokens, cache=cache)


def some_requests(count, settings, vocabulary=VOCABULARY, seed=0, longest=60):
    draw = np.random.default_rng(seed)
    return [
        GenerationRequest(
            draw.integers(1, vocabulary, int(draw.integers(1, longest))).tolist(),
            max_tokens=int(draw.integers(1, 24)),
            sampling=settings[int(draw.integers(0, len(settings)))],
            stop_tokens=frozenset(draw.integers(0, vocabulary, 5).tolist()),
        )
        for _ in range(count)
    ]


def run(engine, requests, *, seed=None, aborted=()):
    """Tokens by request. New requests come at random steps, by default three at each.

    Args:
        aborted: indices of requests that are dropped at random steps.
    """
    draw = np.random.default_rng(seed or 0)
    tokens = {request: [] for request in requests}
    waiting, doomed = list(requests), [requests[index] for index in aborted]
    while waiting or not engine.idle:
        for _ in range(3 if seed is None else int(draw.integers(0, 4))):
            if waiting:
                engine.add_request(waiting.pop(0))
        for output in engine.step():
            assert not output.error, output.error
            tokens[output.request].append(output.token)
        for request in doomed:
            if draw.random() < 0.2:
                engine.abort(request)
    return [tokens[request] for request in requests]


def alone(model, requests, **options):
    """Tokens by request, each in an engine of its own without drafts."""
    engines = [Engine(model, prefill_step_size=16, **options) for _ in requests]
    return [run(e, [r])[0] for e, r in zip(engines, requests, strict=True)]

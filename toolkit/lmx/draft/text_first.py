"""Text that a draft trains on before the target's completions.

A completion needs a forward pass of the target per token, a text one for all its
tokens. So a draft sees many times more text than completions in the same time.
"""

from collections.abc import Iterator
from hashlib import sha256
from typing import Protocol

import numpy as np

from ..data.batching import Batch, ExampleDataset
from ..data.tokenization import Example


class Batches(Protocol):
    """The batches of a training; see `Trainer`."""

    digest: str

    def __call__(self, step: int) -> Batch: ...


class TextFirst:
    """Batches of text in the first steps, then those of completions.

    Args:
        num_text_steps: steps that train on text.
    """

    def __init__(self, text: Batches, num_text_steps: int, completions: Batches):
        facts = [text.digest, num_text_steps, completions.digest]
        self.digest = sha256(repr(facts).encode()).hexdigest()
        self._text, self._completions = text, completions
        self._num_text_steps = num_text_steps

    def __call__(self, step: int) -> Batch:
        """The batch of a step, from 0."""
        if step < self._num_text_steps:
            return self._text(step)
        return self._completions(step - self._num_text_steps)


def choose_text(
    examples: ExampleDataset, max_tokens: int, *, seed: int
) -> Iterator[Example]:
    """Examples in random order, at most so many tokens."""
    left = max_tokens
    for index in np.random.default_rng(seed).permutation(len(examples)):
        example = examples[index]
        left -= len(example.tokens)
        if left < 0:
            return
        yield example

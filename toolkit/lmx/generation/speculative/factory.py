"""Several proposers, the cheapest first."""

from collections.abc import Callable, Sequence
from functools import partial

import mlx.core as mx

from ...data.tokenizer_files import require_same_tokenizer
from ...models.loader import LoadedModel
from .draft_length import DraftLengthController
from .draft_model import DraftModelProposer
from .layer_skip import choose_skipped_layers, skip_layers
from .prompt_lookup import NGramIndex, PromptLookupProposer
from .proposer import NO_DRAFT, DraftTokens, Proposer, TargetSampler


class FallbackProposer:
    """Asks one proposer after the other until one has a guess."""

    def __init__(self, *proposers: Proposer):
        self._proposers = proposers

    def propose(
        self, context: Sequence[int], count: int, choice: TargetSampler
    ) -> DraftTokens:
        """The first guess that is not empty."""
        for proposer in self._proposers:
            if len(proposal := proposer.propose(context, count, choice)):
                return proposal
        return NO_DRAFT


# --- from generate.drafting: `--draft-model`: who guesses, by name, and whether it speaks the model's tokens.


PROMPT_LOOKUP, LAYER_SKIP = "prompt-lookup", "layer-skip"
TRIED = 128
"""Tokens of the prompt that `layer-skip` is chosen on."""


def proposer_factory(
    name: str,
    loaded: LoadedModel,
    sample: Sequence[int],
    *,
    load_draft: Callable[[str], LoadedModel],
) -> Callable[[], Proposer] | None:
    """Makes a proposer for every answer; None = nothing pays on this machine.

    Args:
        name: `prompt-lookup`, `layer-skip`, a model folder or Hub id, or `prompt-lookup+` one of
            these.
        sample: tokens of the kind the model will read.
        load_draft: loads the model of a folder or Hub id.

    Raises:
        UserError: no such model, or it has other tokens.
    """
    first, plus, rest = name.partition("+")
    # Answers to later prompts are guessed from earlier ones, too.
    lookup = partial(PromptLookupProposer, NGramIndex())
    if name == PROMPT_LOOKUP:
        return lookup
    if first == PROMPT_LOOKUP and plus:
        second = proposer_factory(rest, loaded, sample, load_draft=load_draft)
        return (lambda: FallbackProposer(lookup(), second())) if second else lookup
    if name == LAYER_SKIP:
        skipped = choose_skipped_layers(
            loaded.model, mx.array([sample[:TRIED]], mx.int32)
        )
        twin = skip_layers(loaded.model, skipped)
        return (lambda: DraftModelProposer(twin)) if skipped else None
    draft = load_draft(name)
    require_same_tokenizer(loaded.tokenizer, draft.tokenizer, role="draft", place=name)
    return lambda: DraftModelProposer(draft.model)


def draft_length_controller(guesses: int | None) -> DraftLengthController:
    """One that always asks for so many guesses; None = as many as pay."""
    return (
        DraftLengthController(max_draft_tokens=guesses, fixed=guesses)
        if guesses
        else DraftLengthController()
    )

"""Proposers by name, and the fallback proposer that combines them."""

from collections.abc import Callable, Sequence

import mlx.core as mx

from ...data.tokenizer_files import require_same_tokenizer
from ...models.drafters.base import Drafter
from ...models.drafters.dflash import DFlashDrafter
from ...models.drafters.eagle3 import Eagle3Drafter
from ...models.drafters.io import is_drafter, load_drafter
from ...models.drafters.mtp import MTPHead, is_split_head
from ...models.loader import LoadedModel
from ...models.pipeline_parallel import require_all_layers
from ..kv_cache.sequence import CacheState
from ..sampler import Sampler
from .dflash import DFlashProposer
from .draft_model import draft_model_proposer
from .eagle3 import Eagle3Proposer
from .mtp import MTPProposer
from .prompt_lookup import NGramIndex, PromptLookupProposer
from .proposer import NO_DRAFT, MakeProposer, Proposer

PROMPT_LOOKUP, MTP = "prompt-lookup", "mtp"
FIRST_MIN_PROBABILITY = 0.6
"""Prompt lookup drafts before another proposer with at least this probability of the
first token. Such tokens are accepted as often as those after three equal ones."""


class FallbackProposer(Proposer):
    """Uses the first of several proposers that has draft tokens."""

    def __init__(self, *proposers: Proposer):
        self._proposers = proposers

    def propose(
        self, context: Sequence[int], num_draft_tokens: int, sampler: Sampler
    ) -> mx.array:
        """The first non-empty proposal."""
        for proposer in self._proposers:
            draft = proposer.propose(context, num_draft_tokens, sampler)
            if len(draft):
                return draft
        return NO_DRAFT

    def close(self) -> None:
        """Free what the request needed."""
        for proposer in self._proposers:
            proposer.close()


PROPOSERS: dict[str, type] = {
    Eagle3Drafter.architecture: Eagle3Proposer,
    DFlashDrafter.architecture: DFlashProposer,
}


def drafter_proposer(drafter: Drafter, cache: CacheState) -> Proposer:
    """The proposer of a drafter on hidden states for the completion in this cache."""
    return PROPOSERS[drafter.architecture](drafter, cache)


def proposer_factory(
    name: str, target: LoadedModel, *, load_draft: Callable[[str], LoadedModel]
) -> MakeProposer:
    """A function that makes a proposer for every completion.

    Args:
        name: `prompt-lookup`, `mtp`, the folder of a drafter on hidden states or of an
            MTP head alone, a model folder or Hub id, or `prompt-lookup+` followed by
            one of these.
        load_draft: loads the model of a folder or Hub id.

    Raises:
        UserError: the model does not exist or has a different tokenizer, the drafter
            was made for another target, or the target has no MTP head.
    """
    first, plus, second_name = name.partition("+")
    # One index for all completions: later ones also look up in earlier ones.
    index = NGramIndex()

    if name == PROMPT_LOOKUP:
        return lambda _: PromptLookupProposer(index)
    if first == PROMPT_LOOKUP and plus:
        second = proposer_factory(second_name, target, load_draft=load_draft)
        return lambda cache: FallbackProposer(
            PromptLookupProposer(index, min_probability=FIRST_MIN_PROBABILITY),
            second(cache),
        )
    if name == MTP or is_split_head(name):
        require_all_layers(target.model, place=name)
        head = MTPHead.load(target.path if name == MTP else name, target)
        return lambda cache: MTPProposer(head, cache)
    if is_drafter(name):
        require_all_layers(target.model, place=name)
        drafter = load_drafter(name, target.model)
        return lambda cache: drafter_proposer(drafter, cache)
    draft = load_draft(name)
    require_same_tokenizer(target.tokenizer, draft.tokenizer, place=name)
    return draft_model_proposer(draft.model)

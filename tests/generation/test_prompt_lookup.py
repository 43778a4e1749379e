"""What lookup guesses, in the request itself and in earlier ones."""

import pytest
from lmx.generation.speculative.prompt_lookup import NGramIndex, PromptLookupProposer


def guess(lookup, context, count=3):
    return lookup.propose(context, count, None).tokens.tolist()


def test_prompt_lookup_drafts_earlier_continuation():
    assert guess(PromptLookupProposer(), [1, 2, 3, 4, 5, 6, 1, 2, 3]) == [4, 5, 6]
    assert guess(PromptLookupProposer(), [1, 2, 3, 4, 5, 6, 1, 2, 9]) == []
    assert guess(PromptLookupProposer(), [1, 2]) == []


def test_prompt_lookup_prefers_longest_then_latest_match():
    longer = [7, 1, 2, 3, 40, 8, 1, 2, 3, 50, 7, 1, 2, 3]
    assert guess(PromptLookupProposer(), longer, 1) == [40]
    last = [1, 2, 3, 40, 1, 2, 3, 50, 1, 2, 3]
    assert guess(PromptLookupProposer(), last, 1) == [50]


def test_ngram_index_is_shared_between_requests():
    memory = NGramIndex()
    assert guess(PromptLookupProposer(memory), [1, 2, 3, 4, 5]) == []
    assert guess(PromptLookupProposer(memory), [9, 1, 2, 3]) == [4, 5]
    assert guess(PromptLookupProposer(), [9, 1, 2, 3]) == []


def test_ngram_index_extends_texts_independently():
    memory = NGramIndex()
    one, two = PromptLookupProposer(memory), PromptLookupProposer(memory)
    guess(one, [1, 2, 3])
    guess(two, [5, 6, 7])
    guess(one, [1, 2, 3, 4])
    assert guess(two, [5, 6, 7, 1, 2, 3]) == [4]


def test_ngram_index_removes_oldest_text():
    memory = NGramIndex(max_tokens=13)
    first = PromptLookupProposer(memory)
    guess(first, [1, 2, 3, 4, 5])
    guess(PromptLookupProposer(memory), [11, 12, 13, 14, 15])
    guess(PromptLookupProposer(memory), [21, 22, 23, 24, 25])
    assert guess(PromptLookupProposer(memory), [1, 2, 3]) == []
    assert guess(PromptLookupProposer(memory), [21, 22, 23]) == [24, 25]
    assert not any(run[0] < 10 for run in memory._positions)
    # What is forgotten may go on asking.
    assert guess(first, [1, 2, 3, 4, 5, 1, 2, 3]) == []


@pytest.mark.parametrize("shortest", [1, 2, 4])
def test_ngram_index_ignores_shorter_matches(shortest):
    run = list(range(shortest))
    assert guess(PromptLookupProposer(NGramIndex(shortest)), [*run, 77, *run], 1) == [
        77
    ]
    assert (
        guess(PromptLookupProposer(NGramIndex(shortest + 1)), [*run, 77, *run], 1) == []
    )

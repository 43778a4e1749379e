"""Prompt lookup in the current request and in earlier ones."""

import pytest
from lmx.generation.speculative.prompt_lookup import NGramIndex, PromptLookupProposer


def propose(lookup, context, count=3):
    return lookup.propose(context, count, None).tolist()


def test_prompt_lookup_drafts_earlier_continuation():
    assert propose(PromptLookupProposer(), [1, 2, 3, 4, 5, 6, 1, 2, 3]) == [4, 5, 6]
    assert propose(PromptLookupProposer(), [1, 2, 3, 4, 5, 6, 1, 2, 9]) == []
    assert propose(PromptLookupProposer(), [1, 2]) == []


def test_prompt_lookup_prefers_longest_then_latest_match():
    longer = [7, 1, 2, 3, 40, 8, 1, 2, 3, 50, 7, 1, 2, 3]
    assert propose(PromptLookupProposer(), longer, 1) == [40]
    latest = [1, 2, 3, 40, 1, 2, 3, 50, 1, 2, 3]
    assert propose(PromptLookupProposer(), latest, 1) == [50]


def test_ngram_index_is_shared_between_requests():
    index = NGramIndex()
    assert propose(PromptLookupProposer(index), [1, 2, 3, 4, 5]) == []
    assert propose(PromptLookupProposer(index), [9, 1, 2, 3]) == [4, 5]
    assert propose(PromptLookupProposer(), [9, 1, 2, 3]) == []


def test_ngram_index_extends_texts_independently():
    index = NGramIndex()
    first, second = PromptLookupProposer(index), PromptLookupProposer(index)
    propose(first, [1, 2, 3])
    propose(second, [5, 6, 7])
    propose(first, [1, 2, 3, 4])
    assert propose(second, [5, 6, 7, 1, 2, 3]) == [4]


def test_ngram_index_removes_oldest_text():
    index = NGramIndex(max_tokens=13)
    first = PromptLookupProposer(index)
    propose(first, [1, 2, 3, 4, 5])
    propose(PromptLookupProposer(index), [11, 12, 13, 14, 15])
    propose(PromptLookupProposer(index), [21, 22, 23, 24, 25])
    assert propose(PromptLookupProposer(index), [1, 2, 3]) == []
    assert propose(PromptLookupProposer(index), [21, 22, 23]) == [24, 25]
    assert not any(ngram[0] < 10 for ngram in index._positions)
    # A proposer whose text was removed still works.
    assert propose(first, [1, 2, 3, 4, 5, 1, 2, 3]) == []


@pytest.mark.parametrize("ngram_size", [1, 2, 4])
def test_ngram_index_ignores_shorter_matches(ngram_size):
    ngram = list(range(ngram_size))
    assert propose(
        PromptLookupProposer(NGramIndex(ngram_size)), [*ngram, 77, *ngram], 1
    ) == [77]
    assert (
        propose(
            PromptLookupProposer(NGramIndex(ngram_size + 1)), [*ngram, 77, *ngram], 1
        )
        == []
    )

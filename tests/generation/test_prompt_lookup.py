"""Prompt lookup in the current request and in earlier ones."""

import pytest
from lmx.generation.speculative import prompt_lookup
from lmx.generation.speculative.prompt_lookup import NGramIndex, PromptLookupProposer

# After equal texts: 40 and 41 twice, and 80 after three other tokens.
LONG = [*range(1, 17)]
ENDS = ((40, 41, 90), (40, 41, 91), (50, 80, 92), (60, 80, 93), (70, 80, 94))


def propose(lookup, context, count=3):
    return lookup.propose(context, count, None).tolist()


@pytest.mark.parametrize(
    ("context", "count", "draft"),
    [
        ([1, 2, 3, 4, 5, 6, 1, 2, 3], 3, [4, 5]),
        ([*range(9), *range(9)], 3, [0, 1, 2]),
        ([1, 2, 3, 4, 5, 6, 1, 2, 3], 1, [4]),
        ([1, 2, 3, 4, 5, 6, 1, 2, 9], 3, []),
        ([1, 2], 3, []),
        # One token that occurred once predicts one token, not three.
        ([9, 1, 4, 5, 6, 8, 1], 3, [4]),
        # One of four continuations is not enough.
        ([1, 4, 1, 5, 1, 6, 1, 7, 1], 3, []),
        # The most frequent one, and among equally frequent ones the latest.
        ([7, 1, 2, 40, 7, 1, 2, 50, 7, 1, 2, 40, 7, 1, 2, 60, 7, 1, 2], 1, [40]),
        ([1, 2, 3, 40, 1, 2, 3, 50, 1, 2, 3], 1, [50]),
        # What follows 40, and not what is more frequent after all matches.
        ([token for end in ENDS for token in (*LONG, *end)] + LONG, 2, [40, 41]),
        # A longer match predicts better than two shorter ones, but not than six.
        ([7, 1, 2, 3, 40, *[8, 1, 2, 3, 50] * 2, 7, 1, 2, 3], 1, [40]),
        ([7, 1, 2, 3, 40, *[8, 1, 2, 3, 50] * 6, 7, 1, 2, 3], 1, [50]),
    ],
)
def test_draft_is_the_most_probable_continuation(context, count, draft):
    assert propose(PromptLookupProposer(), context, count) == draft


def test_ngram_index_is_shared_between_requests():
    index = NGramIndex()
    assert propose(PromptLookupProposer(index), [1, 2, 3, 4, 5]) == []
    assert propose(PromptLookupProposer(index), [9, 1, 2, 3]) == [4, 5]
    assert propose(PromptLookupProposer(), [9, 1, 2, 3]) == []


def test_own_text_is_counted_apart_from_others():
    index = NGramIndex()
    for _ in range(3):
        propose(PromptLookupProposer(index), [1, 2, 3, 4, 5, 6])
    own = [1, 2, 3, 70, 71, 72, 73, 1, 2, 3]
    # Three earlier texts are more certain than one place in this one.
    assert propose(PromptLookupProposer(index), own, 1) == [4]
    # Counted together, 4 would be as frequent as 70, and less probable than alone.
    certain = [1, 2, 3, 70, 1, 2, 3, 70, 1, 2, 3, 70, 1, 2, 3]
    assert propose(PromptLookupProposer(index), certain, 2) == [70, 1]


def test_minimum_probability_leaves_rare_continuations_to_others():
    context = [1, 2, 3, 40, 1, 2, 3, 50, 1, 2, 3]
    assert propose(PromptLookupProposer(min_probability=0.6), context, 1) == []
    certain = [1, 2, 3, 40, 1, 2, 3, 40, 1, 2, 3]
    assert propose(PromptLookupProposer(min_probability=0.6), certain, 1) == [40]


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
    assert not any(ngram[0] < 10 for ngram in index._positions)
    assert propose(PromptLookupProposer(index), [1, 2, 3]) == []
    assert propose(PromptLookupProposer(index), [21, 22, 23]) == [24, 25]
    # A proposer whose text was removed still works.
    assert propose(first, [1, 2, 3, 4, 5, 1, 2, 3]) == []


def test_memory_of_a_frequent_ngram_is_bounded():
    index, limit = NGramIndex(), 2 * prompt_lookup.MAX_MATCHES
    lookup = PromptLookupProposer(index)
    assert propose(lookup, [1, 2] * 500, 3) == [1, 2, 1]
    assert max(map(len, index._positions.values())) <= limit

"""What lookup guesses, in the request itself and in earlier ones."""

import pytest

from toolkit.generate.proposers.lookup import Lookup, Memory


def guess(lookup, context, count=3):
    return lookup.propose(context, count, None).tokens.tolist()


def test_what_followed_before_is_guessed():
    assert guess(Lookup(), [1, 2, 3, 4, 5, 6, 1, 2, 3]) == [4, 5, 6]
    assert guess(Lookup(), [1, 2, 3, 4, 5, 6, 1, 2, 9]) == []
    assert guess(Lookup(), [1, 2]) == []


def test_the_longest_run_counts_and_of_those_the_last():
    longer = [7, 1, 2, 3, 40, 8, 1, 2, 3, 50, 7, 1, 2, 3]
    assert guess(Lookup(), longer, 1) == [40]
    last = [1, 2, 3, 40, 1, 2, 3, 50, 1, 2, 3]
    assert guess(Lookup(), last, 1) == [50]


def test_earlier_requests_are_remembered():
    memory = Memory()
    assert guess(Lookup(memory), [1, 2, 3, 4, 5]) == []
    assert guess(Lookup(memory), [9, 1, 2, 3]) == [4, 5]
    assert guess(Lookup(), [9, 1, 2, 3]) == []


def test_a_text_grows_and_is_told_apart():
    memory = Memory()
    one, two = Lookup(memory), Lookup(memory)
    guess(one, [1, 2, 3])
    guess(two, [5, 6, 7])
    guess(one, [1, 2, 3, 4])
    assert guess(two, [5, 6, 7, 1, 2, 3]) == [4]


def test_the_oldest_text_is_forgotten_first_and_leaves_nothing():
    memory = Memory(limit=13)
    first = Lookup(memory)
    guess(first, [1, 2, 3, 4, 5])
    guess(Lookup(memory), [11, 12, 13, 14, 15])
    guess(Lookup(memory), [21, 22, 23, 24, 25])
    assert guess(Lookup(memory), [1, 2, 3]) == []
    assert guess(Lookup(memory), [21, 22, 23]) == [24, 25]
    assert not any(run[0] < 10 for run in memory._places)
    # What is forgotten may go on asking.
    assert guess(first, [1, 2, 3, 4, 5, 1, 2, 3]) == []


@pytest.mark.parametrize("shortest", [1, 2, 4])
def test_shorter_runs_are_no_reason(shortest):
    run = list(range(shortest))
    assert guess(Lookup(Memory(shortest)), [*run, 77, *run], 1) == [77]
    assert guess(Lookup(Memory(shortest + 1)), [*run, 77, *run], 1) == []

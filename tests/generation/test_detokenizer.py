"""Stop strings, with the text split into chunks in every possible way."""

from itertools import combinations, pairwise

import pytest
from lmx.generation.detokenizer import StopStringMatcher
from tiny_generators import scripted


def push_all(parts, stops):
    matcher, out = StopStringMatcher(stops), ""
    for part in parts:
        out += matcher.push(part)
        if matcher.matched:
            return out, True
    return out + matcher.flush(), False


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("abcabd", ["abd"], "abc"),
        ("aabaab!", ["aab!"], "aab"),
        ("no end", ["END"], "no end"),
        ("almost EN", ["END"], "almost EN"),
        ("x--y", ["--", "y"], "x"),
        ("later first", ["first", "ter"], "la"),
        ("né🎈b", ["🎈"], "né"),
    ],
)
def test_stop_string_is_found_across_chunks(text, stops, expected):
    positions = range(1, len(text))
    for count in range(len(text)):
        for cuts in combinations(positions, count):
            edges = [0, *cuts, len(text)]
            parts = [text[a:b] for a, b in pairwise(edges)]
            out, matched = push_all(parts, stops)
            assert (out, matched) == (expected, expected != text), parts


def test_stop_string_matcher_holds_back_partial_match():
    matcher = StopStringMatcher(["END"])
    assert [matcher.push(part) for part in ("xE", "N", "Ey", "EN")] == [
        "x",
        "",
        "ENEy",
        "",
    ]
    assert matcher.flush() == "EN"


def test_completion_ends_before_stop_string():
    generator, prompt = scripted("abcdefgh", ids=[257])
    result = generator.generate(prompt, max_tokens=20, stop=["de", "zz"])
    assert (result.text, result.finish_reason) == ("abc", "stop")
    unstopped = generator.generate(prompt, max_tokens=20, stop=["hz"])
    assert unstopped.text == "abcdefgh"

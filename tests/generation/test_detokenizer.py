"""Texts that end an answer, by brute force over all ways to cut it."""

from itertools import combinations, pairwise

import pytest
from lmx.generation.detokenizer import StopStringMatcher
from tiny_generators import scripted


def shown(parts, stops):
    watch, out = StopStringMatcher(stops), ""
    for part in parts:
        out += watch.push(part)
        if watch.matched:
            return out, True
    return out + watch.flush(), False


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
    places = range(1, len(text))
    for count in range(len(text)):
        for cuts in combinations(places, count):
            borders = [0, *cuts, len(text)]
            parts = [text[a:b] for a, b in pairwise(borders)]
            out, hit = shown(parts, stops)
            assert (out, hit) == (expected, expected != text), parts


def test_stop_string_matcher_holds_back_partial_match():
    watch = StopStringMatcher(["END"])
    assert [watch.push(part) for part in ("xE", "N", "Ey", "EN")] == [
        "x",
        "",
        "ENEy",
        "",
    ]
    assert watch.flush() == "EN"


def test_completion_ends_before_stop_string():
    generator, prompt = scripted("abcdefgh", ids=[257])
    answer = generator.generate(prompt, max_tokens=20, stop=["de", "zz"])
    assert (answer.text, answer.finish_reason) == ("abc", "stop")
    whole = generator.generate(prompt, max_tokens=20, stop=["hz"])
    assert whole.text == "abcdefgh"

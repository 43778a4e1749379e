"""Options and verbs of other tools get a hint."""

import pytest
from lmx.cli import main, parser


@pytest.mark.parametrize(
    ("argv", "hints"),
    [
        (
            ["train", "r", "--overwrite", "--force"],
            [
                "--overwrite is called --restart here",
                "--force is called --ignore-limits here",
            ],
        ),
        (
            ["train", "--model", "m", "--lr", "1", "--iters=5"],
            [
                "--lr is called --learning-rate here",
                "--iters is called --steps here",
            ],
        ),
        (["quantize", "--q-bits", "3"], ["--q-bits is called --bits here"]),
        (["import", "a", "b"], ["import is called convert here"]),
        (
            [
                "generate",
                "m",
                "--prompt",
                "x",
                "--temp=0",
                "--adapter=a",
                "--draft",
                "b",
            ],
            [
                "--temp is called --temperature here",
                "--adapter is called --adapter-path here",
                "--draft is called --draft-model here",
            ],
        ),
        (["generate", "m", "--max_new_tokens", "5"], ["called --max-tokens here"]),
    ],
)
def test_known_option_gets_the_name_here(argv, hints, capsys):
    with pytest.raises(SystemExit) as caught:
        main.main(argv)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert all(f"hint: {hint}" in error or hint in error for hint in hints)


@pytest.mark.parametrize("lengths", ["a,b", "32,", "0", "-1", "1.5", ""])
def test_invalid_lists_of_numbers_are_refused(lengths, capsys):
    with pytest.raises(SystemExit) as caught:
        main.main(["bench", "m", f"--prompt-lengths={lengths}"])
    assert caught.value.code == 2
    expected = f"expected numbers from 1, such as 32,512; got {lengths!r}"
    assert expected in capsys.readouterr().err


def test_unknown_option_gets_no_hint(capsys):
    with pytest.raises(SystemExit):
        main.main(["train", "recipe", "--no-such-option"])
    assert "hint" not in capsys.readouterr().err


def test_hints_name_options_that_exist():
    help_texts = [main.train_parser().format_help()]
    for verb in main.VERBS:
        arguments = parser.HintingParser(prog=verb)
        if verb != "train":
            main.add_arguments(verb, arguments)
            help_texts.append(arguments.format_help())
    known = " ".join([*help_texts, *main.VERBS])
    for name, target in parser.KNOWN.items():
        if not target.startswith(("mlx_lm", "the recipe")):
            assert all(word in known for word in target.split()), name

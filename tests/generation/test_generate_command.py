"""`lmx generate` on a folder: output streams, exit codes and errors."""

import argparse
import io
import json
import os
import re

import pytest
from lmx.cli import generate, main
from lmx.errors import WILL_NOT_FIT, UserError
from lmx.generation import scheduler as scheduler_module
from lmx.generation.generator import Generator
from lmx.generation.outputs import GenerationResponse, GenerationResult
from lmx.generation.sampling import Sampling
from lmx.run.terminal import StreamedText, printable
from tiny_generators import chatting, write_folder

DRAFT = ["--draft-model", "prompt-lookup"]


@pytest.fixture(scope="module")
def generator():
    return chatting()


@pytest.fixture(scope="module")
def run_folder(generator, tmp_path_factory):
    """A run folder with the generator's model in model/."""
    run = tmp_path_factory.mktemp("run")
    folder = run / "model"
    write_folder(generator, folder)
    return run


def lmx(*words):
    parser = argparse.ArgumentParser()
    generate.add_generate_arguments(parser)
    return generate.generate(parser.parse_args([str(word) for word in words]))


def test_generate_streams_text_and_reports_on_stderr(generator, run_folder, capsys):
    expected = generator.chat("hello", max_tokens=12)
    assert lmx(run_folder, "-p", "hello", "--max-tokens", 12) == 0
    out, err = capsys.readouterr()
    assert out == printable(expected.text) + "\n"
    assert f"{expected.prompt_tokens} prompt tokens, TTFT " in err
    assert err.count("tokens/s") == 2
    assert err.endswith(" GB\n")
    assert "\x1b" not in out + err


def test_more_tokens_than_fit_in_memory_are_refused(
    generator, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(scheduler_module, "available_memory", lambda: 10**9)
    write_folder(generator, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["max_position_embeddings"] = 10**9
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["--prompt", "hello", "--max-tokens", "90000000"]
    assert main.main(["generate", str(tmp_path), *words]) == WILL_NOT_FIT
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("the KV cache of 90,000,0")
    assert "3,906,250 tokens fit: lower max_tokens" in err


def test_generate_json_is_one_object(generator, run_folder, capsys):
    sampling = Sampling(0.8, top_p=0.9, top_k=50, min_p=0.01, seed=3)
    expected = generator.generate(
        generator.tokenizer.encode("hello"), max_tokens=9, sampling=sampling
    )
    flags = "--ignore-chat-template --json --max-tokens 9 --temperature 0.8"
    flags += " --top-p 0.9 --top-k 50 --min-p 0.01 --seed 3 --prompt hello"
    assert lmx(run_folder / "model", *flags.split()) == 0
    out, err = capsys.readouterr()
    facts = json.loads(out)
    assert (facts["text"], facts["tokens"]) == (expected.text, expected.tokens)
    assert (facts["prompt_tokens"], facts["finish_reason"]) == (5, "length")
    assert facts["ttft_ms"] > 0
    assert facts["decode_tokens_per_second"] > 0
    assert facts["peak_memory_gb"] > 0
    assert err == ""


def test_generate_reads_prompt_file_and_system_message(
    generator, run_folder, capsys, tmp_path, monkeypatch
):
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "né?"},
    ]
    expected = printable(generator.chat(messages, max_tokens=5).text) + "\n"
    options = ["--system", "be brief", "--max-tokens", 5, "--prompt-file"]
    file = tmp_path / "prompt.txt"
    file.write_text("né?", encoding="utf-8")
    lmx(run_folder, *options, file)
    assert capsys.readouterr().out == expected
    monkeypatch.setattr("sys.stdin", io.StringIO("né?"))
    lmx(run_folder, *options, "-")
    assert capsys.readouterr().out == expected


def test_generate_command_accepts_zero_max_tokens(run_folder, capsys):
    assert lmx(run_folder, "--prompt", "hello", "--max-tokens", 0) == 0
    out, err = capsys.readouterr()
    assert out == "\n"
    assert "TTFT" not in err


def test_generate_interrupt_ends_the_line(run_folder, capsys, monkeypatch):
    def interrupt(output, text):
        raise KeyboardInterrupt

    monkeypatch.setattr(StreamedText, "write", interrupt)
    assert lmx(run_folder, "--prompt", "hello") == 130
    assert capsys.readouterr() == ("\n", "")


def test_generate_stops_when_nobody_reads(run_folder, capfd, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr("sys.stdout", stream)
        words = [str(run_folder), "--prompt", "hello", "--max-tokens", "5"]
        assert main.main(["generate", *words]) == 0
    assert capfd.readouterr() == ("", "")


def test_prompt_of_another_locale_is_read_as_utf8(run_folder, capsys, monkeypatch):
    # How Python decodes the bytes of an argument and of a stream in the C locale.
    prompt = "caf\xe9 \u4e2d".encode().decode("ascii", "surrogateescape")
    flags = ["--max-tokens", 3, "--json"]
    monkeypatch.setattr("sys.stdin", io.StringIO(prompt))
    for words in (
        ["--prompt", "caf\xe9 \u4e2d"],
        ["--prompt", prompt],
        ["--prompt-file", "-"],
        ["--prompt", prompt, "--ignore-chat-template"],
    ):
        assert lmx(run_folder, *words, *flags) == 0
    first, *others, raw = map(json.loads, capsys.readouterr().out.splitlines())
    assert [other["text"] for other in others] == [first["text"]] * 2
    assert [other["prompt_tokens"] for other in others] == [first["prompt_tokens"]] * 2
    assert raw["prompt_tokens"] == len("caf\xe9 \u4e2d".encode())


@pytest.mark.parametrize(
    ("flags", "prompt"), [([], "a\udcff"), (["--ignore-chat-template"], "\ud800")]
)
def test_prompt_that_is_no_text_is_refused(run_folder, capfd, flags, prompt):
    words = [str(run_folder), "--prompt", prompt, *flags]
    assert main.main(["generate", *words]) == 2
    assert "the prompt is not UTF-8 text\n    hint: " in capfd.readouterr().err


@pytest.mark.parametrize("source", [["--prompt-file", "-"], ["--chat"]])
def test_closed_standard_input_is_refused(run_folder, capfd, monkeypatch, source):
    monkeypatch.setattr("sys.stdin", None)
    assert main.main(["generate", str(run_folder), *source]) == 2
    assert capfd.readouterr().err.startswith("the standard input is closed\n    hint")


@pytest.mark.parametrize("source", [["--prompt-file", "-"], ["--chat"]])
def test_standard_input_of_other_bytes_is_refused(
    run_folder, capfd, monkeypatch, source
):
    stream = io.TextIOWrapper(io.BytesIO(b"a\xff\n"), encoding="utf-8")
    monkeypatch.setattr("sys.stdin", stream)
    assert main.main(["generate", str(run_folder), *source]) == 2
    error = capfd.readouterr().err
    assert "cannot read the prompt" in error
    assert "Traceback" not in error


# The colors of a text, the title of a window with a bell, and a reversed name.
HOSTILE = "a\x1b[31mred\x1b[0m \x1b]0;title\x07\x9b2J \xe9 \u202eexe.\u2028\t\U0001f600"
SAFE = "ared  \xe9 exe.\n\t\U0001f600"


@pytest.fixture
def hostile_model(generator, monkeypatch):
    """The model answers HOSTILE, one character per token."""

    def answer(self, prompt, *, on_token=None, **options):
        for character in HOSTILE:
            on_token(GenerationResponse(character, 0))
        return GenerationResult(HOSTILE, [0], 3, "stop", None, None, None)

    monkeypatch.setattr(Generator, "generate", answer)


def test_generate_streams_no_escape_sequence(run_folder, hostile_model, capfd):
    assert lmx(run_folder, "--prompt", "hello") == 0
    assert capfd.readouterr().out == SAFE + "\n"


def test_chat_streams_no_escape_sequence(run_folder, hostile_model, capfd, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\nand then?\n"))
    assert lmx(run_folder, "--chat") == 0
    assert capfd.readouterr().out == f"{SAFE}\n{SAFE}\n"


def test_generate_json_escapes_and_keeps_every_character(
    run_folder, hostile_model, capfd
):
    assert lmx(run_folder, "--prompt", "hello", "--json") == 0
    out = capfd.readouterr().out
    assert printable(out) == out
    assert json.loads(out)["text"] == HOSTILE


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt-file", "no-such-file"], "cannot read the prompt"),
        (
            ["--prompt", "x", "--ignore-chat-template", "--system", "y"],
            "--system needs the chat template",
        ),
        (
            ["--prompt", "x", "--max-tokens", "-1"],
            "--max-tokens must be 0 or more, got -1",
        ),
        (["--prompt", "x", "--top-p", "7"], r"top_p is 7\.0"),
        (["--prompt", "", "--ignore-chat-template"], "prompt is empty"),
        (["--prompt", "x", "--stop", ""], "--stop is empty"),
        (
            ["--prompt", "x", "--kv-bits", "4"],
            "no group size divides the head dimension 8",
        ),
        (
            ["--prompt", "x", "--max-kv-size", "63"],
            "--max-kv-size must be 64 or more, got 63",
        ),
        (["--prompt", "x", "--kv-policy", "snapkv"], "needs --max-kv-size"),
        (["--prompt", "x", "--check-parity"], "need --draft-model"),
        (
            [
                "--prompt",
                "x",
                "--draft-model",
                "prompt-lookup",
                "--num-draft-tokens",
                "33",
            ],
            "--num-draft-tokens must be 1 to 32, got 33",
        ),
        (
            [
                "--prompt",
                "x",
                "--draft-model",
                "prompt-lookup",
                "--check-parity",
                "--temperature",
                "1",
            ],
            "remove --temperature",
        ),
        (
            ["--prompt", "x", *DRAFT, "--check-parity", "--regex", "a"],
            "does not work with --json-schema",
        ),
        (["--prompt", "x", "--json-schema", '{"minLenght": 1}'], "minLenght"),
        (["--prompt", "x", "--json-schema", "no-such"], "cannot read the JSON schema"),
        (["--prompt", "x", "--regex", "(a"], "the regular expression is refused"),
        (
            ["--input-file", "x", "--save-prompt-cache", "y"],
            "--input-file does not work with prompt caches",
        ),
        (["--prompt", "x", "--adapter-path", "no-such"], "the adapter does not load"),
        (
            ["--prompt", "x", "--prompt-cache-file", "no-such"],
            "not a saved prompt cache",
        ),
    ],
)
def test_generate_rejects_invalid_options(run_folder, options, message):
    with pytest.raises(UserError, match=message):
        lmx(run_folder, *options)


def test_generate_follows_a_grammar(run_folder, capsys, tmp_path):
    schema = {"enum": ["the lamp", 7]}
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    for source in (json.dumps(schema), tmp_path / "schema.json"):
        lmx(run_folder, "--prompt", "hello", "--json-schema", source)
        assert capsys.readouterr().out in ('"the lamp"\n', "7\n")
    lmx(run_folder, "--prompt", "hello", "--regex", "[ab]{3}")
    assert re.fullmatch("[ab]{3}\n", capsys.readouterr().out)


def test_requests_of_a_file_have_grammars_of_their_own(run_folder, capsys, tmp_path):
    file = tmp_path / "requests.jsonl"
    choice = {"prompt": "x", "response_format": {"choice": ["on", "off"]}}
    file.write_text(f'{json.dumps(choice)}\n{{"prompt": "x"}}\n')
    lmx(run_folder, "--input-file", file, "--regex", "[ab]{3}")
    texts = [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()]
    assert texts[0] in ("on", "off")
    assert re.fullmatch("[ab]{3}", texts[1])
    for wrong, message in [
        ({"choice": []}, f"{file}:1: response_format.choice: expected a list"),
        ({"regex": "(a"}, f"{file}:1: the regular expression is refused"),
        ({"type": "x"}, f"{file}:1: response_format: there is no type"),
    ]:
        file.write_text(json.dumps(choice | {"response_format": wrong}))
        with pytest.raises(UserError, match=re.escape(message)):
            lmx(run_folder, "--input-file", file)


def test_requests_of_a_file_share_no_noise(run_folder, capsys, tmp_path):
    file = tmp_path / "requests.jsonl"
    rows = [{"prompt": "x"}] * 3 + [{"prompt": "x", "seed": 5}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--temperature", "1", "--seed", "4", "--max-tokens", "12"]
    lmx(run_folder, "--input-file", file, *options)
    texts = [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()]
    assert len({*texts[:3]}) == 3
    assert texts[1] == texts[3]


def test_generate_requires_a_prompt(run_folder, capsys):
    with pytest.raises(SystemExit):
        lmx(run_folder)
    assert "--prompt" in capsys.readouterr().err

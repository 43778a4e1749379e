"""`lmx generate`: chats, prompt caches, draft models and input files."""

import argparse
import io
import json
import os
import shutil
import signal
from pathlib import Path

import mlx.core as mx
import pytest
from lmx.api import model as api_model
from lmx.api.generation import generate as generate_text
from lmx.cli import generate
from lmx.data.tokenizer_files import require_same_tokenizer
from lmx.errors import UserError
from lmx.generation.generator import Generator
from lmx.generation.kv_cache.prefix import PrefixCache
from lmx.generation.kv_cache.prompt_cache import METADATA_FILE
from lmx.generation.kv_cache.sequence import CacheState
from lmx.generation.sampling import Sampling
from lmx.generation.speculative.prompt_lookup import PromptLookupProposer
from lmx.run.terminal import StreamedText, printable
from mlx.utils import tree_map
from tiny_generators import byte_tokenizer, chatting, tiny, write_folder

pytestmark = pytest.mark.fused


@pytest.fixture(scope="module")
def generator():
    return chatting()


@pytest.fixture(scope="module")
def folder(generator, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_folder(generator, folder)
    return folder


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    """A model with the same tokenizer that mostly agrees with the first."""
    draft_generator = chatting()
    mx.random.seed(5)
    weights = tree_map(
        lambda w: w + 0.02 * mx.random.normal(w.shape),
        draft_generator.model.parameters(),
    )
    draft_generator.model.update(weights)
    folder = tmp_path_factory.mktemp("draft")
    write_folder(draft_generator, folder)
    return folder


def lmx(*words):
    parser = argparse.ArgumentParser()
    generate.add_generate_arguments(parser)
    return generate.generate(parser.parse_args([str(word) for word in words]))


@pytest.fixture
def run_json(capsys, monkeypatch):
    """Run a command; returns its JSON output lines."""

    def run(*words, stdin=""):
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        assert lmx(*words) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return run


def chat(generator, turns, count):
    """The replies of a chat, with every turn processed from the start."""
    messages, replies = [], []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        replies.append(generator.chat(messages, max_tokens=count).text)
        messages.append({"role": "assistant", "content": replies[-1]})
    return replies


def test_chat_keeps_conversation_and_ends_at_exit(generator, folder, run_json):
    turns = ["hello", "and then?", "why"]
    stdin = "hello\n\nand then?\nwhy\n/exit\nnever asked\n"
    output = run_json(folder, "--chat", "--json", "--max-tokens", 7, stdin=stdin)
    assert [turn["text"] for turn in output] == chat(generator, turns, 7)


def test_chat_streams_text_only(generator, folder, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    assert lmx(folder, "--chat", "--max-tokens", 5) == 0
    (reply,) = chat(generator, ["hello"], 5)
    assert capsys.readouterr() == (printable(reply) + "\n", "")


def messages_in(cache_folder):
    return json.loads((cache_folder / METADATA_FILE).read_text())["prompts"]["messages"]


@pytest.mark.parametrize("place", ["token", "forward"])
def test_interrupt_ends_an_answer_and_not_the_chat(
    generator, folder, capsys, monkeypatch, place, tmp_path
):
    """The conversation goes on with the part that was printed."""
    printed, write, forward = [], StreamedText.write, CacheState.forward

    def interrupt_once():
        if len(printed) == 3:
            printed.append("")
            os.kill(os.getpid(), signal.SIGINT)

    def write_and_interrupt(output, text):
        write(output, text)
        printed.append(text)
        if place == "token":
            interrupt_once()

    def forward_and_interrupt(*args, **options):
        if place == "forward":
            interrupt_once()
        return forward(*args, **options)

    monkeypatch.setattr(StreamedText, "write", write_and_interrupt)
    monkeypatch.setattr(CacheState, "forward", forward_and_interrupt)
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\nand then?\n"))
    cache_folder = tmp_path / "cache"
    words = "--max-tokens", 9, "--save-prompt-cache", cache_folder
    assert lmx(folder, "--chat", *words) == 0
    first, second = capsys.readouterr().out.splitlines()
    (whole,) = chat(generator, ["hello"], 9)
    said = messages_in(cache_folder)[1]["content"]
    assert first == printable(said)
    assert whole.startswith(said)
    assert 0 < len(said) < len(whole)
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": said},
        {"role": "user", "content": "and then?"},
    ]
    assert second == printable(generator.chat(messages, max_tokens=9).text)
    assert messages_in(cache_folder)[:3] == messages


def test_interrupted_forward_pass_leaves_no_cache(generator, monkeypatch):
    """Without a chat, Ctrl-C arrives anywhere."""
    cached = Generator(
        generator.model, generator.tokenizer, prefix_cache=PrefixCache(1 << 30)
    )
    forward, calls = CacheState.forward, []

    def fail(self, *args, **options):
        calls.append(1)
        if len(calls) == 4:
            self.length += 1
            raise KeyboardInterrupt
        return forward(self, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(CacheState, "forward", fail)
        with pytest.raises(KeyboardInterrupt):
            cached.generate([1, 2, 3], max_tokens=9)
    stored = cached.engine.prefixes.nodes()
    assert [node.tokens.tolist() for node in stored] == [[1, 2]]  # from before
    expected = generator.generate([1, 2, 3], max_tokens=9).tokens
    assert cached.generate([1, 2, 3], max_tokens=9).tokens == expected


def test_chat_continues_from_saved_prompt_cache(generator, folder, run_json, tmp_path):
    arguments = [folder, "--chat", "--json", "--max-tokens", 6]
    cache_folder = tmp_path / "prompt_cache"
    run_json(*arguments, "--save-prompt-cache", cache_folder, stdin="one\n")
    (turn,) = run_json(*arguments, "--prompt-cache-file", cache_folder, stdin="two\n")
    assert turn["text"] == chat(generator, ["one", "two"], 6)[1]


@pytest.mark.parametrize("end", ["error", "interrupt"])
def test_chat_that_ends_early_is_saved(
    end, generator, folder, run_json, tmp_path, monkeypatch, capsys
):
    class Lines(io.StringIO):
        def readline(self):
            if line := super().readline():
                return line
            raise KeyboardInterrupt

    too_long = "x" * 500 + "\n"
    lines = "one\n" + too_long if end == "error" else "one\n"
    monkeypatch.setattr("sys.stdin", Lines(lines))
    cache_folder = tmp_path / "prompt_cache"
    words = [folder, "--chat", "--json", "--max-tokens", 6]
    if end == "error":
        with pytest.raises(UserError, match="400 positions"):
            lmx(*words, "--save-prompt-cache", cache_folder)
    else:
        assert lmx(*words, "--save-prompt-cache", cache_folder) == 130
    capsys.readouterr()
    (turn,) = run_json(*words, "--prompt-cache-file", cache_folder, stdin="two\n")
    assert turn["text"] == chat(generator, ["one", "two"], 6)[1]


def test_chat_that_ends_before_its_first_answer_saves_nothing(
    folder, tmp_path, monkeypatch
):
    monkeypatch.setattr("sys.stdin", io.StringIO("x" * 500 + "\n"))
    with pytest.raises(UserError, match="400 positions"):
        lmx(folder, "--chat", "--save-prompt-cache", tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_saved_prompt_cache_is_reused(folder, run_json, tmp_path, monkeypatch):
    cache_folder = tmp_path / "prompt_cache"
    text = "the quick brown fox jumps over the lazy dog"
    words = [
        folder,
        "--ignore-chat-template",
        "--json",
        "--max-tokens",
        4,
        "--prompt",
        text + " and",
    ]
    (expected,) = run_json(*words)
    run_json(*words[:-1], text, "--save-prompt-cache", cache_folder)
    reused, original = [], api_model.make_generator

    def counting_generator(*arguments, **options):
        session = original(*arguments, **options)
        fetch = session.engine.prefixes.fetch

        def counted(*arguments):
            output = fetch(*arguments)
            reused.append(output[1])
            return output

        session.engine.prefixes.fetch = counted
        return session

    monkeypatch.setattr(api_model, "make_generator", counting_generator)
    (output,) = run_json(*words, "--prompt-cache-file", cache_folder)
    assert output["text"] == expected["text"]
    assert reused[-1] == len(text)  # after the check of the file


def test_prompt_cache_does_not_replace_other_files(folder, run_json, tmp_path):
    words = folder, "--json", "--prompt", "x", "--max-tokens", 2, "--save-prompt-cache"
    keepsake = tmp_path / "home" / "letter.txt"
    keepsake.parent.mkdir()
    keepsake.write_text("Dear")
    for place in (keepsake.parent, keepsake):
        with pytest.raises(UserError, match=r"letter\.txt is there"):
            lmx(*words, place)
    assert keepsake.read_text() == "Dear"
    for _ in range(2):
        run_json(*words, tmp_path / "cache")


def test_prompt_cache_of_changed_weights_is_rejected(folder, run_json, tmp_path):
    """Names, shapes, and the last bytes of the file stay."""
    model, cache_folder = tmp_path / "model", tmp_path / "prompt_cache"
    shutil.copytree(folder, model)
    words = model, "--json", "--prompt", "x", "--max-tokens", 2
    run_json(*words, "--save-prompt-cache", cache_folder)
    run_json(*words, "--prompt-cache-file", cache_folder)
    weights = mx.load(str(model / "model.safetensors"))
    [name, *_] = [name for name in sorted(weights) if "v_proj" in name]
    weights[name] = -weights[name]
    mx.eval(weights)
    mx.save_safetensors(str(model / "model.safetensors"), weights, {"format": "mlx"})
    with pytest.raises(UserError, match="belongs to another model"):
        lmx(*words, "--prompt-cache-file", cache_folder)


def test_a_second_adapter_is_refused(folder, capsys):
    with pytest.raises(SystemExit):
        lmx(folder, "--prompt", "x", "--adapter-path", "one", "--adapter-path", "two")
    assert "--adapter-path is given twice" in capsys.readouterr().err


def test_a_path_that_is_not_utf_8_is_one_sentence(folder, tmp_path):
    place = os.fsdecode(os.fsencode(tmp_path) + b"/b\xffd")
    with pytest.raises(UserError, match="not UTF-8"):
        lmx(folder, "--prompt", "x", "--max-tokens", 2, "--save-prompt-cache", place)
    shutil.copytree(folder, place)
    with pytest.raises(UserError, match="not UTF-8"):
        lmx(place, "--prompt", "x", "--max-tokens", 2)


@pytest.mark.parametrize("name", ["prompt-lookup", "model", "prompt-lookup+model"])
def test_draft_does_not_change_text(name, folder, draft, run_json):
    name = name.replace("model", str(draft))
    words = [folder, "--json", "--prompt", "abcabcabcabc", "--max-tokens", 60]
    (baseline,) = run_json(*words)
    assert "speculation" not in baseline
    (output,) = run_json(
        *words, "--draft-model", name, "--num-draft-tokens", 3, "--check-parity"
    )
    assert output["tokens"] == baseline["tokens"]
    assert output["speculation"]["rounds"] > (0 if name == "prompt-lookup" else 5)
    assert output["parity"] == {
        "tokens": 60,
        "mismatches": 0,
        "mismatches_per_1000": 0.0,
        "first_mismatch": None,
        "all_from_rounding": True,
    }


def test_summary_reports_speculation(folder, draft, capsys):
    words = [
        "--prompt",
        "x",
        "--draft-model",
        draft,
        "--num-draft-tokens",
        2,
        "--check-parity",
    ]
    assert lmx(folder, *words, "--max-tokens", 30) == 0
    err = capsys.readouterr().err
    assert "acceptance rate " in err
    assert "accepted length " in err
    assert err.endswith(
        "0 of 30 tokens differ from standard decoding (0.00 per 1,000)\n"
    )


def test_draft_with_other_tokenizer_is_rejected(folder, tmp_path):
    other = chatting()
    write_folder(other, tmp_path)
    text = (tmp_path / "tokenizer.json").read_text()
    swapped = text.replace('"a":', '"aa":').replace('"b":', '"a":')
    (tmp_path / "tokenizer.json").write_text(swapped.replace('"aa":', '"b":'))
    with pytest.raises(UserError, match=r"other tokens than the model: 2 differ.*'a'"):
        lmx(folder, "--prompt", "x", "--draft-model", tmp_path)


def test_tokenizer_check_compares_special_tokens():
    original, other = byte_tokenizer(), byte_tokenizer()
    require_same_tokenizer(original, other, place="here")
    other.add_special_tokens({"additional_special_tokens": ["a"]})
    with pytest.raises(UserError, match="other special tokens"):
        require_same_tokenizer(original, other, place="here")


def test_input_file_completions_keep_order(generator, folder, run_json, tmp_path):
    messages = [
        {"role": "user", "content": "long"},
        {"role": "assistant", "content": "x"},
    ]
    requests = [
        {"prompt": "first", "max_tokens": 20},
        {"messages": messages, "temperature": 0.9, "seed": 4},
        {"prompt": "third", "max_tokens": 0},
        {"prompt": "fourth", "max_tokens": 2},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n\n".join(map(json.dumps, requests)))
    output = run_json(folder, "--input-file", file, "--max-tokens", 9)
    sampling = Sampling(0.9, seed=4)
    expected = [
        generator.chat("first", max_tokens=20),
        generator.chat(messages, max_tokens=9, sampling=sampling),
        generator.chat("third", max_tokens=0),
        generator.chat("fourth", max_tokens=2),
    ]
    assert [result["index"] for result in output] == [0, 1, 2, 3]
    for result, one in zip(output, expected, strict=True):
        assert result["text"] == one.text
        assert result["tokens"] == len(one.tokens)
        assert result["prompt_tokens"] == one.prompt_tokens
        assert result["finish_reason"] == one.finish_reason


def test_input_file_is_answered_with_drafts(folder, run_json, tmp_path, monkeypatch):
    proposed = []
    propose = PromptLookupProposer.propose

    def record(self, *args):
        proposed.append(propose(self, *args))
        return proposed[-1]

    monkeypatch.setattr(PromptLookupProposer, "propose", record)
    file = tmp_path / "requests.jsonl"
    file.write_text("".join(f'{{"prompt": "abcabc{n}abcabc"}}\n' for n in range(3)))
    words = [folder, "--input-file", file, "--max-tokens", 24]
    expected = run_json(*words)
    assert not proposed
    options = ["--draft-model", "prompt-lookup", "--num-draft-tokens", 2]
    assert run_json(*words, *options) == expected
    assert proposed


def test_input_file_completion_ends_at_stop_string(
    generator, folder, run_json, tmp_path
):
    text = generator.chat("first", max_tokens=20).text
    stop = text[4:6]
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "first"}\n{"prompt": "other"}\n')
    output = run_json(folder, "--input-file", file, "--max-tokens", 20, "--stop", stop)
    assert output[0]["text"] == text[: text.index(stop)]
    assert output[0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("[]", "expected a block of keys"),
        ('{"promt": "x"}', "promt: this key is unknown"),
        ("{}", "either prompt or messages"),
        ('{"prompt": 3}', "prompt: expected text, got 3"),
        ('{"prompt": "x", "max_tokens": -1}', "at least 0"),
        ('{"messages": []}', "messages: needs at least one entry"),
        ('{"messages": [{"role": "user"}]}', "content: this key is missing"),
        ('{"prompt": "x", "temperature": -1}', r"temperature is -1"),
        (json.dumps({"prompt": "x" * 500}), "400 positions"),
    ],
)
def test_input_file_errors_come_before_generation(
    folder, capsys, tmp_path, line, message
):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "good"}\n' + line + "\n")
    with pytest.raises(UserError, match=message) as error:
        lmx(folder, "--input-file", file)
    assert error.value.place == f"{file}:2"
    assert capsys.readouterr().out == ""


def test_input_file_without_requests_is_refused(folder, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n\n")
    with pytest.raises(UserError, match="there are no requests"):
        lmx(folder, "--input-file", file)


def test_penalties_and_stop_options_are_applied(generator, folder, run_json):
    words = [folder, "--json", "--prompt", "hello", "--max-tokens", 30]
    penalties = {"repetition_penalty": 1.4, "presence_penalty": 0.5}
    penalties["frequency_penalty"] = 0.3
    sampling = Sampling(**penalties)
    expected = generator.chat("hello", max_tokens=30, sampling=sampling)
    words += [f"--{n.replace('_', '-')}={v}" for n, v in penalties.items()]
    (output,) = run_json(*words)
    assert output["tokens"] == expected.tokens
    stop = expected.text[3:5]
    (output,) = run_json(*words, "--stop", stop)
    assert output["text"] == expected.text[: expected.text.index(stop)]


def test_adapter_changes_text_and_prompt_cache(generator, folder, run_json, tmp_path):
    from mlx.utils import tree_flatten
    from mlx_lm.tuner.utils import linear_to_lora_layers

    adapted = tiny("llama")
    keys = ["self_attn.q_proj", "mlp.up_proj"]
    settings = {"rank": 4, "scale": 8.0, "dropout": 0.3, "keys": keys}
    linear_to_lora_layers(adapted, 2, settings)
    mx.random.seed(1)
    adapters = {
        path: mx.random.normal(value.shape)
        for path, value in tree_flatten(adapted.parameters())
        if "lora_" in path
    }
    adapted.load_weights(list(adapters.items()), strict=False)
    adapted.eval()
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), adapters)
    config = {"num_layers": 2, "lora_parameters": settings, "fine_tune_type": "lora"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    words = [folder, "--json", "--prompt", "hello", "--max-tokens", 12]
    (baseline,) = run_json(*words, "--save-prompt-cache", tmp_path / "cache_folder")
    (output,) = run_json(*words, "--adapter-path", tmp_path)
    expected = Generator(adapted, generator.tokenizer).chat("hello", max_tokens=12)
    assert output["text"] == expected.text != baseline["text"]
    with pytest.raises(UserError, match="belongs to another model"):
        lmx(
            *words,
            "--adapter-path",
            tmp_path,
            "--prompt-cache-file",
            tmp_path / "cache_folder",
        )


def test_kv_bits_of_the_checkpoint_are_used_unless_named(run_json, tmp_path):
    from lmx.models.loader import load

    folder = tmp_path / "model"
    shutil.copytree(Path(__file__).parents[2] / "data/tiny-base", folder)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"kv_bits": [2, 16, 8, 4, 4, 2]}))
    loaded = load(folder)

    def expected(kv_bits):
        generator = Generator(loaded.model, loaded.tokenizer, kv_bits=kv_bits)
        return generator.generate(generator.encode_text("the quick"), max_tokens=12)

    words = [folder, "--ignore-chat-template", "--json", "--prompt", "the quick"]
    words += ["--max-tokens", 12]
    texts = {}
    for bits in (None, 2, 16):
        (output,) = run_json(*words, *(["--kv-bits", bits] if bits else []))
        options = {"ignore_chat_template": True, "kv_bits": bits, "max_tokens": 12}
        assert output["text"] == generate_text(folder, "the quick", **options).text
        texts[bits] = output["text"]
        assert texts[bits] == expected(bits or loaded.kv_bits).text
    assert len(set(texts.values())) == 3
    file.write_text(json.dumps(config | {"kv_bits": [4] * 5}))
    with pytest.raises(UserError, match="for 5 layers, and the model has 6"):
        Generator(
            loaded.model, loaded.tokenizer, kv_bits=load(folder).kv_bits
        ).engine.new_cache()


def test_max_kv_size_of_the_command_is_that_of_the_api(run_json):
    folder = Path(__file__).parents[2] / "data/tiny-base"
    prompt = "".join(f"def add_{n}(x):\n    return x + {n}\n\n" for n in range(20))
    words = [folder, "--ignore-chat-template", "--json", "--prompt", prompt]
    texts = set()
    for size, policy in ((None, None), (64, None), (64, "window"), (64, "snapkv")):
        named = {"--max-kv-size": size, "--kv-policy": policy}
        given = [word for pair in named.items() if pair[1] for word in pair]
        (output,) = run_json(*words, "--max-tokens", 24, *given)
        options = {"max_kv_size": size, "kv_policy": policy, "max_tokens": 24}
        options["ignore_chat_template"] = True
        assert output["text"] == generate_text(folder, prompt, **options).text
        texts.add(output["text"])
    assert len(texts) == 3


def test_chat_prompts_on_a_terminal(folder, capsys, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr("sys.stdin", Terminal("one\n/exit\n"))
    assert lmx(folder, "--chat", "--max-tokens", 2) == 0
    assert capsys.readouterr().err == "> > "

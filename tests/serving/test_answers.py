"""Answers, whole and streamed: text, log-probabilities, counts."""

import threading
import time

import mlx.core as mx
import pytest
from lmx.data.token_bytes import token_bytes
from lmx.generation.generator import Generator
from tiny_generators import Scripted, byte_tokenizer, scripted, tiny
from tiny_server import CHAT, COMPLETIONS, joined, joined_chat, load

pytestmark = pytest.mark.fused

PROMPT = "The quick brown fox"
LONG = {"max_tokens": 40, "ignore_eos": True}
CASES = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 3},
    "three": {"temperature": 1.0, "seed": 3, "n": 3},
    "stop": {"stop": ["e", "\n"]},
    "penalties": {"frequency_penalty": 1.0, "repetition_penalty": 1.2},
}


def _messages(text=PROMPT):
    return {"messages": [{"role": "user", "content": text}]}


@pytest.mark.parametrize("case", CASES)
def test_a_stream_is_the_whole_completion(server, case):
    counts = case in ("greedy", "three")
    body = LONG | CASES[case] | {"prompt": PROMPT, "logprobs": 2}
    whole = server.complete(**body)
    options = {"include_usage": True, "continuous_usage_stats": counts}
    chunks = server.stream(COMPLETIONS, body | {"stream_options": options})
    assert joined(chunks) == whole["choices"]
    usage = chunks[-1].pop("usage")
    assert chunks[-1]["choices"] == []
    # The prompt is cached now, of which the first answer knew nothing.
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage[name] == whole["usage"][name]
    assert len({chunk["id"] for chunk in chunks}) == 1
    running = [chunk.get("usage") for chunk in chunks[:-1]]
    assert all(running) if counts else not any(running)
    # OpenAI's chunks have the key, too.
    assert all("usage" in chunk for chunk in chunks[:-1])
    if counts:
        totals = [u["completion_tokens"] for u in running]
        assert totals == sorted(totals)
        assert totals[-1] == usage["completion_tokens"]


@pytest.mark.parametrize("case", ["greedy", "three", "stop"])
def test_a_stream_is_the_whole_chat(server, case):
    body = LONG | CASES[case] | {"logprobs": True, "top_logprobs": 2}
    whole = server.chat(PROMPT, **body)["choices"]
    chunks = server.stream(CHAT, _messages() | body)
    for choice in whole:
        choice["message"].pop("refusal")
        choice["logprobs"].pop("refusal")
    assert joined_chat(chunks) == whole
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    assert all("usage" not in chunk for chunk in chunks)
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = server.stream(CHAT, _messages() | body | {"stream_options": options})
    assert chunks[0]["usage"]["prompt_tokens"] == chunks[-1]["usage"]["prompt_tokens"]


def test_names_and_forms(server):
    completion, chat = server.complete(), server.chat()
    assert completion["object"] == "text_completion"
    assert chat["object"] == "chat.completion"
    assert completion["id"].startswith("cmpl-")
    assert chat["id"].startswith("chatcmpl-")
    assert chat["model"] == completion["model"] == "tiny"
    message = chat["choices"][0]["message"]
    assert (message["role"], message["refusal"]) == ("assistant", None)
    assert "tool_calls" not in message
    assert completion["choices"][0]["logprobs"] is None


def test_prompts_as_text_tokens_and_lists(server):
    ids = byte_tokenizer().encode("Hi")
    text = server.complete("Hi")["choices"][0]["text"]
    other = server.complete("Ho")["choices"][0]["text"]
    assert text != other
    for prompt in (ids, ["Hi"], [ids]):
        assert server.complete(prompt)["choices"][0]["text"] == text
    several = server.complete(["Hi", "Ho", "Hi"], n=2, temperature=0)
    assert [c["index"] for c in several["choices"]] == [*range(6)]
    texts = [c["text"] for c in several["choices"]]
    assert texts == [text, text, other, other, text, text]
    assert several["usage"]["prompt_tokens"] == 6
    assert several["usage"]["completion_tokens"] == 6 * 16


def test_echo(server):
    text = server.complete(PROMPT)["choices"][0]["text"]
    body = {"prompt": [PROMPT, "Hi"], "echo": True}
    whole = server.complete(**body)["choices"]
    assert whole[0]["text"] == PROMPT + text
    assert whole[1]["text"].startswith("Hi")
    assert joined(server.stream(COMPLETIONS, body)) == whole
    # The prompt alone.
    (choice,) = server.complete("Hi", echo=True, max_tokens=0)["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("Hi", "length")
    status, error = server.refused(COMPLETIONS, {"prompt": "Hi", "max_tokens": 0})
    assert (status, error["param"]) == (400, "max_tokens")
    body = {"prompt": "", "echo": True, "logprobs": 1}
    status, error = server.refused(COMPLETIONS, body)
    assert (status, error["param"]) == (400, "prompt")


def name_of(tokenizer, token):
    raw = token_bytes(tokenizer, token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + repr(raw)[2:-1]


def check_scores(choice, text, prompt):
    tokenizer, logprobs = byte_tokenizer(), choice["logprobs"]
    assert (choice["text"], choice["finish_reason"]) == (text, "length")
    assert logprobs["tokens"] == [name_of(tokenizer, token) for token in prompt]
    # Every token is a byte: those of a character begin where it does.
    places = [n for n, c in enumerate(text) for _ in c.encode()]
    assert logprobs["text_offset"] == places
    first, *scores = logprobs["token_logprobs"]
    none, *tops = logprobs["top_logprobs"]
    assert first is none is None
    rows = _reference(prompt)[:-1]
    for token, score, top, row in zip(prompt[1:], scores, tops, rows, strict=True):
        assert score == pytest.approx(row[token], abs=1e-4)
        assert max(top.values()) == pytest.approx(max(row), abs=1e-4)
        assert top[name_of(tokenizer, token)] == score


def test_prompts_are_scored(server):
    """As lm-eval's local-completions asks, for every form of prompts."""
    texts, tokenizer = [PROMPT, "Hé ho", "H"], byte_tokenizer()
    prompts = [tokenizer.encode(text) for text in texts]
    body = {"echo": True, "logprobs": 2, "max_tokens": 0}
    together = server.complete(prompts, **body)
    assert together["usage"]["completion_tokens"] == 0
    assert server.complete(texts, **body)["choices"] == together["choices"]
    chunks = server.stream(COMPLETIONS, body | {"prompt": prompts})
    assert joined(chunks) == together["choices"]
    for text, prompt, choice in zip(texts, prompts, together["choices"], strict=True):
        check_scores(choice, text, prompt)
        for alone in (text, prompt):
            check_scores(server.complete(alone, **body)["choices"][0], text, prompt)
    # With tokens of a completion after them.
    more = {"max_tokens": 3, "ignore_eos": True}
    (choice,) = server.complete(PROMPT, **body | more)["choices"]
    bare = server.complete(PROMPT, logprobs=2, **more)["choices"][0]
    assert choice["text"] == PROMPT + bare["text"]
    prompt = together["choices"][0]["logprobs"]
    offsets = bare["logprobs"]["text_offset"]
    bare["logprobs"]["text_offset"] = [len(PROMPT) + n for n in offsets]
    for name, values in choice["logprobs"].items():
        expected = prompt[name] + bare["logprobs"][name]
        for value, same in zip(values, expected, strict=True):
            is_close = name.endswith("logprobs")
            assert value == (pytest.approx(same, abs=1e-4) if is_close else same)


def test_too_many_scores_are_refused(server):
    body = {"prompt": [[1] * 400] * 32, "echo": True, "max_tokens": 0}
    status, error = server.refused(COMPLETIONS, body | {"logprobs": 20})
    assert (status, error["param"]) == (400, "logprobs")
    assert len(server.complete(**body)["choices"]) == 32


def test_a_scored_prompt_that_the_model_ends(start):
    """lm-eval takes the last entry for the token of the completion, always."""
    server = start(load(lambda: scripted("", ids=[257])[0]))
    body = {"echo": True, "logprobs": 1, "max_tokens": 1}
    (choice,) = server.complete("a^", **body)["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("a^", "stop")
    assert choice["logprobs"]["tokens"] == ["a", "^", "<|im_end|>"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]


# Stop strings


def test_stop_strings_across_chunks(server):
    """Every string of the completion ends it where it first stands."""
    full = server.complete(PROMPT, **LONG)["choices"][0]["text"]
    starts = [i for i in range(3, len(full) - 4) if "\ufffd" not in full[i : i + 4]]
    for start in starts[::4]:
        stop = full[start : start + 4]
        body = {"prompt": PROMPT, **LONG, "stop": ["never there", stop]}
        whole = server.complete(**body)["choices"][0]
        assert whole["text"] == full[: full.index(stop)]
        assert whole["finish_reason"] == "stop"
        assert joined(server.stream(COMPLETIONS, body))[0]["text"] == whole["text"]
    assert len(starts) > 4
    # Negative control: the beginning of a stop string alone does not.
    body = {"prompt": PROMPT, **LONG, "stop": full[-3:] + "never there"}
    assert server.complete(**body)["choices"][0]["text"] == full


# Seeds


def _sampled(server, seed, **body):
    options = {"temperature": 1.0, "max_tokens": 32, "ignore_eos": True}
    return server.complete(PROMPT, seed=seed, **options, **body)["choices"]


def test_a_seed_gives_the_same_text_alone_and_with_neighbours(server):
    alone = _sampled(server, 11)[0]["text"]
    assert _sampled(server, 12)[0]["text"] != alone
    texts = {}

    def ask(number):
        texts[number] = _sampled(server, 11 if number == 4 else 100 + number)

    threads = [threading.Thread(target=ask, args=[i]) for i in range(9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts[4][0]["text"] == alone
    assert len({c[0]["text"] for c in texts.values()}) == 9
    # The completions of a request have seeds in a row.
    several = _sampled(server, 10, n=3)
    assert several[1]["text"] == alone
    # Without a seed they differ from call to call.
    assert _sampled(server, None)[0]["text"] != _sampled(server, None)[0]["text"]


@pytest.mark.parametrize("seed", [None, 10])
def test_completions_of_a_request_share_no_noise(server, seed):
    """Four equal prompts had four equal texts."""
    body = {"temperature": 1.0, "max_tokens": 32, "ignore_eos": True, "n": 2}
    choices = server.complete([PROMPT] * 3, seed=seed, **body)["choices"]
    assert len({choice["text"] for choice in choices}) == 6
    if seed is not None:
        alone = [_sampled(server, seed + i)[0]["text"] for i in range(6)]
        assert [choice["text"] for choice in choices] == alone


def test_seeds_of_all_sizes(server):
    texts = {_sampled(server, seed)[0]["text"] for seed in (0, -1, 2**63, 2**64 - 2)}
    assert len(texts) == 4
    assert len(_sampled(server, 2**64 - 1, n=2)) == 2


# Log-probabilities


def _reference(tokens):
    """Log-probabilities at all positions, by a forward pass without a cache."""
    logits = tiny("llama")(mx.array([tokens]))[0].astype(mx.float32)
    return (logits - mx.logsumexp(logits, axis=-1, keepdims=True)).tolist()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_logprobs_are_those_of_a_forward_pass(server, temperature):
    tokenizer = byte_tokenizer()
    prompt = tokenizer.encode(PROMPT)
    sampling = {"temperature": temperature, "top_k": 50, "seed": 1}
    body = {"max_tokens": 12, "ignore_eos": True} | sampling
    answer = server.complete(prompt, **body, logprobs=3)["choices"][0]["logprobs"]
    bare = server.complete(prompt, **body, logprobs=0)["choices"][0]["logprobs"]
    assert bare["token_logprobs"] == answer["token_logprobs"]
    # The token of the completion is always there; it may be none of the likely ones.
    for part in (answer, bare):
        for token, score, top in zip(
            part["tokens"], part["token_logprobs"], part["top_logprobs"], strict=True
        ):
            assert top[token] == score
    assert {len(top) for top in bare["top_logprobs"]} == {1}
    # Bytes that are no character have no name, so the tokens come from a chat's form.
    chat = server.chat(PROMPT, **body, logprobs=True, top_logprobs=3)["choices"][0]
    entries = chat["logprobs"]["content"]
    rendered = f"<|im_start|>user\n{PROMPT}<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode(rendered)
    names = {token_bytes(tokenizer, i): i for i in range(256)}
    tokens = [names[bytes(entry["bytes"])] for entry in entries]
    scores = _reference(ids + tokens)[len(ids) - 1 : -1]
    for entry, token, row in zip(entries, tokens, scores, strict=True):
        assert entry["logprob"] == pytest.approx(row[token], abs=1e-4)
        best = sorted(row, reverse=True)[:3]
        top = [each["logprob"] for each in entry["top_logprobs"]]
        assert top == pytest.approx(best, abs=1e-4)
        assert entry["token"] == tokenizer.decode([token])


def test_text_offsets_are_places_in_the_text(start):
    text = "aé日 🎈!"
    server = start(load(lambda: scripted(text, ids=[257])[0]))
    body = {"prompt": "^", "logprobs": 1, "max_tokens": 12}
    whole = server.complete(**body)["choices"][0]
    assert whole["text"] == text
    # Every token is a byte: those of a character begin where it does.
    expected = [n for n, c in enumerate(text) for _ in c.encode()]
    assert whole["logprobs"]["text_offset"] == expected
    assert joined(server.stream(COMPLETIONS, body)) == [whole]


def test_a_completion_of_the_stop_token_only(start):
    """The lists of its log-probabilities are empty, not null."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    server = start(load(lambda: scripted("", ids=[257], template=template)[0]))
    chat = server.chat("^", logprobs=True)["choices"][0]
    assert chat["logprobs"] == {"content": [], "refusal": None}
    assert server.chat("^")["choices"][0]["logprobs"] is None
    logprobs = server.complete("^", logprobs=0)["choices"][0]["logprobs"]
    assert logprobs == {key: [] for key in logprobs}
    assert logprobs["tokens"] == []


def sentencepiece():
    """Llama's kind of tokenizer, of a few tokens."""
    from mlx_lm.tokenizer_utils import NaiveStreamingDetokenizer, TokenizerWrapper
    from tokenizers import Tokenizer, decoders, models, normalizers, processors
    from transformers import PreTrainedTokenizerFast

    pieces = ["<s>", "</s>", "<0xC3>", "<0xA9>", *"▁the", "a"]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("▁", "a")]
    pieces += [left + right for left, right in merges]
    ids = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(ids, merges, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=["<s>", "$A"], special_tokens=[("<s>", 0)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"
    )
    fast.chat_template = "{{ messages[0].content }}"
    return TokenizerWrapper(fast, NaiveStreamingDetokenizer)


def test_tokens_of_sentencepiece_keep_their_space(start):
    def made():
        tokenizer = sentencepiece()
        script = tokenizer.encode("the a é", add_special_tokens=False)
        return Generator(Scripted([*script, tokenizer.eos_token_id]), tokenizer)

    server = start(load(made))
    tokenizer = sentencepiece()
    prompt = tokenizer.encode("the")
    assert prompt[0] == tokenizer.bos_token_id
    body = {"max_tokens": 9, "logprobs": 1}
    for text in ("the", prompt[1:]):
        choice = server.complete(text, **body)["choices"][0]
        assert choice["text"] == " a é"
        logprobs = choice["logprobs"]
        partial = ["bytes:\\xc3", "bytes:\\xa9"]
        assert logprobs["tokens"] == [" a", " ", *partial]
        assert logprobs["text_offset"] == [0, 2, 3, 3]
        # The token before a text is no part of it.
        scored = server.complete(text, echo=True, **body)["choices"][0]
        assert scored["text"] == "the a é"
        head = ["<s>", " the"] if text == "the" else [" the"]
        expected = [*head, " a", " ", *partial, "</s>"]
        assert scored["logprobs"]["tokens"] == expected
        places = [*([0] * len(head)), 3, 5, 6, 6, 7]
        assert scored["logprobs"]["text_offset"] == places
    entries = server.chat("the", logprobs=True, top_logprobs=1)["choices"][0]
    entries = entries["logprobs"]["content"]
    raw = [bytes(entry["bytes"]) for entry in entries]
    assert raw == [b" a", b" ", b"\xc3", b"\xa9"]
    assert [bytes(e["top_logprobs"][0]["bytes"]) for e in entries] == raw


# Counts


def test_cached_tokens(start):
    server = start()
    first = server.complete([65] * 200)["usage"]
    second = server.complete([65] * 200)["usage"]
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    cached = second["prompt_tokens_details"]["cached_tokens"]
    assert cached >= 128
    other = server.complete([66] * 200)["usage"]
    assert other["prompt_tokens_details"]["cached_tokens"] == 0
    metrics = server.metrics()
    assert metrics["lmx:prefix_cache_hits_total{}"] == cached
    assert metrics["lmx:prompt_tokens_total{}"] == 600
    # Completions of one prompt share it, so it counts once.
    several = server.complete([65] * 200, n=3)["usage"]
    assert several["prompt_tokens_details"]["cached_tokens"] == cached


def test_the_reason_of_the_end(start):
    from tiny_generators import scripted
    from tiny_server import load

    def made():
        return scripted("Hello", ids=[tokenizer.eos_token_id])[0]

    tokenizer = byte_tokenizer()
    tokenizer.eos_token_id = tokenizer.convert_tokens_to_ids("<|im_end|>")
    server = start(load(made))
    answer = server.complete("^", logprobs=0)
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "stop"
    # The token of the end is counted, and has no text.
    assert answer["usage"]["completion_tokens"] == len(choice["logprobs"]["tokens"]) + 1


def test_tokens_are_counted_as_they_come(server, monkeypatch):
    step = server.engine.step

    def slow():
        time.sleep(0.05)
        return step()

    monkeypatch.setattr(server.engine, "step", slow)
    before = server.metrics()
    body = LONG | {"prompt": PROMPT, "stream": True}
    with server.client.stream("POST", COMPLETIONS, json=body) as response:
        lines = response.iter_lines()
        next(lines)
        now = server.metrics()
    name = "lmx:generation_tokens_total{}"
    assert 0 < now[name] - before.get(name, 0) < LONG["max_tokens"]
    ends = [{k: v for k, v in m.items() if "success" in k} for m in (before, now)]
    assert ends[0] == ends[1], "it has ended"
    server.until_idle()

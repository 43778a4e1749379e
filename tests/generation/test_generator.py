"""The generator against mlx-lm, cached against uncached logits, streams and stops."""

import math

import mlx.core as mx
import numpy as np
import pytest
from lmx.errors import WILL_NOT_FIT, UserError
from lmx.generation import scheduler as scheduler_module
from lmx.generation.generator import Generator
from lmx.generation.kv_cache.layer_rows import WINDOW_SLACK
from lmx.generation.speculative.draft_model import DraftModelBatch, DraftModelProposer
from lmx.models.loader import build_model
from tiny_families import WINDOW, changed, config
from tiny_generators import MODELS, VOCABULARY, byte_tokenizer, scripted, tiny
from tiny_requests import LONG, PROMPT, sharpened, speculative, tokens_of

pytestmark = pytest.mark.fused

LENGTHS = [1, 2, 7, 8, 9, 16, 17, 40]  # around the step size 8 and window 16


@pytest.fixture(params=list(MODELS), scope="session")
def model(request):
    return tiny(request.param)


@pytest.fixture(scope="session")
def llama():
    return tiny("llama")


@pytest.fixture(scope="session")
def tokenizer():
    return byte_tokenizer()


def random_prompt(length, seed=0):
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


def test_generate_matches_mlx_lm(model, tokenizer):
    from mlx_lm import generate

    generator = Generator(model, tokenizer, prefill_step_size=8)
    texts = set()
    for length in LENGTHS:
        prompt = random_prompt(length)
        ours = generator.generate(prompt, max_tokens=12)
        theirs = generate(model, tokenizer, prompt, max_tokens=12)
        # mlx-lm drops the space that a completion begins with.
        assert ours.text.removeprefix(" ") == theirs
        assert ours.text == tokenizer.decode(ours.tokens)
        texts.add(ours.text)
    assert len(texts) == len(LENGTHS)


def texts_of(generator, prompts, max_tokens):
    requests = [generator.request(p, max_tokens=max_tokens) for p in prompts]
    return [result.text for result in generator.generate_all(requests)]


def test_requests_have_the_texts_of_single_prompts(llama):
    tokenizer = byte_tokenizer(eos=[*"aeiostuU", "<|im_end|>"])
    generator = Generator(llama, tokenizer, prefill_step_size=8)
    lengths = [5, 20, 5, 1, 20, 20, 5]
    prompts = [random_prompt(n, seed) for seed, n in enumerate(lengths)]
    alone = [generator.generate(prompt, max_tokens=30) for prompt in prompts]
    assert texts_of(generator, prompts, 30) == [g.text for g in alone]
    assert len({len(g.tokens) for g in alone}) > 2  # sequences end at different steps
    assert texts_of(generator, [], 30) == []
    requests = [generator.request(p, max_tokens=30) for p in prompts]
    stop = [alone[1].text[2:4]]
    singles = [generator.generate(p, max_tokens=30, stop=stop) for p in prompts]
    results = list(generator.generate_all(requests, stop=stop))
    assert [r.text for r in results] == [r.text for r in singles]
    assert results[0].ttft_ms is None


def test_streams_that_are_read_by_turns_are_decoded_together(llama, tokenizer):
    prompts = [random_prompt(n, seed) for seed, n in enumerate((3, 17, 9, 30))]
    limits = [12, 30, 5, 9]
    generator = Generator(llama, tokenizer)
    options = {"stop_tokens": ()}
    alone = [
        list(generator.stream(p, max_tokens=n, **options))
        for p, n in zip(prompts, limits, strict=True)
    ]
    steps, step = [], generator.engine.step
    generator.engine.step = lambda: steps.append(1) or step()
    streams = [
        generator.stream(p, max_tokens=n, **options)
        for p, n in zip(prompts, limits, strict=True)
    ]
    got, left = [[] for _ in streams], list(range(4))
    while left:
        for index in list(left):
            response = next(streams[index], None)
            got[index].append(response) if response else left.remove(index)
            if index == 3 and len(got[3]) == 4:
                streams[3].close()
                left.remove(3)
    assert got[:3] == alone[:3]
    assert got[3] == alone[3][:4]
    # Those that are decoded together share their steps.
    assert len(steps) < 12 + 30
    assert generator.engine.idle


def test_streams_of_an_interrupted_step_end(llama, tokenizer, monkeypatch):
    generator = Generator(llama, tokenizer)
    first, second = (generator.stream([n], max_tokens=9) for n in (1, 2))
    next(first)
    next(second)
    with monkeypatch.context() as patch:

        def interrupted():
            raise KeyboardInterrupt

        patch.setattr(generator.engine, "_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            for _ in first:
                pass
    with pytest.raises(UserError, match="the request was interrupted"):
        list(second)
    assert generator.engine.idle
    assert len(list(generator.stream([1], max_tokens=9, stop_tokens=()))) == 9


def test_errors_of_a_request_reach_its_stream(tokenizer):
    model = sharpened("llama")
    model.model.norm.weight[0] = float("nan")
    generator = Generator(model, tokenizer)
    with pytest.raises(UserError, match="the model's predictions are NaN"):
        generator.generate(PROMPT)
    with pytest.raises(UserError, match="the model's predictions are NaN"):
        list(generator.generate_all([generator.request(PROMPT)]))
    assert generator.engine.idle


def test_short_requests_get_drafts():
    """While the time of a step is not known, few steps are taken without drafts."""
    model = sharpened("llama")
    generator = speculative(model, lambda _: DraftModelProposer(DraftModelBatch(model)))
    tokens_of(generator, max_tokens=32)
    assert generator.speculative_stats.rounds
    # Four measurements of four steps, and the step that is launched ahead.
    assert generator.speculative_stats.standard_tokens < 24


def test_stops_and_limits_inside_accepted_draft_tokens():
    length = 3
    model = sharpened("llama")
    plain_generator = Generator(model, byte_tokenizer())
    plain = tokens_of(plain_generator)
    text = plain_generator.generate(PROMPT, max_tokens=LONG, stop_tokens=()).text
    generator = speculative(
        model, lambda _: DraftModelProposer(DraftModelBatch(model)), length
    )
    # Every position in two rounds.
    for limit in range(1, 2 * (length + 1) + 2):
        assert tokens_of(generator, max_tokens=limit) == plain[:limit]
    for end in range(3, 15):
        options = {"max_tokens": LONG, "stop_tokens": (plain[end],)}
        result = generator.generate(PROMPT, **options)
        assert result.tokens == plain_generator.generate(PROMPT, **options).tokens
        assert result.finish_reason == "stop"
    options = {"stop": [text[9:11]], "stop_tokens": (), "max_tokens": LONG}
    expected = plain_generator.generate(PROMPT, **options)
    assert generator.generate(PROMPT, **options).text == expected.text


@pytest.mark.parametrize("end", [257, 258])
def test_generate_stops_at_every_eos_token(end):
    eos = ("<|im_end|>", "<|end|>")
    generator, prompt = scripted("abc", ids=[end, 40], eos=eos)
    responses = list(generator.stream(prompt, max_tokens=10))
    assert [p.text for p in responses] == ["a", "b", "c", ""]
    assert [p.finish_reason for p in responses] == [None, None, None, "stop"]
    assert responses[-1].token == end
    generation = generator.generate(prompt, max_tokens=10)
    assert (generation.text, len(generation.tokens)) == ("abc", 3)
    assert generation.finish_reason == "stop"


def test_stop_tokens_replace_eos_tokens():
    generator, prompt = scripted("abc", ids=[257, 40])
    b = generator.tokenizer.encode("b")
    assert generator.generate(prompt, max_tokens=9, stop_tokens=b).text == "a"
    past = generator.generate(prompt, max_tokens=5, stop_tokens=())
    assert past.tokens[3:] == [257, 40]
    assert past.finish_reason == "length"


def test_stream_yields_complete_characters():
    text = "né 🎈🧑‍🚀!"
    # A scripted byte has only one successor, so every character has its own script.
    for character in text:
        generator, prompt = scripted(character, ids=[257])
        responses = list(generator.stream(prompt, max_tokens=9))
        assert "".join(p.text for p in responses) == character
        assert len(responses) == len(character.encode()) + 1
        assert not any("\ufffd" in p.text for p in responses)


def test_generate_ends_with_replacement_for_partial_character():
    generator, prompt = scripted("🎈", ids=[257])
    assert generator.generate(prompt, max_tokens=2).text == "\ufffd"


def test_logprobs_match_float64_reference(llama, tokenizer):
    prompt, options = random_prompt(5), {"max_tokens": 20, "logprobs": True}
    responses = list(Generator(llama, tokenizer).stream(prompt, **options))
    tokens = [p.token for p in responses]
    logits = np.array(llama(mx.array([prompt + tokens])), np.float64)[0, 4:-1]
    norm = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1))
    norm += logits.max(-1)
    expected = logits[np.arange(len(tokens)), tokens] - norm
    np.testing.assert_allclose([p.logprob for p in responses], expected, atol=1e-4)


def test_generate_reports_timings(llama, tokenizer):
    streamed = []
    generation = Generator(llama, tokenizer).generate(
        [5, 6, 7], max_tokens=6, stop_tokens=(), on_token=streamed.append
    )
    assert [p.token for p in streamed] == generation.tokens
    assert len(generation.tokens) == 6
    assert (generation.prompt_tokens, generation.finish_reason) == (3, "length")
    rate = 3 / (generation.ttft_ms / 1000)
    assert math.isclose(generation.prefill_tokens_per_second, rate, rel_tol=1e-6)
    assert generation.decode_tokens_per_second > 0


def test_generator_rejects_empty_and_long_prompts(llama, tokenizer):
    generator = Generator(llama, tokenizer)
    for call in (
        generator.stream,
        generator.generate,
        lambda p: texts_of(generator, [p], 9),
    ):
        with pytest.raises(UserError, match="prompt is empty"):
            call([])
        with pytest.raises(UserError, match=r"401 tokens.* 400 positions"):
            call([1] * 401)


def test_generation_ends_at_max_positions(llama, tokenizer):
    generation = Generator(llama, tokenizer).generate([1] * 398, stop_tokens=())
    assert len(generation.tokens) == 3
    assert generation.finish_reason == "length"


TEMPLATE = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}>{% if enable_thinking %}?{% endif %}{% endif %}"
)


def test_encode_chat_with_and_without_template(llama, tokenizer):
    plain, chat = Generator(llama, tokenizer), byte_tokenizer(template=TEMPLATE)
    messages = [{"role": "user", "content": "hi"}]
    assert (
        plain.encode_chat("hi") == plain.encode_chat(messages) == tokenizer.encode("hi")
    )
    with_template = Generator(llama, chat)
    assert chat.decode(with_template.encode_chat("hi")) == "<|im_start|>hi<|im_end|>>"
    assert with_template.encode_chat("hi") == with_template.encode_chat(messages)
    assert with_template.chat("hi", max_tokens=3) is not None
    with pytest.raises(UserError, match="rejects these messages: no system"):
        with_template.encode_chat([{"role": "system", "content": "x"}, *messages])


def test_encode_text_adds_one_bos(llama):
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_tokenizer()
    tokenizer.bos_token = "<|im_start|>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 256)]
    )
    generator = Generator(llama, tokenizer)
    tokens = generator.encode_text("hi")
    assert tokens[0] == 256
    assert (
        generator.encode_text("<|im_start|>hi") == generator.encode_chat("hi") == tokens
    )


def test_encode_chat_can_disable_thinking(llama):
    chat = byte_tokenizer(template=TEMPLATE)
    chat.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    thinking_tokenizer = type(chat)(
        chat._tokenizer, type(chat._detokenizer), chat.eos_token_ids
    )
    generator = Generator(llama, thinking_tokenizer)
    assert thinking_tokenizer.decode(generator.encode_chat("hi")).endswith(">?")
    assert thinking_tokenizer.decode(
        generator.encode_chat("hi", thinking=False)
    ).endswith(">>")


@pytest.mark.parametrize(
    ("family", "options", "per_token"),
    [
        ("llama", {}, 2 * 2 * 16 * 4),  # two layers, keys and values, one head
        ("llama wide", {"kv_bits": [16, 4]}, 2 * 32 * 4 + 2 * (16 + 4 * 2)),
        ("deepseek_v3", {}, 2 * (16 + 8) * 4),  # the latent, and the rotated key
        ("gemma3", {}, 2 * 16 * 4),  # the other layer has a window, which counts too
        ("recurrent_gemma", {}, 0),
    ],
)
def test_completions_that_do_not_fit_in_memory_are_refused(
    family, options, per_token, tokenizer, monkeypatch
):
    name, _, wide = family.partition(" ")
    settings = changed(config(name), {"head_dim": 32} if wide else {})
    model = build_model(settings | {"max_position_embeddings": 10**9})
    generator = Generator(model, tokenizer, **options)
    generator.max_positions = None
    monkeypatch.setattr(scheduler_module, "available_memory", lambda: 10**7)
    window = 2 * 16 * 4 * (WINDOW + WINDOW_SLACK) if family == "gemma3" else 0
    fitting = (10**7 - window) // per_token if per_token else 10**9
    next(generator.stream([1, 2, 3], max_tokens=fitting - 3))
    if per_token:
        with pytest.raises(UserError, match=r"takes 0\.0 GB") as caught:
            next(generator.stream([1, 2, 3], max_tokens=fitting - 2))
        assert caught.value.hint.startswith(f"{fitting:,} tokens fit: lower max_tokens")
        assert caught.value.code == WILL_NOT_FIT
    if not options and per_token:
        requests = [generator.request([1, 2], max_tokens=n) for n in (1, fitting)]
        with pytest.raises(UserError, match="tokens fit"):
            list(generator.generate_all(requests))


def test_tiny_models_generate_varied_tokens(tokenizer):
    """Control: the other tests would pass on a model that repeats one token."""
    for name in MODELS:
        generator = Generator(tiny(name), tokenizer)
        tokens = generator.generate([1, 2, 3], max_tokens=40).tokens
        assert len(set(tokens)) > 12, name
        assert max(tokens) < VOCABULARY

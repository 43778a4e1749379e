"""Penalties, logit bias and allowed tokens, compared with mlx-lm and NumPy."""

import mlx.core as mx
import numpy as np
import pytest
from lmx.errors import UserError
from lmx.generation.generator import Generator
from lmx.generation.sampling import LogitsProcessor, Sampling
from tiny_generators import VOCABULARY, byte_tokenizer, tiny

pytestmark = pytest.mark.fused

SETTINGS = {
    "repetition": {"repetition_penalty": 1.3},
    "presence": {"presence_penalty": 0.7},
    "frequency": {"frequency_penalty": 0.4},
    "bias": {"logit_bias": ((5, 3.0), (7, -100.0))},
}


def processors(settings):
    from mlx_lm.sample_utils import make_logits_processors

    settings = dict(settings)
    if bias := settings.pop("logit_bias", None):
        settings["logit_bias"] = dict(bias)
    sizes = {k.replace("_penalty", "_context_size"): 10**6 for k in settings}
    sizes.pop("logit_bias", None)
    return make_logits_processors(**settings, **sizes)


@pytest.mark.parametrize("name", SETTINGS)
def test_logits_processor_matches_mlx_lm(name):
    from mlx_lm.generate import generate_step

    prompt = np.random.default_rng(0).integers(0, 256, 24).tolist()
    model = tiny("llama")
    theirs = [
        token if isinstance(token, int) else token.item()
        for token, _ in generate_step(
            mx.array(prompt),
            model,
            max_tokens=40,
            logits_processors=processors(SETTINGS[name]),
        )
    ]
    generator = Generator(model, byte_tokenizer())
    options = {"max_tokens": 40, "stop_tokens": ()}
    ours = generator.generate(prompt, sampling=Sampling(**SETTINGS[name]), **options)
    assert ours.tokens == theirs
    assert ours.tokens != generator.generate(prompt, **options).tokens


def test_logits_processor_matches_numpy_reference():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2, 9)).astype(np.float32)
    prompts, next_tokens = [[1, 1, 2], [8, 0, 0]], [3, 0]
    sampling = Sampling(
        repetition_penalty=1.5,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        logit_bias=((4, 1.0),),
        allowed_tokens=(0, 1, 2, 4),
    )
    processor = LogitsProcessor.create(sampling, 9)
    counts = processor.update(processor.count_prompts(prompts), mx.array(next_tokens))
    expected = logits.astype(np.float64)
    for index, prompt in enumerate(prompts):
        history = [*prompt, next_tokens[index]]
        for token in set(history):
            value = expected[index, token]
            expected[index, token] = value * 1.5 if value < 0 else value / 1.5
            expected[index, token] -= 0.3 + 0.2 * history.count(token)
    expected[:, 4] += 1.0
    expected[:, [3, 5, 6, 7, 8]] = -np.inf
    np.testing.assert_allclose(processor(mx.array(logits), counts), expected, rtol=1e-6)


def test_logits_processor_is_none_for_neutral_settings():
    assert LogitsProcessor.create(Sampling(temperature=1.0, top_p=0.5), 9) is None


def test_allowed_tokens_restrict_sampling():
    generator = Generator(tiny("llama"), byte_tokenizer())
    sampling = Sampling(temperature=1.0, allowed_tokens=(3, 4, 250), seed=1)
    result = generator.generate([1, 2], max_tokens=30, sampling=sampling)
    assert {3, 250} <= set(result.tokens) <= {3, 4, 250}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0"),
        ({"presence_penalty": float("nan")}, "presence_penalty is nan"),
        ({"allowed_tokens": ()}, "at least one token"),
    ],
)
def test_sampling_rejects_invalid_values(settings, message):
    with pytest.raises(UserError, match=message):
        Sampling(**settings)


@pytest.mark.parametrize("token", [VOCABULARY, -1])
@pytest.mark.parametrize("name", ["logit_bias", "allowed_tokens"])
def test_logits_processor_rejects_unknown_tokens(name, token):
    value = ((token, 1.0),) if name == "logit_bias" else (token,)
    with pytest.raises(UserError, match=f"no token {token}"):
        LogitsProcessor.create(Sampling(**{name: value}), VOCABULARY)

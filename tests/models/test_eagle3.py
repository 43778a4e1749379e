"""EAGLE-3 drafters: parity with float64, gradients, the draft vocabulary, files."""

import json

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from lmx.config.draft import DrafterConfig
from lmx.errors import UserError
from lmx.models.drafters.base import TargetHead
from lmx.models.drafters.configs import default_layer_ids
from lmx.models.drafters.eagle3 import (
    DraftContext,
    Eagle3Attention,
    Eagle3Drafter,
    spread_starts,
)
from lmx.models.drafters.io import is_drafter, load_drafter
from mlx.utils import tree_flatten, tree_map
from tiny_eagle3 import (
    DRAFT_VOCABULARY,
    LAYER_IDS,
    WIDTH,
    Reference,
    float64,
    states_of,
    tiny_drafter,
)
from tiny_families import SHAPE, VOCABULARY, member

TOKENS = mx.random.randint(0, VOCABULARY, (2, 10), key=mx.random.key(4))
LENGTH, STEPS = TOKENS.shape[1] - 1, 4
KEY = "eagle_aux_hidden_state_layer_ids"
VARIANTS = {
    "plain": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "bias": {"attention_bias": True},
    "layers": {"num_hidden_layers": 2},
    "whole_vocabulary": {"draft_vocab_size": VOCABULARY},
}


@pytest.fixture(scope="module")
def target():
    return member("llama")


def variant(target, **changes):
    """A drafter with changed options and random weights."""
    drafter = tiny_drafter(target)
    mx.random.seed(8)
    drafter = Eagle3Drafter(drafter.config.model_copy(update=changes))
    drafter.choose_vocabulary(np.arange(VOCABULARY)[::-1] % 7)
    weights = tree_map(
        lambda w: w + 0.2 * mx.random.normal(w.shape), drafter.trainable_parameters()
    )
    drafter.update(weights)
    return drafter.bind(TargetHead(target))


def draft_logits(drafter, tokens, states, starts=None):
    if starts is None:
        starts = drafter.sample_starts(mx.ones((len(tokens), LENGTH), mx.bool_))
    return drafter.head(drafter.draft_hidden(tokens, states, starts, STEPS))


def test_training_rounds_are_some_of_all_draft_tokens(target):
    drafter = variant(target)
    states = states_of(target, TOKENS, drafter)
    mask = mx.arange(LENGTH) >= mx.array([[0], [4]])
    first, later = drafter.training_rounds(TOKENS, states, mask, STEPS)
    assert (first.first, later.first) == (0, 1)
    for rounds, tokens in ((first, slice(0, 1)), (later, slice(1, None))):
        whole = drafter.draft_hidden(TOKENS, states, rounds.starts, STEPS)
        assert mx.allclose(rounds.hidden, whole[:, :, tokens], atol=1e-6)
    assert first.starts.tolist() == [list(range(1, LENGTH + 1))] * 2
    assert later.starts.shape == (2, 3)
    assert later.weight == 4


@pytest.mark.parametrize("trained", [40, 11, 3, 0])
def test_starts_of_later_tokens_are_every_fourth_trained_one(trained):
    length = 41
    tokens = mx.zeros((4, length + 1), mx.int32)
    tokens[:, 0] = mx.arange(4)
    mask = mx.broadcast_to(mx.arange(length) >= length - trained, (4, length))
    starts = spread_starts(tokens, mask).tolist()
    found = [[start for start in row if start < length] for row in starts]
    places = range(length - trained, length)
    assert found == [[*places[first::4]] for first in range(4)]
    alone = [spread_starts(tokens[n : n + 1], mask[:1]).tolist()[0] for n in range(4)]
    assert starts == alone


def reference_error(drafter, states):
    """Largest difference from the reference over all rounds, relative to the logits."""
    ours, reference = (
        np.array(draft_logits(drafter, TOKENS, states)),
        Reference(drafter),
    )
    errors = []
    for sequence in range(len(TOKENS)):
        for start in range(1, LENGTH + 1):
            count = min(STEPS, LENGTH + 1 - start)
            expected = reference.logits(
                TOKENS[sequence], states[sequence], start, count
            )
            error = np.abs(ours[sequence, start - 1, :count] - expected).max()
            errors.append(error / np.abs(expected).max())
    return max(errors)


@pytest.mark.parametrize("name", VARIANTS)
def test_training_time_test_equals_rounds_in_float64(target, name):
    drafter = variant(target, **VARIANTS[name])
    assert reference_error(drafter, states_of(target, TOKENS, drafter)) < 1e-5


def test_wrong_attention_differs_from_the_reference(target, monkeypatch):
    drafter = variant(target)
    states = states_of(target, TOKENS, drafter)
    attend = Eagle3Attention._attend

    def sees_later_rows(self, queries, context):
        rows = mx.full(context.rows.shape, LENGTH)
        return attend(self, queries, context._replace(rows=rows))

    def sees_only_itself(self, queries, context):
        return attend(self, queries, context._replace(drafted=context.drafted[-1:]))

    for wrong in (sees_later_rows, sees_only_itself):
        monkeypatch.setattr(Eagle3Attention, "_attend", wrong)
        assert reference_error(drafter, states) > 1e-3
    monkeypatch.setattr(Eagle3Attention, "_attend", attend)
    draft = Eagle3Attention.draft

    def one_position(self, x, context):
        drafted = list(context.drafted)
        wrong = DraftContext(
            context.context, context.rows - len(drafted), context.drafted
        )
        return draft(self, x, wrong)

    monkeypatch.setattr(Eagle3Attention, "draft", one_position)
    assert reference_error(drafter, states) > 1e-3


def test_hidden_states_of_other_blocks_give_other_logits(target):
    """Control: block i instead of i - 1, the usual error with layer ids."""
    drafter = variant(target)
    right = draft_logits(drafter, TOKENS, states_of(target, TOKENS, drafter))
    drafter.layer_ids = (1, 1)
    wrong = draft_logits(drafter, TOKENS, states_of(target, TOKENS, drafter))
    assert mx.abs(right - wrong).max() > 1e-2


def test_draft_tokens_do_not_depend_on_later_tokens(target):
    """Draft token j of round a sees tokens up to a + j - 1, and states before a."""
    drafter = variant(target)
    states = states_of(target, TOKENS, drafter)
    logits = draft_logits(drafter, TOKENS, states)
    for start in (1, 4, 6):
        changed_states = mx.array(states)
        changed_states[:, start:] += 1.0
        for number in range(STEPS):
            tokens = mx.array(TOKENS)
            tokens[:, start + number + 1 :] = 3
            changed = draft_logits(drafter, tokens, changed_states)
            before, after = (x[:, start - 1, number] for x in (logits, changed))
            assert mx.array_equal(before, after)
            # The control: the last token that it may see.
            tokens[:, start + number] = 5
            changed = draft_logits(drafter, tokens, changed_states)
            assert not mx.allclose(before, changed[:, start - 1, number], atol=1e-3)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_cached_rows_and_steps_equal_training_time_test(target, num_layers):
    drafter = variant(target, num_layers=num_layers)
    states = states_of(target, TOKENS, drafter)
    expected = drafter.draft_hidden(TOKENS, states, mx.array([[5, 7], [5, 7]]), 3)
    cache, read = drafter.make_cache(), 0
    for index, start in enumerate((5, 7)):
        # Several rows at a time, as with long prompts.
        for end in range(read + 1, start + 1, 2):
            end = min(end + 1, start)
            output = drafter.read(
                TOKENS[:, read + 1 : end + 1], states[:, read:end], cache
            )[:, -1:]
            read = end
        outputs = [output]
        for place in range(start + 1, start + 3):
            output = drafter.step(TOKENS[:, place : place + 1], output, cache)
            outputs.append(output)
        for layer_cache in cache:
            assert layer_cache.trim(2) == 2
        ours = mx.concatenate(outputs, axis=1)
        # The outputs are up to 15.
        assert mx.allclose(ours, expected[:, index], atol=1e-4)


@pytest.mark.parametrize(
    "name",
    [
        "fc.weight",
        "layers.0.hidden_norm.weight",
        "layers.0.self_attn.k_proj.weight",
        "layers.0.self_attn.v_proj.weight",
        "lm_head.weight",
    ],
)
def test_gradients_equal_finite_differences(target, name):
    drafter = variant(target)
    tokens, start = TOKENS[0], 6
    states = states_of(target, TOKENS, drafter)[:1]
    rng = np.random.default_rng(1)
    weights = rng.normal(size=(STEPS, DRAFT_VOCABULARY))

    def loss(model):
        logits = draft_logits(model, tokens[None], states, mx.array([[start]]))[0, 0]
        return (mx.array(weights, mx.float32) * logits).sum()

    _, gradients = nn.value_and_grad(drafter, loss)(drafter)
    gradient = np.array(dict(tree_flatten(gradients))[name])
    direction, values, epsilon = rng.normal(size=gradient.shape), [], 1e-5
    for sign in (1, -1):
        parameters = float64(drafter)
        parameters[name] += sign * epsilon * direction
        reference = Reference(drafter, parameters)
        logits = reference.logits(tokens, states[0], start, STEPS)
        values.append((weights * logits).sum())
    expected = (values[0] - values[1]) / (2 * epsilon)
    scale = np.linalg.norm(gradient) * np.linalg.norm(direction)
    assert abs((gradient * direction).sum() - expected) < 1e-5 * scale
    # The control: gradients of the first draft token only.
    weights[1:] = 0
    _, others = nn.value_and_grad(drafter, loss)(drafter)
    others = np.array(dict(tree_flatten(others))[name])
    assert abs((others * direction).sum() - expected) > 1e-3 * scale


def test_the_most_frequent_tokens_are_drafted(target):
    drafter = tiny_drafter(target, counts=np.zeros(VOCABULARY))
    counts = np.zeros(VOCABULARY)
    counts[[90, 80, 7]] = 5, 9, 1
    drafter.choose_vocabulary(counts)
    tokens = drafter.target_tokens(mx.arange(DRAFT_VOCABULARY)).tolist()
    # Equally frequent tokens are chosen by their id.
    assert tokens == [*range(DRAFT_VOCABULARY - 2), 80, 90]
    draft_ids = drafter.draft_ids.tolist()
    assert len(draft_ids) == VOCABULARY
    assert [draft_ids[token] for token in tokens] == list(range(DRAFT_VOCABULARY))
    assert draft_ids[DRAFT_VOCABULARY - 2] == DRAFT_VOCABULARY
    logits = mx.random.normal((2, 3, DRAFT_VOCABULARY))
    wide = drafter.target_logits(logits)
    assert mx.array_equal(wide[..., mx.array(tokens)], logits)
    assert (wide == -mx.inf).sum() == 6 * (VOCABULARY - DRAFT_VOCABULARY)
    # A buffer is never trained.
    assert "d2t" not in dict(tree_flatten(drafter.trainable_parameters()))
    assert "d2t" in dict(tree_flatten(drafter.parameters()))


def test_a_drafter_of_all_tokens_has_no_draft_ids(target):
    drafter = tiny_drafter(target, draft_vocab_size=None)
    assert drafter.draft_ids is None
    assert drafter.draft_vocab_size == VOCABULARY
    logits = mx.random.normal((3, VOCABULARY))
    assert mx.array_equal(drafter.target_logits(logits), logits)
    assert "d2t" not in drafter.export_weights()


@pytest.mark.parametrize("bits", [None, 8])
def test_training_starts_with_the_head_of_the_target(bits):
    model = member("llama")
    weight = model.lm_head.weight
    if bits:
        head = model.lm_head = model.lm_head.to_quantized(group_size=32, bits=bits)
        weight = mx.dequantize(
            head.weight, head.scales, head.biases, group_size=32, bits=bits
        )
    drafter = tiny_drafter(model)
    drafter.initialize()
    tokens = drafter.target_tokens(mx.arange(DRAFT_VOCABULARY))
    assert mx.allclose(drafter.lm_head.weight, weight[tokens], atol=1e-5)


def test_layers_are_spread_over_the_target():
    assert default_layer_ids(32) == (1, 15, 28)
    assert default_layer_ids(8) == (1, 3, 4)
    assert default_layer_ids(6) == (0, 2, 4)
    for count in range(1, 8):
        layers = default_layer_ids(count)
        assert layers == tuple(sorted(set(layers)))
        assert max(layers) < count


def test_sizes_follow_the_target():
    config = SHAPE | {
        "intermediate_size": 80,
        "rope_theta": 5e5,
        "rope_parameters": {
            "full_attention": {"rope_theta": 5e5, "rope_type": "default"},
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        },
        "architectures": ["Gemma3ForCausalLM"],
    }
    drafter = Eagle3Drafter.for_target(
        {"text_config": config},
        DrafterConfig(num_draft_tokens=7),
        width=WIDTH,
        vocab_size=VOCABULARY,
        num_blocks=30,
    )
    assert drafter.layer_ids == (1, 14, 26)
    assert drafter.max_draft_tokens == 7
    assert drafter.config.intermediate_size == 80
    assert drafter.config.rope_theta == 5e5
    assert drafter.layers[0].self_attn.q_proj.weight.shape == (32, 2 * WIDTH)


# Files


def stored(drafter):
    """config.json and weights as they are written."""
    return json.loads(json.dumps(drafter.to_config())), drafter.export_weights()


def loaded(config, weights, target, num_blocks=2):
    assert Eagle3Drafter.matches(config)
    drafter = Eagle3Drafter.from_config(config, place="drafter")
    drafter.load_weights(list(drafter.sanitize(weights).items()))
    drafter.choose_layers(num_blocks)
    drafter.require_shape(WIDTH, VOCABULARY, place="drafter")
    return drafter.bind(TargetHead(target))


@pytest.mark.parametrize("name", VARIANTS)
def test_a_stored_drafter_gives_the_same_logits(target, name):
    drafter = variant(target, **VARIANTS[name])
    config, weights = stored(drafter)
    states = states_of(target, TOKENS, drafter)
    again = loaded(config, weights, target)
    expected = draft_logits(drafter, TOKENS, states)
    assert mx.array_equal(draft_logits(again, TOKENS, states), expected)
    assert again.layer_ids == drafter.layer_ids
    assert again.max_draft_tokens == drafter.max_draft_tokens
    # Entry 0 of the list of Hugging Face is the embedding.
    assert config[KEY] == [index + 1 for index in LAYER_IDS]
    embeddings = target.model.embed_tokens.weight
    assert mx.array_equal(weights["embed_tokens.weight"], embeddings)
    if drafter.draft_ids is not None:
        tokens = drafter.target_tokens(mx.arange(DRAFT_VOCABULARY))
        assert weights["t2d"].dtype == mx.bool_
        assert np.flatnonzero(np.array(weights["t2d"])).tolist() == tokens.tolist()


def flat_form(config, weights):
    """The same drafter as SGLang stores it."""
    flat = config["transformer_layer_config"] | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config["draft_vocab_size"],
    }
    weights = {
        name.replace("layers.0.", "midlayer."): value.astype(mx.int64)
        if name == "d2t"
        else value
        for name, value in weights.items()
    }
    del weights["embed_tokens.weight"], flat["rope_parameters"]
    return flat, weights


def test_a_drafter_in_the_form_of_sglang_is_read(target, tmp_path):
    drafter = variant(target)
    states = states_of(target, TOKENS, drafter)
    expected = draft_logits(drafter, TOKENS, states)
    flat, weights = flat_form(*stored(drafter))
    # At the top level the ids are those of Hugging Face; here they are blocks.
    for place in (
        {"eagle_config": {KEY: LAYER_IDS, "use_aux_hidden_state": True}},
        {KEY: [index + 1 for index in LAYER_IDS]},
    ):
        again = loaded(flat | place, weights, target)
        assert again.layer_ids == tuple(LAYER_IDS)
        assert mx.array_equal(draft_logits(again, TOKENS, states), expected)
        assert again.max_draft_tokens is None
    # As a folder, with the target's own embedding.
    named = flat | {KEY: [index + 1 for index in LAYER_IDS]}
    (tmp_path / "config.json").write_text(json.dumps(named))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    assert is_drafter(tmp_path)
    again = load_drafter(tmp_path, target)
    assert mx.array_equal(draft_logits(again, TOKENS, states), expected)
    # Most files name no blocks: there are three.
    unnamed = Eagle3Drafter.from_config(flat, place="drafter")
    assert unnamed.fc.weight.shape == (WIDTH, 3 * WIDTH)
    unnamed.choose_layers(32)
    assert unnamed.layer_ids == (1, 15, 28)
    assert unnamed.to_config()[KEY] == [2, 16, 29]


def test_offsets_that_are_ids_are_refused(target):
    drafter = variant(target)
    config, weights = stored(drafter)
    tokens = drafter.target_tokens(mx.arange(DRAFT_VOCABULARY))
    for d2t in (tokens, weights["d2t"] - 1, mx.zeros(DRAFT_VOCABULARY, mx.int32)):
        with pytest.raises(UserError, match="d2t"):
            loaded(config, weights | {"d2t": d2t}, target)


REFUSED = [
    ("model_type: expected 'llama'", {"model_type": "deepseek_v3"}),
    ("hidden_act: expected 'silu'", {"hidden_act": "gelu"}),
    ("mlp_bias: expected False", {"mlp_bias": True}),
    ("sliding_window 512 is not supported", {"sliding_window": 512}),
    ("embed_requires_grad: expected False", {"embed_requires_grad": True}),
    ("target_hidden_size must be hidden_size", {"target_hidden_size": 64}),
    ("bias: expected False", {"bias": True}),
    ("hidden_size: must be at least 1, got 0", {"hidden_size": 0}),
    ("hidden_size: must be less than 2,147,48", {"hidden_size": 10**30}),
    ("num_attention_heads: must be at least 1, got 0", {"num_attention_heads": 0}),
    ("num_attention_heads: expected a whole number", {"num_attention_heads": 2.0}),
    ("heads do not fit", {"num_key_value_heads": 3}),
    ("head_dim: must be at least 1", {"head_dim": 0}),
    ("vocab_size: expected a whole number, got nothing", {"vocab_size": None}),
    ("draft_vocab_size must be at most vocab_size", {"draft_vocab_size": 10**6}),
    ("draft_vocab_size: must be at least 1", {"draft_vocab_size": 0}),
    ("rms_norm_eps: expected a number, got nothing", {"rms_norm_eps": None}),
    ("rms_norm_eps: must be less than 1", {"rms_norm_eps": 5}),
    ("attention_bias: expected true or false", {"attention_bias": "yes"}),
    ("norm_before_fc: expected true or false", {"norm_before_fc": 1}),
    (f"{KEY}: expected a list", {KEY: 3}),
    (f"{KEY}.0: expected a whole number", {KEY: ["1"]}),
    (f"{KEY}: 0 is the embedding", {KEY: [0, 1]}),
    ("layer_ids: must be a list of blocks in ascending order", {KEY: [2, 1]}),
    ("layer_ids.0: must be at least 0", {"eagle_config": {KEY: [-1]}}),
    ("eagle_config: expected a block of keys", {"eagle_config": "x"}),
    ("use_aux_hidden_state", {"eagle_config": {"use_aux_hidden_state": False}}),
    ("speculators_config.proposal_methods.0: expected a block of keys",
     {"speculators_config": {"proposal_methods": [1]}}),
    ("rope_scaling: expected .* got \"x\"", {"rope_scaling": {"type": "x"}}),
    ("rope_theta: expected a number", {"rope_parameters": {"rope_theta": "1e4"}}),
    ("rope_parameters must be a block", {"rope_parameters": {"full_attention": 1}}),
]  # fmt: skip


@pytest.mark.parametrize(("message", "change"), REFUSED)
def test_configs_that_are_wrong_or_not_supported_have_one_clear_error(
    target, message, change
):
    flat, _ = flat_form(*stored(variant(target)))
    with pytest.raises(UserError, match=message) as caught:
        Eagle3Drafter.from_config(flat | change, place="drafter/config.json")
    assert caught.value.place == "drafter/config.json"


def test_positions_of_transformers_5_are_read(target):
    """`rope_parameters` stand for `rope_theta` and `rope_scaling`."""
    flat, _ = flat_form(*stored(variant(target)))
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
    old = flat | {"rope_theta": 5e5, "rope_scaling": scaling}
    new = {k: v for k, v in flat.items() if not k.startswith("rope")}
    new["rope_parameters"] = scaling | {"rope_theta": 5e5}
    by_layer = new | {"rope_parameters": {"full_attention": new["rope_parameters"]}}
    expected = Eagle3Drafter.from_config(old, place="").config
    assert expected.rope["rope_theta"] == 5e5
    for config in (new, by_layer, new | {"rope_theta": None, "rope_scaling": None}):
        read = Eagle3Drafter.from_config(config, place="").config
        assert read.rope == expected.rope
        layer = read.model_copy(update={"layer_ids": (0, 1)}).to_json()
        again = layer["transformer_layer_config"]
        assert (again["rope_theta"], again["rope_scaling"]) == (5e5, scaling)
        assert again["rope_parameters"] == new["rope_parameters"]
    rotated = [
        Eagle3Drafter.from_config(config, place="").layers[0].self_attn.rope
        for config in (old, new, flat)
    ]
    x = mx.random.normal((1, 1, 8, expected.head_dim), key=mx.random.key(0))
    assert mx.array_equal(rotated[0](x), rotated[1](x))
    assert not mx.allclose(rotated[0](x), rotated[2](x), atol=1e-2)


def write(folder, config, weights):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("num_hidden_layers is 10,000,000, but the", {"num_hidden_layers": 10**7}),
        ("hidden_size is 2,000,000,000, but no", {"hidden_size": 2 * 10**9}),
        ("blocks 0 to 1, the drafter reads", {KEY: [1, 9]}),
        ("tensor layers.0.mlp.up_proj.* is missing", "layers.0.mlp.up_proj.weight"),
        ("up_proj.weight has values of .*int8", {}),
    ],
)
def test_folders_that_do_not_fit_are_refused(target, tmp_path, message, change):
    config, weights = stored(variant(target))
    name = "layers.0.mlp.up_proj.weight"
    if change == name:
        del weights[name]
    elif not change:
        weights[name] = weights[name].astype(mx.int8)
    elif KEY in change:
        config |= change
    else:
        config["transformer_layer_config"] |= change
    with pytest.raises(UserError, match=message) as caught:
        load_drafter(write(tmp_path, config, weights), target)
    assert str(tmp_path) in caught.value.place


def test_a_drafter_of_another_target_is_refused(target):
    drafter = variant(target)
    drafter.require_shape(WIDTH, VOCABULARY + 8, place="drafter")
    with pytest.raises(UserError, match="width"):
        drafter.require_shape(2 * WIDTH, VOCABULARY, place="drafter")
    with pytest.raises(UserError, match="tokens"):
        drafter.require_shape(WIDTH, VOCABULARY - 1, place="drafter")
    drafter.layer_ids = (0, 1, 1)
    with pytest.raises(UserError, match="hidden states"):
        drafter.require_shape(WIDTH, VOCABULARY, place="drafter")


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
        {"architectures": ["DFlashDraftModel"]},
        {"speculators_model_type": "dflash"},
    ],
)
def test_other_models_are_no_eagle3_drafters(config):
    assert not Eagle3Drafter.matches(config)

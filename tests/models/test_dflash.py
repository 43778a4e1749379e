"""DFlash drafters: parity with a float64 forward pass, gradients, files, starts."""

import json

import mlx.core as mx
import numpy as np
import pytest
from lmx.config.draft import DrafterConfig
from lmx.errors import UserError
from lmx.models.drafters.configs import DFlashConfig, spread
from lmx.models.drafters.dflash import DFlashDrafter
from lmx.models.drafters.io import load_drafter, save_drafter
from lmx.models.hooks import forward_with_hidden_states
from mlx.utils import tree_flatten, tree_map
from tiny_dflash import random_drafter, random_target
from tiny_families import FAMILIES, VOCABULARY
from tiny_families import config as family_config

LENGTH = 14
STARTS = np.array([[1, 5, 13], [2, 9, 14]])
TRAPS = ["first slot", "causal block", "state of the anchor", "all states", "layers"]


@pytest.fixture(scope="module")
def case():
    """A drafter of two layers, its inputs and their float64 copies."""
    model, config = random_target("qwen3", num_hidden_layers=3, num_attention_heads=4)
    drafter = random_drafter(model, config, num_layers=2, layer_ids=[0, 2])
    noise = tree_map(lambda w: 0.3 * mx.random.normal(w.shape), drafter.parameters())
    drafter.update(tree_map(mx.add, drafter.parameters(), noise))
    tokens = np.random.default_rng(0).integers(1, VOCABULARY, (2, LENGTH + 1))
    return model, drafter, mx.array(tokens)


def states_of(model, tokens, layer_ids):
    return forward_with_hidden_states(model, tokens[:, :-1], layer_ids)[1]


def as_float64(tree):
    return {name: np.array(value, np.float64) for name, value in tree_flatten(tree)}


def norm(x, weight):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight


def rotate(x, positions):
    """Rotary embedding of x [N, heads, D]."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * 1e4 ** (-np.arange(half) / half)
    cos, sin = np.cos(angles), np.sin(angles)
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def round_outputs(weights, config, block, states, start, trap):
    """All outputs [S, width] of one round, with explicit loops over heads."""
    before = {"state of the anchor": start + 1, "all states": len(states)}
    context = norm(states[: before.get(trap, start)] @ weights["fc.weight"].T,
                   weights["hidden_norm.weight"])  # fmt: skip
    size, group = config.head_dim, config.num_attention_heads
    group //= config.num_key_value_heads
    hidden, slots = block, len(block)
    positions = np.concatenate([np.arange(len(context)), start + np.arange(slots)])
    for index in range(config.num_hidden_layers):
        at = {
            name.removeprefix(f"layers.{index}."): w
            for name, w in weights.items()
            if name.startswith(f"layers.{index}.")
        }
        x = norm(hidden, at["input_layernorm.weight"])
        rows = np.concatenate([context, x])

        def heads(name, rows, at=at):
            projected = rows @ at[f"self_attn.{name}_proj.weight"].T
            return projected.reshape(len(rows), -1, size)

        queries = norm(heads("q", x), at["self_attn.q_norm.weight"])
        queries = rotate(queries, positions[-slots:])
        keys = rotate(norm(heads("k", rows), at["self_attn.k_norm.weight"]), positions)
        values, outputs = heads("v", rows), []
        for head in range(config.num_attention_heads):
            scores = queries[:, head] @ keys[:, head // group].T / np.sqrt(size)
            if trap == "causal block":
                hidden_keys = np.triu(np.ones((slots, slots), bool), 1)
                scores[:, len(context) :][hidden_keys] = -np.inf
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            scores /= scores.sum(-1, keepdims=True)
            outputs.append(scores @ values[:, head // group])
        hidden = hidden + np.concatenate(outputs, -1) @ at["self_attn.o_proj.weight"].T
        x = norm(hidden, at["post_attention_layernorm.weight"])
        gate, up = (x @ at[f"mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        hidden = (
            hidden + (gate / (1 + np.exp(-gate)) * up) @ at["mlp.down_proj.weight"].T
        )
    return norm(hidden, weights["norm.weight"])


def reference(case, weights, count, trap=None):
    """The outputs [B, M, K, width] in float64."""
    model, drafter, tokens = case
    layers = [0, 1] if trap == "layers" else drafter.layer_ids
    states = np.array(states_of(model, tokens, layers), np.float64)
    table = np.array(drafter._target.embed(mx.arange(VOCABULARY)[None])[0], np.float64)
    masks = [drafter.config.mask_token_id] * drafter.max_draft_tokens
    first = 0 if trap == "first slot" else 1
    return np.array(
        [
            [
                round_outputs(
                    weights,
                    drafter.config,
                    table[[tokens[b, start].item(), *masks]],
                    states[b],
                    start,
                    trap,
                )[first : first + count]
                for start in STARTS[b]
            ]
            for b in range(len(STARTS))
        ]
    )


def outputs(case, count):
    model, drafter, tokens = case
    states = states_of(model, tokens, drafter.layer_ids)
    return drafter.draft_hidden(tokens, states, mx.array(STARTS), count)


@pytest.mark.parametrize("count", [1, 4])
def test_outputs_equal_those_in_float64(case, count):
    expected = reference(case, as_float64(case[1].parameters()), count)
    assert np.abs(np.array(outputs(case, count)) - expected).max() < 1e-5


@pytest.mark.parametrize("trap", TRAPS)
def test_planted_errors_change_the_outputs(case, trap):
    expected = reference(case, as_float64(case[1].parameters()), 3, trap)
    errors = np.abs(np.array(outputs(case, 3)) - expected).max(axis=(-1, -2))
    # The third round of the second text starts after its last hidden state.
    seen = errors[:, :2] if trap in ("state of the anchor", "all states") else errors
    assert seen.min() > 1e-2


def test_gradients_equal_finite_differences(case):
    _, drafter, _ = case
    rng = np.random.default_rng(1)
    mixture = rng.normal(size=(*STARTS.shape, 4, drafter.config.hidden_size))

    def loss(parameters):
        drafter.update(parameters)
        return (outputs(case, 4) * mx.array(mixture)).sum()

    parameters = drafter.parameters()
    gradients = as_float64(mx.grad(loss)(parameters))
    drafter.update(parameters)
    weights = as_float64(parameters)
    assert gradients.keys() == weights.keys()
    for name, weight in weights.items():
        place = tuple(rng.integers(size) for size in weight.shape)
        values = []
        for step in (1e-6, -1e-6):
            changed = weight.copy()
            changed[place] += step
            values.append(
                (reference(case, weights | {name: changed}, 4) * mixture).sum()
            )
        slope = (values[0] - values[1]) / 2e-6
        assert gradients[name][place] == pytest.approx(slope, rel=1e-3, abs=2e-3), name


def test_blocks_from_caches_equal_those_of_the_whole_text(case):
    model, drafter, tokens = case
    states = states_of(model, tokens, drafter.layer_ids)
    whole = outputs(case, 4)
    for row, starts in enumerate(STARTS.tolist()):
        cache, end = drafter.make_cache(), 0
        for index, start in enumerate(starts):
            # In uneven pieces.
            for first, last in ((end, end + 1), (end + 1, start)):
                if last > first:
                    piece = states[row : row + 1, first:last]
                    drafter.extend_context(piece, first, cache)
            end = start
            anchor = tokens[row, start].item()
            block = drafter.draft_block(anchor, start, cache, 4)
            assert mx.allclose(block, whole[row, index], atol=1e-5)
            # The control: an anchor at another position.
            other = drafter.draft_block(anchor, start + 1, cache, 4)
            assert not mx.allclose(other, whole[row, index], atol=1e-3)


def test_later_tokens_and_states_do_not_matter(case):
    model, drafter, tokens = case
    states = states_of(model, tokens, drafter.layer_ids)
    start = 6
    starts = mx.array([[start]] * 2)
    expected = drafter.draft_hidden(tokens, states, starts, 4)
    changed = mx.concatenate(
        [tokens[:, : start + 1], tokens[:, start + 1 :] + 1], axis=1
    )
    noisy = mx.concatenate([states[:, :start], states[:, start:] + 1], axis=1)
    assert mx.array_equal(drafter.draft_hidden(changed, noisy, starts, 4), expected)
    noisy = mx.concatenate([states[:, : start - 1], states[:, start - 1 :] + 1], axis=1)
    assert not mx.allclose(drafter.draft_hidden(tokens, noisy, starts, 4), expected)


def test_starts_are_random_trained_tokens(case):
    drafter = case[1]
    mask = mx.array([[True] * 3 + [False] * 17, [False] * 8 + [True] * 12])
    starts = []
    for _ in range(40):
        mx.random.seed(len(starts) // 2)
        starts.append(np.array(drafter.sample_starts(mask)))
        assert starts[-1].shape == (2, 4)
        for row, allowed in zip(starts[-1], ({1, 2}, set(range(8, 20))), strict=True):
            inside = [start for start in row.tolist() if start < 20]
            assert len(set(inside)) == len(inside) == min(len(allowed), 4)
            assert set(inside) <= allowed
    # The same under the same seed; otherwise all tokens in turn.
    assert all(np.array_equal(*starts[i : i + 2]) for i in range(0, 40, 2))
    assert set(np.stack(starts)[:, 1].flatten().tolist()) == set(range(8, 20))


HARMLESS_KEYS = {
    "attention_dropout": 0.1,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "max_window_layers": 5,
    "sliding_window": 4096,
    "transformers_version": "4.57.1",
    "use_cache": True,
    "use_sliding_window": False,
    "causal": False,
}


def read_again(config):
    """The config.json of a drafter that was read from one."""
    return DFlashDrafter.from_config(config, place="config.json").to_config()


def test_files_keep_sizes_and_weights(case):
    drafter = case[1]
    config = json.loads(json.dumps(drafter.to_config()))
    assert DFlashDrafter.matches(config)
    read = DFlashDrafter.from_config(config, place="config.json")
    assert read.to_config() == drafter.to_config()
    weights = read.sanitize(drafter.export_weights())
    read.load_weights(list(weights.items()))
    assert all(
        mx.array_equal(a[1], b[1])
        for a, b in zip(
            tree_flatten(read.parameters()),
            tree_flatten(drafter.parameters()),
            strict=True,
        )
    )
    assert read_again(config | HARMLESS_KEYS) == drafter.to_config()
    names = set(weights)
    assert {"fc.weight", "hidden_norm.weight", "norm.weight"} < names
    assert "layers.1.self_attn.q_norm.weight" in names
    # Older files have these keys at the top only, newer ones below dflash_config only.
    nested = config.pop("dflash_config")
    assert read_again(config) == drafter.to_config()
    for key in nested:
        del config[key]
    config["dflash_config"] = nested
    assert read_again(config) == drafter.to_config()


# Further values that every drafter refuses are in `test_eagle3.py`.
REFUSED = [
    ("selector_rank: 8", {"dflash_config": {"selector_rank": 8}}),
    ("conv_kernel_size: 2", {"dflash_config": {"conv_kernel_size": 2}}),
    ("markov_rank: 256", {"markov_rank": 256}),
    ("causal: True", {"dflash_config": {"causal": True}}),
    ("projector_type: expected 'dflash'",
     {"dflash_config": {"projector_type": "dspark"}}),
    ("DFlash2DraftModel", {"architectures": ["DFlash2DraftModel"]}),
    ("layer_types.0: expected 'full_attention', got \"sliding_attention\"",
     {"layer_types": ["sliding_attention", "full_attention"]}),
    ("speculators format", {"speculators_model_type": "dflash"}),
    ("block_size: expected a whole number, got nothing", {"block_size": None}),
    ("block_size: must be at least 2, got 1", {"block_size": 1}),
    ("block_size: must be at least 2, got 0", {"dflash_config": {"block_size": 0}}),
    ("mask_token_id: must be at least 0", {"mask_token_id": -1}),
    ("target_layer_ids: must be a list of blocks in asc", {"target_layer_ids": [3, 1]}),
    ("target_layer_ids: needs at least one entry", {"target_layer_ids": []}),
    ("dflash_config: expected a block of keys", {"dflash_config": "block_size"}),
    ("num_key_value_heads: must be at least 1, got 0", {"num_key_value_heads": 0}),
    ("attention heads do not fit", {"head_dim": 15}),
    ("rms_norm_eps: must be at least 0, got -1", {"rms_norm_eps": -1}),
    ("rope_theta: must be more than 1, got 0", {"rope_theta": 0}),
    ("rope_theta: expected a finite number", {"rope_theta": float("inf")}),
    ("rope_scaling: expected a block of keys", {"rope_scaling": ["llama3"]}),
    ("rope_scaling.factor: this key is missing",
     {"rope_scaling": {"rope_type": "llama3"}}),
    ('rope_scaling: expected .*got "dynamic"',
     {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}),
    ("rope_scaling.factor: must be more than 0, got 0",
     {"rope_scaling": {"rope_type": "yarn", "factor": 0}}),
    ("low_freq_factor must be less",
     {"rope_scaling": {"rope_type": "llama3", "factor": 2, "low_freq_factor": 4}}),
    ("partial_rotary_factor: must be at least 1", {"partial_rotary_factor": 0.5}),
    # Keys of another version.
    ("drafter: dflash_version", {"dflash_version": 2}),
    ("drafter: gate_rank", {"gate_rank": 64}),
    ("drafter: attention_bias", {"attention_bias": True}),
    ("drafter: (use_)?sliding_window",
     {"use_sliding_window": True, "sliding_window": 4096}),
]  # fmt: skip


@pytest.mark.parametrize(("message", "change"), REFUSED)
def test_other_designs_and_damaged_configs_are_refused(case, message, change):
    config = case[1].to_config()
    del config["dflash_config"], config["rope_parameters"]
    config |= change
    assert DFlashDrafter.matches(config)
    with pytest.raises(UserError, match=message):
        DFlashDrafter.from_config(config, place="config.json")


def test_drafters_of_other_targets_are_refused(case):
    drafter = case[1]
    drafter.require_shape(32, VOCABULARY, place="drafter")
    with pytest.raises(UserError, match="width 32, this one has the width 64"):
        drafter.require_shape(64, VOCABULARY, place="drafter")
    with pytest.raises(UserError, match="the target has 90 tokens"):
        drafter.require_shape(32, 90, place="drafter")


def test_configs_of_models_are_not_those_of_drafters():
    for architectures in ["Qwen3ForCausalLM"], None, 3, [3]:
        assert not DFlashDrafter.matches({"architectures": architectures})


def test_defaults_follow_the_target():
    assert [spread(n) for n in (1, 2, 3, 6, 30, 36)] == [
        *([0], [1], [1], [1, 2, 3], [1, 14, 27], [1, 17, 33])
    ]
    target = {
        "hidden_size": 96,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "intermediate_size": 200,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    }

    def sizes(target):
        return DFlashConfig.for_target(
            target,
            DrafterConfig(num_draft_tokens=7),
            width=96,
            vocab_size=500,
            num_blocks=30,
            mask_token_id=9,
        )

    config = sizes(target)
    assert (config.head_dim, config.num_key_value_heads, config.block_size) == (
        16,
        2,
        8,
    )
    assert (config.num_hidden_layers, config.target_layer_ids) == (3, (1, 14, 27))
    assert (config.rope_theta, config.rope_scaling) == (5e5, None)
    assert sizes({"model_type": "x", "text_config": target}) == config
    assert read_again(config.to_json()) == config.to_json()
    # A target without attention.
    plain = sizes({"intermediate_size": [100, 200]})
    assert (plain.head_dim, plain.num_attention_heads) == (64, 1)
    scaling = {"rope_type": "llama3", "factor": 8.0}
    scaled = sizes(target | {"rope_scaling": scaling})
    assert scaled.rope == config.rope | {"rope_scaling": scaling}
    # Its factors are for heads of another size.
    scaling = {"type": "longrope", "short_factor": [1.0]}
    assert sizes(target | {"rope_scaling": scaling}) == config


@pytest.mark.parametrize("family", FAMILIES)
def test_drafters_of_all_families_can_be_built_and_read(family):
    drafter = DFlashDrafter.for_target(
        family_config(family),
        DrafterConfig(),
        width=32,
        vocab_size=VOCABULARY,
        num_blocks=4,
        mask_token_id=0,
    )
    config = json.loads(json.dumps(drafter.to_config()))
    assert read_again(config) == drafter.to_config()


def test_a_drafter_of_a_target_with_many_layers_is_read(case, tmp_path):
    """The target's layers are more than the drafter's tensors."""
    model, drafter = case[:2]
    save_drafter(tmp_path, drafter, mx.float32)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"num_target_layers": 100}))
    read = load_drafter(tmp_path, model)
    assert read.to_config()["num_target_layers"] == 100


def test_weights_that_are_not_finite_are_refused(case, tmp_path):
    model, drafter, _ = case
    save_drafter(tmp_path, drafter, mx.float32)
    file = tmp_path / "model.safetensors"
    weights = dict(mx.load(str(file)))
    name = min(weights)
    weights[name] = weights[name] * mx.nan
    mx.save_safetensors(str(file), weights)
    with pytest.raises(UserError, match=f"{name} has values that are NaN"):
        load_drafter(tmp_path, model)

"""Changed configs of sound models: the same logits, a refusal, or a warning.

A case changes what a config says without changing a value for another one that is
valid: keys are removed, renamed, moved, given twice, or given values of other types.
"""

import json
import random
import shutil
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

import mlx.core as mx
import numpy as np
import pytest
from forked_cases import run_cases
from json_mutations import dump_json, mutate_json
from lmx.errors import UserError
from test_fuzz_model_folders import require_sentence, write_folder
from test_rope_parameters import SMALL, SPELLINGS
from tiny_checkpoints import QWEN3_MOE

# Values that are no defaults, so that the loss of a key is seen.
OTHER = {"rms_norm_eps": 1e-4, "layer_norm_eps": 1e-4, "routed_scaling_factor": 1.5}
BASES = {
    case: {key: OTHER.get(key, value) for key, value in rest.items()}
    | {"rope_parameters": parameters}
    for case, (rest, _, parameters) in SPELLINGS.items()
}
BASES |= {
    "qwen3_moe": QWEN3_MOE
    | {"hidden_size": 64, "rope_parameters": {"rope_theta": 3e3}},
    "gemma2": SMALL
    | {
        "model_type": "gemma2",
        "head_dim": 16,
        "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 2.0,
        "rope_theta": 3e3,
        "tie_word_embeddings": True,
    },
}
TOKENS = mx.random.randint(0, 320, (1, 24), key=mx.random.key(0))


@pytest.fixture(scope="session")
def bases(tmp_path_factory, tokenizer_folder) -> dict[str, str]:
    """Sound folders, each with its logits."""
    from lmx.models.rope_parameters import in_both_spellings

    root = tmp_path_factory.mktemp("configs")
    for family, settings in BASES.items():
        config = dict(settings)
        if "rope_parameters" in config:
            config.pop("rope_theta", None)
        folder = root / family
        write_folder(folder, in_both_spellings(config, ""), tokenizer_folder, None)
        dump_json(folder / "config.json", config)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            np.save(folder / "logits.npy", logits(folder))
    return {family: str(root / family) for family in BASES}


def logits(folder: Path) -> np.ndarray:
    from lmx.models.loader import load

    return np.array(load(folder).model(TOKENS))


def blocks(config: dict) -> list[dict]:
    """The config, and the blocks of RoPE in it."""
    found = [config]
    for block in found:
        found += [value for value in block.values() if isinstance(value, dict)]
    return found


def remove(rng, config):
    block = rng.choice(blocks(config))
    key = rng.choice(list(block))
    del block[key]
    return f"{key} removed"


def rename(rng, config):
    block = rng.choice(blocks(config))
    key = rng.choice(list(block))
    new = rng.choice([f"{key}s", key.upper(), f"{key}_", key[:-1], "x"])
    block[new] = block.pop(key)
    return f"{key} renamed to {new}"


def retype(rng, config):
    block = rng.choice(blocks(config))
    key = rng.choice(list(block))
    value = block[key]
    block[key] = rng.choice([str(value), [value], {"value": value}, {}, [], ""])
    return f"{key} = {block[key]!r}"


def unknown(rng, config):
    block = rng.choice(blocks(config))
    keys = ["softcap", "alibi", "rope_base", "logit_softcap"]
    keys += ["qk_norm", "parallel_residual", "rope_ratio", "hidden_activation", "temp"]
    key = rng.choice([key for key in keys if key not in block])
    block[key] = rng.choice([0.5, 7, True, "gelu", [1, 2]])
    return f"{key} = {block[key]!r}"


def contradict(rng, config):
    """Both spellings, with different values."""
    if rng.random() < 0.5:
        config["rope_theta"] = 7e4
    else:
        config["rope_scaling"] = {"rope_type": "linear", "factor": 3.0}
        parameters = config.setdefault("rope_parameters", {"rope_theta": 3e3})
        parameters.setdefault("rope_type", "default")
    if "rope_parameters" not in config:
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": 3e3}
    return "two spellings"


def respell(rng, config):
    """The same in both spellings: nothing changes."""
    from lmx.models.rope_parameters import in_both_spellings

    both = in_both_spellings(config, "")
    items = list(both.items())
    rng.shuffle(items)
    config.clear()
    config.update(items)
    harmless = {"use_cache": False, "attention_dropout": 0.1, "bos_token_id": 7}
    config.update(harmless | {"initializer_range": 0.5, "transformers_version": "9"})
    return "both spellings"


CHANGES = [remove, rename, retype, unknown, contradict, respell]


def run_case(seed: str, bases: dict[str, str]) -> str:
    """Change a config; "same", "refused" or "said", else an error."""
    rng = random.Random(seed)
    family = rng.choice(list(bases))
    with TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        shutil.copytree(bases[family], folder)
        config = json.loads((folder / "config.json").read_text())
        # Any damage at all: only the form of the answer is checked.
        is_arbitrary = rng.random() < 0.3
        if is_arbitrary:
            config, text = mutate_json(rng, config), "changed"
        else:
            change = rng.choice(CHANGES)
            text = f"{change.__name__}: {change(rng, config)}"
        dump_json(folder / "config.json", config)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                actual = logits(folder)
            except UserError as error:
                require_sentence(error)
                return "refused"
            except BaseException as error:
                error.add_note(f"{family}: {text}")
                raise
        texts = [str(w.message) for w in said if "config" in str(w.message)]
        assert all(len(line) < 1000 and "\n" not in line for line in texts), texts
        if not is_arbitrary and change is respell:
            assert not texts, f"{family}: {texts}"
        if np.array_equal(actual, np.load(folder / "logits.npy")):
            return "same"
        assert texts or is_arbitrary, f"silent: {family}: {text}"
        return "said" if texts else "changed"


def test_changed_configs_are_never_silent(bases, num_cases, request):
    seed = request.config.getoption("--fuzz-seed")
    seeds = [f"{seed} {number}" for number in range(num_cases(160))]
    outcomes = run_cases("test_fuzz_configs", seeds, bases=bases)
    assert outcomes["refused"] > len(seeds) // 10, outcomes
    assert outcomes["same"] > len(seeds) // 20, outcomes
    assert outcomes["said"] > len(seeds) // 20, outcomes

"""Damaged folders of adapters and drafters: loaded as they say, or refused."""

import json
import random
import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import mlx.core as mx
import pytest
from forked_cases import run_cases
from json_mutations import damage_bytes, dump_json, mutate_json, replace_file
from json_mutations import strange_value as strange
from lmx.errors import UserError
from mlx.utils import tree_flatten
from test_fuzz_model_folders import require_sentence
from tiny_checkpoints import LLAMA

TOKENS = mx.arange(6)[None]
SMALL = LLAMA | {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
SMALL |= {"num_hidden_layers": 2, "vocab_size": 320}
LORA = {"rank": 4, "scale": 2.0, "dropout": 0.0}
MORE_ADAPTER_KEYS = """
    fine_tune_type num_layers lora_parameters scale rank keys peft_target_modules r
    use_rslora use_dora bias rank_pattern alpha_pattern modules_to_save lora_bias
    layers_to_transform exclude_modules target_modules init_lora_weights peft_type
"""
MORE_DRAFTER_KEYS = """
    rope_scaling rope_theta rope_parameters rms_norm_eps head_dim vocab_size hidden_size
    num_attention_heads num_key_value_heads num_hidden_layers draft_vocab_size
    eagle_config speculators_config sliding_window attention_bias norm_before_fc
    eagle_aux_hidden_state_layer_ids block_size mask_token_id target_layer_ids
    dflash_config layer_types num_target_layers partial_rotary_factor hidden_act
    intermediate_size max_position_embeddings target_hidden_size
"""
# Integers that follow from each other, and what is read from the target.
UNREAD = {"d2t", "t2d", "embed_tokens.weight"}
ROPES = [
    {"rope_type": kind, "factor": factor, **more}
    for kind in ("linear", "llama3", "yarn", "dynamic", "longrope", "default", "x")
    for factor in (2.0, 0, -1, 1e300)
    for more in ({}, {"original_max_position_embeddings": 1}, {"beta_fast": 0})
]


def write_adapters(root: Path, base: Path) -> None:
    """A folder of each kind, with random values."""
    import mlx_lm
    from lmx.convert.exporters import peft
    from mlx_lm.tuner.utils import linear_to_lora_layers

    for kind in ("lora", "dora", "full", "peft"):
        model, _ = mlx_lm.load(str(base))
        model.freeze()
        if kind == "full":
            model.layers[-1].unfreeze()
        else:
            linear_to_lora_layers(model, 2, dict(LORA), use_dora=kind == "dora")
        names = [name for name, _ in tree_flatten(model.trainable_parameters())]
        weights = dict(tree_flatten(model.trainable_parameters()))
        for number, name in enumerate(names):
            key = mx.random.key(number)
            weights[name] += 0.1 * mx.random.normal(weights[name].shape, key=key)
        config = {"model": "a/b", "num_layers": 1 if kind == "full" else 2}
        config |= {"fine_tune_type": "lora" if kind == "peft" else kind}
        config |= {"lora_parameters": LORA}
        folder = root / kind
        folder.mkdir(parents=True)
        if kind == "peft":
            peft.write(folder, weights, config)
            file = folder / "adapter_config.json"
            settings = json.loads(file.read_text())
            ends = sorted({n.split(".")[-1] for n in settings["target_modules"]})
            dump_json(file, settings | {"target_modules": ends})
        else:
            mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
            dump_json(folder / "adapter_config.json", config)


def write_drafters(root: Path, base: Path) -> None:
    """An EAGLE-3 and a DFlash drafter in each place of their keys."""
    from lmx.config.draft import DrafterConfig
    from lmx.models.drafters.io import ARCHITECTURES, bind_target, save_drafter
    from lmx.models.loader import load

    target = load(base)
    for name, cls in ARCHITECTURES.items():
        config = DrafterConfig(
            num_layers=1,
            layer_ids=[0, 1],
            draft_vocab_size=40 if name == "eagle3" else None,
        )
        sizes = {"width": 64, "vocab_size": 320, "num_blocks": 2, "mask_token_id": 3}
        drafter = cls.for_target(target.config, config, **sizes)
        drafter.choose_vocabulary(mx.arange(320).__array__())
        bind_target(drafter, target.model, place="")
        folder = root / name
        folder.mkdir(parents=True)
        save_drafter(folder, drafter, mx.float32)
        flat = root / f"{name}_flat"
        shutil.copytree(folder, flat)
        stored = json.loads((folder / "config.json").read_text())
        for key in ("dflash_config", "rope_parameters"):
            stored.pop(key, None)
        if layer := stored.pop("transformer_layer_config", None):
            del stored["speculators_model_type"]
            del layer["rope_parameters"]
            stored |= layer | {"architectures": ["LlamaForCausalLMEagle3"]}
        dump_json(flat / "config.json", stored)


def mutate_config(rng: random.Random, file: Path, keys: str) -> str:
    config = json.loads(file.read_text())
    blocks = [config, *(v for v in config.values() if isinstance(v, dict))]
    block = rng.choice(blocks)
    if rng.random() < 0.5:
        key = rng.choice([*block] * 2 + keys.split())
        block[key] = strange(rng)
        if key.startswith("rope_") and rng.random() < 0.7:
            block[key] = rng.choice(ROPES)
    else:
        config = mutate_json(rng, config)
    dump_json(file, config)
    return f"config: {config!r}"[:600]


def mutate_tensors(rng: random.Random, file: Path) -> str:
    """Drop, rename, cast or reshape tensors: no such file may load."""
    tensors = dict(mx.load(str(file)))
    # MLX reads when it computes, and the file is replaced.
    mx.eval(tensors)
    name = rng.choice(sorted(tensors.keys() - UNREAD))
    kind = rng.choice(["drop", "drop end", "drop block", "cast", "rename", "reshape"])
    kind = rng.choice([kind, "add"])
    value = tensors[name]
    if kind == "cast":
        tensors[name] = value.astype(
            rng.choice([mx.int8, mx.uint8, mx.int32, mx.bool_])
        )
    elif kind == "reshape":
        tensors[name] = rng.choice([value[:-1], value[None]])
    elif kind == "rename":
        tensors[name.replace("0", "7") + rng.choice(["", "x"]) * 2] = tensors.pop(name)
        if name in tensors:
            tensors["y"] = tensors.pop(name)
    elif kind == "add":
        tensors[rng.choice([f"{name}.x", "x", "model.layers.9.mlp.lora_a"])] = value
    else:
        ends = {"drop": name, "drop end": name.rpartition(".")[2]}
        part = ends.get(kind, f"layers.{rng.choice('01')}.")
        gone = [n for n in tensors if n.endswith(part) or part in n] or [name]
        tensors = {n: v for n, v in tensors.items() if n not in gone}
    mx.save_safetensors(str(file), tensors)
    return f"tensors: {kind} {name}"


def damage(rng: random.Random, folder: Path, keys: str) -> tuple[str, str]:
    """Damage a folder once; returns the kind of the damage and what was done."""
    [weights] = folder.glob("*.safetensors")
    [config] = folder.glob("*config.json")
    draw = rng.random()
    if draw < 0.5:
        return "config", mutate_config(rng, config, keys)
    if draw < 0.85:
        return "tensors", mutate_tensors(rng, weights)
    file = rng.choice([weights, config])
    if draw < 0.93:
        file.write_bytes(damage_bytes(rng, file.read_bytes()))
        return "bytes", f"bytes of {file.name}"
    return "file", f"{file.name}: {replace_file(rng, file)}"


@cache
def target(base: str):
    from lmx.models.loader import load

    return load(base)


def run_case(seed: str, part: str, base: str, folder: str) -> str:
    """Damage a folder and load it. What loads has every tensor of its files."""
    rng = random.Random(seed)
    use = {"adapters": use_adapter, "drafters": use_drafter}[part]
    keys = {"adapters": MORE_ADAPTER_KEYS, "drafters": MORE_DRAFTER_KEYS}[part]
    with TemporaryDirectory() as scratch:
        copy = Path(scratch) / "copy"
        source = rng.choice(sorted(Path(folder).iterdir()))
        shutil.copytree(source, copy)
        kind, done = ("none", "") if seed == "sound" else damage(rng, copy, keys)
        try:
            use(base, copy)
        except UserError as error:
            require_sentence(error)
            return f"refused {kind}"
        except BaseException as error:
            error.add_note(f"{source.name}: {done}")
            raise
        assert kind != "tensors", f"loaded in silence: {source.name}: {done}"
        return "worked"


def use_adapter(base: str, folder: Path) -> None:
    from lmx.convert.importers import load_model
    from lmx.convert.importers.peft import resolve_adapter

    model = load_model(base, adapter=folder).model
    mx.eval(model(TOKENS))
    tensors = mx.load(str(resolve_adapter(folder) / "adapters.safetensors"))
    parameters = dict(tree_flatten(model.parameters()))
    leaves = ("lora_a", "lora_b", "m")
    own = {n for n in parameters if n.rpartition(".")[2] in leaves}
    assert own <= tensors.keys() <= parameters.keys(), "another adapter than the file's"


def use_drafter(base: str, folder: Path) -> None:
    from lmx.models.drafters.io import drafter_class, load_drafter
    from lmx.models.hooks import forward_with_hidden_states

    loaded = target(base)
    # As `--draft-model` does, which else takes the folder for a model.
    from lmx.models.drafters.io import is_drafter

    if not is_drafter(folder):
        raise UserError("no drafter", place=str(folder))
    drafter = load_drafter(folder, loaded.model)
    _, states = forward_with_hidden_states(
        loaded.model, TOKENS[:, :-1], drafter.layer_ids
    )
    starts = mx.array([[2, 4]])
    hidden = drafter.draft_hidden(TOKENS, states, starts, 1)
    logits = drafter.head(hidden)
    assert logits.shape[:3] == (1, 2, 1)
    mx.eval(logits)
    again = json.loads(json.dumps(drafter.to_config()))
    read = drafter_class(again).from_config(again, place="config.json")
    assert read.to_config() == drafter.to_config()


@pytest.mark.parametrize("part", ["adapters", "drafters"])
def test_damaged_folders_are_refused(part, folders, num_cases, request):
    seed = request.config.getoption("--fuzz-seed")
    seeds = ["sound", *(f"{seed} {number}" for number in range(num_cases(160)))]
    settings = {"part": part, "base": folders["base"], "folder": folders[part]}
    outcomes = run_cases("test_fuzz_adapters", seeds, **settings)
    assert outcomes["refused tensors"] > len(seeds) // 5, outcomes
    assert outcomes["refused config"] > len(seeds) // 6, outcomes
    assert outcomes["worked"] > len(seeds) // 40, outcomes

"""Damaged model folders: each one works or is refused in one sentence."""

import json
import os
import random
import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import mlx.core as mx
import mlx.nn as nn
import packers
import pytest
from forked_cases import run_cases
from json_mutations import (
    damage_bytes,
    dump_json,
    mutate_json,
    replace_file,
    strange_value,
)
from lmx.errors import UserError
from mlx.utils import tree_flatten
from tiny_checkpoints import LLAMA, QWEN3_MOE

RECIPE = """\
model: {model}
data: {{train: rows.jsonl, max_seq_length: 64}}
stages:
  - train: {{adapter: {{rank: 4}}, {qat}steps: 2, batch_size: 2}}
  - evaluate:
  - export: {{formats: [mlx, hf, gguf]}}
"""
QUANTIZE = "  - quantize: {method: rtn, bits: 4}\n"
ROW = {
    "messages": [
        {"role": "user", "content": "count to three"},
        {"role": "assistant", "content": "one two three"},
    ]
}
# Keys that the tiny models lack.
MORE_KEYS = """
    rope_scaling quantization quantization_config text_config sliding_window layer_types
    model_file architectures tie_word_embeddings head_dim num_experts vision_config
    num_nextn_predict_layers rope_parameters partial_rotary_factor quantize_activations
    attention_bias mlp_only_layers torch_dtype dtype eos_token_id n_layer num_layers
"""
TOKENIZER_KEYS = """
    chat_template tool_parser_type tokenizer_class added_tokens_decoder bos_token
    eos_token unk_token pad_token model_max_length extra_special_tokens auto_map
    additional_special_tokens add_bos_token add_prefix_space use_fast padding_side
"""


def write_folder(folder: Path, config: dict, tokenizer: Path, bits: int | None) -> None:
    """A checkpoint in two files with an index; its chat template is a file."""
    shutil.copytree(tokenizer, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "chat_template.jinja").write_text(settings.pop("chat_template"))
    dump_json(folder / "tokenizer_config.json", settings)
    from lmx.models.loader import build_model

    model = build_model(config)
    if bits:
        nn.quantize(model, 32, bits)
        config = config | {"quantization": {"group_size": 32, "bits": bits}}
    weights = {
        name: value if value.dtype == mx.uint32 else value.astype(mx.float16)
        for name, value in tree_flatten(model.parameters())
    }
    places = {name: f"model-{1 + ('mlp' in name)}.safetensors" for name in weights}
    for file in sorted(set(places.values())):
        own = {name: weights[name] for name in weights if places[name] == file}
        mx.save_safetensors(str(folder / file), own, metadata={"format": "mlx"})
    dump_json(folder / "config.json", config)
    dump_json(folder / "model.safetensors.index.json", {"weight_map": places})


@pytest.fixture(scope="session")
def bases(tmp_path_factory, tokenizer_folder, make_checkpoint) -> list[str]:
    """Tiny folders: dense, with codes, with experts, and in GPTQ's format."""
    root = tmp_path_factory.mktemp("bases")
    small = LLAMA | {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
    gemma = small | {"model_type": "gemma2", "num_hidden_layers": 2}
    gemma |= {"query_pre_attn_scalar": 32, "head_dim": 32}
    for name, config, bits in [
        ("llama", small | {"num_hidden_layers": 2}, None),
        ("codes", small, 4),
        ("experts", QWEN3_MOE | {"num_hidden_layers": 1}, None),
        ("gemma", gemma, None),
    ]:
        write_folder(root / name, config, tokenizer_folder, bits)
    codes = random.Random(0).randrange(2**32)
    rng = packers.np.random.default_rng(codes)
    packers.write_checkpoint(
        make_checkpoint(),
        root / "gptq",
        lambda _, outputs, inputs: packers.random_codes(
            rng, outputs, inputs, bits=4, size=64, symmetric=True
        ),
        lambda codes: packers.gptq(codes, 4),
        {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True},
    )
    return [str(root / name) for name in ("llama", "codes", "experts", "gemma", "gptq")]


def mutate_config(rng: random.Random, folder: Path) -> str:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    draw = rng.random()
    if draw < 0.5:
        key = rng.choice([*config] * 2 + MORE_KEYS.split())
        config[key] = strange_value(rng)
        text = f"{key} = {config[key]!r}"[:200]
    elif draw < 0.6:
        config["model_type"] = rng.choice(model_types())
        text = f"model_type = {config['model_type']}"
    else:
        changed = mutate_json(rng, config)
        text, config = "changed", changed
    dump_json(file, config)
    return f"config: {text}"


@cache
def model_types() -> list[str]:
    import mlx_lm.models

    names = sorted(Path(mlx_lm.models.__file__).parent.glob("*.py"))
    return [file.stem for file in names]


def mutate_small_file(rng: random.Random, folder: Path) -> str:
    names = ["tokenizer_config.json", "generation_config.json", "tokenizer.json"]
    names += ["model.safetensors.index.json", "tokenizer_config.json"]
    file = folder / rng.choice(names)
    value = json.loads(file.read_text()) if file.is_file() else {}
    if file.name == "tokenizer_config.json" and rng.random() < 0.5:
        key = rng.choice(TOKENIZER_KEYS.split())
        value[key] = strange_value(rng)
        text = f"{key} = {value[key]!r}"[:100]
    else:
        value, text = mutate_json(rng, value), "changed"
    dump_json(file, value)
    return f"{file.name}: {text}"


def mutate_any_file(rng: random.Random, folder: Path) -> str:
    file = rng.choice(sorted(p for p in folder.iterdir() if p.is_file()))
    if rng.random() < 0.5:
        file.write_bytes(damage_bytes(rng, file.read_bytes()))
        return f"{file.name}: bytes"
    return f"{file.name}: {replace_file(rng, file)}"


def add_file(rng: random.Random, folder: Path) -> str:
    names = ["added_tokens.json", "special_tokens_map.json", "chat_template.json"]
    names += ["vocab.json", "merges.txt", "tokenizer.model", "hf_quant_config.json"]
    names += ["model-9.safetensors", "x.gguf", "processor_config.json", "README.md"]
    names += ["model.safetensors.index.json", "chat_templates", "x/y.json"]
    file = folder / rng.choice(names)
    file.parent.mkdir(exist_ok=True)
    if rng.random() < 0.2:
        os.mkfifo(file)
    else:
        contents = [b"", b"null", b"[1]", b'{"a": 1}', b"\x80\x04", b"{", b"\xff" * 99]
        file.write_bytes(rng.choice(contents))
    return f"{file.name}: added"


# Weights and chat templates have fuzzers of their own.
MUTATIONS = [mutate_config] * 4 + [mutate_small_file] * 3
MUTATIONS += [mutate_any_file] * 2 + [add_file]


def damage(rng: random.Random, folder: Path) -> list[str]:
    """Damage a folder once, or several times; a later damage may meet the first."""
    done = []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        # The next damage would wait for a pipe, or read a terabyte.
        if any(p.is_fifo() or _size(p) > 1 << 24 for p in folder.rglob("*")):
            break
        try:
            done.append(rng.choice(MUTATIONS)(rng, folder))
        # The file was damaged before.
        except (OSError, ValueError, TypeError, AttributeError, LookupError):
            continue
        except RecursionError:
            continue
    return done


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def run_case(seed: str, bases: list[str]) -> str:
    """Damage a folder, then generate, check a recipe and convert with it."""
    rng = random.Random(seed)
    with TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        base = rng.choice(bases)
        shutil.copytree(base, folder)
        done = damage(rng, folder)
        try:
            return use(folder, rng)
        except BaseException as error:
            error.add_note(f"{Path(base).name}: {'; '.join(done)}")
            raise


def use(model: Path, rng: random.Random) -> str:
    """What a user would do with a model; "refused" if it does not generate."""
    from lmx.cli import main

    outcome = generate(model)
    check_recipe(model, rng)
    more = ["--dequantize"] * (rng.random() < 0.5)
    code = main.main(["convert", str(model), str(model.parent / "target"), *more])
    assert code in (0, 1, 2), code
    return outcome


def generate(model: Path) -> str:
    """Generate two tokens after a chat and after a text."""
    from lmx.convert.importers import load_model
    from lmx.generation.generator import Generator

    try:
        loaded = load_model(model)
        generator = Generator(loaded.model, loaded.tokenizer)
        for prompt in (generator.encode_text("one two"), generator.encode_chat("hi")):
            generator.generate(prompt, max_tokens=2)
    except UserError as error:
        require_sentence(error)
        return "refused"
    return "worked"


def require_sentence(error: UserError) -> None:
    """An error that a user understands: short, of one line, and not of memory."""
    assert error.place or error.hint, error
    # The limits of these cases do not let a file of a terabyte be mapped.
    mapped = "Cannot allocate memory (os error 12)"
    for text in (error.message, error.hint or ""):
        assert len(text) < 1000, text[:1000]
        assert "\n" not in text, text
        assert "allocate" not in text.replace(mapped, ""), text


@cache
def without_measurements() -> None:
    """A dry run measures this machine; here once."""
    from lmx.pipeline import work

    work.rates = lambda dtype: work.Work(1, 1, 1, 1, 1)


def check_recipe(model: Path, rng: random.Random) -> None:
    """`lmx-train --dry-run` of a recipe that names the model."""
    from lmx.cli import main

    without_measurements()
    folder = model.parent
    (folder / "rows.jsonl").write_text(3 * (json.dumps(ROW) + "\n"))
    qat = rng.choice(["", "qat: {bits: 4}, "])
    text = RECIPE.format(model=model.name, qat=qat)
    if rng.random() < 0.3:
        text += QUANTIZE
    (folder / "recipe.yaml").write_text(text)
    os.chdir(folder)
    try:
        code = main.train(["recipe.yaml", "--dry-run"])
    finally:
        os.chdir("/")
    assert code in (0, 1, 2, 3), code


def test_damaged_model_folders_work_or_are_refused(bases, num_cases, request):
    seed = request.config.getoption("--fuzz-seed")
    seeds = [f"{seed} {number}" for number in range(num_cases(30))]
    outcomes = run_cases("test_fuzz_model_folders", seeds, bases=bases)
    assert outcomes["refused"] > len(seeds) // 5, outcomes
    assert outcomes["worked"] > len(seeds) // 20, outcomes


def run_sound_case(seed: str, bases: list[str]) -> str:
    """Use a folder as it is."""
    with TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        shutil.copytree(bases[int(seed)], folder)
        return generate(folder)


def test_sound_model_folders_work(bases):
    """Else the fuzzer would only see refusals."""
    seeds = [str(number) for number in range(len(bases))]
    outcomes = run_cases(
        "test_fuzz_model_folders", seeds, "run_sound_case", bases=bases
    )
    assert outcomes == {"worked": len(bases)}

"""Published checkpoints: all layouts load the same model, and errors name the damage.

What cannot be loaded is named by `load` and by `lmx generate`.
"""

import json
import shutil

import mlx.core as mx
import numpy as np
import pytest
from lmx.cli import main
from lmx.errors import UserError
from lmx.models import checkpoint
from lmx.models.loader import load
from mlx.utils import tree_flatten
from safetensors.numpy import save_file

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def folder(make_checkpoint, tmp_path):
    return shutil.copytree(make_checkpoint(dtype="float32"), tmp_path / "model")


def read_weights(folder):
    return mx.load(str(folder / SINGLE))


def write_weights(folder, weights, name=SINGLE):
    mx.save_safetensors(str(folder / name), weights, metadata={"format": "pt"})


def edit_json(file, **changes):
    old = json.loads(file.read_text()) if file.exists() else {}
    new = {k: v for k, v in (old | changes).items() if v is not None}
    file.write_text(json.dumps(new))


def generate(folder, capfd, *options):
    """Run `lmx generate`: its exit code, output and error text."""
    command = ["generate", str(folder), "--prompt", "add", "--max-tokens", "6"]
    command.append("--json")
    code = main.main([*command, *options])
    out, err = capfd.readouterr()
    return code, json.loads(out) if code == 0 else None, err


def parameters(folder):
    return dict(tree_flatten(load(folder).model.parameters()))


def sharded(folder, count=3):
    weights = read_weights(folder)
    (folder / SINGLE).unlink()
    weight_map = {}
    for number in range(count):
        name = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
        part = {key: weights[key] for key in sorted(weights)[number::count]}
        write_weights(folder, part, name)
        weight_map |= dict.fromkeys(part, name)
    edit_json(folder / INDEX, weight_map=weight_map)


def without_index(folder):
    sharded(folder)
    (folder / INDEX).unlink()


def index_of_missing_files(folder):
    sharded(folder)
    edit_json(
        folder / INDEX, weight_map={EMBEDDING: "model-00001-of-00009.safetensors"}
    )


def index_of_wrong_files(folder):
    sharded(folder)
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    names = list(weight_map.values())
    rotated = dict(zip(weight_map, names[1:] + names[:1], strict=True))
    edit_json(folder / INDEX, weight_map=rotated)


def broken_index(folder):
    sharded(folder)
    (folder / INDEX).write_text("{")


def index_without_a_map(folder):
    sharded(folder)
    (folder / INDEX).write_text('{"weight_map": ["model.safetensors"]}')


def extra_shards_of_another_model(folder):
    """An earlier conversion left files that sort before and after the model's files."""
    sharded(folder)
    weights = {k: mx.zeros((2, 2)) for k in (EMBEDDING, "model.layers.7.old.weight")}
    write_weights(folder, weights, "model-00001-of-00002.safetensors")
    write_weights(folder, weights, "model-00009-of-00009.safetensors")


def incomplete_index(folder):
    sharded(folder)
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    for name in list(weight_map)[::3]:
        del weight_map[name]
    edit_json(folder / INDEX, weight_map=weight_map)


def lm_head_only(folder):
    weights = read_weights(folder)
    weights[HEAD] = weights.pop(EMBEDDING)
    write_weights(folder, weights)


def lm_head_and_embedding(folder):
    weights = read_weights(folder)
    write_weights(folder, weights | {HEAD: weights[EMBEDDING]})


def legacy_buffers(folder):
    tables = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": mx.ones(16),
        "model.rotary_emb.inv_freq": mx.ones(16),
        "model.embeddings.position_ids": mx.arange(8),
    }
    write_weights(folder, read_weights(folder) | tables)


LAYOUTS = [
    sharded,
    without_index,
    index_of_missing_files,
    index_of_wrong_files,
    broken_index,
    index_without_a_map,
    extra_shards_of_another_model,
    incomplete_index,
    lm_head_only,
    lm_head_and_embedding,
    legacy_buffers,
]


@pytest.mark.parametrize("publish", LAYOUTS, ids=lambda f: f.__name__)
def test_load_gives_the_same_model_from_every_layout(folder, publish):
    expected = parameters(folder)
    publish(folder)
    actual = parameters(folder)
    assert actual.keys() == expected.keys()
    assert all(mx.array_equal(actual[name], expected[name]) for name in expected)


def test_load_reads_mixed_dtypes(folder, capfd):
    types = [mx.bfloat16, mx.float16, mx.float32]
    stored = {
        name: value.astype(types[number % 3])
        for number, (name, value) in enumerate(sorted(read_weights(folder).items()))
    }
    write_weights(folder, stored)
    actual = parameters(folder)
    for name, value in stored.items():
        assert actual[name].dtype == mx.float32
        assert mx.array_equal(actual[name], value.astype(mx.float32))
    assert generate(folder, capfd)[0] == 0


def test_load_keeps_a_stored_head_that_the_config_omits(folder, tmp_path, capfd):
    """Without the config key, mlx-lm ties lm_head and drops the stored one."""
    weights = read_weights(folder)
    head = mx.random.normal(weights[EMBEDDING].shape, key=mx.random.key(1))
    write_weights(folder, weights | {HEAD: head})
    explicit = shutil.copytree(folder, tmp_path / "explicit")
    edit_json(explicit / "config.json", tie_word_embeddings=False)
    edit_json(folder / "config.json", tie_word_embeddings=None)
    assert mx.array_equal(parameters(folder)[HEAD], head)
    assert load(folder).config["tie_word_embeddings"] is False
    texts = [generate(place, capfd)[1]["text"] for place in (explicit, folder)]
    assert texts[0] == texts[1]


def test_load_uses_a_stored_head_that_differs_from_the_tied_embedding(folder, capfd):
    """transformers keeps such a head too."""
    weights = read_weights(folder)
    head = mx.random.normal(weights[EMBEDDING].shape, key=mx.random.key(1))
    edit_json(folder / "config.json", tie_word_embeddings=True)
    write_weights(folder, weights | {HEAD: head})
    with pytest.warns(UserWarning, match="lm_head.weight has other values"):
        loaded = load(folder)
    assert loaded.config["tie_word_embeddings"] is False
    assert mx.array_equal(dict(tree_flatten(loaded.model.parameters()))[HEAD], head)


@pytest.mark.parametrize(
    "place", ["tokenizer_config.json", "chat_template.jinja", None]
)
def test_generate_uses_the_chat_template_if_present(folder, place, capfd):
    template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    edit_json(folder / "tokenizer_config.json", chat_template=None)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    if place == "chat_template.jinja":
        (folder / place).write_text(template)
    elif place:
        edit_json(folder / place, chat_template=template)
    code, answer, error = generate(folder, capfd)
    assert code == 0, error
    text = "<add>" if place else "add"
    tokenizer = load(folder).tokenizer
    assert answer["prompt_tokens"] == len(tokenizer.encode(text))


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_generate_stops_at_every_end_token(folder, file, capfd):
    prompt = load(folder).tokenizer.encode("add")
    logits = load(folder).model(mx.array([prompt]))[0, -1]
    first = int(mx.argmax(logits))
    _, before, _ = generate(folder, capfd, "--ignore-chat-template")
    assert before["finish_reason"] == "length"
    edit_json(folder / file, eos_token_id=[319, first])
    _, after, _ = generate(folder, capfd, "--ignore-chat-template")
    assert after["finish_reason"] == "stop"
    assert after["text"] == ""


def truncated(folder):
    sharded(folder)
    file = folder / "model-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    return file, "the file is damaged, cut short"


def wrong_shape(folder):
    file = folder / SINGLE
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header[EMBEDDING]["shape"] = [3, 5]
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    return file, "the file is damaged, cut short"


def overwritten(folder):
    file = folder / SINGLE
    content = bytearray(file.read_bytes())
    content[:64] = bytes(np.random.default_rng(0).integers(0, 256, 64, np.uint8))
    file.write_bytes(content)
    return file, "or none that MLX reads: "


def two_models(folder):
    """Without an index, the files of the model are unknown."""
    sharded(folder, 2)
    (folder / INDEX).unlink()
    write_weights(folder, {EMBEDDING: mx.zeros((320, 128))})
    return folder / SINGLE, f"{EMBEDDING} is in model-00001-of-00002.safetensors too"


def unknown_tensors(folder):
    write_weights(
        folder, read_weights(folder) | {"model.vision_tower.weight": mx.zeros((2, 2))}
    )
    return folder, "model.vision_tower.weight"


def missing_embedding(folder):
    weights = read_weights(folder)
    del weights[EMBEDDING]
    write_weights(folder, weights)
    return folder, f"Missing 1 parameters: {EMBEDDING}"


def no_weights(folder):
    (folder / SINGLE).unlink()
    return folder, "no model*.safetensors"


def pickle_only(folder):
    (folder / SINGLE).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")
    return folder, "save_pretrained()"


def sharded_pickles_only(folder):
    (folder / SINGLE).unlink()
    (folder / "pytorch_model.bin.index.json").write_text("{}")
    return folder, "only pickles (pytorch_model.bin.index.json)"


DAMAGES = [
    truncated,
    wrong_shape,
    overwritten,
    two_models,
    unknown_tensors,
    missing_embedding,
    no_weights,
    pickle_only,
    sharded_pickles_only,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda f: f.__name__)
def test_load_names_what_cannot_be_loaded(folder, damage, capfd):
    place, message = damage(folder)
    with pytest.raises(UserError) as caught:
        load(folder)
    assert caught.value.place == str(place)
    assert message in str(caught.value)
    code, _, error = generate(folder, capfd)
    assert code == 2
    assert error == f"{caught.value}\n"


def test_tensors_that_mlx_lm_drops_are_named(folder):
    write_weights(folder, read_weights(folder))
    load(folder)  # Without a warning, which would be an error.
    weights = read_weights(folder) | {"model.layers.0.self_attn.sinks": mx.ones(4)}
    dropping = {k: v for k, v in weights.items() if "sinks" not in k}
    with pytest.warns(
        UserWarning, match="not read 1 tensors, such as model.layers.0.self"
    ):
        checkpoint._name_dropped(weights, dropping, 2)
    merged = {
        "a.experts.0.up.weight": mx.ones((2, 2)),
        "a.kv_b.weight": mx.ones((4, 2)),
    }
    made = {"a.switch.up.weight": mx.ones((1, 2, 2)), "a.k.weight": mx.ones((4, 2))}
    checkpoint._name_dropped(merged, made, 2)
    dropped = merged | {"a.router.correction": mx.ones(3)}
    with pytest.warns(UserWarning, match="a.router.correction|a.kv_b.weight"):
        checkpoint._name_dropped(dropped, made, 2)


def test_float64_is_named(folder):
    weights = {k: np.array(v, np.float64) for k, v in read_weights(folder).items()}
    save_file(weights, folder / SINGLE)
    with pytest.raises(UserError, match="float64, which MLX does not read") as caught:
        load(folder)
    assert "float32" in caught.value.hint

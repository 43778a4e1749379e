"""Drafters as GGUF files: names, values and metadata for llama.cpp, and refusals.

llama.cpp's own logits: test_gguf_drafters_llama_cpp.py.
"""

import json

import gguf
import mlx.core as mx
import numpy as np
import pytest
from exporting import export
from gguf_drafters import (
    DRAFT_VOCABULARY,
    VOCABULARY,
    drafter_folder,
    random_drafter,
    target_folder,
)
from gguf_models import LLAMA3_SCALING, YARN, config_of, interleave_rows
from lmx.config.draft import DraftConfig, DrafterConfig
from lmx.convert.exporters import gguf as gguf_exporter
from lmx.convert.gguf import blocks, drafters
from lmx.convert.gguf import tokenizer as gguf_tokenizer
from lmx.convert.importers import find_importable, load_model
from lmx.convert.importers.gguf import outline
from lmx.errors import UserError
from lmx.models.drafters.io import read_drafter
from lmx.models.loader import load

# The tiny configs leave some keys out.
pytestmark = pytest.mark.filterwarnings("ignore:.*config.json")
# By llama.cpp's names, those of lmx.
OF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
NAMES = {
    "eagle3": {
        "fc": "fc",
        "output_norm": "norm",
        "output": "lm_head",
        "blk.0.attn_norm_2": "layers.0.hidden_norm",
    },
    "dflash": {"fc": "fc", "output_norm": "norm", "enc.output_norm": "hidden_norm"},
}
QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}


def exported(tmp_path, source, kind, **options):
    """The reader of a drafter's file, the drafter, and the lines of the export."""
    folder = drafter_folder(tmp_path / "drafter", kind, source, **options)
    lines = export(gguf_exporter, source, tmp_path / "gguf", draft=folder)
    reader = gguf.GGUFReader(tmp_path / "gguf" / "draft" / "name-draft.gguf")
    return reader, read_drafter(folder), lines


def values_of(reader, prefix):
    """The metadata below a prefix."""
    fields = {key: f for key, f in reader.fields.items() if key.startswith(prefix)}
    return {key.removeprefix(prefix): f.contents() for key, f in fields.items()}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("eagle3", {}),
        ("eagle3", {"draft_vocab_size": None, "changes": {"norm_before_fc": True}}),
        ("dflash", {}),
    ],
)
def test_every_tensor_has_llama_cpps_name_and_value(
    make_checkpoint, tmp_path, kind, options
):
    source = target_folder(make_checkpoint)
    reader, drafter, _ = exported(tmp_path, source, kind, **options)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    names = dict(NAMES[kind])
    if drafter.config.to_json().get("norm_before_fc"):
        names["enc.output_norm"] = "input_norm"
    for index in range(drafter.config.num_hidden_layers):
        of_layer = OF_LAYER | (QK_NORMS if kind == "dflash" else {})
        names |= {
            f"blk.{index}.{k}": f"layers.{index}.{v}" for k, v in of_layer.items()
        }
    tokens = tensors.pop("d2t", None)
    assert tensors.keys() == {f"{name}.weight" for name in names}
    modules = dict(drafter.named_modules())
    for name, path in names.items():
        expected = np.array(modules[path].weight)
        if kind == "eagle3" and path.endswith((".q_proj", ".k_proj")):
            expected = interleave_rows(expected, len(expected) // 16)
        stored = tensors[f"{name}.weight"]
        dtype = np.float32 if expected.ndim == 1 else np.float16
        assert stored.data.dtype == dtype, name
        assert np.array_equal(stored.data, expected.astype(dtype)), name
    if kind == "dflash" or options:
        assert tokens is None
        return
    # Tokens, where the folder has their distances from the rows.
    assert tokens.tensor_type.name == "I64"
    distances = np.array(drafter.d2t)
    assert distances.any()
    assert tokens.data.tolist() == (distances + range(DRAFT_VOCABULARY)).tolist()


def test_metadata_of_eagle3(make_checkpoint, tmp_path):
    source = target_folder(make_checkpoint)
    norms = {"norm_before_residual": True}
    reader, drafter, lines = exported(tmp_path, source, "eagle3", changes=norms)
    assert drafter.layer_ids == (0, 1, 2)
    assert values_of(reader, "eagle3.") == {
        # The output of a block is the input of the next one.
        "target_layers": [1, 2, 3],
        "target_hidden_size": 64,
        "norm_before_residual": True,
        "norm_before_fc": False,
        "context_length": 256,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "block_count": 1,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 16,
        "attention.value_length": 16,
        "attention.layer_norm_rms_epsilon": pytest.approx(1e-5),
        "rope.dimension_count": 16,
        "rope.freq_base": 5000.0,
        "vocab_size": VOCABULARY,
    }
    use = "-md draft/name-draft.gguf --spec-type draft-eagle3"
    assert lines[-1] == f"with the draft: llama-server -m name.gguf {use}"


def test_metadata_of_dflash(make_checkpoint, tmp_path):
    source = target_folder(make_checkpoint, "qwen3", rope_scaling=YARN)
    reader, drafter, lines = exported(tmp_path, source, "dflash")
    assert drafter.layer_ids == (0, 2)
    values = values_of(reader, "dflash.")
    assert values["target_layers"] == [1, 3]
    assert (values["block_size"], values["block_count"]) == (5, 2)
    scaling = {"type": "yarn", "factor": 8.0, "original_context_length": 32}
    assert {k: values[f"rope.scaling.{k}"] for k in scaling} == scaling
    assert values_of(reader, "tokenizer.ggml.")["mask_token_id"] == 7
    use = "--spec-type draft-dflash --spec-draft-n-max 4"
    assert lines[-1].endswith(use)


def test_the_file_has_the_tokenizer_of_the_target(make_checkpoint, tmp_path):
    source = target_folder(make_checkpoint)
    reader, _, _ = exported(tmp_path, source, "eagle3")
    target = gguf.GGUFReader(tmp_path / "gguf" / "name.gguf")
    of_both = [values_of(file, "tokenizer.") for file in (reader, target)]
    assert of_both[0] == of_both[1]
    assert len(of_both[0]["ggml.tokens"]) == VOCABULARY


def test_rows_of_a_smaller_vocabulary_have_tokens(make_checkpoint, tmp_path):
    """llama.cpp has as many logits as the tokenizer, the target's, has tokens."""
    source = target_folder(make_checkpoint)
    folder = drafter_folder(tmp_path / "drafter", "eagle3", source)
    config = json.loads((folder / "config.json").read_text())
    small = config["transformer_layer_config"] | {"vocab_size": 100}
    config |= {"transformer_layer_config": small, "draft_vocab_size": 100}
    (folder / "config.json").write_text(json.dumps(config))
    weights = mx.load(str(folder / "model.safetensors"))
    weights = {n: w for n, w in weights.items() if n not in ("d2t", "t2d")}
    weights["lm_head.weight"] = mx.random.normal((100, 64))
    weights["embed_tokens.weight"] = weights["embed_tokens.weight"][:100]
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    export(gguf_exporter, source, tmp_path / "gguf", draft=folder)
    reader = gguf.GGUFReader(tmp_path / "gguf" / "draft" / "name-draft.gguf")
    [tokens] = [t.data.tolist() for t in reader.tensors if t.name == "d2t"]
    assert tokens == list(range(100))


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_llama3_scaling_is_a_tensor_of_divisors(make_checkpoint, tmp_path, kind):
    source = target_folder(make_checkpoint, rope_scaling=LLAMA3_SCALING)
    reader, _, _ = exported(tmp_path, source, kind)
    [factors] = [t for t in reader.tensors if t.name == "rope_freqs.weight"]
    assert factors.data.shape == (8,)
    assert factors.data[0] == 1
    assert factors.data[-1] == 32


def test_a_draft_model_is_a_model(make_checkpoint, tmp_path):
    source = target_folder(make_checkpoint)
    draft = target_folder(make_checkpoint, num_hidden_layers=1)
    lines = export(gguf_exporter, source, tmp_path / "gguf", draft=draft)
    assert lines[-1].endswith("draft/name-draft.gguf --spec-type draft-simple")
    tokens = mx.array([[5, 80, 200, 7]])
    file = tmp_path / "gguf" / "draft" / "name-draft.gguf"
    logits = load_model(file).model(tokens)
    assert mx.allclose(logits, load(draft).model(tokens), rtol=1e-2, atol=1e-2)
    # The folder still has one model.
    assert find_importable(tmp_path / "gguf") == tmp_path / "gguf" / "name.gguf"


def test_no_draft_no_folder(make_checkpoint, tmp_path):
    export(gguf_exporter, target_folder(make_checkpoint), tmp_path / "gguf")
    assert not (tmp_path / "gguf" / "draft").exists()


# The drafter, its target, keys of the target's config, options, and the message.
REFUSED = [
    ("eagle3", "llama", {}, {"layer_ids": [0, 1]}, "read 2 blocks, not 3"),
    ("eagle3", "llama", {}, {"num_layers": 2}, "of 2 layers"),
    ("eagle3", "llama", {}, {"layer_ids": [0, 1, 3]}, r"last block \(3\)"),
    ("dflash", "llama", {}, {"layer_ids": [0, 3]}, r"last block \(3\)"),
    ("eagle3", "gemma", {}, {}, "no hidden states of gemma models"),
    ("dflash", "qwen2", {"rope_scaling": None}, {}, "no hidden states of qwen2"),
    (
        "dflash",
        "llama",
        {"rope_scaling": LLAMA3_SCALING | {"high_freq_factor": 5.0}},
        {},
        "high_freq_factor",
    ),
]
# Of files only.
CHANGES = [
    ("eagle3", {"attention_bias": True}, "with attention_bias"),
    ("eagle3", {"partial_rotary_factor": 0.5}, "with partial_rotary_factor"),
]


@pytest.mark.parametrize(("kind", "name", "config", "options", "message"), REFUSED)
def test_what_llama_cpp_lacks_is_refused_before_training(
    kind, name, config, options, message
):
    planned = DrafterConfig(**({"layer_ids": [0, 1, 2]} | options))
    draft = DraftConfig(architecture=kind, drafter=planned)
    target = config_of(name) | config
    with pytest.raises(UserError, match=message):
        gguf_exporter.check_draft(target, draft)
    # The control.
    planned = DrafterConfig(layer_ids=[0, 1, 2])
    gguf_exporter.check_draft(
        config_of("llama"), DraftConfig(architecture=kind, drafter=planned)
    )


@pytest.mark.parametrize(("kind", "changes", "message"), CHANGES)
def test_what_llama_cpp_lacks_is_refused_in_files(
    make_checkpoint, tmp_path, kind, changes, message
):
    target = load(target_folder(make_checkpoint))
    drafter = random_drafter(kind, target, changes=changes)
    with pytest.raises(UserError, match=message):
        drafters.write(tmp_path / "file.gguf", drafter, target, name="name")


def test_a_drafter_of_another_target_is_refused(make_checkpoint, tmp_path):
    source = target_folder(make_checkpoint)
    folder = drafter_folder(tmp_path / "drafter", "dflash", source)
    other = load(target_folder(make_checkpoint, hidden_size=128))
    with pytest.raises(UserError, match="for a target of the width 64"):
        drafters.write(tmp_path / "file.gguf", read_drafter(folder), other, name="name")


def changed_weight(patch):
    from_dense = blocks.from_dense

    def changed(value):
        kind, stored = from_dense(value)
        return kind, stored + np.float16(0.1) * (stored.shape == (64, 192))

    patch.setattr(blocks, "from_dense", changed)


def other_rows(patch):
    patch.setattr(drafters, "row_order", lambda path, value, *rest: value)


def other_tokens(patch):
    original = drafters._tensors

    def changed(*arguments):
        for name, kind, value, bits in original(*arguments):
            yield name, kind, value + (name == "d2t"), bits

    patch.setattr(drafters, "_tensors", changed)


def missing_tensor(patch):
    original = drafters._tensors
    patch.setattr(drafters, "_tensors", lambda *a: list(original(*a))[1:])


def other_tokenizer(patch):
    original = gguf_tokenizer.to_metadata

    def changed(*arguments, **options):
        metadata = original(*arguments, **options)
        tokens = metadata["tokenizer.ggml.tokens"]
        return metadata | {"tokenizer.ggml.tokens": [*tokens[:9], *tokens[9:][::-1]]}

    patch.setattr(gguf_tokenizer, "to_metadata", changed)


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (changed_weight, r".*fc\.weight"),
        (other_rows, r".*blk\.0\.attn_[qk]\.weight"),
        (other_tokens, ".*d2t"),
        (missing_tensor, r".*\.weight"),
        (other_tokenizer, ".*the tokenizer"),
    ],
)
def test_the_file_is_read_and_compared(
    make_checkpoint, tmp_path, monkeypatch, damage, what
):
    target = load(target_folder(make_checkpoint))
    drafter = random_drafter("eagle3", target)
    damage(monkeypatch)
    with pytest.raises(UserError, match=f"^{what}.* differs after reading"):
        drafters.write(tmp_path / "file.gguf", drafter, target, name="name")


def test_a_drafter_is_no_model(make_checkpoint, tmp_path):
    source = target_folder(make_checkpoint)
    exported(tmp_path, source, "eagle3")
    with pytest.raises(UserError, match="GGUF files of eagle3 models"):
        outline(tmp_path / "gguf" / "draft" / "name-draft.gguf")

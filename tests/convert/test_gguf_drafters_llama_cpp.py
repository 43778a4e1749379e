"""llama.cpp computes the logits of our drafters from its own hidden states.

The calls are those of its speculative decoder (common/speculative.cpp).
"""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from gguf_drafters import drafter_folder, target_folder
from gguf_models import LINEAR, LLAMA3_SCALING
from lmx.convert.gguf import blocks, drafters, writer
from lmx.models.drafters.io import load_drafter, read_drafter
from lmx.models.hooks import forward_with_hidden_states
from lmx.models.loader import load

llama_cpp = pytest.importorskip("llama_cpp")
if not hasattr(llama_cpp, "llama_batch_ext_init"):
    pytest.skip("this llama.cpp has no drafters", allow_module_level=True)
from llama_cpp_contexts import DECODE, ENCODE, Context  # noqa: E402

# The tiny configs leave some keys out.
QUIET = pytest.mark.filterwarnings("ignore:.*config.json")
pytestmark = [pytest.mark.slow, QUIET]
TOKENS = np.random.default_rng(0).integers(3, 320, 12).tolist()
NUM_DRAFT_TOKENS = 3


def relative_error(actual, expected):
    return np.sqrt(np.mean((actual - expected) ** 2)) / expected.std(axis=-1).mean()


def contexts(source, folder, tmp_path):
    """llama.cpp's target and drafter."""
    target = load(source)
    writer.write(tmp_path / "target.gguf", target, name="target")
    drafters.write(tmp_path / "draft.gguf", read_drafter(folder), target, name="draft")
    context = Context(tmp_path / "target.gguf")
    return context, Context(tmp_path / "draft.gguf", context)


def eagle3_logits(target, drafter, layers):
    """The logits for three draft tokens after a text, which are its next tokens."""
    rows = len(TOKENS) - NUM_DRAFT_TOKENS
    states = target.read_layers(layers, TOKENS[: rows - 1])
    drafter.keep_hidden()
    drafter.process(ENCODE, range(rows - 1), states=states)
    joined, logits = drafter.hidden(rows - 1), []
    drafter.process(DECODE, range(rows - 1), tokens=TOKENS[1:rows], states=joined)
    logits.append(drafter.logits(rows - 1)[-1])
    hidden = drafter.hidden(rows - 1)[-1:]
    for position in range(rows - 1, rows + 1):
        token = TOKENS[position + 1]
        drafter.process(DECODE, [position], tokens=[token], states=hidden)
        hidden = drafter.hidden(1)
        logits.append(drafter.logits(1)[0])
    return np.array(logits)


def dflash_logits(target, drafter, layers):
    """The logits of all draft tokens of a block after a text."""
    rows, mask = len(TOKENS) - 1, int(drafter.metadata("tokenizer.ggml.mask_token_id"))
    states = target.read_layers(layers, TOKENS[:rows])
    llama_cpp.llama_set_causal_attn(drafter.context, False)
    drafter.process(DECODE, range(rows), states=states)
    slots = int(drafter.metadata("dflash.block_size"))
    block = [TOKENS[rows], *[mask] * (slots - 1)]
    drafter.process(DECODE, range(rows, rows + slots), tokens=block)
    return drafter.logits(slots)[1:]


def expected_logits(kind, source, folder):
    target = load(source)
    drafter = load_drafter(folder, target.model)
    tokens = mx.array([TOKENS])
    start, count = len(TOKENS) - 1, drafter.max_draft_tokens
    if kind == "eagle3":
        start, count = len(TOKENS) - NUM_DRAFT_TOKENS - 1, NUM_DRAFT_TOKENS
    _, states = forward_with_hidden_states(
        target.model, tokens[:, :-1], drafter.layer_ids
    )
    starts = mx.array([[start]])
    hidden = drafter.draft_hidden(tokens, states, starts, count)
    return np.array(drafter.target_logits(drafter.head(hidden))[0, 0], np.float64)


COMPUTE = {"eagle3": eagle3_logits, "dflash": dflash_logits}
NORMS = {"norm_before_residual": True, "norm_before_fc": True}
FEW_BLOCKS = {"num_hidden_layers": 4}
# The drafter, its target, keys of the target's config, and options of the drafter.
CASES = [
    ("eagle3", "llama", {}, {}),
    ("eagle3", "llama", {"rope_scaling": LLAMA3_SCALING}, {"changes": NORMS}),
    ("eagle3", "llama", LINEAR, {"draft_vocab_size": None}),
    ("eagle3", "mistral", {}, {}),
    ("eagle3", "qwen3", {"num_key_value_heads": 1}, {}),
    ("eagle3", "qwen3_moe", FEW_BLOCKS, {}),
    ("eagle3", "mixtral", {}, {}),
    ("eagle3", "gpt_oss", {}, {}),
    ("eagle3", "hunyuan_v1_dense", {}, {}),
    ("dflash", "llama", {"rope_scaling": LLAMA3_SCALING}, {}),
    ("dflash", "llama", LINEAR, {"num_layers": 1, "layer_ids": [0, 1, 2]}),
    ("dflash", "mistral", {}, {"num_draft_tokens": 7}),
    ("dflash", "qwen3", {}, {"layer_ids": [1]}),
    ("dflash", "qwen3_moe", FEW_BLOCKS, {}),
    ("dflash", "mixtral", {}, {}),
    ("dflash", "gpt_oss", {}, {}),
    ("dflash", "hunyuan_v1_dense", {}, {}),
]


@pytest.fixture
def dense_float32(monkeypatch):
    monkeypatch.setattr(
        blocks, "from_dense", lambda v, *_: ("F32", np.array(v.astype(mx.float32)))
    )


@pytest.mark.usefixtures("dense_float32")
@pytest.mark.parametrize(("kind", "name", "config", "options"), CASES)
def test_llama_cpp_computes_the_same_logits(
    make_checkpoint, tmp_path, kind, name, config, options
):
    source = target_folder(make_checkpoint, name, **config)
    folder = drafter_folder(tmp_path / "drafter", kind, source, **options)
    target, drafter = contexts(source, folder, tmp_path)
    expected = expected_logits(kind, source, folder)
    layers = drafter.target_layers()
    actual = COMPUTE[kind](target, drafter, layers)
    # Other tokens than those of the draft vocabulary are never drafted.
    finite = np.isfinite(expected)
    assert np.array_equal(finite, np.isfinite(actual))
    actual, expected = actual[:, finite[0]], expected[:, finite[0]]
    assert relative_error(actual, expected) < 1e-5


@pytest.mark.usefixtures("dense_float32")
@pytest.mark.parametrize("kind", COMPUTE)
def test_the_numbers_of_blocks_are_not_those_of_states(make_checkpoint, tmp_path, kind):
    source = target_folder(make_checkpoint)
    folder = drafter_folder(tmp_path / "drafter", kind, source, draft_vocab_size=None)
    target, drafter = contexts(source, folder, tmp_path)
    expected, layers = expected_logits(kind, source, folder), drafter.target_layers()
    blocks_read = list(read_drafter(folder).layer_ids)
    assert layers == [block + 1 for block in blocks_read]
    actual = COMPUTE[kind](target, drafter, blocks_read)
    assert relative_error(actual, expected) > 0.01


@pytest.mark.usefixtures("dense_float32")
@pytest.mark.parametrize(
    ("kind", "rope"), [("eagle3", "halves"), ("dflash", "permuted")]
)
def test_wrong_rows_change_the_logits(
    make_checkpoint, tmp_path, monkeypatch, kind, rope
):
    source = target_folder(make_checkpoint)
    folder = drafter_folder(tmp_path / "drafter", kind, source, draft_vocab_size=None)
    entry = replace(getattr(drafters, kind.upper()), rope=rope)
    monkeypatch.setattr(drafters, kind.upper(), entry)
    target, drafter = contexts(source, folder, tmp_path)
    actual = COMPUTE[kind](target, drafter, drafter.target_layers())
    assert relative_error(actual, expected_logits(kind, source, folder)) > 0.01

"""BlockwiseModel: same logits as the model, with one block in memory at a time."""

import mlx.core as mx
import pytest
from lmx.errors import UserError
from lmx.models.blockwise import BlockwiseModel
from lmx.models.loader import build_model, load
from memory_at_rest import active_memory
from mlx.utils import tree_flatten
from tiny_checkpoints import LLAMA, QWEN3_MOE
from tiny_families import member

PARTS = [mx.random.randint(0, 96, (2, 12), key=mx.random.key(n)) for n in range(3)]
SEQUENCES = ("llama", "qwen3_moe", "gemma2", "gemma3_text", "qwen3_next", "mamba")


def llama(**changes):
    mx.random.seed(3)
    return build_model(LLAMA | {"num_hidden_layers": 3} | changes).eval()


@pytest.fixture
def deep(make_checkpoint):
    """Sixteen equal blocks hold nearly all parameters."""
    return make_checkpoint(num_hidden_layers=16, dtype="float32")


def num_bytes(model):
    return sum(value.nbytes for _, value in tree_flatten(model.parameters()))


def peak_memory(function):
    """Return the peak memory of a call above the active memory."""
    before = active_memory()
    function()
    return mx.get_peak_memory() - before


def logits_of(blockwise, parts, dtype=None):
    """Logits of each part of the tokens, computed block by block."""
    hidden = [blockwise.embed(tokens) for tokens in parts]
    mx.eval(hidden)
    for index in range(len(blockwise)):
        with blockwise.loaded_block(index, dtype):
            for number, tokens in enumerate(parts):
                hidden[number] = blockwise.run_block(index, tokens, hidden[number])
                mx.eval(hidden[number])
    logits = [blockwise.logits(*pair) for pair in zip(parts, hidden, strict=True)]
    mx.eval(logits)
    blockwise.unload()
    return logits


@pytest.mark.parametrize("family", SEQUENCES)
def test_logits_match_the_model(family):
    model = member(family).eval()
    blockwise = BlockwiseModel(model)
    blockwise.verify(PARTS[0])
    expected = [model(tokens) for tokens in PARTS]
    for actual, logits in zip(logits_of(blockwise, PARTS), expected, strict=True):
        assert mx.allclose(actual, logits, rtol=1e-4, atol=1e-4)


def test_mixture_of_experts_in_16_bits_is_verified(make_checkpoint):
    """MLX's CPU backend multiplies experts in float32 only."""
    source = make_checkpoint(QWEN3_MOE, num_hidden_layers=1)
    BlockwiseModel(load(source, compute="stored").model).verify(PARTS[0])


def test_blocks_run_in_another_dtype_and_the_model_is_restored():
    model = llama()
    model.set_dtype(mx.bfloat16)
    [bfloat16_logits] = logits_of(BlockwiseModel(model), PARTS[:1])
    [float32_logits] = logits_of(BlockwiseModel(model), PARTS[:1], mx.float32)
    assert bfloat16_logits.dtype == mx.bfloat16
    assert float32_logits.dtype == mx.float32
    assert {v.dtype for _, v in tree_flatten(model.parameters())} == {mx.bfloat16}
    model.set_dtype(mx.float32)
    expected = model(PARTS[0])
    assert mx.allclose(float32_logits, expected, rtol=1e-4, atol=1e-4)
    assert not mx.allclose(
        bfloat16_logits.astype(mx.float32), expected, rtol=1e-4, atol=1e-4
    )


def test_one_block_is_in_memory_at_a_time(deep):
    loaded = load(deep, lazy=True)
    size = num_bytes(loaded.model)

    def run(reread):
        blockwise = BlockwiseModel(load(deep, lazy=True).model, reread)
        logits_of(blockwise, PARTS)
        return blockwise

    assert peak_memory(lambda: run(loaded.reread)) < size / 4
    # Without `reread`, all weights that were read stay in memory.
    assert peak_memory(lambda: run(None)) > 0.9 * size
    before = active_memory()
    blockwise = run(loaded.reread)
    assert mx.get_active_memory() - before < size / 8
    assert mx.array_equal(blockwise.model(PARTS[0]), load(deep).model(PARTS[0]))


def test_verify_reads_one_block_at_a_time(deep):
    loaded = load(deep, lazy=True)
    verify = BlockwiseModel(loaded.model, loaded.reread).verify
    assert peak_memory(lambda: verify(PARTS[0])) < num_bytes(loaded.model) / 4


def test_verify_refuses_blocks_that_are_called_twice():
    model = llama()

    class Looping(type(model.model)):
        def __call__(self, inputs, cache=None, *args):
            hidden = super().__call__(inputs, cache, *args)
            return super().__call__(inputs, cache, hidden)

    model.model.__class__ = Looping
    with pytest.raises(UserError, match="once each"):
        BlockwiseModel(model).verify(PARTS[0])


def test_model_without_blocks_is_refused():
    model = llama()
    model.model.layers = []
    with pytest.raises(UserError, match="no list of transformer blocks"):
        BlockwiseModel(model)

"""A model run block by block: its logits, and how little of it is in memory."""

import mlx.core as mx
import pytest
from lmx.errors import UserError
from lmx.models.blockwise import BlockwiseModel
from lmx.models.loader import build_model, load
from mlx.utils import tree_flatten
from tiny_checkpoints import LLAMA
from tiny_families import member

PARTS = [mx.random.randint(0, 96, (2, 12), key=mx.random.key(n)) for n in range(3)]
SEQUENCES = ("llama", "qwen3_moe", "gemma2", "gemma3_text", "qwen3_next", "mamba")


def llama(**changes):
    mx.random.seed(3)
    return build_model(LLAMA | {"num_hidden_layers": 3} | changes).eval()


@pytest.fixture
def deep(make_checkpoint):
    """Sixteen equal blocks, nearly all there is."""
    return make_checkpoint(num_hidden_layers=16, dtype="float32")


def bytes_of(model):
    return sum(value.nbytes for _, value in tree_flatten(model.parameters()))


def peak(work):
    """The most memory that was in use, beyond what is in use already."""
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    work()
    return mx.get_peak_memory() - before


@pytest.mark.parametrize("family", SEQUENCES)
def test_logits_are_the_model_s(family, tmp_path):
    model = member(family).eval()
    blockwise = BlockwiseModel(model)
    blockwise.check(PARTS[0])
    wanted = [model(tokens) for tokens in PARTS]
    for folder in (None, tmp_path):
        found = list(blockwise.logits(PARTS, folder=folder))
        for ours, theirs in zip(found, wanted, strict=True):
            assert mx.allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    assert len(list(tmp_path.iterdir())) == len(PARTS)


def test_in_another_type_and_the_model_as_before():
    model = llama()
    model.set_dtype(mx.bfloat16)
    [plain] = BlockwiseModel(model).logits(PARTS[:1])
    [exact] = BlockwiseModel(model).logits(PARTS[:1], compute=mx.float32)
    assert plain.dtype == mx.bfloat16
    assert exact.dtype == mx.float32
    assert {v.dtype for _, v in tree_flatten(model.parameters())} == {mx.bfloat16}
    model.set_dtype(mx.float32)
    wanted = model(PARTS[0])
    assert mx.allclose(exact, wanted, rtol=1e-4, atol=1e-4)
    assert not mx.allclose(plain.astype(mx.float32), wanted, rtol=1e-4, atol=1e-4)


def test_one_block_is_in_memory_at_a_time(deep):
    loaded = load(deep, lazy=True)
    size = bytes_of(loaded.model)

    def walk(reread):
        blockwise = BlockwiseModel(load(deep, lazy=True).model, reread)
        for logits in blockwise.logits(PARTS):
            mx.eval(logits)
        return blockwise

    assert peak(lambda: walk(loaded.reread)) < size / 4
    # All that is read stays where nothing unread can take its place.
    assert peak(lambda: walk(None)) > 0.9 * size
    before = mx.get_active_memory()
    kept = walk(loaded.reread)
    assert mx.get_active_memory() - before < size / 8
    assert mx.array_equal(kept.model(PARTS[0]), load(deep).model(PARTS[0]))


def test_the_check_reads_one_block_at_a_time(deep):
    loaded = load(deep, lazy=True)
    check = BlockwiseModel(loaded.model, loaded.reread).check
    assert peak(lambda: check(PARTS[0])) < bytes_of(loaded.model) / 4


def test_weights_are_read_when_they_are_used(deep):
    size = bytes_of(load(deep, lazy=True).model)
    assert peak(lambda: load(deep, lazy=True)) < size / 100
    assert peak(lambda: load(deep)) >= size


def test_a_block_called_twice_is_no_sequence():
    model = llama()

    class Looping(type(model.model)):
        def __call__(self, inputs, cache=None, *rest):
            hidden = super().__call__(inputs, cache, *rest)
            return super().__call__(inputs, cache, hidden)

    model.model.__class__ = Looping
    with pytest.raises(UserError, match="once each"):
        BlockwiseModel(model).check(PARTS[0])


def test_a_model_without_blocks_is_refused():
    model = llama()
    model.model.layers = []
    with pytest.raises(UserError, match="no list of blocks"):
        BlockwiseModel(model)

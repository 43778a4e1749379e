"""Models divided by layers compute what whole ones do."""

from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest
import tiny_shards
from lmx.errors import UserError
from lmx.generation.speculative.factory import proposer_factory
from lmx.models import pipeline_parallel, tensor_parallel
from lmx.models.loader import load
from mlx.utils import tree_flatten, tree_map
from test_tensor_parallel import in_ranks
from tiny_shards import LAYERED, Group, model_of


def part_of(rank: int, size: int, family: str = "qwen3_next"):
    """What a rank holds of a model, without the other ranks."""
    model = model_of(family)
    says = pytest.warns(UserWarning, match=f"{family} by layers only")
    with nullcontext() if rank else says:
        tensor_parallel.shard(model, Group(rank, size), lambda: model_of(family))
    return model


def assert_equal(ranks: list[dict]) -> None:
    for case, (error, share, deviation) in ranks[0].items():
        is_wrong = case.endswith("wrong")
        # The same operations, so the same bits.
        assert error > 0.1 if is_wrong else error == 0, case
        assert deviation > 0.1, case
        assert all(rank[case][0] == error for rank in ranks), case
        assert 0.2 < share < 0.8, case


def test_two_ranks_compute_what_one_does(tmp_path):
    # Negative control: rank 1 has two of its layers in the wrong order.
    assert_equal(in_ranks("errors", tmp_path, "qwen3_next", "qwen3_next::wrong"))


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_families_dense_and_quantized(tmp_path, count):
    cases = [f"{family}:{mode}" for family in LAYERED for mode in ("", "affine")]
    cases.append("bailing_hybrid:affine:wrong")
    assert_equal(in_ranks("errors", tmp_path, *cases, count=count))


@pytest.mark.parametrize("family", LAYERED)
def test_a_rank_holds_its_layers(family):
    whole, count = dict(tree_flatten(model_of(family).parameters())), LAYERED[family]
    parts, shares = [], []
    for rank in range(2):
        model = part_of(rank, 2, family)
        own = pipeline_parallel.own_layers(model)
        parts[:0] = range(count)[own]
        held = dict(tree_flatten(model.parameters()))
        assert all(mx.array_equal(whole[name], value) for name, value in held.items())
        numbers = {int(name.split(".")[2]) for name in held if ".layers." in name}
        assert numbers == {*range(count)[own]}
        shares.append(sum(v.size for v in held.values()))
    assert parts == [*range(count)]
    share = tensor_parallel.shard_share(model_of(family), 2)
    assert share == max(shares) / sum(value.size for value in whole.values())


def test_weights_of_other_ranks_stay_unread(make_checkpoint, recwarn):
    sizes = {"num_experts": 64, "vocab_size": 320}
    folder = make_checkpoint(tiny_shards.read_keys("qwen3_next") | sizes)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    model = load(folder, group=Group(1, 2), compute="stored").model
    held = sum(value.nbytes for _, value in tree_flatten(model.parameters()))
    whole = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert held < 0.5 * whole
    assert mx.get_peak_memory() - before < 1.02 * held


@pytest.mark.parametrize(
    ("family", "size", "message", "hint"),
    [
        ("qwen3_next", 4, "process 3 would have no layer with KVCache", "are 2, 3"),
        ("qwen3_next", 8, "split [1, 1, 1, 1, 1, 1, 1, 0] must be", "are 2, 3"),
        ("bailing_hybrid", 4, "split", "possible are 2, 3"),
    ],
)
def test_numbers_of_processes_that_are_refused(family, size, message, hint):
    whole = model_of(family)
    with pytest.raises(UserError, match="cannot be divided among") as caught:
        tensor_parallel.shard(whole, Group(1, size), lambda: model_of(family))
    assert message in str(caught.value)
    assert hint in caught.value.hint
    with pytest.raises(UserError) as caught:
        tensor_parallel.shard_share(whole, size)
    assert message in str(caught.value)


def test_layers_of_several_dtypes_are_refused():
    """A rank makes room for hidden states of the embedding's dtype."""
    model = model_of("qwen3_next")
    model.update(tree_map(lambda w: w.astype(mx.float16), model.parameters()))
    mlp = model.layers[4].mlp.shared_expert
    mlp.update(tree_map(lambda w: w.astype(mx.float32), mlp.parameters()))
    with pytest.raises(UserError, match="are float16 and float32 in different layers"):
        tensor_parallel.shard(model, Group(1, 2), lambda: None)


def test_drafters_on_hidden_states_are_refused():
    target = SimpleNamespace(model=part_of(1, 2), path="target", tokenizer=None)
    with pytest.raises(UserError, match="reads hidden states of the model"):
        proposer_factory("mtp", target, load_draft=None)
    assert proposer_factory("prompt-lookup", target, load_draft=None)


def test_every_architecture_that_is_divided_so_is_compared():
    models = Path(find_spec("mlx_lm").origin).parent / "models"
    names = {path.stem for path in models.glob("*.py") if is_layered(path.read_text())}
    assert names == {*LAYERED}


def is_layered(source: str) -> bool:
    return "(PipelineMixin, " in source and "def shard(" not in source


def test_passes_of_divided_models_are_not_compiled():
    whole, part = model_of("qwen3_next"), part_of(1, 2)
    assert pipeline_parallel.compile_for(whole) is mx.compile
    function = pipeline_parallel.compile_for(whole, part)(len)
    assert function is len

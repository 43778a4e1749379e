"""The mesh of processes: sizes are checked, and a ring has one dimension."""

from types import SimpleNamespace

import pytest
from lmx.config.parallel import ParallelConfig
from lmx.config.schema import RecipeConfig
from lmx.errors import UserError
from lmx.run.parallel_dims import ParallelDims, require_process_count
from processes import in_ring

MESH = """
import sys
from lmx.config.parallel import ParallelConfig
from lmx.errors import UserError
from lmx.run.distributed import join
from lmx.run.parallel_dims import ParallelDims

ranks = join()
for sizes in sys.argv[1:]:
    data, tensor = map(int, sizes)
    try:
        mesh = ParallelDims.build(ParallelConfig(data=data, tensor=tensor), ranks)
        groups = mesh.world, mesh.data, mesh.tensor
        print([(group.rank, group.size) for group in groups])
    except UserError as error:
        print(error, error.hint)
"""


@pytest.mark.parametrize(
    ("data", "tensor", "size", "is_refused"),
    [
        (None, 1, 1, False),
        (None, 1, 4, False),
        (None, 2, 4, False),
        (2, 2, 4, False),
        (None, 2, 3, True),
        (None, 2, 1, True),
        (2, 1, 1, True),
        (1, 1, 2, True),
        (2, 2, 2, True),
    ],
)
def test_the_processes_fill_the_mesh(data, tensor, size, is_refused):
    config = ParallelConfig(data=data, tensor=tensor)
    if not is_refused:
        require_process_count(config, size)
        return
    with pytest.raises(UserError, match=f"this run has {size}") as caught:
        require_process_count(config, size)
    wanted = (data or 1) * tensor
    assert caught.value.hint == f"start it with: mlx.launch -n {wanted} -- ..."


def test_a_process_alone_has_groups_of_one():
    mesh = ParallelDims.build(ParallelConfig(), ParallelDims().world)
    assert [mesh.world.size, mesh.data.size, mesh.tensor.size] == [1, 1, 1]


def test_a_ring_has_one_dimension(tmp_path):
    results = in_ring(MESH, "12", "21", folder=tmp_path)
    assert results[1].stdout.splitlines() == [
        "[(1, 2), (0, 1), (1, 2)]",
        "[(1, 2), (1, 2), (0, 1)]",
    ], results[1].stderr


def test_processes_of_a_tensor_group_follow_each_other():
    """Of four: 0 and 1 hold a model, 2 and 3 the same one for other examples."""
    colors = []
    for rank in range(4):
        world = SimpleNamespace(rank=rank, size=4, split=lambda color: color)
        mesh = ParallelDims.build(ParallelConfig(tensor=2), world)
        colors.append((mesh.data, mesh.tensor))
    assert colors == [(0, 0), (1, 0), (0, 1), (1, 1)]


@pytest.mark.slow
def test_a_ring_cannot_be_split(tmp_path):
    for result in in_ring(MESH, "22", folder=tmp_path, count=4):
        assert "ring cannot split 4 processes into groups of 2" in result.stdout
        assert "parallel.tensor=4, or 1" in result.stdout


STEPS = {"steps": 1, "batch_size": 1}


@pytest.mark.parametrize(
    ("kind", "block", "message"),
    [
        ("draft", {}, "a draft stage holds the whole model"),
        ("train", STEPS, "a train stage holds the whole model"),
    ],
)
def test_what_needs_the_whole_model_is_refused(kind, block, message):
    recipe = {"model": "x", "parallel": {"tensor": 2}, "stages": [{kind: block}]}
    with pytest.raises(ValueError, match=message):
        RecipeConfig.model_validate(recipe)

"""Models divided by layers compute what whole ones do."""

import pytest
from test_tensor_parallel import in_ranks
from tiny_shards import LAYERED


@pytest.mark.parametrize("family", LAYERED)
def test_ranks_compute_what_one_does(tmp_path, family):
    cases = [family, f"{family}:affine", f"{family}:affine:wrong"]
    ranks = in_ranks("errors", tmp_path, *cases)
    raise AssertionError(str(ranks))

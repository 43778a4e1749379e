"""For all tests: no network, caches of their own, one BLAS thread per process, the
BLAS users have."""

import os
import tempfile

os.environ.setdefault("LMX_BLAS_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import mlx.core as mx
import pytest
from lmx import cpu  # The environment comes first.

cpu.enable()

_cache = tempfile.TemporaryDirectory(prefix="lmx-cache-")
os.environ["LMX_CACHE"] = _cache.name
# Nor the user's token or downloads.
os.environ["HF_HOME"] = _cache.name

import fusion  # noqa: E402
import warm  # noqa: E402
from hub_stand_in import stand_in  # noqa: E402, F401
from tiny_checkpoints import make_checkpoint, tokenizer_folder  # noqa: E402, F401

warm.hasten()


@pytest.fixture(autouse=True, scope="module")
def same_fixtures_in_every_run(request) -> None:
    """The fixtures of a module come after this one, with an empty cache."""
    os.environ["LMX_CACHE"] = tempfile.mkdtemp(dir=_cache.name)
    start_anew(request)


@pytest.fixture(autouse=True)
def same_test_in_every_run(request) -> None:
    """Random weights do not depend on the tests that ran before in this process."""
    start_anew(request)


def start_anew(request) -> None:
    mx.random.seed(0)
    fusion.fuse(request.node.get_closest_marker("fused") is not None)


def pytest_addoption(parser) -> None:
    """Options of the fuzzers in tests/fuzz."""
    parser.addoption("--fuzz-cases", type=int, help="cases of each fuzzer")
    parser.addoption("--fuzz-seed", type=int, default=0, help="seed of the cases")

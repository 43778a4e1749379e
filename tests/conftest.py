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

from hub_stand_in import stand_in  # noqa: E402, F401
from tiny_checkpoints import make_checkpoint, tokenizer_folder  # noqa: E402, F401


@pytest.fixture(autouse=True, scope="module")
def same_fixtures_in_every_run() -> None:
    """The fixtures of a module come after this one."""
    mx.random.seed(0)


@pytest.fixture(autouse=True)
def same_test_in_every_run() -> None:
    """Random weights do not depend on the tests that ran before in this process."""
    mx.random.seed(0)


def pytest_addoption(parser) -> None:
    """Options of the fuzzers in tests/fuzz."""
    parser.addoption("--fuzz-cases", type=int, help="cases of each fuzzer")
    parser.addoption("--fuzz-seed", type=int, default=0, help="seed of the cases")

"""Every fuzzer is slow; `--fuzz-cases N` sets how many cases each one makes."""

import random
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
# Recipes that run in half a second.
sys.path.append(str(FOLDER.parent / "pipeline"))
# Some fuzzers use the fixtures of other folders.
sys.path.append(str(FOLDER.parent / "convert"))
sys.path.append(str(FOLDER.parent / "data"))
sys.path.append(str(FOLDER.parent / "models"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(FOLDER):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def folders(tmp_path_factory, tokenizer_folder) -> dict[str, str]:
    """A model, adapters of it in every format, and drafters, all sound."""
    import mlx.core as mx
    from lmx.models import gguf_scales
    from test_fuzz_adapters import SMALL, write_adapters, write_drafters
    from test_fuzz_model_folders import write_folder

    root = tmp_path_factory.mktemp("folders")
    write_folder(root / "base", SMALL, tokenizer_folder, None)
    layer, rows = "model.layers.0.self_attn.q_proj", mx.ones((64, 4))
    names = [f"{layer}.{name}" for name in (gguf_scales.STEPS, gguf_scales.SCALES)]
    gguf_scales.write(root / "base", dict.fromkeys(names, rows))
    write_adapters(root / "adapters", root / "base")
    write_drafters(root / "drafters", root / "base")
    return {name: str(root / name) for name in ("base", "adapters", "drafters")}


@pytest.fixture
def num_cases(request: pytest.FixtureRequest):
    """The number of cases: that of the command line, else the default of the test."""

    def choose(default: int) -> int:
        return request.config.getoption("--fuzz-cases") or default

    return choose


@pytest.fixture
def fuzz_random(request: pytest.FixtureRequest) -> random.Random:
    """Random numbers that depend on `--fuzz-seed` and on the name of the test."""
    return random.Random(
        f"{request.config.getoption('--fuzz-seed')} {request.node.name}"
    )

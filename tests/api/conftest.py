"""Session fixtures: one tiny run, made from a dict."""

import lmx
import pytest
from tiny_api import Recorder, tiny_recipe, write_examples


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """A folder with training and validation examples."""
    return write_examples(tmp_path_factory.mktemp("examples"))


@pytest.fixture
def recipe(files) -> dict:
    return tiny_recipe(files)


@pytest.fixture(scope="session")
def recorder() -> Recorder:
    """What a callback saw of the run."""
    return Recorder()


@pytest.fixture(scope="session")
def run(files, recorder, tmp_path_factory) -> lmx.Run:
    """The finished run of the recipe."""
    folder = tmp_path_factory.mktemp("run") / "tiny"
    return lmx.train(
        tiny_recipe(files), output=folder, callbacks=[recorder], quiet=True
    )


@pytest.fixture(scope="session")
def model(run) -> lmx.Model:
    return lmx.load(run)

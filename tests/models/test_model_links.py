"""Links in a model folder: none may leave it, except into the Hub's cache."""

import shutil

import pytest
from lmx.cli import main
from lmx.errors import UserError
from lmx.models.checkpoint import read_config
from tiny_checkpoints import LLAMA


@pytest.fixture
def model(make_checkpoint, tmp_path):
    return shutil.copytree(make_checkpoint(LLAMA), tmp_path / "model")


@pytest.mark.parametrize("target", ["secret.txt", "folder", "missing"])
@pytest.mark.parametrize("name", ["tokenizer_extra.json", "sub/chat_template.jinja"])
def test_links_out_of_a_model_are_refused(model, tmp_path, capsys, target, name):
    (tmp_path / "secret.txt").write_text("a secret")
    (tmp_path / "folder").mkdir()
    link = model / name
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(tmp_path / target)
    with pytest.raises(UserError, match="leaves the model folder") as caught:
        read_config(model)
    assert str(link) in str(caught.value)
    assert main.main(["generate", str(model), "--prompt", "a"]) == 2
    assert "a secret" not in capsys.readouterr().out


def test_links_within_a_model_and_to_a_model_are_followed(model, tmp_path):
    (model / "copy.json").symlink_to("config.json")
    (tmp_path / "other-name").symlink_to(model)
    assert read_config(tmp_path / "other-name") == read_config(model)


def test_layout_of_the_hub_cache_is_allowed(model, tmp_path):
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / "abc"
    (repository / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(model.iterdir()):
        blob = file.rename(repository / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{blob.name}")
    assert read_config(snapshot)["model_type"] == "llama"
    (snapshot / "other").symlink_to(tmp_path)
    with pytest.raises(UserError, match="leaves the model folder"):
        read_config(snapshot)

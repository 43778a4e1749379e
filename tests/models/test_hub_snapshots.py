"""Hub models by name and revision, and from the cache when offline."""

import pytest
from hub_stand_in import Repository
from lmx.cli import main
from lmx.errors import UserError
from lmx.models.loader import checkpoint_folder


@pytest.fixture
def files(make_checkpoint):
    return {p.name: p.read_bytes() for p in make_checkpoint().iterdir()}


def go_offline(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def generate(*arguments):
    return main.main(
        [
            "generate",
            *arguments,
            "--prompt",
            "add",
            "--ignore-chat-template",
            "--max-tokens",
            "4",
        ]
    )


def test_generate_uses_the_revision_and_its_offline_cache(
    stand_in, files, monkeypatch, capfd
):
    new_files = files | {"config.json": b"{}"}
    stand_in.repositories["models/lab/tiny"] = Repository(
        files, new_files, tags={"v1": 0}
    )
    assert generate("lab/tiny", "--revision", "v1") == 0
    text = capfd.readouterr().out
    assert generate("lab/tiny") == 2
    assert "names no model_type" in capfd.readouterr().err
    go_offline(monkeypatch)
    num_requests = len(stand_in.requests)
    assert generate("lab/tiny", "--revision", "v1") == 0
    assert capfd.readouterr().out == text
    assert generate("lab/tiny", "--revision", "v2") == 2
    message = capfd.readouterr().err
    assert "lab/tiny: no folder of this name, and the Hub does not give it" in message
    assert len(stand_in.requests) == num_requests


def test_download_snapshot_skips_unneeded_files(stand_in, files):
    all_files = files | {
        "pytorch_model.bin": b"\x80\x04",
        "consolidated.safetensors": b"a copy",
        "custom.py": b"1/0",
        "onnx/model.onnx": b"x",
    }
    stand_in.repositories["models/lab/tiny"] = Repository(all_files)
    folder = checkpoint_folder("lab/tiny")
    actual = {p.name: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    assert actual == files
    assert (
        checkpoint_folder("lab/tiny", trust_remote_code=True) / "custom.py"
    ).is_file()


@pytest.mark.parametrize(
    ("name", "revision"), [("lab/nothing", None), ("lab/tiny", "v9")]
)
def test_checkpoint_folder_names_what_the_hub_lacks(stand_in, files, name, revision):
    stand_in.repositories["models/lab/tiny"] = Repository(files)
    with pytest.raises(UserError) as caught:
        checkpoint_folder(name, revision=revision)
    assert "the Hub does not give it" in caught.value.message
    assert caught.value.place == name

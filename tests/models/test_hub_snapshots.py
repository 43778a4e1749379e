"""Hub models by name and revision, and from the cache when offline."""

import mlx.core as mx
import pytest
from hub_stand_in import Repository
from lmx.cli import main
from lmx.config.draft import DrafterConfig
from lmx.errors import UserError
from lmx.models.drafters.eagle3 import Eagle3Drafter
from lmx.models.drafters.io import bind_target, save_drafter
from lmx.models.loader import checkpoint_folder, load
from tiny_checkpoints import LLAMA


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


def test_drafter_of_the_hub_drafts(stand_in, make_checkpoint, tmp_path, capfd):
    target = make_checkpoint(dtype="float32", num_hidden_layers=2)
    drafter = Eagle3Drafter.for_target(
        LLAMA,
        DrafterConfig(num_draft_tokens=2),
        width=LLAMA["hidden_size"],
        vocab_size=LLAMA["vocab_size"],
        num_blocks=2,
    )
    folder = tmp_path / "drafter"
    folder.mkdir()
    model = load(target).model
    save_drafter(folder, bind_target(drafter, model, place="drafter"), mx.float32)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    stand_in.repositories["models/lab/drafter"] = Repository(files)
    assert generate(str(target)) == 0
    text = capfd.readouterr().out
    assert generate(str(target), "--draft-model", "lab/drafter") == 0
    assert capfd.readouterr().out == text
    # The control: a name that the Hub does not have.
    assert generate(str(target), "--draft-model", "lab/nothing") == 2
    assert "lab/nothing" in capfd.readouterr().err

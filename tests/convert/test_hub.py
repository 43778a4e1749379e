"""Pushes to the Hub: complete uploads, resumed pushes and refused access."""

import hashlib
import shutil
from collections import Counter

import mlx.core as mx
import pytest
from hub_stand_in import READER, SCOPED, TOKEN, Repository
from lmx.cli import main
from lmx.convert.exporters.hub import license_metadata_of, require_write_access
from lmx.errors import UserError


@pytest.fixture
def folder(make_checkpoint, tmp_path):
    """A valid checkpoint in three shards with a model card."""
    folder = shutil.copytree(make_checkpoint(), tmp_path / "model")
    weights = sorted(mx.load(str(folder / "model.safetensors")).items())
    (folder / "model.safetensors").unlink()
    for number in range(3):
        file = folder / f"model-{number + 1:05d}-of-00003.safetensors"
        mx.save_safetensors(str(file), dict(weights[number::3]))
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# Tiny\n")
    (folder / ".notes").write_text("private")
    return folder


def contents(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name[0] != "."}


def push(*arguments):
    return main.main(["push", *map(str, arguments)])


def test_push_uploads_folder_byte_for_byte(stand_in, folder, capfd):
    assert push(folder, "alice/tiny") == 0
    repository = stand_in.repositories["models/alice/tiny"]
    assert repository.files == contents(folder)
    assert repository.private
    assert len(stand_in.sent) == 3
    out, err = capfd.readouterr()
    assert f"pushing {len(contents(folder))} files, 0.4 MB" in out
    assert "pushed: https://huggingface.co/alice/tiny/commit/" in out
    assert TOKEN not in out + err
    # The second push uploads only the changed file.
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# Tiny 2\n")
    assert push(folder, "alice/tiny") == 0
    assert len(stand_in.sent) == 3
    assert repository.files == contents(folder)


def test_push_is_private_by_default(stand_in, folder):
    folder.rename(folder.parent / "moved")
    run = folder.parent / "run"
    run.mkdir()
    (folder.parent / "moved").rename(run / "model")
    assert push(run, "lab/tiny", "--public") == 0
    repository = stand_in.repositories["models/lab/tiny"]
    assert not repository.private
    assert repository.files == contents(run / "model")


def test_interrupted_push_resumes_without_resending(stand_in, folder, capfd):
    arrived = []

    def should_drop(method, path):
        if method == "PUT" and path not in arrived and len(arrived) < 2:
            arrived.append(path)
        return method == "PUT" and path not in arrived

    stand_in.should_drop = should_drop
    assert push(folder, "alice/tiny") == 1
    message = capfd.readouterr().err
    assert "alice/tiny: the Hub refuses or does not respond: " in message
    assert "Error while uploading 'model-0000" in message
    assert "run the same command again" in message
    assert TOKEN not in message
    assert stand_in.repositories["models/alice/tiny"].files == {}
    assert len(stand_in.sent) == 2
    stand_in.should_drop = lambda method, path: False
    assert push(folder, "alice/tiny") == 0
    assert stand_in.repositories["models/alice/tiny"].files == contents(folder)
    shards = {name: c for name, c in contents(folder).items() if "safetensors" in name}
    hashes = [hashlib.sha256(content).hexdigest() for content in shards.values()]
    assert sorted(stand_in.sent) == sorted(hashes)


def test_dropped_connection_is_retried(stand_in, folder):
    attempts = Counter()

    def should_drop(method, path):
        attempts[path] += 1
        return method == "PUT" and attempts[path] == 1

    stand_in.should_drop = should_drop
    assert push(folder, "alice/tiny") == 0
    assert (
        sum(attempts[path] for method, path in stand_in.requests if method == "PUT")
        == 12
    )
    assert stand_in.repositories["models/alice/tiny"].files == contents(folder)


def test_interrupted_chunked_push_resumes(stand_in, folder, tmp_path, monkeypatch):
    """Push with hf-xet, which stores chunks in a local folder."""
    pytest.importorskip("hf_xet")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    stand_in.chunks = tmp_path / "chunks"
    stand_in.should_drop = lambda method, path: path.endswith("/commit/main")
    assert push(folder, "alice/tiny") == 1
    # Not all of the folder: hf-xet removes its own temporary folders meanwhile.
    chunks = stand_in.chunks / "xet/xorbs/xorbs"
    stored = {p: p.stat().st_mtime_ns for p in chunks.glob("default*")}
    size = sum(p.stat().st_size for p in folder.glob("*.safetensors"))
    assert sum(p.stat().st_size for p in stored) > 0.9 * size
    stand_in.should_drop = lambda method, path: False
    assert push(folder, "alice/tiny") == 0
    resumed = {p: p.stat().st_mtime_ns for p in chunks.glob("default*")}
    assert resumed == stored
    expected = {
        name: (hashlib.sha256(content).hexdigest(), len(content))
        if name.endswith(".safetensors")
        else content
        for name, content in contents(folder).items()
    }
    assert stand_in.repositories["models/alice/tiny"].files == expected


@pytest.mark.parametrize(
    ("token", "name", "message"),
    [
        (None, "alice/tiny", "there is no Hub token"),
        ("hf_no\x01token", "alice/tiny", "the Hub token is invalid"),
        ("hf_nobodyHasThisOne", "alice/tiny", "Invalid user token"),
        (READER, "alice/tiny", "the token of 'alice' may not write to this"),
        (TOKEN, "bob/tiny", "the token of 'alice' may not write to this"),
        (TOKEN, "club/tiny", "may not write to this"),
        (SCOPED, "alice/tiny", "may not write to this"),
        (SCOPED, "lab/tiny", None),
        (TOKEN, "Alice/tiny", None),
        (TOKEN, "lab/other", None),
        (TOKEN, "tiny", "this is not a Hub id"),
        (TOKEN, "lab/seen", "this repository is public, but a private one"),
    ],
)
def test_push_without_write_access_is_refused(
    stand_in, monkeypatch, token, name, message
):
    stand_in.repositories["models/lab/seen"] = Repository({})
    if token is None:
        monkeypatch.delenv("HF_TOKEN")
    else:
        monkeypatch.setenv("HF_TOKEN", token)
    if message is None:
        return require_write_access(name, private=True)
    with pytest.raises(UserError) as caught:
        require_write_access(name, private=True)
    assert message in caught.value.message
    assert caught.value.place == name
    assert str(token) not in str(caught.value)
    assert not {method for method, _ in stand_in.requests} & {"POST", "PUT"}
    return None


def test_offline_push_sends_no_request(stand_in, folder, monkeypatch, capfd):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert push(folder, "alice/tiny") == 2
    assert "HF_HUB_OFFLINE is set" in capfd.readouterr().err
    assert stand_in.requests == []


def test_damaged_model_is_not_pushed(stand_in, folder, capfd):
    file = folder / "model-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert push(folder, "alice/tiny") == 2
    assert str(file) in capfd.readouterr().err
    assert stand_in.requests == []


def test_license_metadata_of_model_card(tmp_path):
    card = tmp_path / "README.md"
    assert license_metadata_of(card) == {}
    card.write_text("---\nlicense: other\nlicense_name: custom\ntags: [a]\n---\n# x\n")
    assert license_metadata_of(card) == {"license": "other", "license_name": "custom"}
    for text in ("# license: mit", "---\n- license\n---\n", "---\na: {b\n---\n"):
        card.write_text(text)
        assert license_metadata_of(card) == {}
    # No such day, and no UTF-8: neither stops an export.
    card.write_bytes(b"---\nlicense: mit\ndate: 2024-02-30\n---\n")
    assert license_metadata_of(card) == {}
    card.write_bytes(b"---\nlicense: mit\n---\n# Mod\xe8le\n")
    assert license_metadata_of(card) == {"license": "mit"}

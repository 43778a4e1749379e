"""Recipes that read from the Hub and push to it: early checks, resume, model card."""

from pathlib import Path

import pytest
import yaml
from hub_stand_in import READER, TOKEN, Repository
from tiny_runs import Run

CARD = "---\nlicense: apache-2.0\nbase_model: lab/older\n---\n# Base\n"
TRAIN = {"train": {"steps": 2, "batch_size": 4, "learning_rate": 1e-3}}


def export(**changes):
    return {"export": {"hub_repo_id": "alice/small", **changes}}


def all_output(run, capfd):
    files = [p for p in run.output.rglob("*") if p.suffix not in (".safetensors", "")]
    output = "".join(capfd.readouterr())
    return output + "".join(p.read_bytes().decode("latin-1") for p in files)


def metadata(repository):
    return yaml.safe_load(repository.files["README.md"].decode().split("---\n")[1])


@pytest.fixture
def with_data(stand_in, monkeypatch, tmp_path):
    """The Hub stand-in, with the datasets client connected to it."""
    import datasets
    from huggingface_hub import constants

    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", constants.ENDPOINT)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "rows")
    return stand_in


@pytest.mark.parametrize("token", [None, READER])
@pytest.mark.parametrize("flag", [[], ["--dry-run"]])
def test_run_without_hub_write_access_is_refused(
    stand_in, make_checkpoint, tmp_path, monkeypatch, capfd, token, flag
):
    run = Run(tmp_path, TRAIN, export(), model=make_checkpoint())
    monkeypatch.delenv("HF_TOKEN")
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    code = run(*flag)
    output = capfd.readouterr()
    if flag and token:
        # A dry run sends no request to the Hub.
        assert code == 0
        assert "pushed to alice/small on the Hub, private" in output.out
        assert stand_in.requests == []
    else:
        assert code == 2
        reason = "may not write to this" if token else "there is no Hub token"
        assert f"alice/small: {reason}" in output.err.replace(
            "the token of 'alice' ", ""
        )
    assert not run.output.exists()


def test_failed_push_resumes(stand_in, make_checkpoint, tmp_path, capfd):
    run = Run(tmp_path, TRAIN, export(license="mit"), model=make_checkpoint())
    stand_in.should_drop = lambda method, path: path.endswith("/commit/main")
    assert run() == 1
    stand_in.should_drop = lambda method, path: False
    [commit] = stand_in.sent
    assert run() == 0
    assert stand_in.sent == [commit]
    repository = stand_in.repositories["models/alice/small"]
    assert repository.private
    model = run.output / "model"
    assert repository.files == {p.name: p.read_bytes() for p in model.iterdir()}
    assert metadata(repository) == {
        "library_name": "mlx",
        "pipeline_tag": "text-generation",
        "tags": ["mlx", "lmx"],
        "license": "mit",
    }
    output = all_output(run, capfd)
    assert "stage 1-train: already complete, skipping" in output
    assert "pushed: https://huggingface.co/alice/small/commit/" in output
    assert TOKEN not in output


def test_hub_revision_and_license_are_in_the_card(
    with_data, make_checkpoint, tmp_path, monkeypatch
):
    import datasets
    from huggingface_hub import constants

    files = {p.name: p.read_bytes() for p in make_checkpoint().iterdir()}
    files["README.md"] = CARD.encode()
    models = Repository(files, {"config.json": b"{}"}, tags={"v1": 0})
    run = Run(tmp_path, TRAIN, export(private=False), model="lab/base")
    train_data = Path(run.data["train"][0]).read_bytes()
    invalid = b'{"nothing": "to use"}\n'
    with_data.repositories = {
        "models/lab/base": models,
        "datasets/lab/rows": Repository(
            {"train.jsonl": train_data}, {"train.jsonl": invalid}, tags={"v1": 0}
        ),
    }
    run.model = {"path": "lab/base", "revision": "v1"}
    run.data["train"] = ["lab/rows@v1", run.data["train"][0]]
    run.write()
    assert run() == 0
    repository = with_data.repositories.pop("models/alice/small")
    assert not repository.private
    assert metadata(repository) == {
        "library_name": "mlx",
        "pipeline_tag": "text-generation",
        "tags": ["mlx", "lmx"],
        "base_model": "lab/base",
        "base_model_relation": "finetune",
        "license": "apache-2.0",
        "datasets": ["lab/rows"],
    }
    # Offline, the cache has all inputs. A push is not possible.
    run.stages = [TRAIN, {"export": None}]
    run.write()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    num_requests = len(with_data.requests)
    assert run("--restart") == 0
    assert len(with_data.requests) == num_requests
    assert "apache-2.0" in (run.output / "model" / "README.md").read_text()

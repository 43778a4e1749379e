"""The export stage in several formats: together or not at all, and said beforehand."""

import mlx.core as mx
import pytest
from lmx.convert.exporters import hf
from lmx.convert.importers import load_model as load
from tiny_runs import TRAIN, VALIDATE, Run

LORA = {"adapter": {"rank": 4}, "steps": 4, "learning_rate": 1e-2}
EVERY = ["mlx", "hf", "peft", "gguf"]
TOKENS = mx.array([[5, 80, 200, 7, 33, 120]])


@pytest.fixture(scope="module")
def published(tmp_path_factory, base):
    stages = {"train": TRAIN | LORA}, {"export": {"formats": EVERY}}
    run = Run(tmp_path_factory.mktemp("formats"), *stages, model=base)
    assert run() == 0
    return run


def test_every_export_format_is_the_same_model(published):
    wanted = load(published.output / "model").model(TOKENS)
    for place in ("hf", "gguf"):
        found = load(published.output / place).model(TOKENS)
        assert mx.allclose(found, wanted, rtol=1e-4, atol=1e-4), place
    assert (published.output / "gguf" / "tiny.gguf").is_file()
    assert (published.output / "peft" / "adapter_model.safetensors").is_file()
    assert (published.output / "model" / "README.md").is_file()
    for name in EVERY:
        assert f"exported {name}:" in published.log


def test_exports_are_hashed_in_the_manifest(published):
    recorded = published.json("manifest.json")["stages"]["2-export"]["artifacts"]
    assert {"model", "hf", "peft", "gguf"} <= recorded.keys()
    before = len(published.log)
    (published.output / "gguf" / "tiny.gguf").write_bytes(b"other")
    assert published() == 0
    assert "gguf is damaged or missing" in published.log[before:]
    load(published.output / "gguf")


def test_failed_verification_publishes_no_format(tmp_path, base, monkeypatch):
    real = hf.unstack_experts
    monkeypatch.setattr(
        hf, "unstack_experts", lambda t: real({n: v + 1 for n, v in t.items()})
    )
    run = Run(tmp_path, {"export": {"formats": ["mlx", "hf"]}}, model=base)
    assert run() == 1
    assert not (run.output / "model").exists()
    assert not (run.output / "hf").exists()
    assert not run.half_written()


def test_training_continues_from_an_exported_adapter(published, tmp_path, base):
    """The first validation is of the adapter; peft's format gives the same."""
    before = [r["loss"] for r in published.rows() if r["kind"] == "valid"]
    for form in ("adapters", "peft"):
        start = str(published.output / form)
        train = TRAIN | LORA | {"adapter": {"rank": 6, "init_from": start}}
        (tmp_path / form).mkdir()
        run = Run(tmp_path / form, {"train": train | {"steps": 1}}, model=base)
        assert run() == 0
        [first, *_] = [r["loss"] for r in run.rows() if r["kind"] == "valid"]
        assert first == pytest.approx(before[-1], rel=1e-3)
        assert first < before[0] - 0.01


def test_model_loads_with_adapter_in_both_formats(published, base):
    own, foreign = (
        load(base, adapter=published.output / form).model(TOKENS)
        for form in ("adapters", "peft")
    )
    assert mx.allclose(own, foreign, rtol=1e-5, atol=1e-5)
    assert not mx.allclose(own, load(base).model(TOKENS), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("formats", "changes", "said"),
    [
        (["peft"], {}, "there is no trained adapter"),
        (["mlx", "mlx"], {}, "formats has duplicates"),
        (["hf"], {"model_type": "helium"}, "export of helium models is not supported"),
        (
            ["gguf"],
            {"model_type": "gemma"},
            "GGUF export of gemma models is not supported",
        ),
        (["onnx"], {}, "onnx"),
    ],
)
def test_unsupported_export_is_refused_before_training(
    tmp_path, make_checkpoint, capsys, formats, changes, said
):
    stages = {"evaluate": VALIDATE}, {"export": {"formats": formats}}
    run = Run(tmp_path, *stages, model=make_checkpoint(**changes))
    assert run("--dry-run") == 2
    assert said in capsys.readouterr().err

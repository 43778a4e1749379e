"""mlx-vlm makes a drafter of an exported multi-token-prediction head."""

import json

import mlx.core as mx
import pytest
from lmx.cli import main
from lmx.models.drafters.mtp import MTPHead
from lmx.models.loader import load
from tiny_mtp import EXPERTS, WIDTH, write_published

pytest.importorskip("mlx_vlm")


@pytest.mark.parametrize("changes", [{}, EXPERTS], ids=["dense", "experts"])
def test_split_head_computes_what_ours_does(tmp_path, tokenizer_folder, changes):
    from mlx_vlm.speculative.drafters.mtp_split import detect_mtp_splitter
    from mlx_vlm.split_mtp import split_mtp

    write_published(tmp_path / "base", tokenizer_folder, **changes)
    arguments = ["--model", str(tmp_path / "base"), "--method", "rtn", "--bits", "4"]
    arguments += ["--group-size", "32", "--output", str(tmp_path / "run"), "--quiet"]
    assert main.main(["quantize", *arguments]) == 0
    model = tmp_path / "run/model"
    loaded = load(model)
    ours = MTPHead.load(model, loaded)
    tokens = mx.random.randint(0, 320, (1, 11), key=mx.random.key(1))
    states = mx.random.normal((1, 11, WIDTH), key=mx.random.key(2))
    expected = ours(tokens, states, ours.make_cache())

    theirs = detect_mtp_splitter(model).load(model).bind(loaded.model)
    theirs.reset(loaded.model)
    outputs = theirs._forward_tokens(tokens, states, mx.int32)
    assert mx.allclose(outputs, expected, atol=1e-5)

    # The command writes the same: of the export as of the published checkpoint.
    parts = []
    for name, folder in {"ours": model, "published": tmp_path / "base"}.items():
        split_mtp(str(folder), str(tmp_path / name))
        parts.append(mx.load(str(tmp_path / name / "model.safetensors")))
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config["model_type"] == "qwen3_5_mtp"
    assert parts[0].keys() == parts[1].keys()
    assert all(mx.array_equal(parts[0][name], parts[1][name]) for name in parts[0])
    # And we load what it writes.
    again = MTPHead.load(tmp_path / "ours", loaded)
    assert mx.array_equal(again(tokens, states, again.make_cache()), expected)

"""Multi-token-prediction heads survive all stages, and draft for the result."""

import json

import mlx.core as mx
import mlx_lm
import pytest
from lmx.cli.main import main
from lmx.models.drafters.mtp import MTP_FILE, read_mtp
from mlx.utils import tree_flatten
from tiny_mtp import write_published
from tiny_runs import TRAIN, Run

LORA = TRAIN | {"steps": 2, "adapter": {"type": "lora", "rank": 4}}
RTN = {"bits": 4, "group_size": 32}
CALIBRATION = {"num_tokens": 256, "max_seq_length": 32, "num_eval_tokens": 64}
GPTQ = RTN | {"method": "gptq", "calibration": CALIBRATION}
MIXED = GPTQ | {"mixed_precision": {"target_bpw": 5.5, "candidate_bits": [3, 4, 8]}}


@pytest.mark.parametrize(
    "stages",
    [
        [{"quantize": RTN}],
        pytest.param([{"train": LORA}, {"quantize": MIXED}], marks=pytest.mark.slow),
        pytest.param(
            [{"train": TRAIN | {"steps": 2, "qat": RTN}}], marks=pytest.mark.slow
        ),
    ],
    ids=["rtn", "lora-gptq-mixed", "qat"],
)
def test_head_is_exported_as_published(tmp_path, tokenizer_folder, stages, capsys):
    base = tmp_path / "base"
    _, head, config = write_published(base, tokenizer_folder, dtype=mx.bfloat16)
    run = Run(tmp_path, *stages, "export", model=base)
    assert run() == 0
    model = run.output / "model"
    exported = read_mtp(model, config)
    for name, value in tree_flatten(head.parameters()):
        # What the file has is bfloat16; norms are offsets there.
        assert mx.allclose(exported[name], value, rtol=2**-8, atol=2**-8), name
        assert exported[name].dtype == mx.bfloat16
    # Neither mlx-lm nor the index of the model knows it.
    index = json.loads((model / "model.safetensors.index.json").read_text())
    assert not any("mtp" in name for name in index["weight_map"])
    assert mlx_lm.load(str(model))
    assert (model / MTP_FILE).is_file()

    capsys.readouterr()
    arguments = ["generate", str(run.output), "--prompt", "Add 1 and 1.", "--json"]
    arguments += ["--max-tokens", "12", "--draft-model", "mtp", "--check-parity"]
    assert main([*arguments, "--num-draft-tokens", "2", "--ignore-chat-template"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["parity"]["mismatches"] == 0
    assert answer["speculation"]["rounds"]

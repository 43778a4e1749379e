"""LoRAConfig: ranks, scale, and one error per mistake."""

import pytest
from lmx.config.lora import LoRAConfig
from lmx.config.train import TrainConfig
from pydantic import ValidationError


@pytest.mark.parametrize(
    ("block", "rank", "scale"),
    [
        ({}, 16, 2.0),
        ({"rank": 4}, 4, 2.0),
        ({"rank": 4, "use_rslora": True}, 4, 2.0),
        ({"rank": 4, "alpha": 6.0}, 4, 1.5),
        ({"rank": 4, "alpha": 6.0, "use_rslora": True}, 4, 3.0),
        ({"rank": 4, "alpha": 6.0}, 8, 0.75),
        ({"rank": 4}, 8, 1.0),
    ],
)
def test_lora_scale(block, rank, scale):
    assert LoRAConfig(**block).scale(rank) == pytest.approx(scale)


def test_lora_ranks_by_pattern():
    assert LoRAConfig(rank=3, target_modules=["a", "b"]).ranks == {"a": 3, "b": 3}
    assert (
        LoRAConfig(rank=3).ranks
        == LoRAConfig(rank=3, target_modules="auto").ranks
        == {"auto": 3}
    )
    assert LoRAConfig(rank=3, target_modules={"a": 1, "b": 2}).ranks == {"a": 1, "b": 2}


@pytest.mark.parametrize("layers", [[], {}, 3, [3], {"a": 0}, {"a": "b"}, "all"])
def test_invalid_target_modules_give_one_error(layers):
    with pytest.raises(ValidationError) as caught:
        LoRAConfig(target_modules=layers)
    assert caught.value.error_count() == 1


def test_dora_is_refused_with_qat():
    size = {"steps": 1, "batch_size": 1}
    TrainConfig(**size, adapter={"type": "lora"}, qat={})
    with pytest.raises(ValidationError, match="does not work with qat"):
        TrainConfig(**size, adapter={"type": "dora"}, qat={})

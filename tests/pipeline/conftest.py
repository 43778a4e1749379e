"""One tiny model, trained once, that other runs start from."""

import pytest
from tiny_runs import TRAIN, VALIDATE, Run


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """A run of every stage, done: a fresh model, trained, quantized, exported."""
    # Enough to answer something.
    train = TRAIN | {"steps": 45, "eval_steps": 15, "sample_prompts": ["Add 1 and 1."]}
    run = Run(
        tmp_path_factory.mktemp("whole"),
        {"train": train},
        {"quantize": {"bits": 4, "group_size": 32}},
        {
            "evaluate": VALIDATE
            | {"thresholds": {"max_kl": 5.0, "min_top1_agreement": 0.0}}
        },
        "export",
    )
    assert run() == 0
    return run


@pytest.fixture(scope="session")
def base(whole):
    """The trained tiny model."""
    return whole.output / "stages" / "1-train" / "dense"

"""Session fixtures: one tiny model, trained once, is the base of the other runs."""

import pytest
from lmx.draft import cost_model
from lmx.pipeline.evaluate import metrics
from tiny_runs import EVALUATE, TRAIN, Run


@pytest.fixture(autouse=True, scope="session")
def quick_runs():
    """Speeds are measured once, because no test reads them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost_model, "REPEATS", 1)
        patch.setattr(metrics, "LATENCY_PROMPTS", 1)
        yield


@pytest.fixture(scope="session")
def full_run(tmp_path_factory):
    """A finished run of every stage, from random weights to the export."""
    # Enough steps for the model to generate an answer.
    train = TRAIN | {"steps": 45, "eval_steps": 15, "sample_prompts": ["Add 1 and 1."]}
    run = Run(
        tmp_path_factory.mktemp("full_run"),
        {"train": train},
        {"quantize": {"bits": 4, "group_size": 32}},
        {
            "evaluate": EVALUATE
            | {"thresholds": {"max_kl": 5.0, "min_top1_agreement": 0.0}}
        },
        "export",
    )
    assert run() == 0
    return run


@pytest.fixture(scope="session")
def base(full_run):
    """The folder of the trained tiny model."""
    return full_run.output / "stages" / "1-train" / "dense"

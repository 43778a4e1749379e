"""TensorBoard's own reader gets the metrics that the tracker writes."""

import pytest
from lmx.config.trackers import TrackerConfig
from lmx.run import tensorboard_tracker
from lmx.run.logger import RunLogger
from lmx.run.trackers import TrackerThread, finish_all

pytest.importorskip("tensorboardX")
reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

RECIPE = {"model": {"path": "a"}, "stages": [{"train": {"steps": 3}}]}


def open_logger(folder):
    logger = RunLogger(folder, quiet=True)

    def start():
        config = TrackerConfig(type="tensorboard")
        return tensorboard_tracker.start(
            config, folder=folder, name="try", recipe=RECIPE
        )

    logger.trackers = [TrackerThread("tensorboard", start, logger.warning)]
    return logger


def train(logger, steps, *, loss=10.0):
    logger.stage = "1-train"
    for step in steps:
        record = {"kind": "train", "step": step, "loss": loss - step, "norm": 0.5}
        logger.metrics(record | {"speed": float("inf")})


def read(folder):
    """Steps and values by tag, as TensorBoard shows them."""
    events = reader.EventAccumulator(str(folder)).Reload()
    tags = events.Tags()["scalars"]
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in tags}


def test_tensorboard_reads_the_metrics_of_every_stage(tmp_path):
    logger = open_logger(tmp_path)
    train(logger, [1, 2])
    logger.stage = "2-train, fp_baseline"
    logger.metrics({"kind": "valid", "step": 0, "loss": 1.5})
    finish_all(logger.trackers, {"quantized/perplexity": 3.25}, 0)
    # No tracker failed.
    assert not (tmp_path / "log.txt").exists()
    folder = tmp_path / "tensorboard"
    assert read(folder / "1-train") == {
        "train/loss": [(1, 9.0), (2, 8.0)],
        "train/norm": [(1, 0.5), (2, 0.5)],
    }
    assert read(folder / "2-train-fp_baseline") == {"valid/loss": [(0, 1.5)]}
    [summary] = [f for f in folder.iterdir() if f.is_file()]
    assert read(summary) == {"quantized/perplexity": [(0, 3.25)]}
    events = reader.EventAccumulator(str(summary)).Reload()
    [text] = events.Tensors("recipe/text_summary")
    assert b"stages.1.train.steps: 3" in text.tensor_proto.string_val[0]


def test_tensorboard_drops_the_steps_that_a_resumed_run_repeats(tmp_path):
    killed = open_logger(tmp_path)
    train(killed, [1, 2, 3, 4])
    finish_all(killed.trackers, {}, 1)
    resumed = open_logger(tmp_path)
    train(resumed, [3, 4, 5], loss=20.0)
    finish_all(resumed.trackers, {}, 0)
    assert read(tmp_path / "tensorboard/1-train")["train/loss"] == [
        (1, 9.0),
        (2, 8.0),
        (3, 17.0),
        (4, 16.0),
        (5, 15.0),
    ]

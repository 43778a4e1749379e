"""`lmx.train`: the same bytes as lmx-train, callbacks, functions, interruptions."""

import os
import signal
import sys
import threading
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import lmx
import mlx.core as mx
import pytest
from lmx.cli import main
from lmx.files.hashes import hash_file
from tiny_api import Recorder


def hash_of(run: lmx.Run) -> str:
    return hash_file(run.model_path / "model.safetensors")


def scaled_loss(scale: float):
    """A cross-entropy, written by a user."""

    def loss(logits, targets, mask):
        logits = logits.astype(mx.float32)
        chosen = mx.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        losses = mx.logsumexp(logits, axis=-1) - chosen
        return scale * mx.where(mask, losses, 0.0).sum()

    return loss


def test_command_dict_and_its_recipe_file_give_the_same_bytes(run, recipe, tmp_path):
    text = run.recipe_path.read_text()
    assert text == lmx.Recipe(recipe, overrides={"output": run.path}).to_yaml()
    file, output = tmp_path / "same.yaml", tmp_path / "same"
    file.write_text(text)
    assert main.train([str(file), f"output={output}", "--quiet"]) == 0
    same = lmx.open_run(output)
    assert hash_of(same) == hash_of(run)
    assert lmx.Recipe(output / "resolved.yaml").hash == run.recipe.hash


def test_run_has_paths_metrics_and_history(run, recipe):
    assert run.status == "done"
    assert run.model_path == run.path / "model"
    assert run.reference_path == run.path / "stages/1-train/dense"
    assert run.adapter_path is run.draft_path is None
    assert run.report.is_file()
    assert [*run.metrics] == ["fine-tuned", "quantized"]
    losses = [r["loss"] for r in run.history if r["kind"] == "train"]
    assert len(losses) == recipe["stages"][0]["train"]["steps"]
    assert losses[-1] < losses[0]
    assert "perplexity" in str(run)
    assert "<td>perplexity</td>" in run._repr_html_()


def test_values_of_a_run_are_its_own(run, tmp_path):
    run.resolved["model"].clear()
    assert run.resolved["model"]
    with pytest.raises(lmx.UserError, match="not a run directory"):
        lmx.open_run(tmp_path)
    (tmp_path / "manifest.json").write_bytes((run.path / "manifest.json").read_bytes())
    with pytest.raises(lmx.UserError, match=r"this run has no resolved\.yaml"):
        lmx.load(tmp_path)


def test_completed_run_is_not_repeated(run, recipe):
    recorder = Recorder()
    again = lmx.train(recipe, output=run.path, callbacks=[recorder], quiet=True)
    assert recorder.events == []
    assert again.metrics == run.metrics


def test_callbacks_see_every_step_evaluation_and_stage(run, recorder):
    events = recorder.events
    assert [s for e, s in events if e == "step"] == [1, 2, 3, 4, 5, 6]
    assert [s for e, s in events if e == "evaluate"] == [0, 3, 6]
    assert events[-4:] == [
        ("1-train", []),
        ("2-quantize", []),
        ("3-evaluate", ["fine-tuned", "quantized"]),
        ("4-export", ["fine-tuned", "quantized"]),
    ]


# The step after a stopping step may be running already.
@pytest.mark.parametrize(("event", "last"), [(("step", 1), 2), (("evaluate", 3), 3)])
def test_stopped_run_resumes_to_the_same_bytes(
    event, last, run, recipe, tmp_path, capsys
):
    recipe["stages"], stop = recipe["stages"][:1], Recorder(event)
    first = lmx.train(recipe, output=tmp_path / "r", callbacks=[stop], quiet=True)
    assert first.status == "interrupted"
    assert stop.events[-1][1] == last
    assert "interrupted; to resume: lmx-train" in capsys.readouterr().err
    with pytest.raises(FileNotFoundError, match="no stage is complete"):
        _ = first.model_path
    recorder = Recorder()
    second = lmx.train(recipe, output=tmp_path / "r", callbacks=[recorder], quiet=True)
    assert recorder.events[0] == ("step", last + 1)
    assert second.status == "done"
    trained = hash_file(run.reference_path / "model.safetensors")
    assert hash_of(second) == trained


def test_stop_after_a_stage_keeps_it(recipe, tmp_path):
    class Stop(lmx.Callback):
        def on_stage_end(self, state):
            state.stop()

    recipe["stages"] = recipe["stages"][:2]
    run = lmx.train(recipe, output=tmp_path / "r", callbacks=[Stop()], quiet=True)
    assert run.status == "interrupted"
    assert run.model_path == run.path / "stages/1-train/dense"
    run = lmx.train(recipe, output=tmp_path / "r", callbacks=[Stop()], quiet=True)
    assert run.status == "done"


def test_exit_of_a_callback_is_an_error(recipe, tmp_path):
    class Exit(lmx.Callback):
        def on_step(self, state):
            sys.exit(0)

    recipe["stages"] = recipe["stages"][:1]
    with pytest.raises(lmx.UserError, match=r"ended by sys\.exit\(0\)") as caught:
        lmx.train(recipe, output=tmp_path / "r", callbacks=[Exit()], quiet=True)
    assert caught.value.code == 1
    assert Path(__file__).name in caught.value.place
    assert lmx.open_run(tmp_path / "r").status == "failed"


def test_interrupt_saves_and_raises(recipe, tmp_path):
    class Interrupt(lmx.Callback):
        def on_step(self, state):
            if state.step == 1:
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match="stopped after step 2; saved"):
        lmx.train(recipe, output=tmp_path / "r", callbacks=[Interrupt()], quiet=True)
    assert lmx.open_run(tmp_path / "r").status == "interrupted"


def test_run_in_another_thread_prints_lines(recipe, tmp_path):
    recipe["stages"] = [{"train": recipe["stages"][0]["train"] | {"steps": 2}}]
    handler, runs, text = signal.getsignal(signal.SIGINT), [], StringIO()
    with redirect_stdout(text):
        thread = threading.Thread(
            target=lambda: runs.append(lmx.train(recipe, output=tmp_path / "r"))
        )
        thread.start()
        thread.join()
    assert runs[0].status == "done"
    assert signal.getsignal(signal.SIGINT) is handler
    assert "training 2/2  loss" in text.getvalue()
    assert "\r" not in text.getvalue()


def test_loss_from_python_trains_and_is_part_of_the_recipe(recipe, tmp_path):
    train = recipe["stages"][0]["train"]
    train |= {"steps": 2, "optimizer": "sgd", "gradient_accumulation_steps": 2}
    train["max_grad_norm"] = None
    recipe["stages"] = recipe["stages"][:1]
    plain = lmx.train(recipe, output=tmp_path / "plain", quiet=True)
    runs = {
        scale: lmx.train(
            recipe, output=tmp_path / str(scale), loss=scaled_loss(scale), quiet=True
        )
        for scale in (1.0, 2.0)
    }
    losses = {k: [r["loss"] for r in run.history] for k, run in runs.items()}
    assert losses[1.0] == pytest.approx([r["loss"] for r in plain.history], rel=1e-5)
    # Step 0's validation and the first step see the same weights.
    assert losses[2.0][:2] == pytest.approx([2 * x for x in losses[1.0][:2]], rel=1e-5)
    assert losses[2.0][-1] / 2 < losses[1.0][-1]
    text = runs[1.0].recipe_path.read_text()
    assert "scaled_loss.<locals>.loss" in text
    again = lmx.train(recipe, output=tmp_path / "1.0", loss=scaled_loss(1.0))
    assert again.status == "done"
    with pytest.raises(lmx.UserError, match=r"python\.loss: "):
        lmx.train(recipe, output=tmp_path / "1.0", loss=scaled_loss(2.0))


ZERO = r"gradient of the loss .* is zero"
LOSSES = [
    (lambda logits, targets, mask: logits.sum(axis=-1), r"must return the sum"),
    (lambda logits, targets, mask: logits.sum() + 1j, r"must .* got .*complex64 \(\)"),
    (lambda logits, targets, mask: 1.0, r"must return the sum .* got float"),
    (lambda logits, targets, mask: logits.nothing, r"fails: AttributeError"),
    (lambda logits, targets, mask: sys.exit(0), r"fails: SystemExit: 0"),
    (lambda x, targets, mask: (mask * (x.argmax(-1) != targets)).sum(), ZERO),
    (lambda logits, targets, mask: mx.array(1.0), ZERO),
    (lambda logits, targets, mask: mx.stop_gradient(logits).sum(), ZERO),
]


@pytest.mark.parametrize(("loss", "message"), LOSSES)
def test_wrong_loss_is_named(loss, message, recipe, tmp_path):
    recipe["stages"] = recipe["stages"][:1]
    with pytest.raises(lmx.UserError, match=message) as caught:
        lmx.train(recipe, output=tmp_path / "r", loss=loss, quiet=True)
    assert caught.value.code == 1
    assert lmx.open_run(tmp_path / "r").status == "failed"


def test_loss_that_is_no_function_is_refused(recipe):
    with pytest.raises(lmx.UserError, match="loss must be a function"):
        lmx.train(recipe, loss=mx.mean)


def test_metrics_are_reported_and_a_missed_threshold_raises(recipe, run, tmp_path):
    def examples(model, examples):
        assert examples[0]["prompt"].startswith("Add 1")
        return len(examples) + model.config["num_hidden_layers"] / 10

    evaluate = recipe["stages"][2]["evaluate"] | {"thresholds": {"max_perplexity": 1.5}}
    recipe |= {"model": run.model_path, "stages": [{"evaluate": evaluate}]}
    with pytest.raises(lmx.UserError, match="misses its thresholds") as caught:
        lmx.train(
            recipe, output=tmp_path / "r", metrics={"examples": examples}, quiet=True
        )
    assert caught.value.code == 1
    failed = lmx.open_run(tmp_path / "r")
    assert failed.status == "failed"
    assert failed.metrics["base"]["custom"] == {"examples": 8.2}
    assert "examples" in str(failed.table)
    assert "metrics:\n    examples: " in failed.recipe_path.read_text()


def test_another_metric_keeps_the_stages_before_it(recipe, run, tmp_path):
    recipe |= {"model": run.reference_path, "stages": recipe["stages"][1:3]}
    recorder, options = Recorder(), {"output": tmp_path / "r", "quiet": True}
    for value in (1, 2):
        options |= {"metrics": {"n": lambda *_, value=value: value}}
        done = lmx.train(recipe, callbacks=[recorder], **options)
        assert done.metrics["quantized"]["custom"] == {"n": value}
    stages = [stage for stage, _ in recorder.events]
    assert stages == ["1-quantize", "2-evaluate", "2-evaluate"]

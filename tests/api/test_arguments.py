"""Arguments of the public functions: one message for each that is wrong."""

# ruff: noqa: E501

import types
from pathlib import Path

import lmx
import mlx.core as mx
import numpy as np
import pytest
from lmx.api.arguments import checked
from tiny_api import Recorder

RECIPE = {"model": "a/b", "stages": [{"export": {}}]}


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no")


def hook(name, function=lambda self, state: None):
    """An instance of a callback with one method."""
    return type("Mine", (lmx.Callback,), {name: function})()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: lmx.train(5), "lmx.train: recipe: expected an instance of lmx.Recipe "
         "or text or a path or a dict, got 5"),
        (lambda: lmx.train([]), "recipe: expected .* got a list"),
        (lambda: lmx.train(Unprintable()), "recipe: expected .* an Unprintable"),
        (lambda: lmx.train(), "lmx.train: recipe: missing required argument"),
        (lambda: lmx.train(RECIPE, RECIPE), "unexpected positional"),
        (lambda: lmx.train(RECIPE, recipe=RECIPE), "got multiple values"),
        (lambda: lmx.train(RECIPE, quit=True), "unknown option 'quit'"),
        (lambda: lmx.train(RECIPE, overrides={"output": "a\0b"}), "output: a NUL char"),
        (lambda: lmx.train(RECIPE, overrides={1: 1}), "overrides.1: expected text, "),
        (lambda: lmx.train(RECIPE, overrides="seed=1"), "overrides: expected a dict or "
         "a list, got \"seed=1\""),
        (lambda: lmx.train(RECIPE, overrides=[1]), "overrides.0: expected text or a li"),
        (lambda: lmx.train(RECIPE, callbacks=5), "callbacks: expected a list, got 5"),
        (lambda: lmx.train(RECIPE, callbacks=Recorder()), "callbacks: expected a list, "
         "got a Recorder"),
        (lambda: lmx.train(RECIPE, callbacks=[Recorder]), "callbacks.0: expected an "
         "instance of lmx.Callback, got a type"),
        (lambda: lmx.train(RECIPE, metrics=len), "metrics: expected a dict, got a"),
        (lambda: lmx.train(RECIPE, metrics={"a": 5}), "metrics.a: expected a function"),
        (lambda: lmx.train(RECIPE, loss="mse"), "loss: expected a function, got \"mse\""),
        (lambda: lmx.train(RECIPE, output="a\0b"), "output: a NUL character is not allowed"),
        (lambda: lmx.train(RECIPE, output=5), "output: expected text or a path, got 5"),
        (lambda: lmx.train(RECIPE, restart=1), "restart: expected true or false, got 1"),
        (lambda: lmx.train("a" * 300), "recipe: a name in the path has over 255"),
        (lambda: lmx.train("\ud800"), "recipe: .*half of a surrogate"),
        (lambda: lmx.train("a\0b"), "recipe: a NUL character is not allowed"),
        (lambda: lmx.Recipe(5), "recipe: source: expected an instance of lmx.Recipe"),
        (lambda: lmx.Recipe(RECIPE, overrides=5), "overrides: expected a dict or a list"),
        (lambda: lmx.check(5), "lmx.check: recipe: expected"),
        (lambda: lmx.quantize(5), "lmx.quantize: model: expected"),
        (lambda: lmx.quantize("a", seed="x"), "seed: expected a whole number, got \"x\""),
        (lambda: lmx.quantize("a", data=5), "data: expected text or a path or a list or "
         "a dict, got 5"),
        (lambda: lmx.make_draft("a"), "lmx.make_draft: data: missing req"),
        (lambda: lmx.export("a", "mlx"), "formats: expected a list, got \"mlx\""),
        (lambda: lmx.export("a", [1]), "formats.0: expected text, got 1"),
        (lambda: lmx.load(None), "lmx.load: source: expected .*, got nothing"),
        (lambda: lmx.load("a", compute="int4"), "compute: expected 'auto', 'stored'"),
        (lambda: lmx.load("a", adapter=3), "adapter: expected text or a path, got 3"),
        (lambda: lmx.load("a\0b"), "source: a NUL character is not allowed"),
        (lambda: lmx.evaluate("a", 5), "lmx.evaluate: data: expected"),
        (lambda: lmx.evaluate("a", "b", seed=0.5), "seed: expected a whole number"),
        (lambda: lmx.evaluate("a", "b", [len]), "metrics: expected a dict, got a list"),
        (lambda: lmx.generate(5, "x"), "lmx.generate: model: expected an instance of "
         "lmx.Model or text or a path or an instance of lmx.Run, got 5"),
        (lambda: lmx.generate("a", "x", max_tokens="5"), "max_tokens: expected a whole "
         "number, got \"5\""),
        (lambda: lmx.generate("a", "x", max_tokens=10**5000), "must be less than 2,14"),
        (lambda: lmx.generate("a", "x", seed="x"), "seed: expected a whole number"),
        (lambda: lmx.generate("a", "x", stop=[5]), "stop.0: expected text, got 5"),
        (lambda: lmx.generate("a", "x", stop=5), "stop: expected text or a list, got 5"),
        (lambda: lmx.generate("a", "x", kv_bits=7), "kv_bits: expected 2, 3, 4, 5, 6, 8 or 16, got 7"),
        (lambda: lmx.generate("a", "x", max_kv_size=9), "max_kv_size: must be at least 64, got 9"),
        (lambda: lmx.generate("a", "x", kv_policy="window"), "kv_policy needs max_kv_size"),
        (lambda: lmx.generate("a", "x", temp=1), "unknown option 'temp'"),
        (lambda: lmx.generate("a", "x", temperature=float("nan")), "temperature"),
        (lambda: lmx.generate("a", None), "prompt: expected text or a list, got nothing"),
        (lambda: lmx.open_run(5), "lmx.open_run: path: expected text or a path, got 5"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(lmx.UserError, match=message) as caught:
        call()
    assert caught.value.code == 2


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (hook("on_train_step"), "lmx never calls on_train_step of Mine"),
        (hook("on_stage_ended"), "on_evaluate, on_stage_end, on_step"),
        (hook("log"), "lmx never calls a method of Mine"),
        (lmx.Callback(), "lmx never calls a method of Callback"),
    ],
)
def test_callbacks_that_would_not_be_called_are_refused(callback, message):
    with pytest.raises(lmx.UserError, match=message):
        lmx.train(RECIPE, callbacks=[callback])


def test_numbers_of_numpy_and_mlx_and_other_mappings_are_taken():
    @checked
    def public(keys: lmx.api.arguments.Keys, seed: lmx.api.arguments.Integer):
        return dict(keys), seed

    values = types.MappingProxyType({"a": 1})
    for seed in (3, np.int64(3), np.array(3), mx.array(3)):
        assert public(values, seed) == ({"a": 1}, 3)
        assert type(public(values, seed)[1]) is int
    for seed in (True, 3.0, np.float32(3), np.array([3]), "3"):
        with pytest.raises(lmx.UserError, match="seed: expected a whole number"):
            public(values, seed)


def test_errors_within_a_function_are_not_those_of_its_arguments():
    from lmx.config.model import ModelConfig
    from pydantic import ValidationError

    @checked
    def public(path: Path):
        return ModelConfig.model_validate({"path": path})

    with pytest.raises(ValidationError):
        public(Path("x"))


def test_errors_name_keywords_and_have_no_frames_of_pydantic():
    @checked
    def fails(number: int) -> None:
        raise lmx.UserError("no", hint="use --restart or --ignore-limits")

    for call, hint in (
        (lambda: fails(1), "use restart=True or ignore_limits=True"),
        (lambda: fails("x"), None),
    ):
        with pytest.raises(lmx.UserError) as caught:
            call()
        assert caught.value.hint == hint
        assert not any("pydantic" in str(entry.path) for entry in caught.traceback)
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__ or not caught.value.__context__

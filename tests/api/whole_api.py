"""Every public name with its types: mypy checks this file, and nothing runs it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmx
import mlx.core as mx
from lmx import Check, Evaluation, Model, Recipe, Run


class EarlyStop(lmx.Callback):
    def on_step(self, state: lmx.RunState) -> bool | None:
        return state.loss is None or state.loss > 0.1

    def on_evaluate(self, state: lmx.RunState) -> bool | None:
        if (state.validation_loss or 0) < 1:
            state.stop()
        return None

    def on_stage_end(self, state: lmx.RunState) -> None:
        print(state.stage, state.metrics)


def loss(logits: mx.array, targets: mx.array, mask: mx.array) -> mx.array:
    return mx.where(mask, logits.max(axis=-1), 0).sum()


def count(model: Model, examples: list[dict[str, Any]]) -> float:
    return len(examples) / len(str(model.path))


def recipes() -> Recipe:
    stages: list[dict[str, Any]] = [{"train": {"steps": 1, "batch_size": 2}}]
    recipe: Recipe = lmx.Recipe(
        model="a/b", data={"train": "builtin:stdlib"}, seed=1, stages=stages
    )
    recipe = lmx.Recipe(recipe, overrides={"stages.train.steps": 50})
    text: str = recipe.to_yaml(resolved=True)
    path: Path = recipe.save("recipe.yaml")
    values: dict[str, Any] = recipe.to_dict()
    names: tuple[str, str, Path] = recipe.name, recipe.hash, recipe.output
    print(text, path, values, names)
    return lmx.Recipe({"model": "a/b", "stages": stages})


def runs(recipe: Recipe) -> Run:
    checked: Check = lmx.check(recipe, overrides={"seed": 2})
    needs: tuple[int | None, float | None, bool | None] = (
        checked.memory,
        checked.seconds,
        checked.fits,
    )
    options = {"restart": True, "ignore_limits": False, "quiet": True}
    try:
        run: Run = lmx.train(
            recipe,
            overrides={"seed": 2},
            output=Path("exports/try"),
            callbacks=[EarlyStop()],
            loss=loss,
            metrics={"count": count},
            **options,
        )
    except lmx.ConfigErrors as errors:
        raise SystemExit([error.message for error in errors.errors]) from errors
    except lmx.UserError as error:
        raise SystemExit(error.code) from error
    paths: list[Path | None] = [run.model_path, run.adapter_path, run.report]
    rows: list[dict[str, Any]] = run.history
    figures: dict[str, dict[str, Any]] = run.metrics
    print(needs, paths, rows, figures, run.table, run.status)
    return lmx.open_run(run.path)


def jobs(run: Run) -> None:
    quantized: Run = lmx.quantize(run, data=["a.jsonl"], bits=4, method="gptq")
    draft: Run = lmx.make_draft(quantized, {"train": "a.jsonl"}, steps=10)
    exported: Run = lmx.export(draft, formats=["mlx", "gguf"], output="exports/gguf")
    print(exported)


def models(run: Run) -> None:
    model: Model = lmx.load(run, adapter=run.adapter_path, draft="prompt-lookup")
    text: str = lmx.generate(model, "Hello", max_tokens=8, temperature=0.5, seed=1).text
    chat = lmx.generate(run, [{"role": "user", "content": "Hello"}])
    both: list[str] = [result.text for result in lmx.generate(model, ["a", "b"])]
    chunks: Iterator[str] = (c.text for c in lmx.generate(model, "a", stream=True))
    speed: float | None = chat.decode_tokens_per_second
    figures: Evaluation = lmx.evaluate(
        model, "a.jsonl", {"count": count}, reference="a/b", num_tokens=5
    )
    kl: float | None = figures.kl
    print(text, chat.tokens, both, list(chunks), speed, kl, figures.metrics)


print(lmx.__version__)

"""`lmx.evaluate`: measure a model on data."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from .. import cpu
from ..config.model import ModelConfig
from ..errors import UserError
from ..models.loader import LoadedModel
from ..pipeline.evaluate.evaluator import Evaluator
from ..pipeline.extensions import Extensions
from ..pipeline.runner import make_context
from ..run.logger import RunLogger
from ..run.parallel_dims import ParallelDims
from ..run.tables import metrics_table
from .arguments import Integer, checked
from .functions import Metrics, checked_metric
from .jobs import Data, data_block
from .model import Model, ModelLike, load, model_path
from .recipe import Recipe
from .run import Run, Table


@dataclass(frozen=True, repr=False)
class Evaluation:
    """The measurements of a model, and of the models it was compared with.

    Attributes:
        models: figures by model, as in report.json; the evaluated model is the last.
        samples: prompts with the models' answers: prompt, expected, answers.
    """

    models: dict[str, dict[str, Any]]
    samples: list[dict[str, Any]]

    @property
    def figures(self) -> dict[str, Any]:
        """All figures of the evaluated model."""
        return self.models[[*self.models][-1]]

    @property
    def perplexity(self) -> float:
        """exp of the mean loss per token."""
        return float(self.figures["perplexity"])

    @property
    def perplexity_stderr(self) -> float:
        """Standard error of the perplexity, with sequences as clusters."""
        return float(self.figures["perplexity_stderr"])

    @property
    def loss(self) -> float:
        """Mean loss in nats per token."""
        return float(self.figures["loss"])

    @property
    def tokens(self) -> int:
        """Tokens with a loss that were evaluated."""
        return int(self.figures["tokens"])

    @property
    def kl(self) -> float | None:
        """Mean KL divergence from the reference in nats per token; None without one."""
        return self.figures.get("kl_mean")

    @property
    def top1_agreement(self) -> float | None:
        """Share of positions with the reference's most probable token."""
        return self.figures.get("top1_agreement")

    @property
    def exact_match(self) -> float | None:
        """Share of exact matches, on examples with one correct answer."""
        return self.figures.get("exact_match")

    @property
    def bits_per_weight(self) -> float:
        """Bytes of the checkpoint times 8, divided by its weights."""
        return float(self.figures["bits_per_weight"])

    @property
    def metrics(self) -> dict[str, float]:
        """The values of the given metric functions, by name."""
        return dict(self.figures.get("custom", {}))

    @property
    def table(self) -> Table:
        """The figures, one column per model."""
        return Table(*metrics_table(self.models))

    def __str__(self) -> str:
        return str(self.table)

    def __repr__(self) -> str:
        kl = "" if self.kl is None else f", kl {self.kl:.4f}"
        return f"<lmx.Evaluation: perplexity {self.perplexity:.3f}{kl}>"

    def _repr_html_(self) -> str:
        return self.table._repr_html_()


@checked
def evaluate(
    model: Model | ModelLike,
    data: Data | None = None,
    metrics: Metrics | None = None,
    *,
    reference: Model | ModelLike | None = None,
    seed: Integer = 0,
    quiet: bool = False,
    **keys: Any,
) -> Evaluation:
    """Measure a model as an evaluate stage does; nothing is written.

    Args:
        model: a `Model`, or what `lmx.load` takes. A `Run` is measured with its
            baselines: the base model, and the model before quantization.
        data: a file, a Hub id, a list of them, or a `data` block (its `valid`); None =
            the validation data of the `Run`.
        metrics: functions by name from a `Model` and the examples, as dicts, to a
            number.
        reference: a model with the same tokenizer, for `kl` and `top1_agreement`.
        quiet: print only warnings.
        keys: those of an evaluate stage: num_tokens, exact_match, tasks,
            thresholds, ... (docs/recipes.md).

    Raises:
        ConfigErrors: all errors of the keys.
        UserError: a model does not load, there is no data, or a threshold is missed.
    """
    cpu.enable()
    run = model if isinstance(model, Run) else None
    if data is None and run is None:
        raise UserError("nothing to evaluate on", hint="lmx.evaluate(model, data=...)")
    block = run.resolved["data"] if run and data is None else data_block(data, "valid")
    recipe = Recipe(
        {
            "model": model_path(model),
            "data": block,
            "seed": seed,
            "stages": [{"evaluate": keys}],
        }
    )
    functions = {name: checked_metric(f, name) for name, f in (metrics or {}).items()}
    with TemporaryDirectory() as scratch:
        context = make_context(
            recipe.loaded,
            Path(scratch),
            RunLogger(None, quiet=quiet),
            ParallelDims(),
            Extensions(metrics=functions),
        )
        if run:
            source = ModelConfig.model_validate(run.resolved["model"])
            current = run.artifact
            context = replace(context, source=source, current=current, name=run.name)
        config = recipe.config.stages[0].evaluate
        assert config, "the recipe has an evaluate stage"
        evaluator = Evaluator(config, context)
        if run and reference is None:
            loaders = evaluator.loaders
        else:
            loaders = {"reference": _loader(reference)} if reference else {}
            loaders["model"] = _loader(model)
        evaluator.measure(loaders)
        evaluator.require_thresholds()
    # As a report has them: plain data with text keys.
    models = json.loads(json.dumps(evaluator.metrics))
    return Evaluation(models, evaluator.samples)


def _loader(model: Model | ModelLike) -> Callable[[], LoadedModel]:
    return lambda: (model if isinstance(model, Model) else load(model)).loaded

"""The model card: origin, recipe and measurements of a model.

The metadata follows the Hub's specification of model cards.
"""

from dataclasses import dataclass
from pathlib import Path

import yaml

from ...config.redaction import redact
from ...files.atomic import write_atomic
from ...version import __version__
from .base import FormatCard

TEMPLATE = """\
---
{{ metadata }}---

# {{ title }}

{{ kind }}, made with lmx {{ version }} from {{ origin }}.

{% if models %}
| | {{ models | join(" | ") }} |
|---|{{ "---:|" * (models | length) }}
{% for row in rows %}| {{ row | join(" | ") }} |
{% endfor %}

Perplexity, KL divergence (nats per token, against the previous column) and top-1
agreement are measured on {{ tokens }} held-out tokens{% if questions %}; exact match
is the share of {{ questions }} questions answered exactly{% endif %}.
{{ measured }}

{% endif %}
## Usage

```{{ language }}
{{ usage }}
```

## Recipe

```yaml
{{ recipe }}
```
"""
MEASURED_FILES = "The files in this repository were reloaded for the measurement."
MEASURED_MODEL = (
    "The model was measured in MLX's format, from which these files were made."
)


@dataclass(frozen=True)
class CardFacts:
    """What the cards of all formats of a run say.

    Attributes:
        title: the name under which the model is published.
        name: the recipe's name, which single-file formats have.
        recipe: its text.
        base: Hub id of the base model, if it is on the Hub.
        origin: description of the base model, if it is not on the Hub.
        terms: the license entries of the metadata.
        datasets: Hub ids of the training data.
        stored_as: how the weights are quantized, e.g. 4bit; None = not at all.
        is_trained: whether weights were trained on data.
        is_qat: whether they were trained with fake quantization.
        report: the run's report; empty if nothing was measured.
        table: column names and rows of the measured models.
        quantize_activations: whether the measured model quantizes its activations.
    """

    title: str
    name: str
    recipe: str
    base: str | None
    origin: str
    terms: dict[str, str]
    datasets: list[str]
    stored_as: str | None
    is_trained: bool
    is_qat: bool
    report: dict
    table: tuple[list[str], list[list[str]]]
    quantize_activations: bool = False


def write_card(folder: Path, facts: CardFacts, form: FormatCard) -> None:
    """Write README.md."""
    from jinja2 import Environment, StrictUndefined

    columns, rows = facts.table
    last = facts.report.get("models", {}).get(columns[-1], {}) if columns else {}
    by_skill = last.get("exact_match_by_skill", {})
    base, kind = facts.base, form.kind
    if facts.stored_as and form.keeps_bits:
        kind += f", quantized to {facts.stored_as.replace('bit', ' bits')}"
    # The name of a quantized model is not that of its copies.
    is_copy = form.is_dequantized and facts.stored_as
    usage = form.usage.strip().format(name=facts.name)
    if facts.quantize_activations and form.keeps_bits:
        command = "mlx_lm.generate"
        usage = usage.replace(command, f"{command} --quantize-activations")
    # The entries that the Hub reads.
    tags = [*form.tags, "lmx"]
    if facts.stored_as and form.keeps_bits:
        tags.append(facts.stored_as.replace("bit", "-bit"))
    if facts.is_qat:
        tags.append("qat")
    metadata = {"library_name": form.library} if form.library else {}
    metadata |= {"pipeline_tag": "text-generation", "tags": tags}
    if base:
        metadata["base_model"] = base
        # The Hub's word for what was done to the base model.
        if form.is_adapter:
            metadata["base_model_relation"] = "adapter"
        elif facts.stored_as:
            metadata["base_model_relation"] = "quantized"
        elif facts.is_trained:
            metadata["base_model_relation"] = "finetune"
    metadata |= facts.terms
    if facts.datasets:
        metadata["datasets"] = facts.datasets
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    text = environment.from_string(TEMPLATE).render(
        metadata=yaml.safe_dump(metadata, sort_keys=False),
        title=facts.title + ("-dequantized" if is_copy else form.suffix),
        kind=kind,
        version=__version__,
        origin=f"[{base}](https://huggingface.co/{base})" if base else facts.origin,
        models=columns[1:],
        rows=rows,
        tokens=f"{last.get('tokens', 0):,}",
        questions=sum(each["questions"] for each in by_skill.values()),
        measured=MEASURED_FILES if form.library == "mlx" else MEASURED_MODEL,
        language=form.language,
        usage=usage,
        recipe=facts.recipe.strip(),
    )
    write_atomic(folder / "README.md", redact(text))

"""The model card: origin, recipe and measurements of a model."""

from pathlib import Path

import yaml

from ... import __version__
from ...config.redaction import redact
from ...run.fs import write_atomic

TEMPLATE = """\
---
{{ metadata }}---

# {{ name }}

{{ kind }} made with lmx {{ version }} from {{ origin }}.

{% if models %}
| | {{ models | join(" | ") }} |
|---|{{ "---:|" * (models | length) }}
{% for row in rows %}| {{ row | join(" | ") }} |
{% endfor %}

Perplexity, KL divergence (nats per token, against the previous column) and top-1
agreement are measured on {{ tokens }} held-out tokens{% if questions %}; exact match
is the share of {{ questions }} questions answered exactly{% endif %}.
The files in this repository were reloaded for the measurement.

{% endif %}
## Usage

```bash
lmx generate . --prompt "..."
mlx_lm.generate --model . --prompt "..."
```

## Recipe

```yaml
{{ recipe }}
```
"""


def write_card(
    folder: Path,
    *,
    name: str,
    recipe: str,
    base: str | None,
    origin: str,
    terms: dict[str, str],
    datasets: list[str],
    is_quantized: bool,
    report: dict,
    table: tuple[list[str], list[list[str]]],
) -> None:
    """Write README.md.

    Args:
        base: Hub id of the base model, if it is on the Hub.
        origin: description of the base model, if it is not on the Hub.
        terms: the license entries of the metadata.
        datasets: Hub ids of the training data.
        report: the run's report; empty if nothing was measured.
        table: column names and rows of the measured models.
    """
    from jinja2 import Environment, StrictUndefined

    metadata = {
        "library_name": "mlx",
        "pipeline_tag": "text-generation",
        "tags": ["mlx", "lmx"],
    }
    if base:
        relation = "quantized" if is_quantized else "finetune"
        metadata |= {"base_model": base, "base_model_relation": relation}
    metadata |= terms
    if datasets:
        metadata["datasets"] = datasets
    columns, rows = table
    last = report.get("models", {}).get(columns[-1], {}) if columns else {}
    by_skill = last.get("exact_match_by_skill", {})
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    text = environment.from_string(TEMPLATE).render(
        metadata=yaml.safe_dump(metadata, sort_keys=False),
        name=name,
        kind="A quantized model" if is_quantized else "A model",
        version=__version__,
        origin=f"[{base}](https://huggingface.co/{base})" if base else origin,
        models=columns[1:],
        rows=rows,
        tokens=f"{last.get('tokens', 0):,}",
        questions=sum(count for _, count in by_skill.values()),
        recipe=recipe.strip(),
    )
    write_atomic(folder / "README.md", redact(text))

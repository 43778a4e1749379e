"""The model card: what this model is, how it was made, and what was measured."""

from pathlib import Path

import yaml

from ... import __version__

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

Perplexity, KL divergence (nats per token, from the column before) and agreement are on
{{ tokens }} held-out tokens{% if asked %}; skill accuracy is the share of
{{ asked }} questions answered exactly{% endif %}.
The figures are of these very files, reloaded.

{% endif %}
## Use

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
        base: the Hub id the model comes from, if it does.
        origin: where it comes from, in words, otherwise.
        terms: the card's entries of the license.
        datasets: Hub ids of the data it was trained on.
        report: the run's report; empty when nothing was measured.
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
        asked=sum(asked for _, asked in by_skill.values()),
        recipe=recipe.strip(),
    )
    (folder / "README.md").write_text(text)

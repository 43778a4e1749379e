"""Model cards: Hub metadata and the measurements of the run."""

from dataclasses import replace

import pytest
import yaml
from huggingface_hub import ModelCard
from lmx.convert.exporters import FORMATS
from lmx.convert.exporters.model_card import CardFacts, write_card

TABLE = (
    ["", "base", "fine-tuned", "quantized"],
    [["perplexity", "5.1", "3.2", "3.3"], ["bits per weight", "16", "16", "4.5"]],
)
REPORT = {
    "models": {
        "quantized": {
            "tokens": 12345,
            "exact_match_by_skill": {"a": {"questions": 8}, "b": {"questions": 12}},
        }
    }
}
FACTS = CardFacts(
    title="tiny-base-4bit-qat",
    name="qat_4bit",
    recipe="model: data/tiny-base\n",
    base=None,
    origin="`data/tiny-base`",
    terms={},
    datasets=[],
    stored_as="4bit",
    is_trained=True,
    is_qat=True,
    report=REPORT,
    table=TABLE,
)


def write_and_read_card(folder, form="mlx", **changes):
    write_card(folder, replace(FACTS, **changes), FORMATS[form].CARD)
    text = (folder / "README.md").read_text()
    _, metadata, body = text.split("---\n", 2)
    return yaml.safe_load(metadata), body


def test_card_holds_measurements_and_recipe(tmp_path):
    metadata, body = write_and_read_card(tmp_path)
    assert metadata == {
        "library_name": "mlx",
        "pipeline_tag": "text-generation",
        "tags": ["mlx", "lmx", "4-bit", "qat"],
    }
    prose = " ".join(body.split())
    assert (
        "# tiny-base-4bit-qat A model in MLX's format, quantized to 4 bits, made with "
        "lmx"
    ) in prose
    assert "from `data/tiny-base`. |" in prose
    assert "| | base | fine-tuned | quantized |\n|---|---:|---:|---:|\n" in body
    assert (
        "| perplexity | 5.1 | 3.2 | 3.3 |\n| bits per weight | 16 | 16 | 4.5 |\n"
        in body
    )
    assert "on 12,345 held-out tokens; exact match is the share of 20" in prose
    assert "files in this repository were reloaded" in prose
    assert "```yaml\nmodel: data/tiny-base\n```" in body


@pytest.mark.parametrize(
    ("form", "changes", "relation"),
    [
        ("mlx", {}, "quantized"),
        ("mlx", {"stored_as": None, "is_qat": False}, "finetune"),
        ("mlx", {"is_trained": False, "is_qat": False}, "quantized"),
        ("gguf", {}, "quantized"),
        ("peft", {"stored_as": None, "is_qat": False}, "adapter"),
        # A model that was only converted: the Hub infers the relation.
        ("mlx", {"stored_as": None, "is_trained": False, "is_qat": False}, None),
    ],
)
def test_relation_to_the_base_model_is_that_of_the_run(
    tmp_path, form, changes, relation
):
    base = "Qwen/Qwen3-0.6B"
    metadata, body = write_and_read_card(tmp_path, form, base=base, **changes)
    assert metadata["base_model"] == base
    assert metadata.get("base_model_relation") == relation
    assert "[Qwen/Qwen3-0.6B](https://huggingface.co/Qwen/Qwen3-0.6B)" in body


@pytest.mark.parametrize(
    ("form", "library", "tags", "usage", "suffix"),
    [
        ("mlx", "mlx", ["mlx", "lmx", "4-bit", "qat"], "mlx_lm.generate --model .", ""),
        ("hf", "transformers", ["lmx", "qat"], "AutoModelForCausalLM", "-dequantized"),
        ("peft", "peft", ["lora", "lmx", "qat"], "AutoPeftModelForCausalLM", "-lora"),
        (
            "gguf",
            None,
            ["gguf", "lmx", "qat"],
            "llama-cli -m qat_4bit.gguf\nollama",
            "-GGUF",
        ),
    ],
)
def test_card_of_every_format(tmp_path, form, library, tags, usage, suffix):
    metadata, body = write_and_read_card(tmp_path, form)
    assert f"# tiny-base-4bit-qat{suffix}\n" in body
    assert metadata.get("library_name") == library
    assert metadata["tags"] == tags
    assert usage in body
    # Only MLX's format keeps the bits, and only its files were measured.
    prose = " ".join(body.split())
    assert ("quantized to 4 bits" in prose) is (form == "mlx")
    assert ("measured in MLX's format" in prose) is (form != "mlx")


def test_unquantized_model_is_not_called_dequantized(tmp_path):
    changes = {"title": "tiny-base-finetuned", "stored_as": None, "is_qat": False}
    _, body = write_and_read_card(tmp_path, "hf", **changes)
    assert "# tiny-base-finetuned\n" in body


def test_metadata_is_readable_by_the_hub(tmp_path):
    terms = {"license": "other", "license_name": "custom"}
    metadata, _ = write_and_read_card(
        tmp_path, base="a/b", terms=terms, datasets=["c/d", "e"]
    )
    card_data = ModelCard.load(tmp_path / "README.md").data
    assert card_data.to_dict() == metadata
    assert (card_data.base_model, card_data.license) == ("a/b", "other")
    assert (card_data.library_name, card_data.pipeline_tag) == (
        "mlx",
        "text-generation",
    )
    assert card_data.datasets == ["c/d", "e"]


def test_card_without_measurements_has_no_table(tmp_path):
    _, body = write_and_read_card(tmp_path, report={}, table=([], []))
    assert "|" not in body
    assert "held-out" not in body
    assert "measure" not in body


def test_card_without_questions_has_no_exact_match(tmp_path):
    report = {"models": {"quantized": {"num_tokens": 7}}}
    assert "exact_match" not in write_and_read_card(tmp_path, report=report)[1]

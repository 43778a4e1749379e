"""Model cards: Hub metadata and the measurements of the run."""

import yaml
from lmx.convert.exporters.model_card import write_card

TABLE = (
    ["", "base", "fine-tuned", "quantized"],
    [["perplexity", "5.1", "3.2", "3.3"], ["bits per weight", "16", "16", "4.5"]],
)
REPORT = {
    "models": {
        "quantized": {
            "tokens": 12345,
            "exact_match_by_skill": {"adding": [3, 10], "sorting": [9, 10]},
        }
    }
}


def write_and_read_card(folder, **changes):
    arguments = {
        "name": "qat_4bit",
        "recipe": "model: data/tiny-base\n",
        "base": None,
        "origin": "`data/tiny-base`",
        "terms": {},
        "datasets": [],
        "is_quantized": True,
        "report": REPORT,
        "table": TABLE,
    }
    write_card(folder, **(arguments | changes))
    text = (folder / "README.md").read_text()
    _, metadata, body = text.split("---\n", 2)
    return yaml.safe_load(metadata), body


def test_card_holds_measurements_and_recipe(tmp_path):
    metadata, body = write_and_read_card(tmp_path)
    assert metadata == {
        "library_name": "mlx",
        "pipeline_tag": "text-generation",
        "tags": ["mlx", "lmx"],
    }
    assert "# qat_4bit\n\nA quantized model made with lmx" in body
    prose = " ".join(body.split())
    assert "from `data/tiny-base`. |" in prose
    assert "| | base | fine-tuned | quantized |\n|---|---:|---:|---:|\n" in body
    assert (
        "| perplexity | 5.1 | 3.2 | 3.3 |\n| bits per weight | 16 | 16 | 4.5 |\n"
        in body
    )
    assert "on 12,345 held-out tokens; exact match is the share of 20" in prose
    assert "```yaml\nmodel: data/tiny-base\n```" in body


def test_hub_base_model_is_linked(tmp_path):
    metadata, body = write_and_read_card(
        tmp_path, base="Qwen/Qwen3-0.6B", is_quantized=False
    )
    assert metadata["base_model"] == "Qwen/Qwen3-0.6B"
    assert metadata["base_model_relation"] == "finetune"
    assert "[Qwen/Qwen3-0.6B](https://huggingface.co/Qwen/Qwen3-0.6B)" in body
    assert (
        write_and_read_card(tmp_path, base="a/b")[0]["base_model_relation"]
        == "quantized"
    )


def test_metadata_is_readable_by_the_hub(tmp_path):
    from huggingface_hub import ModelCard

    terms = {"license": "other", "license_name": "custom"}
    metadata, _ = write_and_read_card(
        tmp_path, base="a/b", terms=terms, datasets=["c/d", "e"]
    )
    card_data = ModelCard.load(tmp_path / "README.md").data
    assert card_data.to_dict() == metadata
    assert (card_data.base_model, card_data.license) == ("a/b", "other")
    assert card_data.datasets == ["c/d", "e"]


def test_card_without_measurements_has_no_table(tmp_path):
    _, body = write_and_read_card(tmp_path, report={}, table=([], []))
    assert "|" not in body
    assert "held-out" not in body


def test_card_without_questions_has_no_exact_match(tmp_path):
    report = {"models": {"quantized": {"num_tokens": 7}}}
    assert "exact_match" not in write_and_read_card(tmp_path, report=report)[1]

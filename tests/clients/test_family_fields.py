"""Every field of a config means in lmx what it means in transformers, or is refused.

One field at a time has another value than in the base config of its family.
"""

import copy
import json
import re
import warnings
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from lmx.errors import UserError
from lmx.models import loader

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")
family_fields = pytest.importorskip("family_fields")
NOT_COMPARED, ROUGH = family_fields.NOT_COMPARED, family_fields.ROUGH
TOKENS, WRAPPED = family_fields.TOKENS, family_fields.WRAPPED

PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
FAMILIES = family_fields.families()
COMPARED = [family for family in FAMILIES if family not in NOT_COMPARED]


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """The folders have no tokenizer."""
    monkeypatch.setattr(loader, "load_tokenizer", lambda *_, **__: None)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def publish(family, settings, folder):
    """Write a model with random weights as transformers writes it; its logits."""
    config = family_fields.text_class(family)(**copy.deepcopy(settings))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for value in model.state_dict().values():
            if value.is_floating_point():
                scale = 0.2 if value.ndim > 1 else 0.1
                value += scale * torch.randn(value.shape, generator=noise)
        logits = model(TOKENS).logits.numpy()
    model.save_pretrained(folder, save_original_format=family != "qwen3_5_moe")
    if family in WRAPPED:
        wrap(folder, family)
    return logits


def wrap(folder, family):
    """Change a language model to the language part of a model of images."""
    file, prefix = folder / "config.json", WRAPPED[family]
    text = json.loads(file.read_text())
    shared = {k: text[k] for k in ("vocab_size", "tie_word_embeddings") if k in text}
    file.write_text(json.dumps(shared | {"model_type": family, "text_config": text}))
    weights = safetensors_torch.load_file(folder / "model.safetensors")
    if prefix.endswith("."):
        weights = {prefix + name: value for name, value in weights.items()}
    else:
        weights = {
            re.sub(r"^model\.", f"{prefix}model.", k): v for k, v in weights.items()
        }
    safetensors_torch.save_file(weights, folder / "model.safetensors")


def outcome(family, settings, folder):
    """`equal`, a message that refuses the model, or how it is silently wrong."""
    try:
        expected = publish(family, settings, folder)
    except Exception:
        return "not a model of transformers"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            actual = np.array(loader.load(folder).model(mx.array(TOKENS.numpy())))
        except UserError as error:
            return f"refused: {error}"
    difference = np.abs(actual - expected).max() / expected.std()
    if difference < ROUGH.get(family, 1e-4):
        return "equal"
    # These count only in texts that are longer.
    named = [
        w
        for w in caught
        if re.search("not read.* (sliding_window|attention_chunk)", str(w.message))
    ]
    return "named" if named else f"silent: {difference:.2g}"


@pytest.mark.parametrize("family", COMPARED)
def test_no_field_is_read_otherwise_in_silence(family, tmp_path):
    assert outcome(family, family_fields.base(family), tmp_path / "base") == "equal"
    outcomes = {}
    for number, (field, settings) in enumerate(family_fields.variants(family)):
        outcomes[field, number] = outcome(family, settings, tmp_path / str(number))
    silent = {key: text for key, text in outcomes.items() if text.startswith("silent")}
    assert not silent
    assert "equal" in outcomes.values()


@pytest.mark.parametrize("family", NOT_COMPARED)
def test_families_that_are_not_compared_are_refused_and_listed(family, tmp_path):
    result = outcome(family, family_fields.base(family), tmp_path / "base")
    assert result.startswith(("refused", "not a model"))
    assert f"| `{family}` | {NOT_COMPARED[family]} |" in PAGE.read_text()


def test_the_table_lists_no_other_family():
    table = (
        PAGE.read_text().partition("These are not compared:")[2].partition("\n\nA ")[0]
    )
    listed = re.findall(r"^\| `(\w+)` \|", table, re.M)
    assert sorted(listed) == sorted(NOT_COMPARED)
    assert set(NOT_COMPARED) <= set(FAMILIES)


def test_a_field_that_is_read_otherwise_is_found(tmp_path, monkeypatch):
    """Negative control: without its repair, Falcon H1 is silently wrong."""
    from mlx_lm.models.falcon_h1 import Model

    settings = family_fields.base("falcon_h1") | {"key_multiplier": 0.3}
    assert outcome("falcon_h1", settings, tmp_path / "repaired") == "equal"
    monkeypatch.setattr(Model, "sanitize", Model.sanitize.__wrapped__)
    monkeypatch.setattr("lmx.models.architecture_fixes.REPAIRS", {})
    assert outcome("falcon_h1", settings, tmp_path / "as it was").startswith("silent")

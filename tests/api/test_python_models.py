"""`lmx.load`, `lmx.generate`, `lmx.evaluate` and `lmx.check`."""

import json
import sys

import lmx
import mlx.core as mx
import pytest
from lmx.convert.importers import peft
from lmx.pipeline import resources
from tiny_api import EVALUATE

METRICS_ONLY = EVALUATE | {"num_samples": 0}
PROMPTS = ["Add 3 and 1.", "Add 100 and 1, then 7.", "x"]


def test_load_takes_runs_run_directories_and_folders(run, model):
    for source in (run, run.path, str(run.model_path)):
        assert lmx.load(source).path == model.path
    assert model.config["model_type"] == "llama"
    assert "llama" in repr(model)
    with pytest.raises(lmx.UserError, match="no such folder"):
        lmx.load("./nothing")


def test_load_of_a_run_without_export_finds_the_last_model(run, recipe, tmp_path):
    recipe |= {"model": run.reference_path, "stages": recipe["stages"][1:2]}
    quantized = lmx.train(recipe, output=tmp_path / "r", quiet=True)
    assert lmx.load(tmp_path / "r").path == quantized.model_path


def test_batch_stream_and_single_prompts_agree(model):
    single = [lmx.generate(model, prompt, max_tokens=6) for prompt in PROMPTS]
    batch = lmx.generate(model, PROMPTS, max_tokens=6)
    assert [r.tokens for r in batch] == [r.tokens for r in single]
    assert [r.text for r in batch] == [r.text for r in single]
    for prompt, result in zip(PROMPTS, single, strict=True):
        chunks = list(lmx.generate(model, prompt, max_tokens=6, stream=True))
        assert "".join(chunk.text for chunk in chunks) == result.text
        assert chunks[-1].finish_reason == result.finish_reason
        assert result.decode_tokens_per_second > 0 < result.ttft_ms
    assert lmx.generate(model, [], max_tokens=6) == []


def test_text_is_asked_through_the_chat_template(model):
    text = lmx.generate(model, "Add 3 and 1.", max_tokens=6)
    messages = [{"role": "user", "content": "Add 3 and 1."}]
    assert lmx.generate(model, messages, max_tokens=6).tokens == text.tokens
    assert lmx.generate(model, [messages], max_tokens=6)[0].tokens == text.tokens
    system = lmx.generate(model, "Add 3 and 1.", system="Be brief.", max_tokens=1)
    raw = lmx.generate(model, "Add 3 and 1.", ignore_chat_template=True, max_tokens=1)
    assert raw.prompt_tokens < text.prompt_tokens < system.prompt_tokens


def test_sampling_depends_on_the_seed_only(model):
    options = {"temperature": 1.0, "max_tokens": 8}
    texts = [lmx.generate(model, "x", seed=n, **options).tokens for n in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    batch = lmx.generate(model, ["x", "x", "y"], seed=1, **options)
    # The prompts of a list share no noise.
    assert [each.tokens for each in batch[:2]] == texts[1:]


def test_stop_string_ends_the_text(model):
    whole = lmx.generate(model, "x", max_tokens=12, temperature=1.0).text
    stop = whole[3:5]
    for stops in (stop, [stop]):
        result = lmx.generate(model, "x", max_tokens=12, temperature=1.0, stop=stops)
        assert result.text == whole[: whole.index(stop)]
        assert result.finish_reason == "stop"


def test_the_text_follows_the_response_format(model):
    schema = {"enum": ["on", "off"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    options = {"response_format": form, "temperature": 1.0}
    texts = [each.text for each in lmx.generate(model, PROMPTS, **options)]
    texts.append(lmx.generate(model, "x", **options).text)
    chunks = lmx.generate(model, "x", stream=True, **options)
    texts.append("".join(chunk.text for chunk in chunks))
    assert set(texts) <= {'"on"', '"off"'}


def test_draft_gives_the_same_text(run, model):
    plain = lmx.generate(model, PROMPTS[0], max_tokens=12)
    for draft in ("prompt-lookup", run.model_path, str(run.model_path)):
        result = lmx.generate(
            model, PROMPTS[0], draft=draft, num_draft_tokens=2, max_tokens=12
        )
        assert result.tokens == plain.tokens
    stats = model.generator(str(run.model_path), 2).speculative_stats
    assert stats.acceptance_rate == 1
    drafting = lmx.load(run, draft="prompt-lookup")
    assert lmx.generate(drafting, PROMPTS[0], max_tokens=12).tokens == plain.tokens


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("x", {"max_tokens": -1}, "max_tokens: must be at least 0, got -1"),
        ("x", {"num_draft_tokens": 0}, "num_draft_tokens: must be at least 1, got 0"),
        ("x", {"stop": [""]}, "stop.0: string should have at least 1 character"),
        ("x", {"temperature": -1.0}, "temperature is -1.0"),
        ("x", {"system": "s", "ignore_chat_template": True}, "needs the chat template"),
        ("x", {"response_format": {"type": "x"}}, "response_format: there is no type"),
        (["x"], {"stream": True}, "stream works with one prompt"),
        ([1, 2], {}, "prompt.0: expected a dict or text or a list, got 1"),
        ([{"content": "x"}], {}, "prompt.0: a message needs role"),
    ],
)
def test_wrong_options_are_user_errors(model, prompt, options, message):
    with pytest.raises(lmx.UserError, match=message):
        lmx.generate(model, prompt, **options)


def test_evaluate_a_run_repeats_its_figures(run):
    result = lmx.evaluate(run, quiet=True, **EVALUATE)
    assert [*result.models] == [*run.metrics]
    for name, figures in run.metrics.items():
        for key in ("perplexity", "kl_mean", "bits_per_weight", "tokens"):
            assert result.models[name].get(key) == figures.get(key)
    assert result.perplexity == run.metrics["quantized"]["perplexity"]
    assert result.samples == run.samples
    assert "perplexity" in str(result)


def test_evaluate_a_model_against_a_reference(run, model, files):
    def answered(model, examples):
        prompt = examples[0]["prompt"]
        return lmx.generate(model, prompt, max_tokens=2).prompt_tokens

    result = lmx.evaluate(
        model,
        files / "valid.jsonl",
        {"answered": answered},
        reference=run.reference_path,
        quiet=True,
        **METRICS_ONLY,
    )
    assert result.kl == pytest.approx(run.metrics["quantized"]["kl_mean"])
    assert result.metrics["answered"] > 5
    data = {"valid": files / "valid.jsonl", "max_seq_length": 64}
    alone = lmx.evaluate(run.model_path, data, quiet=True, **METRICS_ONLY)
    assert alone.kl is alone.top1_agreement is None
    assert alone.perplexity == pytest.approx(result.perplexity)


def test_evaluate_errors(model, files):
    with pytest.raises(lmx.UserError, match="nothing to evaluate on"):
        lmx.evaluate(model)
    with pytest.raises(lmx.ConfigErrors, match=r"stages\.1\.evaluate\.num_token: unkn"):
        lmx.evaluate(model, files / "valid.jsonl", num_token=1)

    for name, function in {
        "ZeroDivision": lambda *_: 1 / 0,
        "SystemExit: 0": lambda *_: sys.exit(0),
    }.items():
        with pytest.raises(lmx.UserError, match=f"the metric m fails: {name}"):
            lmx.evaluate(
                model,
                files / "valid.jsonl",
                {"m": function},
                quiet=True,
                **METRICS_ONLY,
            )


def test_check_is_the_dry_run_as_an_object(recipe, monkeypatch):
    checked = lmx.check(recipe)
    assert checked.fits
    assert [*checked.stages] == ["1-train", "2-quantize", "3-evaluate", "4-export"]
    train = checked.stages["1-train"]
    assert checked.memory == max(s.memory or 0 for s in checked.stages.values()) > 0
    assert train.seconds > 0 < checked.seconds
    assert checked.disk == sum(s.disk for s in checked.stages.values())
    assert "plan" in dict(checked.lines)
    assert "memory   1-train" in str(checked)
    monkeypatch.setattr(resources, "memory_limit", lambda: 1000)
    assert lmx.check(recipe).fits is False
    assert not (checked.output).exists()


def test_check_of_an_unknown_size_has_no_numbers():
    stages = [{"train": {"steps": 1, "batch_size": 1}}]
    checked = lmx.check(
        {"model": "a/b", "data": {"train": "builtin:stdlib"}, "stages": stages}
    )
    assert checked.memory is checked.disk is checked.seconds is checked.fits is None
    assert "size unknown" in repr(checked)


def test_quantize_and_export_make_runs(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = run.reference_path
    quantized = lmx.quantize(source, bits=8, group_size=32, quiet=True)
    assert quantized.path.parent.name == "exports"
    assert quantized.path.name.startswith("dense-")
    assert lmx.load(quantized).config["quantization"]["bits"] == 8
    other = lmx.quantize(source, bits=4, group_size=32, quiet=True)
    assert other.path != quantized.path
    exported = lmx.export(quantized, ["hf"], output="exports/hf", quiet=True)
    assert (exported.path / "hf/config.json").is_file()
    with pytest.raises(
        lmx.ConfigErrors, match=r"stages\.1\.quantize\.bit: unknown key"
    ):
        lmx.quantize(source, bit=8)


@pytest.fixture(scope="module")
def adapted(run, files, tmp_path_factory):
    """A run that trained an adapter, and has no export stage."""
    train = {"steps": 2, "batch_size": 4, "adapter": {"rank": 4}}
    recipe = {
        "model": run.reference_path,
        "data": {"train": files / "train.jsonl", "max_seq_length": 64},
        "stages": [{"train": train}],
    }
    return lmx.train(recipe, output=tmp_path_factory.mktemp("lora"), quiet=True)


def test_export_of_an_adapter(adapted, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = mx.load(str(adapted.adapter_path / "adapters.safetensors"))
    base = lmx.load(run.reference_path, adapter=adapted.adapter_path)
    for source, formats in ((str(adapted.path), ["hf", "peft"]), (base, ["peft"])):
        exported = lmx.export(source, formats, output=formats[0], quiet=True)
        assert all((exported.path / name).is_dir() for name in formats)
        folder = exported.path / "peft"
        tensors, _ = peft.read(folder)
        assert tensors.keys() == expected.keys()
        assert all(mx.array_equal(tensors[name], expected[name]) for name in expected)
        # The base is that of the training, not the model with the adapter.
        config = json.loads((folder / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == str(run.reference_path)
        assert str(run.reference_path) in (folder / "README.md").read_text()


def test_there_is_no_adapter_to_export(run, model, adapted):
    for source in (run, model):
        with pytest.raises(lmx.ConfigErrors, match="no trained adapter to export"):
            lmx.export(source, ["peft"])
    with pytest.raises(lmx.ConfigErrors, match="no such file or folder"):
        lmx.export(run, ["peft"], adapter_path="./no-adapter")
    with pytest.raises(lmx.ConfigErrors, match=r"has no adapter_config\.json"):
        lmx.export(run, ["peft"], adapter_path=str(run.path))
    with pytest.raises(lmx.ConfigErrors, match="adapter_path needs peft"):
        lmx.export(adapted, ["hf"], adapter_path=str(adapted.adapter_path))


def test_model_with_an_adapter_is_not_exported_without_it(model):
    adapted = lmx.Model(model.loaded, adapter=model.path)
    with pytest.raises(lmx.UserError, match="do not have its adapter"):
        lmx.export(adapted)


def test_load_finds_the_included_model_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert lmx.load("data/tiny-base").config["model_type"] == "llama"
    with pytest.raises(lmx.UserError, match="no folder of this name"):
        lmx.load("data/no-base")
    # A folder of the user comes first.
    (tmp_path / "data" / "tiny-base").mkdir(parents=True)
    with pytest.raises(lmx.UserError, match="not a model"):
        lmx.load("data/tiny-base")

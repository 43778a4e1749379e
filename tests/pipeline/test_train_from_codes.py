"""Training that starts from the codes of a quantized model, from the command line."""

from functools import cache

import mlx.core as mx
import pytest
from lmx.config.quant_spec import QuantSpec
from lmx.models.loader import load
from lmx.models.quantized_layers import has_quantized_inputs
from lmx.quantization.bit_packing import unpack_codes
from lmx.quantization.packing import dequantize
from page_data import rows
from tiny_checkpoints import QWEN3_MOE
from tiny_runs import METRICS_ONLY, TRAIN, Run

GRID = {"bits": 2, "group_size": 32}
LSQ = {"qat": GRID | {"quantizer": "lsq"}}
GPTQ = GRID | {
    "method": "gptq",
    # The test only needs codes, scales and biases that differ from those of RTN.
    "refine_iters": 1,
    "output_hessian": False,
    "calibration": {"num_tokens": 512, "max_seq_length": 64, "num_eval_tokens": 64},
    "rollback_if_worse": False,
}
TRAINING = TRAIN | {"learning_rate": 5e-3}
FROZEN = TRAIN | {"steps": 1, "learning_rate": 1e-30}
ADAPTER = {"adapter": {"rank": 4}}
# The grid of the model, and how it is trained.
MODES = {
    "lsq": (GRID, LSQ),
    "fixed_codes": (GRID, {"qat": {}}),
    "lora": (GRID, LSQ | ADAPTER),
    "fixed_scale": (GRID, {"qat": GRID | {"quantizer": "fixed_scale"}}),
    "lora_minmax": (GRID, {"qat": GRID} | ADAPTER),
    "mxfp4": ({"mode": "mxfp4"}, {"qat": {"mode": "mxfp4"}}),
    "lora_mxfp8": ({"mode": "mxfp8"}, {"qat": {"mode": "mxfp8"}} | ADAPTER),
}
W4A4 = {"mode": "nvfp4", "quantize_activations": True}
MODES["W4A4"] = (W4A4, {"qat": W4A4})
SLOW = ("lora_mxfp8", "W4A4")
NAMES = [
    pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name
    for name in MODES
]
NO_EMBEDDING = {"*.embed_tokens": "skip"}
TOKENS = mx.array([[5, 80, 200, 7, 33, 120]])


def stage(run, number=2, name="model"):
    [folder] = (run.output / "stages").glob(f"{number}-*")
    return folder / name


def tensors(folder):
    return mx.load(str(folder / "model.safetensors"))


def grid_values(stored, grid) -> dict[str, mx.array]:
    """Weights without their scales: a code each, by path."""
    spec = QuantSpec(**{k: v for k, v in grid.items() if k in QuantSpec.model_fields})
    values = {}
    for key in stored:
        if key.endswith(".scales"):
            path = key.removesuffix(".scales")
            packed = {n: stored.get(f"{path}.{n}") for n in ("weight", "scales")}
            if grid is GRID:
                ones = mx.ones_like(packed["scales"])
                packed |= {"scales": ones, "biases": 0 * ones}
            values[path] = dequantize(packed, spec, mx.float16)
    return values


def mlx_lm_logits(folder):
    """Logits of the model that mlx-lm loads."""
    import mlx_lm

    return mlx_lm.load(str(folder))[0](TOKENS)


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory, base):
    """A function from a mode to its cached run on an RTN-quantized model."""

    @cache
    def run_of_mode(mode):
        grid, train = MODES[mode]
        stages = {"quantize": grid}, {"train": TRAINING | train}
        folder = tmp_path_factory.mktemp("gained")
        run = Run(folder, *stages, {"evaluate": METRICS_ONLY}, model=base)
        assert run() == 0
        return run

    return run_of_mode


@pytest.mark.parametrize("mode", NAMES)
def test_training_from_codes_improves_exported_loss(trained_run, mode):
    run, (grid, _) = trained_run(mode), MODES[mode]
    codes_stay = mode == "fixed_codes"
    start = "training continues from the codes of 15 layers"
    assert start in run.log
    assert (f"{start}, which stay: scales and biases" in run.log) == codes_stay
    facts = run.json("report.json")["training"]
    improvement = facts["improvement"]
    assert improvement["in_training"] > 0.005
    exported = pytest.approx(improvement["exported"], abs=2e-3)
    assert improvement["in_training"] == exported
    before, after = tensors(stage(run, 1)), tensors(stage(run))
    dtypes = [{k: v.dtype for k, v in each.items()} for each in (before, after)]
    assert dtypes[0] == dtypes[1]
    codes = [grid_values(each, grid) for each in (before, after)]
    changed = sum((v != codes[1][k]).sum().item() for k, v in codes[0].items())
    total = sum(value.size for value in codes[0].values())
    assert (changed > 0) != codes_stay
    if codes_stay:
        assert "changed_codes" not in facts
        assert "training has changed" not in run.log
    else:
        assert facts["changed_codes"] == changed
        # LoRA does not train the embedding.
        assert total / 2 < facts["codes"] <= total
        assert f"training has changed {changed:,} of {facts['codes']:,}" in run.log
        page = (run.output / "report.html").read_text()
        assert ["Changed codes", f"{changed:,} of {facts['codes']:,}"] in rows(page)
    path = "model.layers.0.mlp.up_proj"
    for name in {"weight", "scales", "biases"} & {k.split(".")[-1] for k in before}:
        same = mx.array_equal(before[f"{path}.{name}"], after[f"{path}.{name}"])
        is_trained = {"fixed_codes": name != "weight", "lsq": True, "lora": True}
        assert same != is_trained.get(mode, name == "weight"), name
    served = load(stage(run), compute="float32")
    assert has_quantized_inputs(served.model) == (mode == "W4A4")
    if mode != "W4A4":
        expected = mlx_lm_logits(stage(run)).astype(mx.float32)
        assert mx.abs(served.model(TOKENS) - expected).max().item() < 0.05


@pytest.fixture(scope="module")
def gptq_run(tmp_path_factory, base):
    stages = {"quantize": GPTQ}, {"train": FROZEN | LSQ}
    run = Run(tmp_path_factory.mktemp("gptq"), *stages, model=base)
    assert run() == 0
    return run


def assert_same_tensors(before, after):
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert value.dtype == after[name].dtype, name
        assert mx.array_equal(value, after[name]), name


def test_reference_of_codes_is_the_model_before(gptq_run):
    """The recipe's model, from which the codes were quantized."""
    assert not stage(gptq_run, 2, "dense").exists()
    result = gptq_run.json("manifest.json")["stages"]["2-train"]["result"]
    assert result["reference"] is None
    assert_same_tensors(tensors(stage(gptq_run, 1)), tensors(stage(gptq_run)))
    logits = [mlx_lm_logits(stage(gptq_run, number)) for number in (1, 2)]
    assert mx.array_equal(*logits)


@pytest.mark.parametrize(
    "mode",
    [
        "lsq",
        "fixed_codes",
        "lora",
        "lora_minmax",
        "mxfp4",
    ],
)
def test_training_without_updates_keeps_the_codes(
    tmp_path, gptq_run, trained_run, mode
):
    """Of a model of unknown origin: the reference has the dequantized codes."""
    grid, train = MODES[mode]
    start = stage(gptq_run if grid is GRID else trained_run(mode), 1)
    run = Run(tmp_path, {"train": FROZEN | train}, model=start)
    assert run() == 0
    warns = "warning: training has changed only 0 of" in run.log
    assert warns == (mode != "fixed_codes")
    before, dense = tensors(start), tensors(stage(run, 1, "dense"))
    assert_same_tensors(before, tensors(stage(run, 1)))
    if grid is not GRID:
        for path, value in grid_values(before, grid).items():
            assert mx.array_equal(value, dense[f"{path}.weight"]), path
    else:
        logits = load(stage(run, 1, "dense"), compute="float32").model(TOKENS)
        coded = load(start, compute="float32").model(TOKENS)
        assert mx.abs(logits - coded).max().item() < 0.05


def test_fixed_codes_train_grids_and_norms_towards_a_teacher(tmp_path, base):
    """Without weight decay, with layers of another mode, which stay as they are."""
    mixed = {"overrides": {"*.down_proj": {"mode": "mxfp8"}, "*.v_proj": "skip"}}
    options = {"qat": GRID | mixed, "teacher": {}}
    train = options | {"learning_rate": 1e-3, "weight_decay": 0.5}
    stages = {"train": FROZEN | options}, {"train": TRAIN | train}
    stages = {"quantize": GPTQ | mixed}, *stages
    run = Run(tmp_path, *stages, {"evaluate": METRICS_ONLY}, model=base)
    assert run() == 0
    codes, unchanged, after = (tensors(stage(run, number)) for number in (1, 2, 3))
    assert_same_tensors(codes, unchanged)
    for name, value in after.items():
        is_fixed = name.endswith("weight") and value.dtype == mx.uint32
        is_fixed |= "down_proj" in name
        assert mx.array_equal(value, codes[name]) == is_fixed, name
    path = "model.layers.0.mlp.up_proj"
    moved = mx.abs(after[f"{path}.scales"] / codes[f"{path}.scales"] - 1)
    assert 0.001 < moved.mean().item() < 0.5
    improvement = run.json("report.json")["training"]["improvement"]
    assert improvement["in_training"] > 0
    assert improvement["in_training"] == pytest.approx(
        improvement["exported"], abs=2e-3
    )


@pytest.mark.parametrize("quantizer", ["minmax", "lsq", "fixed_scale"])
def test_adapter_of_the_head_is_trained_through_chunks_of_the_loss(
    tmp_path, make_checkpoint, quantizer
):
    adapter = {"rank": 4, "target_modules": ["lm_head"]}
    qat = {"qat": GRID | {"quantizer": quantizer}, "loss_chunk_tokens": 16}
    model = make_checkpoint(tie_word_embeddings=False)
    run = Run(tmp_path, {"train": TRAIN | qat | {"adapter": adapter}}, model=model)
    assert run() == 0
    trained = mx.load(str(run.output / "adapters" / "adapters.safetensors"))
    assert trained.keys() == {"lm_head.lora_a", "lm_head.lora_b"}
    assert mx.abs(trained["lm_head.lora_b"]).max().item() > 1e-4


def test_ternary_model_from_scratch_continues_from_its_codes(tmp_path):
    """Its second training has the same weights, and mlx-lm serves them."""
    ternary = {"qat": GRID | {"quantizer": "ternary", "overrides": NO_EMBEDDING}}
    stages = {"train": TRAIN | ternary}, {"train": FROZEN | ternary}
    run = Run(tmp_path, *stages, {"evaluate": METRICS_ONLY})
    assert run() == 0
    before, after = tensors(stage(run, 1)), tensors(stage(run))
    assert_same_tensors(before, after)
    scales = [name for name in after if name.endswith(".scales")]
    assert len(scales) == 14
    for name in scales:
        path = name.removesuffix(".scales")
        assert mx.array_equal(after[f"{path}.biases"], -after[name])
        codes = unpack_codes(after[f"{path}.weight"], 2)
        assert {*codes.flatten().tolist()} == {0, 1, 2}
    served = load(stage(run), compute="float32").model(TOKENS)
    expected = mlx_lm_logits(stage(run)).astype(mx.float32)
    assert mx.abs(served - expected).max().item() < 0.05


@pytest.mark.slow
def test_training_from_codes_of_imported_experts(tmp_path, make_checkpoint):
    """Without the original weights, the reference has the dequantized codes."""
    first = Run(tmp_path, {"quantize": GRID}, model=make_checkpoint(QWEN3_MOE))
    assert first() == 0
    (tmp_path / "on").mkdir()
    stages = {"train": FROZEN | LSQ}, {"evaluate": METRICS_ONLY}
    run = Run(tmp_path / "on", *stages, model=stage(first, 1))
    assert run() == 0
    assert [*run.json("report.json")["models"]] == ["base", "dequantized", "quantized"]
    assert_same_tensors(tensors(stage(first, 1)), tensors(stage(run, 1)))


@pytest.mark.parametrize(
    ("qat", "message"),
    [
        (
            {"bits": 3, "group_size": 64, "quantizer": "lsq"},
            "quantized here with bits: 2, group_size: 32; this block has bits: 3, "
            "group_size: 64",
        ),
        (GRID | {"quantizer": "minmax"}, "minmax would quantize it again"),
        (
            GRID | {"quantizer": "lsq", "fake_quant_after_n_steps": 3},
            "leave fake_quant_after_n_steps out",
        ),
    ],
)
def test_conflicting_quantization_is_refused_before_training(
    tmp_path, base, capsys, qat, message
):
    stages = {"quantize": GRID}, {"train": TRAIN | {"qat": qat}}
    run = Run(tmp_path, *stages, model=base)
    assert run() == 2
    assert message in capsys.readouterr().err
    assert not run.output.exists()

"""The benchmark programs, with sizes so small that only the comparisons are tested."""

import json
import math
import os
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import warm_benchmarks
from lmx.cpu import blas
from small_base import write_small_base

pytestmark = [pytest.mark.slow, pytest.mark.fused]
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
PROGRAMS = {path.name: path for path in BENCHMARKS.glob("*/*.py")}


@pytest.fixture(scope="module")
def small_base(tmp_path_factory) -> Path:
    return write_small_base(tmp_path_factory.mktemp("small") / "model")


def run(program: str, options: str) -> str:
    """The output of a benchmark program."""
    process = warm_benchmarks.run(PROGRAMS[program], *shlex.split(options))
    assert process.returncode == 0, process.stderr
    return process.stdout


def parse_table(text: str) -> dict[str, dict[str, str]]:
    """The cells of the table of a program by library and column."""
    split = re.compile(r" {2,}").split
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("library "))
    names, *rows = (split(line) for line in lines[start:] if line)
    return {row[0]: dict(zip(names, row, strict=True)) for row in rows}


def milliseconds(row: dict[str, str]) -> float:
    return float(row["ms/step"].replace(",", ""))


def libraries() -> list[str]:
    """Libraries in a table; "stock" only where lmx replaces MLX's BLAS."""
    return ["lmx", "mlx-lm"] + ["stock"] * (blas.use_openblas().path is not None)


def test_processes_measure_the_same_as_one():
    text = run(
        "data_parallel.py",
        "--hidden-size 64 --num-layers 1 --num-tokens 2000 --questions 8 --prompts 4 "
        "--num-generations 2 --max-tokens 8 --repeats 1",
    )
    rows = [line.split() for line in text.splitlines()]
    ratios = {row[0]: row[-2:] for row in rows if row[-1].endswith("x")}
    assert [*ratios] == ["perplexity", "exact", "rollouts", "evaluation"]
    (difference,) = re.findall("differ by (.*)", text)
    assert float(difference) < 1e-5
    assert text.count("8 of 8 completions have the same tokens") == 2


def test_lookup_counts_the_same_again(tmp_path, small_base):
    problems = [{"question": f"Ann has {n} pears. How many?"} for n in range(40)]
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, problems)))
    (tmp_path / "text.txt").write_text("The river bends at the old mill. " * 200)
    options = (
        f"--folder {tmp_path / 'runs'} --model {small_base} --gsm8k "
        f"{tmp_path / 'test.jsonl'} --text {tmp_path / 'text.txt'} "
        "--num-requests 3 --max-tokens 12"
    )
    printed = run("lookup.py", options)
    assert printed == run("lookup.py", f"{options} --print-only")
    assert printed.count("own text") == 14
    means = re.findall(r": ([\d.]+) ± [\d.]+ tokens, ([\d.]+)", printed)
    assert all(1 <= float(tokens) <= float(passed) for tokens, passed in means)


def test_real_model_compares_all_methods(tmp_path, small_base):
    text = "The river bends at the old mill, and the road follows it to the town. " * 4
    for name in ("valid", "test"):
        rows = [{"text": f"{n} {text}"} for n in range(10)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    questions = [{"question": f"{n} + 1?", "answer": str(n + 1)} for n in range(3)]
    gsm8k = tmp_path / "gsm8k"
    gsm8k.mkdir()
    (gsm8k / "test.jsonl").write_text("\n".join(map(json.dumps, questions)))
    options = (
        f"--folder {tmp_path / 'runs'} --gsm8k {gsm8k} --model {small_base} "
        f"--calibration-data {tmp_path / 'valid.jsonl'} "
        f"--eval-data {tmp_path / 'test.jsonl'} --bits 4 --budgets 4.5 "
        "--modes nvfp4 --formats q4_k --seq-length 32 "
        "--num-tokens 512 --num-eval-tokens 64 --num-answers 2 --threads 1 "
    )
    efforts = (
        '--part quality budget formats cost --rows RTN "mlx gptq" "lmx fast" '
        '"lmx fast, then QAT" "mlx gptq, run 1" "lmx fast, run 1"'
    )
    printed = run("real_model.py", f"{options} {efforts}")
    assert run("real_model.py", f"{options} {efforts} --print-only") == printed
    rows = real_model_rows(printed)
    quality = rows["quality, 4 bits, groups of 64"]
    assert list(quality) == ["RTN", "mlx gptq", "lmx fast"]
    assert list(rows["budget, 4.5 bits per weight"]) == ["lmx fast"]
    assert list(rows["formats, q4_k"]) == ["RTN", "lmx fast", "lmx fast, then QAT"]
    assert list(rows["cost, 4 bits, groups of 64"]) == ["mlx gptq", "lmx fast"]
    errors = {name: float(row[1].split()[0]) for name, row in quality.items()}
    assert errors["lmx fast"] < errors["mlx gptq"] < errors["RTN"]
    before, after = (
        rows["formats, q4_k"][name] for name in ("lmx fast", "lmx fast, then QAT")
    )
    assert float(after[1].split()[0]) != float(before[1].split()[0])
    choices = '--part parts activations --rows "no embedding clusters" RTN '
    printed = run("real_model.py", f'{options} {choices} "RTN smoothing 0.5"')
    rows = real_model_rows(printed)
    assert list(rows["parts, 4 bits, groups of 64"]) == ["no embedding clusters"]
    assert list(rows["activations, nvfp4"]) == ["RTN", "RTN smoothing 0.5"]
    kl = [float(row[1].split()[0]) for row in rows["activations, nvfp4"].values()]
    (difference,) = re.findall(r"RTN, WikiText-2: KL (\S+)", printed)
    assert float(difference) == pytest.approx(kl[1] - kl[0], abs=2e-4)


def real_model_rows(text: str) -> dict[str, dict[str, list[str]]]:
    """Cells of the tables by title and first cell."""
    tables: dict[str, dict[str, list[str]]] = {}
    for line in text.splitlines():
        if line.startswith("**"):
            rows = tables[line.strip("*")] = {}
        elif line.startswith("| ") and not line.startswith(("| method", "| ---")):
            cells = line.strip("| ").split(" | ")
            rows[cells[0]] = cells
    return tables


def test_only_other_tools_may_fail(tmp_path, monkeypatch):
    """A method that mlx-lm refuses is a row; a run of lmx that fails is a fault."""
    monkeypatch.syspath_prepend(str(BENCHMARKS / "quantization"))
    import ptq_runners

    def refuses(*_):
        raise AssertionError("no such bits")

    for name in ("gptq", "lmx"):
        monkeypatch.setitem(ptq_runners.RUNNERS, name, refuses)
    (tmp_path / "settings.json").write_text("{}")
    row = ptq_runners.run("gptq", tmp_path, tmp_path / "model", {})
    assert row == {"failed": "no such bits"}
    with pytest.raises(AssertionError):
        ptq_runners.run("lmx", tmp_path, tmp_path / "model", {})


def test_real_model_training_runs_all_libraries(tmp_path, small_base):
    for name, count in (("train", 24), ("test", 4)):
        rows = [
            {"question": f"What is {n} + 1?", "answer": f"It is #### {n + 1}"}
            for n in range(count)
        ]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = (
        f"--folder {tmp_path / 'runs'} --gsm8k {tmp_path} --bits 4 --num-examples 8 "
        f"--model {small_base} --batch-size 4 "
        "--seq-length 64 --num-answers 4 --num-questions 2 --max-tokens 4 --threads 1 "
        '--rows untrained "lmx LoRA" "mlx-lm LoRA, fuse" "lmx gptq, 4 bits" '
        '"mlx-lm LoRA, fuse, quantize, 4 bits" "lmx gptq, QLoRA, 4 bits" "lmx full"'
    )
    printed = run("real_model_training.py", options)
    assert run("real_model_training.py", f"{options} --print-only") == printed
    cells = [
        line.strip("| ").split(" | ")
        for line in printed.splitlines()
        if line.startswith("| ")
    ]
    rows = {row[0]: row for row in cells[2:]}
    assert len(rows) == 7
    losses = {k: float(v[1].split()[0]) for k, v in rows.items() if k != "lmx full"}
    assert losses["lmx LoRA"] < losses["untrained"]
    assert losses["lmx LoRA"] == pytest.approx(losses["mlx-lm LoRA, fuse"], rel=0.05)
    assert float(rows["lmx full"][4]) > 0


def test_qat_from_codes_changes_codes_in_proportion_to_the_rate(tmp_path, small_base):
    options = (
        f"--folder {tmp_path / 'runs'} --model {small_base} "
        f"--data {BENCHMARKS.parent / 'data/skills'} --bits 4 --num-tokens 1024 "
        "--learning-rates 1e-4 1e-3 --steps 8 --batch-size 8 --seq-length 64"
    )
    printed = run("qat_from_codes.py", options)
    assert run("qat_from_codes.py", options) == printed
    low, high = (line.split() for line in printed.splitlines()[2:])
    assert (low[1], high[1]) == ("0.0001", "0.001")
    for row in (low, high):
        before, unrounded, qat = map(float, row[2:5])
        assert unrounded != before != qat
        assert qat == pytest.approx(unrounded, abs=0.02)
    changed = [int(row[5].replace(",", "")) for row in (low, high)]
    assert 5 < changed[1] / changed[0] < 20


def test_gguf_blocks_compares_quantizers_at_the_same_size(tmp_path):
    pytest.importorskip("llama_cpp")
    # Blocks of 256 weights do not fit into half the width.
    model = write_small_base(tmp_path / "model", blocks=1, half_width=False)
    options = (
        f"--folder {tmp_path / 'runs'} --model {model} --modes q4_k --num-tokens 1024 "
        "--seq-length 64 --num-eval-tokens 256 --efforts fast --qat-steps 1 "
        "--qat-batch-size 1 --threads 1"
    )
    lines = run("gguf_blocks.py", options).splitlines()
    split = re.compile(r" {2,}").split
    rows = {cells[1]: cells for line in lines if len(cells := split(line)) > 6}
    names = ["llama.cpp", "llama.cpp imatrix", "lmx fast", "lmx QAT 0.0001"]
    assert list(rows)[1:] == [*names, "lmx fast, QAT 0.0005"]
    bits = {rows[name][2] for name in names}
    assert bits == {"4.597"}
    values = {name: float(rows[name][3]) for name in names}
    assert values["lmx fast"] < values["llama.cpp imatrix"] != values["llama.cpp"]
    ratio = float(rows["lmx fast"][8].split()[0])
    assert ratio == pytest.approx(values["lmx fast"] / values["llama.cpp"], rel=0.01)
    assert all(float(rows[name][7]) < 0.05 for name in names)


def test_gguf_blocks_judges_a_file(tmp_path, monkeypatch):
    """Without llama.cpp: its logits alone are left out."""
    monkeypatch.syspath_prepend(str(BENCHMARKS / "quantization"))
    import gguf_blocks

    model = BENCHMARKS.parent / "data/tiny-base"
    tokens = np.random.default_rng(0).integers(3, 300, (3, 32)).astype(np.int32)
    np.save(tmp_path / "eval.npy", tokens)
    (tmp_path / "settings.json").write_text(json.dumps({"model": str(model)}))
    judge = gguf_blocks.Judge(tmp_path)
    monkeypatch.setattr(judge, "_difference", lambda file: 0.0)
    weights, unit = judge.model.parameters(), judge.model.model.norm.weight
    gguf_blocks._write_gguf(tmp_path / "dense.gguf", model)
    dense = judge.measure(tmp_path / "dense.gguf")
    assert dense["bits"] == 16
    assert dense["kl"].shape == dense["agrees"].shape == (3, 31)
    assert abs(dense["kl"]).max() < 1e-9
    importance = judge.importance(tokens)
    attention = weights["model"]["layers"][0]["input_layernorm"]["weight"]
    rows = np.array(weights["model"]["embed_tokens"]["weight"], np.float64)[tokens]
    rows /= np.sqrt((rows**2).mean(axis=-1, keepdims=True) + 1e-5)
    expected = ((rows * np.array(attention)) ** 2).mean(axis=(0, 1))
    np.testing.assert_allclose(importance["blk.0.attn_q"], expected, rtol=1e-3)
    # The norms of the file replace those of the model. Results are kept.
    judge.model.model.norm.weight = 2 * unit
    result = tmp_path / "dense.npz"
    before = result.read_bytes()
    result.unlink()
    assert abs(judge.measure(tmp_path / "dense.gguf")["kl"]).max() < 1e-9
    assert result.read_bytes() == before


def test_larger_model_goes_through_all_stages(tmp_path):
    options = (
        f"--folder {tmp_path / 'runs'} --num-layers 2 --hidden-size 128 "
        "--intermediate-size 192 --num-heads 2 --num-key-value-heads 1 "
        "--vocab-size 2048 --num-tokens 1024 --steps 2 --batch-tokens 256 "
        "--seq-length 64"
    )
    printed = run("larger_model.py", options)
    assert run("larger_model.py", options) == printed
    stages = {line.split()[0]: line.split()[1:] for line in printed.splitlines()[1:]}
    assert list(stages) == ["import", "quantize", "train", "export"]
    assert all(0.05 < float(cells[2]) < 3 for cells in stages.values())


@pytest.mark.parametrize(("case", "trained"), [("full", 73_920), ("lora", 20_480)])
def test_train_step_losses_are_equal(case, trained):
    text = run(
        "train_step.py",
        "--hidden-size 64 --num-layers 1 --vocab-size 320 --batch-size 2 "
        f"--seq-length 32 --steps 2 --repeats 1 --threads 1 --case {case}",
    )
    assert f"{trained:,} trained parameters" in text
    rows = parse_table(text)
    assert list(rows) == libraries()
    lmx = rows["lmx"]
    for row in rows.values():
        first, last = float(row["first loss"]), float(row["last loss"])
        assert first == pytest.approx(float(lmx["first loss"]), abs=1e-4)
        # Equal losses mean something only if training changes the loss.
        assert float(row["max diff"]) < 1e-5 < first - last
        ratio = milliseconds(row) / milliseconds(lmx)
        assert float(row["ratio"].rstrip("x")) == pytest.approx(ratio, rel=0.1)
    assert rows["mlx-lm"]["BLAS"] == lmx["BLAS"]
    if "stock" in rows:
        assert rows["stock"]["BLAS"] == "MLX's own"


def test_finetune_trains_the_same_examples_in_as_many_steps():
    text = run(
        "finetune.py",
        "--case chat --hidden-size 64 --num-layers 1 --max-samples 16 "
        "--vocab-size 1024 --repeats 1 --threads 1",
    )
    assert "No --hf-python" in text
    assert "20,480 trained parameters" in text
    rows = parse_table(text)
    assert list(rows) == libraries()
    lmx, mlx_lm = rows["lmx"], rows["mlx-lm"]
    assert int(mlx_lm["steps"]) == 2
    for row in (lmx, mlx_lm):
        assert float(row["last loss"]) < float(row["first loss"])
    # Both trained one epoch, in different batches.
    gap = float(lmx["last loss"]) - float(mlx_lm["last loss"])
    assert abs(gap) < 0.05 * float(lmx["last loss"])


@pytest.mark.parametrize("case", ["dpo", "grpo"])
def test_preference_trains_the_same_model_with_both_libraries(case):
    pytest.importorskip("mlx_lm_lora")
    text = run(
        "preference.py",
        f"--case {case} --num-examples 16 --batch-size 4 --steps 2 --repeats 1 "
        "--num-generations 2 --max-tokens 4 --threads 1",
    )
    assert "356,352 trained parameters" in text
    rows = parse_table(text)
    assert list(rows) == ["lmx", "mlx-lm-lora"]
    for row in rows.values():
        assert min(float(row[name]) for name in ("CPU s", "peak MB", "RSS MB")) > 0
        if case == "dpo":
            assert float(row["first loss"]) == pytest.approx(math.log(2), abs=1e-4)
            assert float(row["last loss"]) < float(row["first loss"])
        else:
            assert 1 <= float(row["tokens/completion"]) <= 4
            # No completion was trained before the first step.
            assert float(row["first loss"]) == pytest.approx(0, abs=1e-3)
    if case == "dpo":
        losses = [float(row["last loss"]) for row in rows.values()]
        assert losses[0] == pytest.approx(losses[1], rel=0.15)
        assert float(rows["lmx"]["reference CPU s"]) > 0


@pytest.mark.parametrize("case", ["grpo", "distillation"])
def test_preference_quality_compares_before_and_after(case, tmp_path, small_base):
    # The small model answers no question.
    model = BENCHMARKS.parent / "data/tiny-base" if case == "grpo" else small_base
    lines = (BENCHMARKS.parent / "data/skills/test.jsonl").read_text().splitlines()
    (tmp_path / "test.jsonl").write_text("\n".join(lines[:24]))
    options = (
        f"--case {case} --folder {tmp_path / 'runs'} --steps 3 --batch-size 4 "
        f"--num-generations 2 --max-tokens 4 --bits 4 --seeds 0 --model {model} "
        f"--questions {tmp_path / 'test.jsonl'}"
    )
    printed = run("preference_quality.py", options)
    assert run("preference_quality.py", options) == printed
    lines = [line.split() for line in printed.splitlines()]
    if case == "grpo":
        assert [line[:2] for line in lines[-2:]] == [["4", "greedy"], ["4", "sampled"]]
        assert all(0 < float(line[2]) < 100 for line in lines[-2:])
    else:
        rows = {line[0]: line for line in lines if line[1] != "/"}
        before, dataset, on_policy = (
            rows[k] for k in ("before", "dataset", "on-policy")
        )
        assert len({before[1], dataset[1], on_policy[1]}) == 3
        assert min(float(row[1]) for row in (before, dataset, on_policy)) > 0
        tokens = [float(row[-1].replace(",", "")) for row in (dataset, on_policy)]
        assert tokens[0] == pytest.approx(tokens[1], rel=0.3)


def test_generate_outputs_have_the_same_tokens():
    text = run(
        "generate.py",
        "--hidden-size 64 --num-layers 1 --vocab-size 512 --prompt-length 32 "
        "--max-tokens 8 --batch-size 3 --repeats 1 --threads 1 --sampled-tokens 250",
    )
    cells = [line.split() for line in text.splitlines()]
    for case in ("prefill", "decode", "batch", "ragged", "kv"):
        lmx, mlx_lm = (
            row for row in cells if row[:1] == [case] and row[1] in ("lmx", "mlx-lm")
        )
        assert (lmx[1], mlx_lm[1], lmx[4]) == ("lmx", "mlx-lm", "1.00x")
    assert "7 of 7 outputs have the same tokens" in text
    for count in (1, 2, 4):
        (row,) = [r for r in cells if r[:1] == [str(count)] and len(r) == 8]
        lmx, mlx_lm, _, overlap, lmx_expected, product, mlx_lm_expected = row[1:]
        assert float(overlap) > 2 * float(product)
        assert float(lmx) == pytest.approx(float(lmx_expected), rel=0.2)
        assert float(mlx_lm) == pytest.approx(float(mlx_lm_expected), rel=0.2)


def test_requests_of_one_engine_share_their_prompt():
    text = run(
        "engine.py",
        "--hidden-size 64 --num-layers 1 --vocab-size 512 --requests 4 --shared 64 "
        "--max-tokens 4 --decoded 12 --adapters 2 --rank 2 --repeats 1",
    )
    rows = [re.split(r" {2,}", line) for line in text.splitlines()]
    every, once, with_draft = (int(row[1]) for row in rows if "cache" in row[0])
    assert once == with_draft < every - 3 * 60
    assert "4 of 4 requests have the same tokens" in text
    assert text.count("4 of 4 the same") == 3
    assert "4 of 4 have the same tokens together and alone" in text


def test_two_processes_hold_half_of_the_weights_each():
    text = run(
        "tensor_parallel.py",
        "--hidden-size 128 --num-layers 2 --vocab-size 512 --prompt-length 64 "
        "--max-tokens 8 --requests 1 --repeats 1",
    )
    rows = {line[:14].strip(): line[14:].split() for line in text.splitlines()[2:]}
    assert [*rows] == ["1 process", "2 processes", "ratio"]
    assert all(
        float(cell.replace(",", "")) > 0 for row in rows.values() for cell in row
    )
    weights, peak = map(float, rows["ratio"][2:4])
    assert weights <= 0.52
    assert peak <= 0.7


def test_generate_takes_a_real_model(small_base):
    text = run(
        "generate.py",
        f"--model {small_base} --bits 4 --prompt-length 8 "
        "--max-tokens 2 --batch-size 1 --repeats 1 --threads 1",
    )
    assert "hidden size 128, vocabulary 2048, 4 bits" in text
    assert "3 of 3 outputs have the same tokens" in text
    assert "draft" not in text


def test_draft_quality_takes_questions_of_gsm8k(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS / "drafts"))
    from draft_quality import questions

    rows = [{"question": f"{n} + 1?", "answer": str(n + 1)} for n in range(5)]
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    chats = questions(tmp_path, "valid", 3, random.Random(0))
    turns = [[turn["content"] for turn in chat["messages"]] for chat in chats]
    assert len({question for question, _ in turns}) == 3
    assert all({"question": q, "answer": a} in rows for q, a in turns)


def test_ptq_large_is_killed_and_resumed():
    options = (
        "--hidden-size 128 --intermediate-size 128 --num-layers 3 --num-heads 2 "
        "--num-key-value-heads 2 --vocab-size 320 --num-tokens 1024 --refine-iters 1 "
        "--uninterrupted"
    )
    printed = run("ptq_large.py", options)
    rows = {line.split()[0]: line.split() for line in printed.splitlines()}
    assert rows["killed"][-1] == "1"
    assert rows["resumed"][-1] == rows["uninterrupted"][-1] == "3"
    assert printed.endswith("the resumed run has the same bytes\n")


def test_processes_quantize_to_the_codes_of_one():
    options = (
        "--hidden-size 128 --num-layers 1 --vocab-size 320 --num-tokens 4096 "
        "--effort fast --repeats 1"
    )
    *_, ratio, codes = run("distributed_gptq.py", options).splitlines()
    assert re.fullmatch(r"2 processes are [\d.]+ times as fast as one", ratio)
    moved, total = re.match(r"([\d,]+) of ([\d,]+) codes differ", codes).groups()
    moved, total = (int(number.replace(",", "")) for number in (moved, total))
    assert moved < 1e-3 * total


def run_gpu_script(folder: Path, **environment: object) -> dict[str, str]:
    """The short form of gpu.sh; its summary by step."""
    settings = {"SHORT": 1, "PYTHON": sys.executable, **environment}
    subprocess.run(
        [BENCHMARKS / "gpu.sh", folder],
        env=os.environ | {name: str(value) for name, value in settings.items()},
        capture_output=True,
        check=False,
    )
    lines = (folder / "summary.txt").read_text().splitlines()
    return dict(line.split(": ", 1) for line in lines)


def test_gpu_script_names_failures_and_measures_a_row_of_each(tmp_path, small_base):
    tests = tmp_path / "test_two.py"
    tests.write_text("def test_right(): pass\ndef test_wrong(): assert 1 == 2\n")
    results = tmp_path / "results"
    summary = run_gpu_script(results, TESTS=tests, MODEL=small_base)
    rows = ["gptq", "lora", "qat", "decode"]
    assert list(summary) == ["doctor", "kernels", "tests", *rows]
    assert summary.pop("tests").startswith("1 passed, 1 failures")
    assert all(text.startswith("exit code 0 ") for text in summary.values()), summary
    (failure,) = (results / "failures.txt").read_text().splitlines()
    assert failure.endswith("test_two.py::test_wrong")
    for name in rows:
        text = (results / f"{name}.txt").read_text()
        assert re.search(r"^\|? *\w* *lmx ", text, re.MULTILINE), name
        assert re.search(r"^\|? *\w* *mlx(-lm)? ", text, re.MULTILINE), name
    assert not list(results.rglob("*.safetensors"))


def test_gpu_script_ends_itself(tmp_path):
    summary = run_gpu_script(tmp_path, LIMIT=1)
    assert re.match("exit code 124 after [12] s", summary.pop("doctor"))
    assert summary.pop("tests").startswith("0 passed, 0 failures")
    assert set(summary.values()) == {"no time left"}


def test_kv_cache_prints_the_divergence_of_both_caches(tmp_path, small_base):
    text = tmp_path / "text.txt"
    text.write_text("The river bends at the old mill. " * 40)
    options = f"--model {small_base} --text prose={text} --bits 4 8 --length 32"
    _, _, *rows = run("kv_cache.py", options).splitlines()
    assert [row.split("|")[1:3] for row in rows] == [
        [f" {bits} ", f" {name} "] for bits in (4, 8) for name in ("mlx-lm", "lmx")
    ]
    kls = [float(row.split("|")[-2].split("±")[0]) for row in rows]
    assert 0 < max(kls[2:]) < min(kls[:2])


def test_cross_tokenizer_distillation_compares_the_same_tokens(tmp_path, small_base):
    text = "The river bends at the old mill, and the road follows it to the town. " * 20
    (tmp_path / "text.txt").write_text(text)
    teacher = write_small_base(tmp_path / "teacher")
    tokenizer = json.loads((teacher / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = [token for token, n in vocabulary.items() if n in (300, 301)]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (teacher / "tokenizer.json").write_text(json.dumps(tokenizer))
    options = (
        f"--folder {tmp_path / 'runs'} --teacher {teacher} --student {small_base} "
        f"--train {tmp_path / 'text.txt'} --valid {tmp_path / 'text.txt'} "
        "--seeds 0 1 --epochs 1 --seq-length 64"
    )
    printed = run("cross_tokenizer_distillation.py", options)
    assert run("cross_tokenizer_distillation.py", options) == printed
    rows = {line.split()[0]: line.split() for line in printed.splitlines()[1:]}
    assert [*rows] == ["cross-entropy", "both", "teacher"]
    assert float(rows["cross-entropy"][3]) == 0 != float(rows["teacher"][3])
    assert all(len(row[5:]) == 2 for row in rows.values())

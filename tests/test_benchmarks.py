"""The benchmark programs, with sizes so small that only the comparisons are tested."""

import json
import re
import shlex
from pathlib import Path

import pytest
import warm_benchmarks
from small_base import write_small_base

pytestmark = [pytest.mark.slow, pytest.mark.fused]
ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
PROGRAMS = {path.name: path for path in BENCHMARKS.glob("*/*.py")}
TEXT = "The river bends at the old mill, and the road follows it to the town. "

# By program: its options, and patterns of what it prints; {0} is the folder `inputs`.
MODEL = "--hidden-size 64 --num-layers 1 --vocab-size 512"
PRINTED = {
    "data_parallel.py": (
        "--hidden-size 64 --num-layers 1 --num-tokens 2000 --questions 8 --prompts 4 "
        "--num-generations 2 --max-tokens 8 --repeats 1",
        [r"differ by \d\S*e-0[5-9]|differ by 0", "8 of 8 completions have the same"],
    ),
    "lookup.py": (
        "--folder {0}/runs --model {0}/model --gsm8k {0}/test.jsonl --text "
        "{0}/text.txt --num-requests 3 --max-tokens 12",
        [r"own text.*: [\d.]+ ± [\d.]+ tokens, [\d.]+"],
    ),
    "real_model.py": (
        "--folder {0}/runs --gsm8k {0} --model {0}/model --calibration-data "
        "{0}/train.jsonl --eval-data {0}/test.jsonl --bits 4 --budgets 4.5 "
        "--modes nvfp4 --formats q4_k --seq-length 32 --num-tokens 512 "
        "--num-eval-tokens 64 --num-answers 2 --threads 1 --part quality budget "
        'formats parts --rows RTN "mlx gptq" "lmx fast" "no embedding clusters"',
        [r"\| mlx gptq +\|", r"\| lmx fast +\|", r"\| no embedding clusters +\|"],
    ),
    "real_model_training.py": (
        "--folder {0}/runs --gsm8k {0} --bits 4 --num-examples 8 --model {0}/model "
        "--batch-size 4 --seq-length 64 --num-answers 4 --num-questions 2 "
        '--max-tokens 4 --threads 1 --rows untrained "lmx LoRA" "mlx-lm LoRA, fuse" '
        '"lmx gptq, 4 bits" "lmx gptq, QLoRA, 4 bits" "lmx full"',
        [r"\| mlx-lm LoRA, fuse +\| [\d.]+ ±", r"\| lmx gptq, QLoRA, 4 bits +\| [\d.]"],
    ),
    "qat_from_codes.py": (
        "--folder {0}/runs --model {0}/model --data data/skills --bits 4 --num-tokens "
        "1024 --learning-rates 1e-4 1e-3 --steps 4 --batch-size 8 --seq-length 64",
        [r" 0\.0001 ", r" 0\.001 "],
    ),
    "qat_text.py": (
        "--model {0}/model --folder {0}/runs --valid {0}/text.txt --bits 2.5 --effort "
        "fast --tokens 128 256 --seq-length 64 --answers 4 --calibration-tokens 512 "
        "--data answers own --texts prose={0}/text.txt:{0}/text.txt "
        "answers={0}/train.jsonl:{0}/test.jsonl --train learning_rate=1e-4",
        [
            r"2.5 \| GPTQ \| 0 \| 0 \| [\d.]+ ± [\d.]+ \| [\d.]+ ±",
            r"answers learning_rate=1e-4 \| 256 .*\([+-][\d.]+ ± .*\([+-]",
            r"own learning_rate=1e-4 \| 128",
        ],
    ),
    "larger_model.py": (
        "--folder {0}/runs --num-layers 2 --hidden-size 128 --intermediate-size 192 "
        "--num-heads 2 --num-key-value-heads 1 --vocab-size 2048 --num-tokens 1024 "
        "--steps 2 --batch-tokens 256 --seq-length 64",
        ["import", "quantize", "train", "export"],
    ),
    "train_step.py": (
        "--hidden-size 64 --num-layers 1 --vocab-size 320 --batch-size 2 "
        "--seq-length 32 --steps 2 --repeats 1 --threads 1 --case full",
        ["73,920 trained parameters", "(?m)^lmx ", "(?m)^mlx-lm .*x"],
    ),
    "finetune.py": (
        "--case chat --hidden-size 64 --num-layers 1 --max-samples 16 "
        "--vocab-size 1024 --repeats 1 --threads 1",
        ["20,480 trained parameters", "(?m)^lmx ", "(?m)^mlx-lm .*x"],
    ),
    "preference_quality.py": (
        "--case grpo --folder {0}/runs --steps 3 --batch-size 4 --num-generations 2 "
        "--max-tokens 4 --bits 4 --seeds 0 --model data/tiny-base "
        "--questions {0}/skills.jsonl",
        [r"4 +greedy", r"4 +sampled"],
    ),
    "generate.py": (
        f"{MODEL} --prompt-length 32 --max-tokens 8 --batch-size 3 --repeats 1 "
        "--threads 1 --sampled-tokens 250",
        ["7 of 7 outputs have the same tokens"],
    ),
    "engine.py": (
        f"{MODEL} --requests 4 --shared 64 --max-tokens 4 --decoded 12 --adapters 2 "
        "--rank 2 --repeats 1",
        ["4 of 4 have the same tokens together and alone"],
    ),
    "tensor_parallel.py": (
        "--hidden-size 128 --num-layers 2 --vocab-size 512 --prompt-length 64 "
        "--max-tokens 8 --requests 1 --repeats 1",
        ["1 process", "2 processes", "(?m)^ratio"],
    ),
    "ptq_large.py": (
        "--hidden-size 128 --intermediate-size 128 --num-layers 3 --num-heads 2 "
        "--num-key-value-heads 2 --vocab-size 320 --num-tokens 1024 --refine-iters 1 "
        "--uninterrupted",
        ["the resumed run has the same bytes"],
    ),
    "distributed_gptq.py": (
        "--hidden-size 128 --num-layers 1 --vocab-size 320 --num-tokens 4096 "
        "--effort fast --repeats 1",
        [r"2 processes are [\d.]+ times as fast as one", "0 of [0-9,]+ codes differ"],
    ),
    "calibration_sources.py": (
        "--model {0}/model --folder {0}/runs --bits 4 --cases all:256 --seq-length 64 "
        "--texts prose={0}/text.txt:{0}/text.txt "
        "answers={0}/train.jsonl:{0}/test.jsonl",
        [r"\| 4 \| all \| 256 \| [\d.]+ ± [\d.]+ \| [\d.]+ ± "],
    ),
    "kv_cache.py": (
        "--model {0}/model --text prose={0}/text.txt --bits 4 --length 32",
        [r"\| 4 \| mlx-lm \|", r"\| 4 \| lmx \|"],
    ),
    "serve_ttft.py": (
        "{0}/model --requests 2 --clients 2 --characters 200000 --seconds 1 "
        "--text {0}/text.txt --words 50",
        [
            r"beside 2 clients, \d+\.\d prompts/s",
            r"after a restart +TTFT",
        ],
    ),
    "max_kv_size.py": (
        "--model {0}/model --gsm8k {0}/test.jsonl --text {0}/text.txt --records "
        "{0}/kv.jsonl --prompts 2 --shots 6 --length 160 --continued 8 --needles 1 "
        "--needle-length 150 --shares 0.5",
        [
            r"\| 16 \| all \| 100.0% \| 0.0000",
            r"\| 4 \| snapkv, 50.0% \| \S+ \| [\d.]+ ±",
        ],
    ),
    "cross_tokenizer_distillation.py": (
        "--folder {0}/runs --teacher {0}/model --student {0}/model --train "
        "{0}/text.txt --valid {0}/text.txt --seeds 0 1 --epochs 1 --seq-length 64",
        ["(?m)^cross-entropy ", "(?m)^teacher "],
    ),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """A small model, a text, and questions in the form of GSM8K."""
    folder = tmp_path_factory.mktemp("inputs")
    write_small_base(folder / "model")
    (folder / "text.txt").write_text(TEXT * 100)
    skills = (ROOT / "data/skills/test.jsonl").read_text().splitlines()
    (folder / "skills.jsonl").write_text("\n".join(skills[:24]))
    for name in ("train", "test"):
        rows = [
            {
                "question": f"Ann has {n} pears. How many?",
                "answer": f"It is #### {n + 1}",
                "text": f"{n} {TEXT * 4}",
            }
            for n in range(40)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def run(program: str, options: str) -> str:
    """The output of a benchmark program."""
    process = warm_benchmarks.run(PROGRAMS[program], *shlex.split(options), cwd=ROOT)
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.mark.parametrize("program", PRINTED)
def test_program_prints_its_comparison(program, inputs, tmp_path):
    options, patterns = PRINTED[program]
    text = run(program, options.format(inputs).replace(f"{inputs}/runs", str(tmp_path)))
    for pattern in patterns:
        assert re.search(pattern, text), text


def test_gguf_blocks_compares_quantizers_at_the_same_size(tmp_path):
    pytest.importorskip("llama_cpp")
    # Blocks of 256 weights do not fit into half the width.
    model = write_small_base(tmp_path / "model", blocks=1, half_width=False)
    text = run(
        "gguf_blocks.py",
        f"--folder {tmp_path / 'runs'} --model {model} --modes q4_k --num-tokens 1024 "
        "--seq-length 64 --num-eval-tokens 256 --efforts fast --qat-steps 1 "
        "--qat-batch-size 1 --threads 1",
    )
    assert re.search("llama.cpp imatrix +4.597", text)
    assert re.search("lmx fast +4.597", text)


def test_preference_trains_the_same_model_with_both_libraries():
    pytest.importorskip("mlx_lm_lora")
    text = run(
        "preference.py",
        "--case dpo --num-examples 16 --batch-size 4 --steps 2 --repeats 1 "
        "--num-generations 2 --max-tokens 4 --threads 1",
    )
    assert "356,352 trained parameters" in text
    assert re.search("(?m)^mlx-lm-lora ", text)


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

"""`lmx bench`: tables, JSON and comparisons."""

import json
from pathlib import Path

import pytest
from lmx.cli import main
from lmx.evaluation import latency
from lmx.models.loader import load_tokenizer
from tiny_checkpoints import LLAMA

WIDE = LLAMA | {"num_hidden_layers": 2, "max_position_embeddings": 128}
SMALL = ["--prompt-lengths=9,20", "--batch-sizes=1,3", "--tokens=4", "--repeats=2"]


@pytest.fixture(scope="module")
def folder(make_checkpoint):
    return str(make_checkpoint(WIDE, dtype="float32"))


def lmx(capsys, *options):
    code = main.main(["bench", *options])
    return code, *capsys.readouterr()


def test_bench_measures_every_case_and_decoder(folder, capsys):
    options = [
        "--draft-model",
        folder,
        "--num-draft-tokens",
        "2",
        "--check-parity",
        "--json",
    ]
    code, out, _ = lmx(capsys, folder, *SMALL, *options)
    assert code == 0
    rows = json.loads(out)[folder]
    name = f"draft {folder.rpartition('/')[2]}"
    columns = [(1, "standard"), (1, "prompt-lookup"), (1, name), (3, "standard")]
    cases = [(n, *column) for n in (9, 20) for column in columns]
    assert [(r["prompt_tokens"], r["batch_size"], r["decoder"]) for r in rows] == cases
    for row in rows:
        for key in ("ttft_ms", *latency.RATES):
            assert row[key].keys() == {"p50", "p90", "p99"}
            assert min(row[key].values()) > 0
        assert row["ttft_ms"]["p50"] <= row["ttft_ms"]["p99"]
        for rate in latency.RATES:
            assert row[rate]["p50"] >= row[rate]["p99"]
        assert row["peak_memory_gb"] > 0
        is_standard = row["decoder"] == "standard"
        assert (row["speedup"] == 1) == is_standard
        assert (row.get("bandwidth_share", 0) > 0) == is_standard
    # The model is its own draft model: all draft tokens are accepted.
    for row in rows[2], rows[6]:
        assert row["acceptance_rate"] == 1
        assert 2 < row["accepted_length"] <= 3
        assert row["parity"]["mismatches"] == 0


def test_bench_prints_a_table(folder, capsys):
    code, out, _ = lmx(capsys, folder, *SMALL)
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == folder
    assert lines[1].startswith("Values are p50 / p90 / p99")
    assert lines[2].startswith("bandwidth: ")
    assert lines[3].startswith("verify cost: ")
    assert lines[4].split("  ")[-1].strip() == "accept"
    assert [line.split()[:3] for line in lines[5:8]] == [
        ["9", "1", "standard"],
        ["9", "1", "prompt-lookup"],
        ["9", "3", "standard"],
    ]
    assert all(line.count(" / ") == 6 for line in lines[5:11])


def test_cut_prompts():
    prompts = latency.cut_prompts(range(10), 4, 3)
    assert prompts == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
    assert latency.cut_prompts(range(3), 5, 1) == [[0, 1, 2, 0, 1]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt-lengths", "125"], "exceed the model's maximum of 128"),
        (["--tokens", "1"], "--tokens must be 2 or more"),
        (["--check-parity"], "need --draft-model"),
        (["--corpus", "no-such-file"], "cannot read the corpus"),
    ],
)
def test_bench_refuses_bad_options(folder, capsys, options, message):
    code, out, err = lmx(capsys, folder, "--tokens", "8", *options)
    assert code == 2
    assert message in err
    assert "tokens/s" not in out


def test_bench_refuses_a_length_of_zero(folder, capsys):
    with pytest.raises(SystemExit):
        main.main(["bench", folder, "--prompt-lengths", "0,5"])
    assert "--prompt-lengths" in capsys.readouterr().err


def test_bench_refuses_an_empty_corpus(folder, tmp_path, capsys):
    corpus = tmp_path / "empty.txt"
    corpus.write_text(" \n")
    assert main.main(["bench", folder, "--corpus", str(corpus)]) == 2
    assert f"{corpus}: the corpus has no text" in capsys.readouterr().err


def test_sample_text_is_long_enough_for_the_default_prompts(folder):
    tokens = load_tokenizer(Path(folder)).encode(latency.sample_text())
    assert len(tokens) > 512

"""`lmx bench` on a folder: its tables, its JSON, and the arithmetic behind them."""

import json

import pytest
from lmx.cli import main
from lmx.evaluation import ladder, throughput
from tiny_checkpoints import LLAMA

WIDE = LLAMA | {"num_hidden_layers": 2, "max_position_embeddings": 128}
SMALL = ["--prompt-lengths=9,20", "--batch-sizes=1,3", "--tokens=8", "--repeats=2"]


@pytest.fixture(scope="module")
def folder(make_checkpoint):
    return str(make_checkpoint(WIDE, dtype="float32"))


def lmx(capsys, *words):
    code = main.main(["bench", *words])
    return code, *capsys.readouterr()


def test_every_case_and_column_is_measured(folder, capsys):
    words = [
        "--draft-model",
        folder,
        "--num-draft-tokens",
        "2",
        "--check-parity",
        "--json",
    ]
    code, out, _ = lmx(capsys, folder, *SMALL, *words)
    assert code == 0
    rows = json.loads(out)[folder]
    name = f"draft {folder.rpartition('/')[2]}"
    columns = [(1, "standard"), (1, "prompt-lookup"), (1, name), (3, "standard")]
    cases = [(n, *column) for n in (9, 20) for column in columns]
    assert [(r["prompt_tokens"], r["batch_size"], r["decoder"]) for r in rows] == cases
    for row in rows:
        for key in ("ttft_ms", *throughput.RATES):
            assert row[key].keys() == {"p50", "p90", "p99"}
            assert min(row[key].values()) > 0
        assert row["ttft_ms"]["p50"] <= row["ttft_ms"]["p99"]
        for rate in throughput.RATES:
            assert row[rate]["p50"] >= row[rate]["p99"]
        assert row["peak_memory_gb"] > 0
        assert (row["speedup"] == 1) == (row["decoder"] == "standard")
    # The model is its own draft: all it guesses stands, two of three tokens.
    for row in rows[2], rows[6]:
        assert row["acceptance_rate"] == 1
        assert 2 < row["accepted_length"] <= 3
        assert row["parity"]["mismatches"] == 0


def test_the_table_and_the_other_model(folder, make_checkpoint, capsys):
    other = str(make_checkpoint(WIDE, dtype="float32", num_hidden_layers=1))
    code, out, _ = lmx(capsys, folder, *SMALL, "--compare", other)
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == folder
    assert lines[1].startswith("Values are p50 / p90 / p99")
    assert lines[2].split("  ")[-1].strip() == "accept"
    assert [line.split()[:3] for line in lines[3:6]] == [
        ["9", "1", "standard"],
        ["9", "1", "prompt-lookup"],
        ["9", "3", "standard"],
    ]
    assert all(line.count(" / ") == 6 for line in lines[3:9])
    assert other in lines
    ratios = [
        line for line in lines if line.startswith("prompt 20, batch 1, standard: ")
    ]
    assert ratios[0].count("x") == 2


def test_prompts_are_stretches_of_the_text():
    found = throughput.prompts(range(10), 4, 3)
    assert found == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
    assert throughput.prompts(range(3), 5, 1) == [[0, 1, 2, 0, 1]]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--prompt-lengths", "125"], "exceed the model's maximum of 128"),
        (["--tokens", "1"], "--tokens must be 2 or more"),
        (["--ladder", "--compare", "x"], "no --compare"),
        (["--check-parity"], "need --draft-model"),
        (["--corpus", "no-such-file"], "cannot read the corpus"),
    ],
)
def test_faults_are_named(folder, capsys, words, says):
    code, out, err = lmx(capsys, folder, "--tokens", "8", *words)
    assert code == 2
    assert says in err
    assert "tokens/s" not in out


def test_lengths_are_numbers(folder, capsys):
    with pytest.raises(SystemExit):
        main.main(["bench", folder, "--prompt-lengths", "0,5"])
    assert "--prompt-lengths" in capsys.readouterr().err


def test_the_ladder_names_what_every_rung_gains(folder, capsys, monkeypatch):
    monkeypatch.setattr("lmx.evaluation.memory_bandwidth.COPIED_BYTES", 1 << 16)
    words = ["--ladder", "--prompt-lengths=20", "--batch-sizes=4", "--tokens=8"]
    code, out, _ = lmx(capsys, folder, *words, "--json")
    assert code == 0
    rungs = {row["step"]: row for row in json.loads(out)[folder]}
    best = "4-bit weights"
    assert {name: row["compared_with"] for name, row in rungs.items()} == {
        "no cache": None,
        "cache": "no cache",
        best: "cache",
        "8-bit cache": best,
        "batch of 4, static": best,
        "batch of 4, continuous": "batch of 4, static",
        "speculative": best,
    }
    for name, row in rungs.items():
        rate, before = row["tokens_per_second"], rungs.get(row["compared_with"])
        assert row["cumulative"] == rate / rungs["no cache"]["tokens_per_second"]
        if before:
            assert row["speedup"] == rate / before["tokens_per_second"], name
        roofline = row["roofline_tokens_per_second"]
        assert row["roofline_share"] == pytest.approx(rate / roofline)
    # Fewer bytes of a weight, and a weight for four: that is what they are for.
    ceilings = {name: row["roofline_tokens_per_second"] for name, row in rungs.items()}
    assert ceilings[best] > 3 * ceilings["cache"]
    assert ceilings["batch of 4, static"] > ceilings[best]


def test_bytes_of_the_weights_that_a_token_reads(make_checkpoint):
    import mlx.core as mx
    from lmx.models.loader import load
    from mlx.utils import tree_flatten

    tied = load(make_checkpoint(WIDE, dtype="float32"))
    sizes = {k: v.nbytes for k, v in tree_flatten(tied.model.parameters())}
    assert ladder.weight_bytes(tied.model, tied.config) == sum(sizes.values())
    untied = load(make_checkpoint(WIDE, dtype="float32", tie_word_embeddings=False))
    found = ladder.weight_bytes(untied.model, untied.config)
    # Of the embedding one row is read, which is as good as nothing.
    assert found == sum(sizes.values())
    assert mx.float32 == untied.dtype


def test_idle_experts_are_not_read(make_checkpoint):
    from lmx.models.loader import load
    from mlx.utils import tree_flatten
    from tiny_checkpoints import QWEN3_MOE

    loaded = load(make_checkpoint(QWEN3_MOE, dtype="float32"))
    sizes = {k: v.nbytes for k, v in tree_flatten(loaded.model.parameters())}
    experts = sum(size for k, size in sizes.items() if "switch_mlp" in k)
    rest = sum(sizes.values()) - experts - sizes["model.embed_tokens.weight"]
    # Two of four.
    assert ladder.weight_bytes(loaded.model, loaded.config) == rest + experts // 2

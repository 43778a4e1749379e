"""The time of work, at rates that are measured once per machine."""

import mlx.core as mx
import pytest
from lmx.cli import main
from lmx.pipeline import work
from lmx.pipeline.work import Work, rates

SOME = Work(1.0, 2.0, 4.0, 8.0, 16.0)


@pytest.fixture
def measured(monkeypatch, tmp_path) -> list[mx.Dtype]:
    """The dtypes whose rates were measured, with a cache of its own."""
    dtypes = []
    monkeypatch.setenv("LMX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(work, "_measure", lambda dtype: dtypes.append(dtype) or SOME)
    return dtypes


def test_rates_are_measured_once_per_machine_and_dtype(measured, tmp_path, monkeypatch):
    for dtype in (mx.float32, mx.float32, mx.bfloat16, mx.float32):
        assert rates(dtype) == SOME
    assert measured == [mx.float32, mx.bfloat16]
    assert rates(mx.float32, again=True) == SOME
    monkeypatch.setattr(mx, "device_info", lambda: {"device_name": "another"})
    rates(mx.float32)
    *_, file = sorted(
        (tmp_path / "cache" / work.RATES).rglob("index.json"),
        key=lambda path: path.stat().st_mtime_ns,
    )
    for damage in ("{", "[]", file.read_text().replace("solved", "other")):
        file.write_text(damage)
        assert rates(mx.float32) == SOME
    assert len(measured) == 7


def test_rates_need_no_cache(measured, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file" / "cache", "~nobody-here/cache"):
        monkeypatch.setenv("LMX_CACHE", str(folder))
        assert rates(mx.float32) == SOME
    assert len(measured) == 2


def test_time_is_the_sum_over_the_kinds_of_work(measured):
    assert Work().seconds(mx.float32) == 0
    assert not measured
    amounts = Work(1, 1, 1, 1, 1) + Work(trained=2, solved=31)
    assert (amounts * 2).seconds(mx.float32) == 2 * (3 + 1 / 2 + 1 / 4 + 1 / 8 + 2)


def test_rates_are_those_of_a_model(monkeypatch):
    """Of the same work: generating one by one is slowest."""
    monkeypatch.setattr(work, "CPU_PROBE", (2, 32, 64))
    measured = work._measure(mx.float32)
    assert min(vars(measured).values()) > 1e3
    assert measured.decoded < measured.generated
    assert measured.decoded < measured.forward


def test_dry_run_says_the_time(measured, tmp_path, capsys):
    # README's first command leaves a finished run, whose stages take no time.
    recipe = ["recipes/qat_4bit.yaml", f"output={tmp_path / 'run'}", "--dry-run"]
    assert main.train(recipe) == 0
    assert "time     1-train: roughly " in capsys.readouterr().out
    assert set(measured) == {mx.float32}

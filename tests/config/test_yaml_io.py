"""yaml_io: no surprising scalars, and the position of every key and value."""

import subprocess
import sys

import pytest
import yaml
from lmx.config.yaml_io import read, write


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("2E3", 2000.0),
        ("-1.5", -1.5),
        (".5", 0.5),
        ("1_000", 1000),
        ("0", 0),
        ("0123", "0123"),
        ("0x10", "0x10"),
        ("0o17", "0o17"),
        ("12:30", "12:30"),
        ("2024-01-02", "2024-01-02"),
        ("yes", "yes"),
        ("on", "on"),
        ("Off", "Off"),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ('"1"', "1"),
        ("!!str 1", "1"),
        ("1.2.3", "1.2.3"),
        ("1e", "1e"),
        (".inf", float("inf")),
        ("-.Inf", -float("inf")),
    ],
)
def test_read_scalar(text, value):
    data = read(f"x: {text}").data
    assert data == {"x": value}
    assert type(data["x"]) is type(value)


def test_read_nan():
    nan = read(".nan").data
    assert nan != nan


def test_read_does_not_change_pyyaml():
    # In a separate process: importing mlx_lm.lora changes PyYAML.
    program = """if True:
        import yaml
        from lmx.config.yaml_io import read
        read("x: 1e-5")
        assert yaml.safe_load("[1e-5, on, 12:30]") == ["1e-5", True, 750]
    """
    subprocess.run([sys.executable, "-c", program], check=True)


def test_positions_count_from_one():
    document = read("a:\n  - {b: 1,\n     c: 2}\n")
    assert document.keys[("a",)] == (1, 1)
    assert document.keys[("a", 0, "c")] == (3, 6)
    assert document.values[("a", 0, "c")] == (3, 9)
    assert document.values[("a", 0)] == (2, 5)


def test_alias_is_a_copy():
    document = read("a: &x {b: 1}\nc: *x\nd: [*x, *x]\n")
    data = document.data
    assert data == {"a": {"b": 1}, "c": {"b": 1}, "d": [{"b": 1}, {"b": 1}]}
    assert data["a"] is not data["c"]
    assert not document.errors


@pytest.mark.parametrize("reader", [lambda text: read(text).data, yaml.safe_load])
def test_written_yaml_reads_the_same_elsewhere(reader):
    data = {
        "text": ["yes", "1e-5", "0123", "12:30", "null", "", "true", "é", "a: b"],
        "numbers": [1, -2, 0.5, 1e-5, 3e-20],
        "rest": [True, None, {}, []],
    }
    assert reader(write(data)) == data

"""The commands for a home: reproducible, and really held out."""

import json
from pathlib import Path

DATA = Path(__file__).parents[2] / "data"


def test_commands_are_reproducible_and_held_out(load_script, tmp_path, capsys):
    script = load_script("make_commands")
    script.main(tmp_path)
    assert capsys.readouterr().out.count("examples") == 3
    # The commands of the documentation are in no file.
    calls = [json.dumps(call) for call in script.HELD_OUT]
    prompts = []
    for split, size in script.SIZES.items():
        made = tmp_path / f"{split}.jsonl"
        assert made.read_bytes() == (DATA / "commands" / made.name).read_bytes()
        rows = [json.loads(line) for line in made.read_text().splitlines()]
        assert len(rows) == size
        calls += [row["completion"] for row in rows]
        prompts += [row["prompt"] for row in rows]
    assert len(set(calls)) == len(calls)
    assert len(set(prompts)) == len(prompts)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 1_500_000

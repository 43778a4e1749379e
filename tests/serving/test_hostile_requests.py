"""Hostile requests beside clients that behave; `run_hostile_requests.py` sends more."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "fuzz"))

from run_hostile_requests import Attack, open_files, wait_until_idle

pytestmark = pytest.mark.fused


def _attack(server, count):
    attack = Attack(server.port, seed=1, threads=8)
    files = open_files("self") if sys.platform == "linux" else 0
    outcome = attack.run(count)
    assert not outcome.hangs
    assert not outcome.wrong
    assert outcome.good
    assert wait_until_idle(server.port)
    server.until_idle()
    while server.server._server.server_state.connections:
        pass
    if files:
        assert open_files("self") <= files
    return outcome


def test_hostile_requests(start):
    outcome = _attack(start(max_requests=64), 300)
    # Negative control: the requests are of many kinds, and reach what they aim at.
    assert len({case for case, _ in outcome.statuses}) > 20
    statuses = {status for _, status in outcome.statuses}
    assert statuses >= {"200", "400", "404", "413", "closed", "left"}


def test_the_check_sees_a_server_that_is_wrong(start, monkeypatch):
    server = start()
    attack = Attack(server.port, threads=2)
    attack._expected[1] = ["another text"]
    server.engine._step, step = None, server.engine._step
    outcome = attack.run(5)
    assert outcome.wrong
    server.engine._step = step


@pytest.mark.slow
def test_many_hostile_requests(start):
    _attack(start(max_requests=64), 800)

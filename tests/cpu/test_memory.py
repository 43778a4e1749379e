"""The memory of this machine: the system's, containers, NVIDIA's GPUs and Macs."""

from contextlib import suppress
from types import SimpleNamespace

import mlx.core as mx
import pytest
from lmx.cpu import memory
from lmx.models.loader import load

GPU = memory.WORKING_SET


class Machine:
    """A stand-in for MLX's device, and for the memory of the system."""

    def __init__(self, monkeypatch):
        self.info, self.available, self.processes = {}, 7000, 1
        self.active, self.cached = 0, 0
        self.wired, self.cache_limits = [], [999]
        system = SimpleNamespace(
            virtual_memory=lambda: SimpleNamespace(available=self.available)
        )
        monkeypatch.setattr(memory, "psutil", system)
        monkeypatch.setattr(
            memory.launcher, "local_process_count", lambda: self.processes
        )
        monkeypatch.setattr(mx, "device_info", lambda: self.info)
        monkeypatch.setattr(mx, "get_active_memory", lambda: self.active)
        monkeypatch.setattr(mx, "get_cache_memory", lambda: self.cached)
        monkeypatch.setattr(mx, "set_wired_limit", self.wired.append)
        monkeypatch.setattr(mx, "set_cache_limit", self._set_cache_limit)

    def _set_cache_limit(self, limit):
        self.cache_limits.append(limit)
        return self.cache_limits[-2]


@pytest.fixture
def machine(monkeypatch):
    memory.keep_resident.cache_clear()
    yield Machine(monkeypatch)
    memory.keep_resident.cache_clear()


def test_a_cpu_has_what_the_system_has(machine, monkeypatch, tmp_path):
    """Also on a Mac whose default device is the CPU, and which has no /proc."""
    container = tmp_path / "memory.max"
    container.write_text("max\n")
    monkeypatch.setattr(memory, "CONTAINER_LIMIT", container)
    assert memory.available_memory() == 7000
    machine.processes = 2
    assert memory.available_memory() == 3500
    machine.processes = 1
    container.write_text("5000")
    assert memory.available_memory() == memory.memory_limit() == 5000


def test_weights_take_memory_of_an_nvidia_gpu(machine):
    machine.info, machine.active, machine.processes = {"total_memory": 9000}, 2000, 2
    assert (memory.memory_limit(), memory.available_memory()) == (9000, 7000)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({"available": 9000}, 8000),
        ({"available": 9000, "active": 3000}, 5000),
        # Other programs have most of the memory.
        ({"available": 1000, "active": 3000}, 1000),
        # What MLX keeps of freed arrays is its own.
        ({"available": 1000, "active": 3000, "cached": 500}, 1500),
        # Two processes, each with as much.
        ({"available": 9000, "active": 3000, "processes": 2}, 1000),
        ({"available": 1000, "active": 500, "cached": 9, "processes": 2}, 509),
        ({"active": 9000}, 0),
    ],
)
def test_a_mac_shares_its_memory_with_all_programs(machine, state, expected):
    machine.info = {GPU: 8000, "memory_size": 16000}
    vars(machine).update(state)
    assert memory.available_memory() == expected


@pytest.mark.parametrize(
    ("info", "processes", "expected"),
    [
        ({GPU: 8000, "memory_size": 16000}, 1, [8000]),
        ({GPU: 8000}, 2, [4000]),
        # The CPU of a Mac is its default device, or there is no Metal.
        ({"memory_size": 16000}, 1, []),
        ({"total_memory": 9000}, 1, []),
    ],
)
def test_weights_stay_in_memory_from_the_first_model_on(
    machine, make_checkpoint, info, processes, expected
):
    machine.info, machine.processes = info, processes
    folder = make_checkpoint()
    load(folder)
    load(folder, lazy=True)
    assert machine.wired == expected


def test_a_training_keeps_a_part_of_metals_memory(machine):
    with memory.limited_cache():
        assert machine.cache_limits == [999]
    machine.info = {GPU: 8000}
    with suppress(KeyError), memory.limited_cache():
        assert machine.cache_limits == [999, 2000]
        raise KeyError
    assert machine.cache_limits == [999, 2000, 999]

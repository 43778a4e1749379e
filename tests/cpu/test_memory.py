"""The memory of this machine: the kernel's files, containers and GPUs."""

import mlx.core as mx
import pytest
from lmx.cpu import memory


@pytest.fixture
def files(tmp_path, monkeypatch):
    meminfo, container = tmp_path / "meminfo", tmp_path / "memory.max"
    meminfo.write_text("MemTotal: 100 kB\nMemAvailable:    7 kB\n")
    container.write_text("max\n")
    monkeypatch.setattr(memory, "MEMORY_FILE", meminfo)
    monkeypatch.setattr(memory, "CONTAINER_LIMIT", container)
    monkeypatch.setattr(mx, "device_info", dict)
    return container


def test_available_memory_is_read_from_the_kernel(files):
    assert memory.available_memory() == 7 * 1024
    files.write_text("5000")
    assert memory.available_memory() == memory.memory_limit() == 5000


def test_processes_share_the_memory_of_their_machine(files, monkeypatch):
    monkeypatch.setattr(memory.launcher, "local_process_count", lambda: 2)
    assert memory.available_memory() == 7 * 1024 // 2


def test_weights_take_memory_of_a_gpu(monkeypatch):
    monkeypatch.setattr(mx, "device_info", lambda: {"total_memory": 9000})
    monkeypatch.setattr(mx, "get_active_memory", lambda: 2000)
    assert (memory.memory_limit(), memory.available_memory()) == (9000, 7000)

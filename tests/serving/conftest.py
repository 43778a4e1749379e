"""A server that all tests of a file share."""

import sys
from pathlib import Path

import pytest

# Tiny models.
sys.path.append(str(Path(__file__).parents[1] / "generation"))

from tiny_server import TinyServer, load


# Not of the session: other tests set the clock, by which the server's event loop runs.
@pytest.fixture(scope="module")
def server():
    """The server with default settings, and a prompt cache that remembers."""
    started = TinyServer(load())
    yield started
    assert started.stop() == 0


@pytest.fixture
def start():
    """A function that starts a server which ends with the test."""
    servers = []

    def start(*arguments, **settings):
        servers.append(TinyServer(*(arguments or [load()]), **settings))
        return servers[-1]

    yield start
    for each in servers:
        each.stop()

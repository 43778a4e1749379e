"""The files of docs/serving/ run as shown, but for their ports and folders.

Without nginx, Caddy or systemd-analyze, the tests of their files are skipped.
"""

import configparser
import os
import plistlib
import re
import shlex
import shutil
import socket
import subprocess
import threading
import time
from pathlib import Path

import httpx
import pytest
from lmx.cli.main import verb_parser
from tiny_server import CHAT, COMPLETIONS, SECONDS, TinyServer

FILES = Path(__file__).parents[2] / "docs/serving"
LONG = {"prompt": "Hello", "max_tokens": 400, "ignore_eos": True, "stream": True}
PROXIES = {"nginx.conf": "nginx", "Caddyfile": "caddy", "candidate.conf": "nginx"}


def command(program: str, config: Path) -> list[str]:
    """The command that runs a proxy in the foreground."""
    if Path(program).name == "caddy":
        return [program, "run", "--config", str(config), "--adapter", "caddyfile"]
    # Its workers must reach the folders of the package.
    user = "user root; " if os.geteuid() == 0 else ""
    return [program, "-c", str(config), "-g", f"{user}daemon off;"]


class Proxy:
    """A proxy that runs one of the files, with other ports.

    Args:
        ports: those of the servers, in the place of 8081 and 8082.
    """

    def __init__(self, name: str, folder: Path, ports: list[int]):
        program = shutil.which(PROXIES[name])
        if program is None:
            pytest.skip(f"there is no {PROXIES[name]}")
        numbers = {"8081": ports[0], "8082": ports[1]}
        self.ports = {"8080": free_port(), "8090": free_port()}
        text = re.sub(
            r"\b(80[89]\d)\b",
            lambda match: str((numbers | self.ports)[match[1]]),
            (FILES / name).read_text(),
        )
        text = text.replace("/tmp/", f"{folder}/")
        (config := folder / name).write_text(text)
        environment = os.environ | {"HOME": str(folder)}
        with (folder / "log").open("w") as log:
            self._process = subprocess.Popen(
                command(program, config), stdout=log, stderr=log, env=environment
            )
        self.client = httpx.Client(timeout=SECONDS)
        end = time.monotonic() + SECONDS
        while True:
            assert self._process.poll() is None, (folder / "log").read_text()
            try:
                assert self.post().status_code == 200
                return
            except httpx.TransportError:
                assert time.monotonic() < end, (folder / "log").read_text()
                time.sleep(0.05)

    def url(self, path=CHAT, port="8080"):
        return f"http://127.0.0.1:{self.ports[port]}{path}"

    def post(self, port="8080", **headers):
        """A short chat."""
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
        return self.client.post(self.url(CHAT, port), json=body, headers=headers)

    def stop(self):
        self.client.close()
        self._process.terminate()
        self._process.wait(SECONDS)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as opened:
        return opened.getsockname()[1]


@pytest.fixture
def start_proxy(tmp_path, start):
    """A function from a file to a proxy in front of two servers."""
    proxies = []

    def start_proxy(name):
        servers = [start(), start()]
        proxies.append(Proxy(name, tmp_path, [server.port for server in servers]))
        return proxies[-1], servers

    yield start_proxy
    for proxy in proxies:
        proxy.stop()


def answered(server: TinyServer) -> int:
    """Completions that a server has answered."""
    values = server.metrics()
    return int(sum(v for k, v in values.items() if "request_success_total" in k))


def aborted(server: TinyServer) -> int:
    """Completions that clients have left."""
    values = server.metrics()
    return int(sum(v for k, v in values.items() if 'reason="abort"' in k))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nginx.conf", "Caddyfile"])
def test_no_request_fails_when_a_server_ends(start_proxy, name):
    proxy, servers = start_proxy(name)
    statuses, over = [], threading.Event()

    def ask_on():
        number = 0
        with httpx.Client(timeout=SECONDS) as client:
            while not over.is_set():
                number += 1
                headers = {"X-Session-Id": f"{number % 7}"}
                body = {"prompt": "Hello", "max_tokens": 4}
                url = proxy.url(COMPLETIONS)
                response = client.post(url, json=body, headers=headers)
                statuses.append(response.status_code)

    threads = [threading.Thread(target=ask_on) for _ in range(3)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + SECONDS
    while not all(map(answered, servers)) and time.monotonic() < end:
        time.sleep(0.05)
    shares = [*map(answered, servers)]
    # The one drains while requests come.
    assert servers[0].stop() == 0
    before = answered(servers[1])
    while answered(servers[1]) < before + 20 and time.monotonic() < end:
        time.sleep(0.05)
    over.set()
    for thread in threads:
        thread.join()
    assert all(shares), "one server had no request"
    assert len(statuses) > 20
    assert set(statuses) == {200}
    assert proxy.client.get(proxy.url("/metrics")).status_code == 404


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nginx.conf", "Caddyfile"])
def test_tokens_come_at_once_and_a_client_that_leaves_ends_them(start_proxy, name):
    proxy, servers = start_proxy(name)
    with proxy.client.stream("POST", proxy.url(COMPLETIONS), json=LONG) as response:
        first = next(response.iter_lines())
        assert first.startswith("data: ")
    end = time.monotonic() + SECONDS
    while not any(map(aborted, servers)):
        assert time.monotonic() < end
        time.sleep(0.02)
    for server in servers:
        server.until_idle()


@pytest.mark.slow
def test_conversation_stays_with_its_server(start_proxy):
    proxy, servers = start_proxy("nginx.conf")
    before = [*map(answered, servers)]
    for _ in range(6):
        proxy.post(**{"X-Session-Id": "a"})
    gains = [answered(s) - b for s, b in zip(servers, before, strict=True)]
    assert sorted(gains) == [0, 6]


@pytest.mark.slow
def test_candidate_gets_a_share_of_the_users(start_proxy):
    proxy, servers = start_proxy("candidate.conf")
    before = [*map(answered, servers)]
    names = [
        proxy.post(Authorization=f"Bearer {n}").headers["X-Model"] for n in "ab" * 3
    ]
    assert len(set(names[::2])) == len(set(names[1::2])) == 1
    users = [
        proxy.post(Authorization=f"Bearer {n}").headers["X-Model"] for n in range(60)
    ]
    assert 0 < users.count("candidate") < 20
    gains = [answered(s) - b for s, b in zip(servers, before, strict=True)]
    assert gains == [(names + users).count(n) for n in ("present", "candidate")]


@pytest.mark.slow
def test_candidate_in_the_shadow_gets_every_request(start_proxy):
    proxy, servers = start_proxy("candidate.conf")
    before = answered(servers[1])
    answers = {proxy.post("8090").json()["id"] for _ in range(5)}
    servers[1].until_idle()
    assert answered(servers[1]) == before + 5
    # A candidate that is down harms nobody.
    servers[1].stop()
    assert proxy.post("8090").status_code == 200
    assert len(answers) == 5


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str
    parser.read(FILES / "lmx.service")
    return parser


@pytest.mark.parametrize("name", PROXIES)
def test_proxy_takes_its_file(name, tmp_path):
    program = shutil.which(PROXIES[name])
    if program is None:
        pytest.skip(f"there is no {PROXIES[name]}")
    text = (FILES / name).read_text().replace("/tmp/", f"{tmp_path}/")
    for wrong in (False, True):
        (path := tmp_path / name).write_text(text + "}" * wrong)
        arguments = ["-t", "-c", path]
        if PROXIES[name] == "caddy":
            arguments = ["adapt", "--adapter", "caddyfile", "--config", path]
        process = subprocess.run(
            [program, *arguments], capture_output=True, text=True, check=False
        )
        assert (process.returncode != 0) == wrong, process.stderr


@pytest.mark.parametrize("kind", ["systemd", "launchd"])
def test_service_runs_a_command_of_lmx(kind):
    if kind == "systemd":
        words = shlex.split(unit()["Service"]["ExecStart"])
        seconds = int(unit()["Service"]["TimeoutStopSec"])
    else:
        agent = plistlib.loads((FILES / "lmx.plist").read_bytes())
        words, seconds = agent["ProgramArguments"], agent["ExitTimeOut"]
        assert agent["KeepAlive"] == {"SuccessfulExit": False}
    assert words[0].endswith("/bin/lmx")
    arguments = verb_parser(words[1]).parse_args(words[2:])
    assert seconds > arguments.timeout


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="there is no systemd"
)
@pytest.mark.slow
def test_unit_is_right(tmp_path):
    text = (FILES / "lmx.service").read_text()
    (path := tmp_path / "lmx.service").write_text(
        text.replace("/opt/lmx/bin/lmx", "/bin/true")
    )
    process = subprocess.run(
        ["systemd-analyze", "verify", path], capture_output=True, text=True, check=False
    )
    assert "lmx.service" not in process.stderr, process.stderr
    assert process.returncode == 0
    path.write_text(text.replace("Restart=", "Restat="))
    wrong = subprocess.run(
        ["systemd-analyze", "verify", path], capture_output=True, text=True, check=False
    )
    assert "Restat" in wrong.stderr

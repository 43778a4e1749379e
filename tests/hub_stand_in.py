"""A small Hugging Face Hub server on loopback, for tests."""

import base64
import hashlib
import json
import re
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml

TOKEN = "hf_thisTokenMayWrite0000"
READER = "hf_thisTokenMayOnlyRead00"
SCOPED = "hf_thisTokenIsFineGrained"


def make_user(role, scoped=()):
    access = {"displayName": "laptop", "role": role}
    if role == "fineGrained":
        access["fineGrained"] = {"scoped": list(scoped), "global": []}
    orgs = [
        {"name": "lab", "roleInOrg": "contributor"},
        {"name": "club", "roleInOrg": "read"},
    ]
    auth = {"type": "access_token", "accessToken": access}
    return {"type": "user", "name": "alice", "orgs": orgs, "auth": auth}


USERS = {
    TOKEN: make_user("write"),
    READER: make_user("read"),
    SCOPED: make_user(
        "fineGrained",
        [
            {"entity": {"type": "user", "name": "alice"}, "permissions": []},
            {
                "entity": {"type": "model", "name": "lab/tiny"},
                "permissions": ["repo.content.read", "repo.write"],
            },
        ],
    ),
}


class Repository:
    """Files of each commit. The last commit is main."""

    def __init__(self, *commits, private=False, tags=()):
        self.private = private
        self.commits = [dict(files) for files in commits]
        self.tags = dict(tags)

    @property
    def files(self):
        return self.commits[-1] if self.commits else {}

    def at(self, revision):
        """Return the number of a commit by branch, tag or hash, or None."""
        if revision == "main":
            return len(self.commits) - 1
        shas = [self.sha(number) for number in range(len(self.commits))]
        return self.tags.get(
            revision, shas.index(revision) if revision in shas else None
        )

    @staticmethod
    def sha(number):
        return hashlib.sha1(b"%d" % number).hexdigest()


class Hub:
    """State of the server and a record of the requests.

    Attributes:
        stored: uploaded large files by sha256.
        sent: sha256 of every complete upload of a large file, in order.
        requests: method and path of every request.
        chunks: folder where hf-xet stores the chunks of an upload.
        should_drop: (method, path) -> whether to close the connection without a
            response.
    """

    def __init__(self):
        self.repositories = {}
        self.stored = {}
        self.sent = []
        self.requests = []
        self.chunks = None
        self.should_drop = lambda method, path: False
        self.lock = threading.Lock()


def is_large(name):
    return name.endswith(".safetensors")


def oid(name, content):
    """Return the Hub's object id: sha256 of a large file, else the git sha1."""
    if isinstance(content, tuple):
        return content[0]
    if is_large(name):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *arguments):
        pass

    def answer(self, value, code=200, **headers):
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        for name, text in headers.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, code, kind, message):
        self.answer(
            {"error": message}, code, X_Error_Code=kind, X_Error_Message=message
        )

    def handle_any(self):
        path, _, self.query = self.path.partition("?")
        length = int(self.headers.get("Content-Length") or 0)
        with self.hub.lock:
            self.hub.requests.append((self.command, path))
            should_drop = self.hub.should_drop(self.command, path)
        if should_drop:
            # Read half of the body and send no response.
            self.rfile.read(length // 2)
            self.close_connection = True
            return
        body = self.rfile.read(length)
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = self.chunks()
        self.route(path, body)

    do_GET = do_POST = do_PUT = do_HEAD = handle_any

    def chunks(self):
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    @property
    def user(self):
        return USERS.get((self.headers.get("Authorization") or "")[len("Bearer ") :])

    def route(self, path, body):
        for pattern, method in ROUTES.items():
            if match := re.fullmatch(pattern, path):
                with self.hub.lock:
                    return getattr(self, method)(body, **match.groupdict())
        return self.refuse(404, "EntryNotFound", f"no such page: {path}")

    def find_repository(self, kind, name):
        """Return a visible repository, or send a 404 response and return None."""
        repository = self.hub.repositories.get(f"{kind}/{name}")
        if repository is None or (repository.private and not self.user):
            self.refuse(404, "RepoNotFound", "Repository not found")
            return None
        return repository

    def whoami(self, body):
        if self.user:
            return self.answer(self.user)
        return self.refuse(401, "Unauthorized", "Invalid credentials")

    def create(self, body):
        request = json.loads(body)
        owner = request["organization"] or self.user["name"]
        name = f"models/{owner}/{request['name']}"
        url = {"url": f"https://huggingface.co/{owner}/{request['name']}"}
        if name in self.hub.repositories:
            return self.answer(url | {"error": "You already created this repo"}, 409)
        private = request.get("visibility") == "private" or bool(request.get("private"))
        self.hub.repositories[name] = Repository(private=private)
        return self.answer(url)

    def check_card(self, body):
        text = json.loads(body)["content"]
        metadata = yaml.safe_load(text.split("---\n")[1])
        missing = [k for k in ("license", "base_model") if not metadata.get(k, "x")]
        return self.answer({"errors": missing, "warnings": []}, 400 if missing else 200)

    def preupload(self, body, kind, name, revision):
        if (repository := self.find_repository(kind, name)) is None:
            return
        files = []
        for file in json.loads(body)["files"]:
            old_content = repository.files.get(file["path"])
            files.append(
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if is_large(file["path"]) else "regular",
                    "shouldIgnore": False,
                    "oid": None
                    if old_content is None
                    else oid(file["path"], old_content),
                }
            )
        self.answer({"files": files})

    def batch(self, body, name):
        objects = []
        for item in json.loads(body)["objects"]:
            if item["oid"] not in self.hub.stored:
                host = self.headers["Host"]
                href = f"http://{host}/storage/{item['oid']}"
                item = item | {"actions": {"upload": {"href": href}}}
            objects.append(item)
        self.answer({"transfer": "basic", "objects": objects})

    def store(self, body, oid):
        assert hashlib.sha256(body).hexdigest() == oid
        self.hub.stored[oid] = body
        self.hub.sent.append(oid)
        self.answer({})

    def commit(self, body, kind, name, revision):
        if (repository := self.find_repository(kind, name)) is None:
            return
        files = dict(repository.files)
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                content = self.hub.stored.get(value["oid"])
                # Only the hash and the size of a chunked file are known.
                assert self.hub.chunks or len(content) == value["size"]
                files[value["path"]] = content or (value["oid"], value["size"])
        repository.commits.append(files)
        sha = repository.sha(len(repository.commits) - 1)
        url = f"https://huggingface.co/{name}/commit/{sha}"
        self.answer({"success": True, "commitOid": sha, "commitUrl": url})

    def chunk_store(self, body, kind, name, revision):
        url = f"local://{self.hub.chunks}"
        self.answer({"accessToken": "key", "exp": 4102444800, "casUrl": url})

    def info(self, body, kind, name, revision="main"):
        if (repository := self.find_repository(kind, name)) is None:
            return
        if (number := repository.at(revision or "main")) is None:
            return self.refuse(404, "RevisionNotFound", "Invalid rev id")
        files = [{"rfilename": path} for path in repository.files]
        metadata = {"id": name, "private": repository.private, "siblings": files}
        self.answer(metadata | {"sha": repository.sha(number), "tags": []})

    def tree(self, body, kind, name, revision):
        if (repository := self.find_repository(kind, name)) is None:
            return
        files = repository.commits[repository.at(revision)]
        entries = [
            {"type": "file", "path": p, "size": len(c), "oid": oid(p, c)}
            for p, c in files.items()
        ]
        self.answer(entries)

    def paths(self, body, kind, name, revision):
        self.answer([])

    def file(self, body, name, revision, path, kind="models"):
        if (
            repository := self.find_repository(kind.rstrip("/") or "models", name)
        ) is None:
            return
        number = repository.at(revision)
        if number is None or path not in repository.commits[number]:
            return self.refuse(404, "EntryNotFound", "Entry not found")
        content = repository.commits[number][path]
        self.answer(
            content,
            ETag=f'"{oid(path, content)}"',
            X_Repo_Commit=repository.sha(number),
        )


NAME = r"(?P<name>[^/]+/[^/]+)"
API = rf"/api/(?P<kind>models|datasets)/{NAME}"
ROUTES = {
    r"/api/whoami-v2": "whoami",
    r"/api/repos/create": "create",
    r"/api/validate-yaml": "check_card",
    rf"{API}/preupload/(?P<revision>.+)": "preupload",
    rf"{API}/commit/(?P<revision>.+)": "commit",
    rf"{API}/tree/(?P<revision>[^/]+)/?": "tree",
    rf"{API}/paths-info/(?P<revision>[^/]+)": "paths",
    rf"{API}/revision/(?P<revision>.+)": "info",
    rf"{API}/xet-write-token/(?P<revision>.+)": "chunk_store",
    API: "info",
    rf"/{NAME}\.git/info/lfs/objects/batch": "batch",
    r"/storage/(?P<oid>[0-9a-f]+)": "store",
    rf"/(?P<kind>(datasets/)?){NAME}/resolve/(?P<revision>[^/]+)/(?P<path>.+)": "file",
}


@contextmanager
def running():
    """Run a server and yield its state and address."""
    hub = Hub()
    handler = type("Handling", (Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def stand_in(monkeypatch, tmp_path):
    """A Hub server for this process, with a write token."""
    from huggingface_hub import constants

    with running() as (hub, address):
        monkeypatch.setattr(constants, "ENDPOINT", address)
        template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr(time, "sleep", lambda seconds: None)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub

"""The command that adds an extra, as lmx was installed."""

import json
from importlib.metadata import PackageNotFoundError

import pytest
from lmx import installation
from lmx.installation import install_command


def record(monkeypatch, installer, origin, prefix=None):
    """Make these the records of the installation."""
    files = {"INSTALLER": f"{installer}\n", "direct_url.json": json.dumps(origin)}

    class Distribution:
        read_text = staticmethod(files.get)

    monkeypatch.setattr(installation, "distribution", lambda name: Distribution)
    if prefix:
        monkeypatch.setattr("sys.prefix", str(prefix))


@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_checkout_is_named_as_seen_from_here(installer, tmp_path, monkeypatch):
    folder = tmp_path / "a checkout"
    folder.mkdir()
    url, start = folder.as_uri(), {"uv": "uv "}.get(installer, "")
    record(monkeypatch, installer, {"url": url, "dir_info": {"editable": True}})
    assert install_command("serve") == f'{start}pip install -e "{folder}[serve]"'
    monkeypatch.chdir(folder)
    assert install_command("serve") == f'{start}pip install -e ".[serve]"'
    record(monkeypatch, installer, {"url": url, "dir_info": {}})
    assert install_command() == f'{start}pip install "."'


def test_tool_of_uv_is_installed_again(tmp_path, monkeypatch):
    (tmp_path / "uv-receipt.toml").touch()
    monkeypatch.chdir(tmp_path)
    origin = {"url": tmp_path.as_uri(), "dir_info": {}}
    record(monkeypatch, "uv", origin, tmp_path)
    assert install_command("eval") == 'uv tool install --force ".[eval]"'


def test_other_origins(monkeypatch, tmp_path):
    record(monkeypatch, "pip", {}, tmp_path)
    assert install_command("serve") == 'pip install "lmx-toolkit[serve]"'
    record(monkeypatch, "pip", {"url": "https://a/b", "vcs_info": {"vcs": "git"}})
    shown = 'pip install "lmx-toolkit[serve] @ git+https://a/b"'
    assert install_command("serve") == shown

    def absent(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(installation, "distribution", absent)
    assert install_command("serve") == 'pip install "lmx-toolkit[serve]"'

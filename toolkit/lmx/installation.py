"""How lmx was installed, and so how an extra is added."""

import json
import os
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit

PACKAGE = "lmx-toolkit"
# uv writes this file into the environment of a tool.
UV_TOOL = "uv-receipt.toml"


def install_command(extra: str = "") -> str:
    """The command that adds an extra, or all dependencies, to this installation.

    It goes by the records of PEP 376 (INSTALLER) and PEP 610 (direct_url.json).
    """
    try:
        installed = distribution(PACKAGE)
        installer = (installed.read_text("INSTALLER") or "").strip()
        origin = json.loads(installed.read_text("direct_url.json") or "{}")
    except PackageNotFoundError:  # A checkout that PYTHONPATH names.
        installer, origin = "", {}
    command = "uv pip install" if installer == "uv" else "pip install"
    if (Path(sys.prefix) / UV_TOOL).is_file():
        # It replaces the tool, and needs the word to do so.
        command = "uv tool install --force"
    extras = f"[{extra}]" if extra else ""
    url = urlsplit(origin.get("url", ""))
    if "dir_info" in origin and url.scheme == "file":
        folder = unquote(url.path)
        here = (
            "." if os.path.realpath(folder) == os.path.realpath(os.curdir) else folder
        )
        editable = "-e " * bool(origin["dir_info"].get("editable"))
        return f'{command} {editable}"{here}{extras}"'
    source = origin.get("url", "")
    if version := origin.get("vcs_info"):
        source = f"{version['vcs']}+{source}"
    return f'{command} "{PACKAGE}{extras}{f" @ {source}" * bool(source)}"'

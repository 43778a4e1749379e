"""Pushes checkpoint folders to the Hugging Face Hub; checks access beforehand."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from ...config.export import HUB_REPO_ID
from ...errors import FAILED, UserError
from ...files.json_files import read_text
from ...models.checkpoint import check_weights, checkpoint_size, read_config
from ...version import __version__

# Endings of names that say how the base model is stored.
STORED_AS = re.compile(
    r"(?i)([-_.](bf16|fp16|f16|fp32|f32|\d+(\.\d+)?-?(bit|bpw)|mxfp[48]|nvfp4|qat|mlx"
    r"|gguf|q\d\w*))+$"
)
MAX_WIDTHS = 2
TOKENS_URL = "huggingface.co/settings/tokens"
# The license entries of a model card.
LICENSE_KEYS = ("license", "license_name", "license_link")
READ_ONLY_ROLES = ("read", "no_access")


def repository_name(
    base: str, folder: Path, *, is_trained: bool = False, is_qat: bool = False
) -> str:
    """The base model's name with what was done to it, e.g. Qwen3-0.6B-4bit-qat.

    Args:
        base: folder, Hub id or GGUF file of the base model.
        folder: the published checkpoint.
        is_trained: whether weights were trained on data.
        is_qat: whether they were trained with fake quantization.
    """
    # The Hub refuses names with other characters, or with - or . at an end.
    name = re.sub(r"[^\w.-]+", "-", Path(base).name)
    stem = STORED_AS.sub("", name).strip("-.") or "model"
    parts = [stem]
    if is_trained and not is_qat:
        parts.append("finetuned")
    if stored := stored_as(folder):
        parts.append(stored)
    if is_qat:
        parts.append("qat")
    return "-".join(parts)


def stored_as(folder: Path) -> str | None:
    """How a checkpoint is quantized, e.g. 4bit, mxfp4 or 3.5bpw; None = not at all.

    A checkpoint with more than two widths has its mean bits per weight.
    """
    quantization = read_config(folder).get("quantization")
    if not quantization:
        return None
    if (mode := quantization.get("mode", "affine")) != "affine":
        return mode
    layers = [value for value in quantization.values() if isinstance(value, dict)]
    widths = {quantization["bits"], *(layer["bits"] for layer in layers)}
    if len(widths) > MAX_WIDTHS:
        return f"{checkpoint_size(folder).bits_per_weight:.1f}bpw"
    return f"{quantization['bits']}bit"


def require_token(name: str) -> str:
    """This machine's token for the Hub, without a request to the Hub.

    Raises:
        UserError: the Hub is offline, or there is no valid token.
    """
    from huggingface_hub import constants, get_token

    if not re.match(HUB_REPO_ID, name):
        raise UserError(
            "this is not a Hub id", hint="a Hub id looks like user/name", place=name
        )
    if constants.HF_HUB_OFFLINE:
        raise UserError(
            "HF_HUB_OFFLINE is set, so nothing can be pushed",
            hint="unset it; or remove hub_repo_id, and `lmx push` the model later",
            place=name,
        )
    with _hub_errors(name):
        token = get_token()
    # The HTTP client would print a token that it cannot send.
    if not token or not re.fullmatch(r"[!-~]+", token):
        raise UserError(
            "the Hub token is invalid" if token else "there is no Hub token",
            hint="`hf auth login`, or set HF_TOKEN, with a token that may write "
            f"({TOKENS_URL})",
            place=name,
        )
    return token


def require_write_access(name: str, *, private: bool) -> None:
    """Refuse a push that the Hub would refuse, or that would be public by mistake.

    Raises:
        UserError: there is no token, the token may not write to the repository, or the
            repository is public and `private` is set.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    api = HfApi(token=require_token(name))
    with _hub_errors(name):
        user = api.whoami()
        try:
            is_public = not api.model_info(name).private
        except RepositoryNotFoundError:
            is_public = False
    owner = name.partition("/")[0].lower()
    roles = {org["name"].lower(): org.get("roleInOrg") for org in user.get("orgs", [])}
    access = user.get("auth", {}).get("accessToken", {})
    is_reader = roles.get(owner, "no_access") in READ_ONLY_ROLES
    if owner != user["name"].lower() and is_reader:
        may_write = False
    elif access.get("role") != "fineGrained":
        may_write = access.get("role") != "read"
    else:
        may_write = any(
            "repo.write" in scope["permissions"]
            and scope["entity"].get("name", "").lower() in (owner, name.lower())
            for scope in access.get("fineGrained", {}).get("scoped", [])
        )
    if not may_write:
        raise UserError(
            f"the token of {user['name']!r} may not write to this repository",
            hint=f"make one that may ({TOKENS_URL}), or push to {user['name']}/...",
            place=name,
        )
    if private and is_public:
        raise UserError(
            "this repository is public, but a private one is required",
            hint="set private: false (lmx push --public), or use another name",
            place=name,
        )


def push(
    folder: Path, name: str, *, private: bool, info: Callable[[str], None]
) -> None:
    """Upload a checkpoint folder. Files of an interrupted push are not sent again.

    Args:
        private: visibility of a new repository.

    Raises:
        UserError: the folder is not a valid checkpoint, or the Hub refuses or fails.
    """
    from huggingface_hub import HfApi

    check_weights(folder, read_config(folder))
    require_write_access(name, private=private)
    api = HfApi(token=require_token(name))
    files = [p for p in folder.rglob("*") if p.is_file() and p.name[0] != "."]
    size = sum(file.stat().st_size for file in files)
    info(f"pushing {len(files)} files, {size / 1e6:,.1f} MB, to {name}")
    with _hub_errors(name):
        api.create_repo(name, private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=name,
            folder_path=folder,
            ignore_patterns=[".*", "**/.*"],
            commit_message=f"Upload by lmx {__version__}",
        )
    info(f"pushed: {commit.commit_url}")


def license_metadata(name: str, revision: str | None) -> dict[str, str]:
    """License entries of the card of a Hub model; empty if there are none."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        file = hf_hub_download(name, "README.md", revision=revision)
    except (HfHubHTTPError, OSError):
        return {}
    return license_metadata_of(Path(file))


def license_metadata_of(card: Path) -> dict[str, str]:
    """License entries of a model card; empty if there are none, or no card."""
    block = re.match(r"---\s*\n(.*?)\n---\s*(\n|$)", read_text(card), re.DOTALL)
    try:
        metadata = yaml.safe_load(block[1]) if block else None
    except (yaml.YAMLError, ValueError):  # PyYAML's of dates such as 2024-02-30
        return {}
    metadata = metadata if isinstance(metadata, dict) else {}
    return {key: metadata[key] for key in LICENSE_KEYS if key in metadata}


@contextmanager
def _hub_errors(name: str) -> Iterator[None]:
    """Turn errors of the Hub's client into `UserError`.

    Its releases raise different exceptions, most without a common class.
    """
    try:
        yield
    except Exception as error:
        cause = f": {error.__cause__}" if type(error) is RuntimeError else ""
        # The query of an upload URL holds a key.
        message = re.sub(r"\?\S+", "", f"{error}{cause}") or type(error).__name__
        raise UserError(
            f"the Hub refuses or does not respond: {' '.join(message.split())}",
            hint="run the same command again: uploaded files are not sent again",
            place=name,
            code=FAILED,
        ) from error

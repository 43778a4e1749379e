"""The Hugging Face Hub: who may write there, and a checkpoint folder sent to it."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from ... import __version__
from ...config.export import HUB_REPO_ID
from ...errors import FAILED, UserError
from ...models.checkpoint import check_weights, read_config

TOKENS = "huggingface.co/settings/tokens"
# What a card says of the terms a model may be used under.
TERMS = ("license", "license_name", "license_link")
READ_ONLY = ("read", "no_access")


def require_token(name: str) -> str:
    """This machine's token of the Hub, without asking the Hub.

    Raises:
        UserError: the Hub is switched off here, no token is here, or it is no token.
    """
    from huggingface_hub import constants, get_token

    if not re.match(HUB_REPO_ID, name):
        raise UserError(
            "this is no name of the Hub", hint="it looks like user/name", place=name
        )
    if constants.HF_HUB_OFFLINE:
        raise UserError(
            "HF_HUB_OFFLINE is set, so nothing can be pushed",
            hint="unset it; or leave hub_repo_id out, and `lmx push` the model later",
            place=name,
        )
    with _explained(name):
        token = get_token()
    # The HTTP client would show one that it cannot send.
    if not token or not re.fullmatch(r"[!-~]+", token):
        raise UserError(
            "the Hub's token here is no token" if token else "there is no token here",
            hint=f"`hf auth login`, or set HF_TOKEN, to one that may write ({TOKENS})",
            place=name,
        )
    return token


def require_write_access(name: str, *, private: bool) -> None:
    """Refuse what the Hub would refuse, or would show to everybody, before any work.

    Raises:
        UserError: no token, one that may not write there, or a public repository of
            this name where a private one is wanted.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    api = HfApi(token=require_token(name))
    with _explained(name):
        who = api.whoami()
        try:
            is_public = not api.model_info(name).private
        except RepositoryNotFoundError:
            is_public = False
    if not _may_write(who, name):
        raise UserError(
            f"the token of {who['name']!r} may not write here",
            hint=f"make one that may ({TOKENS}), or push to {who['name']}/...",
            place=name,
        )
    if private and is_public:
        raise UserError(
            "this repository is public, and a private one was asked for",
            hint="private: false (lmx push --public), or another name",
            place=name,
        )


def _may_write(who: dict, name: str) -> bool:
    """Whether a token may, as far as the Hub's answer about it says."""
    owner = name.partition("/")[0].lower()
    roles = {org["name"].lower(): org.get("roleInOrg") for org in who.get("orgs", [])}
    if owner != who["name"].lower() and roles.get(owner, "no_access") in READ_ONLY:
        return False
    access = who.get("auth", {}).get("accessToken", {})
    if access.get("role") != "fineGrained":
        return access.get("role") != "read"
    return any(
        "repo.write" in scope["permissions"]
        and scope["entity"].get("name", "").lower() in (owner, name.lower())
        for scope in access.get("fineGrained", {}).get("scoped", [])
    )


def push(
    folder: Path, name: str, *, private: bool, info: Callable[[str], None]
) -> None:
    """Send a checkpoint folder; what an earlier, broken push has sent stays sent.

    Args:
        private: of a repository that is made now.

    Raises:
        UserError: the folder is no sound model, or the Hub refuses or breaks off.
    """
    from huggingface_hub import HfApi

    read_config(folder)
    check_weights(folder)
    require_write_access(name, private=private)
    api = HfApi(token=require_token(name))
    files = [p for p in folder.rglob("*") if p.is_file() and p.name[0] != "."]
    size = sum(file.stat().st_size for file in files)
    info(f"pushing {len(files)} files, {size / 1e6:,.1f} MB, to {name}")
    with _explained(name):
        api.create_repo(name, private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=name,
            folder_path=folder,
            ignore_patterns=[".*", "**/.*"],
            commit_message=f"Upload by lmx {__version__}",
        )
    info(f"pushed: {commit.commit_url}")


def license_metadata(name: str, revision: str | None) -> dict[str, str]:
    """What the card of a model of the Hub says of its license; empty if unknown."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        file = hf_hub_download(name, "README.md", revision=revision)
    except (HfHubHTTPError, OSError):
        return {}
    return license_metadata_of(Path(file))


def license_metadata_of(card: Path) -> dict[str, str]:
    """What a model card says of the license; empty if nothing, or there is none."""
    text = card.read_text(encoding="utf-8") if card.is_file() else ""
    block = re.match(r"---\s*\n(.*?)\n---\s*(\n|$)", text, re.DOTALL)
    try:
        metadata = yaml.safe_load(block[1]) if block else None
    except yaml.YAMLError:
        return {}
    metadata = metadata if isinstance(metadata, dict) else {}
    return {key: metadata[key] for key in TERMS if key in metadata}


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """What the Hub's client fails with, in our words.

    Its releases differ in what they raise; most have no class in common.
    """
    try:
        yield
    except Exception as error:
        cause = f": {error.__cause__}" if type(error) is RuntimeError else ""
        # An address to upload to holds a key of its own behind the question mark.
        said = re.sub(r"\?\S+", "", f"{error}{cause}") or type(error).__name__
        raise UserError(
            f"the Hub refuses, or does not answer: {' '.join(said.split())}",
            hint="the same command goes on: what has arrived is not sent again",
            place=name,
            code=FAILED,
        ) from error

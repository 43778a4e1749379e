"""Removes tokens and passwords from what is written or sent.

People leave them in a comment of a recipe, in a value or in an argument. The run itself
uses the recipe as it is; files, trackers and model cards get `REDACTED` instead.
"""

import os
import re
from typing import Any

REDACTED = "REDACTED"
# Tokens that their form gives away: Hugging Face, OpenAI and Anthropic, GitHub, wandb,
# AWS.
_FORMS = (
    r"hf_(?=[a-z]*[A-Z0-9])[A-Za-z0-9]{20,}",
    r"(?<!-)sk-(?=[\w-]{0,99}[0-9])(?=[\w-]{0,99}[A-Za-z0-9]{16})[\w-]{20,}",
    r"gh[oprsu]_[A-Za-z0-9]{30,}",
    r"github_pat_\w{30,}",
    r"wandb_v1_\w{20,}",
    r"(?:AKIA|ASIA)[A-Z0-9]{16}",
)
# What names a secret, up to its value. A value in quotes ends at the quote.
_NAMED = r"(?i:%s)[\"']?[ \t]*[:=][ \t]*"
_TOKEN_NAME = _NAMED % r"(?<![a-z0-9])token"
_SECRET_NAME = _NAMED % (
    r"(?:api|access|secret|private)[_-]?key|password|passwd|passphrase|secret"
)
_BEARER = r"(?i:\bbearer)[ \t]+"
_BASIC = r"(?i:\bauthorization\W{1,4}basic)[ \t]+"
_WANDB = r"(?i:wandb)[\w ,.'\"-]{0,20}[:=][ \t]*"
_URL_USER = r"://[^\s/:@]+:"
# A number, a placeholder, a variable or YAML's null is no secret.
_NOTHING = (
    r"(?!(?i:null|none|true|false|~|REDACTED|[-+]?[0-9][0-9.,_]*(?:e[-+]?[0-9]+)?)"
    r"(?![^\s\"',;}\])])|[<$*{\[])"
)
_WORD = r"[^\s#\"',;}\])]"
_CREDENTIAL = r"[A-Za-z0-9._~+/=-]"
_HAS_DIGIT = rf"(?={_CREDENTIAL}{{0,99}}[0-9])"
# What is kept, and the secret behind it.
_TOKENS = {
    r"(?<![A-Za-z0-9])": f"(?:{'|'.join(_FORMS)})(?![A-Za-z0-9])",
    rf"{_WANDB}[\"']?": r"[0-9a-f]{40}(?![0-9a-f])",
    _BEARER: rf"{_NOTHING}(?:{_HAS_DIGIT}{_CREDENTIAL}{{8,}}|{_CREDENTIAL}{{20,}})",
    _BASIC: rf"{_NOTHING}{_CREDENTIAL}{{8,}}",
    _URL_USER: r"[^\s/@:]+(?=@)",
}
# The same for the values of keys.
_VALUES = {
    rf"{_SECRET_NAME}\"": rf"{_NOTHING}[^\"\n]+(?=\")",
    rf"{_SECRET_NAME}'": rf"{_NOTHING}[^'\n]+(?=')",
    _SECRET_NAME: rf"{_NOTHING}{_WORD}{{3,}}(?: {_WORD}+)*",
    rf"{_TOKEN_NAME}[\"']?": (
        rf"{_NOTHING}(?:{_HAS_DIGIT}{_CREDENTIAL}{{6,}}|{_CREDENTIAL}{{20,}})"
    ),
}
_IN_MESSAGES, _IN_YAML = (
    [re.compile(f"({kept}){secret}") for kept, secret in table.items()]
    for table in (_TOKENS, _TOKENS | _VALUES)
)
_SECRET_VARIABLE = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD)$")


def redact(text: str, *, keys: bool = True) -> str:
    """The text without what looks like a token or a password.

    Works line by line. Redacted text stays the same, and YAML stays YAML.

    Args:
        keys: also the value of a key such as `password:`. Not in a message, which may
            begin with a path of this name.
    """
    for pattern in _IN_YAML if keys else _IN_MESSAGES:
        text = pattern.sub(rf"\1{REDACTED}", text)
    return text


def redact_values(value: Any) -> Any:
    """JSON data with `redact` applied to every text but the keys."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {key: redact_values(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [redact_values(inner) for inner in value]
    return value


def redact_environment(text: str) -> str:
    """A message without tokens and without the values of secret variables."""
    for name, value in os.environ.items():
        if value and _SECRET_VARIABLE.search(name):
            text = text.replace(value, REDACTED)
    return redact(text, keys=False)

"""Grammars that completions have to follow, as requests name them.

`parse_response_format` reads the forms of OpenAI (`response_format`) and of vLLM
(`structured_outputs`).
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Self

from ..config.messages import nearest
from ..errors import UserError
from .json_schema import check_schema, enforced
from .lark_grammar import check_lark

MAX_CHARACTERS = 1 << 18
"""Longer schemas and expressions take seconds to compile."""
ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True)
class Grammar:
    """What the text of a completion has to match from its first to its last character.

    Attributes:
        kind: how `source` is written. Lark grammars are those of llguidance.
        exit: a token that may come first, and what follows it is free; None = there is
            none.
        message: what a completion has to be, for models that write answers and calls
            in channels (Harmony). "call": the grammar has the header of the call.
            "answer": it is that of the final message; "either": calls are free.

    Raises:
        UserError: it is too long, or a Lark grammar with too long a chain of rules or
            with a JSON schema that is refused.
    """

    kind: Literal["json_schema", "regex", "lark"]
    source: str
    exit: int | None = None
    message: Literal["answer", "call", "either"] = "answer"

    def __post_init__(self):
        if len(self.source) > MAX_CHARACTERS:
            raise UserError(
                f"the grammar has {len(self.source):,} characters, and at most "
                f"{MAX_CHARACTERS:,} are supported"
            )
        if self.kind == "lark":
            check_lark(self.source, "grammar")

    @classmethod
    def json_schema(cls, schema: Any, place: str = "the JSON schema") -> Self:
        """JSON that is valid under a schema, given as an object or as its text.

        Raises:
            UserError: a keyword is not supported, which the error names.
        """
        try:
            schema = json.loads(schema) if isinstance(schema, str) else schema
            check_schema(schema, place)
            return cls("json_schema", json.dumps(enforced(schema), allow_nan=False))
        except (ValueError, TypeError, RecursionError) as error:
            raise UserError(f"not JSON: {error}", place=place) from error

    @classmethod
    def choice(cls, choices: Any, place: str = "choice") -> Self:
        """One of several texts.

        Raises:
            UserError: it is not a list of texts.
        """
        is_list = isinstance(choices, list) and choices
        if not is_list or not all(isinstance(each, str) and each for each in choices):
            raise UserError("expected a list of texts, none empty", place=place)
        return cls("lark", f"start: {' | '.join(map(json.dumps, choices))}")


def parse_response_format(value: Any, place: str = "response_format") -> Grammar | None:
    """The grammar of a `response_format` or of `structured_outputs`.

    Args:
        value: one of
            {"type": "text"},
            {"type": "json_object"}, optionally with "schema" as for llama.cpp,
            {"type": "json_schema", "json_schema": {"schema": ..., "name": ...}},
            {"type": "regex", "regex": ...}, also with "pattern" for "regex",
            {"json": ...}, {"regex": ...}, {"choice": [...]} or {"grammar": ...}.
        place: of the value, for errors.

    Returns:
        None if the text is free.

    Raises:
        UserError: a key or a value is wrong, which the error names. The compiler may
            refuse the grammar later.
    """
    if value is None:
        return None
    if not isinstance(value, dict):
        raise UserError("expected an object", place=place)
    value = {key: each for key, each in value.items() if each is not None}
    if "type" not in value:
        return _structured_outputs(value, place)
    kind = value.pop("type")
    if not isinstance(kind, str) or kind not in FORMATS:
        raise UserError(
            f"there is no type {json.dumps(kind)}",
            place=place,
            hint=nearest(kind, FORMATS),
        )
    return FORMATS[kind](value, place)


def _text(value: dict[str, Any], place: str) -> None:
    _refuse_keys(value, (), place)


def _json_object(value: dict[str, Any], place: str) -> Grammar:
    _refuse_keys(value, ("schema",), place)
    return Grammar.json_schema(value.get("schema", ANY_OBJECT), f"{place}.schema")


def _json_schema(value: dict[str, Any], place: str) -> Grammar:
    _refuse_keys(value, ("json_schema",), place)
    inner, place = value.get("json_schema"), f"{place}.json_schema"
    if not isinstance(inner, dict):
        raise UserError("expected an object with a schema", place=place)
    # The schema is always enforced, so "strict" changes nothing.
    _refuse_keys(inner, ("schema", "name", "description", "strict"), place)
    if "schema" not in inner:
        raise UserError("there is no schema", place=place)
    return Grammar.json_schema(inner["schema"], f"{place}.schema")


def _regex(value: dict[str, Any], place: str) -> Grammar:
    _refuse_keys(value, ("regex", "pattern"), place)
    if len(value) != 1:
        raise UserError("expected either regex or pattern", place=place)
    ((key, text),) = value.items()
    return _from_text("regex", text, f"{place}.{key}")


def _from_text(kind: Literal["regex", "lark"], text: Any, place: str) -> Grammar:
    if not isinstance(text, str):
        raise UserError("expected a text", place=place)
    return Grammar(kind, text)


def _structured_outputs(value: dict[str, Any], place: str) -> Grammar:
    _refuse_keys(value, tuple(CONSTRAINTS), place)
    if len(value) != 1:
        names = ", ".join(CONSTRAINTS)
        raise UserError(f"expected type, or one of {names}", place=place)
    ((key, source),) = value.items()
    return CONSTRAINTS[key](source, f"{place}.{key}")


def _refuse_keys(value: dict[str, Any], known: tuple[str, ...], place: str) -> None:
    for key in value:
        if key not in known:
            hint = nearest(key, known) if known else None
            raise UserError(f"unknown key '{key}'", place=place, hint=hint)


FORMATS: dict[str, Callable[[dict[str, Any], str], Grammar | None]] = {
    "text": _text,
    "json_object": _json_object,
    "json_schema": _json_schema,
    "regex": _regex,
}
CONSTRAINTS: dict[str, Callable[[Any, str], Grammar]] = {
    "json": Grammar.json_schema,
    "regex": lambda text, place: _from_text("regex", text, place),
    "choice": Grammar.choice,
    "grammar": lambda text, place: _from_text("lark", text, place),
}

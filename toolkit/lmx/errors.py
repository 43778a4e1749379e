"""Errors that a user can cause and fix, and the exit codes of the commands."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

USAGE = 2
FAILED = 1
WILL_NOT_FIT = 3
INTERRUPTED = 130
# Lines of a message, characters of a line, and characters of a value in a line that are
# shown: all of them may come from a file.
MAX_LINES, MAX_CHARACTERS, MAX_VALUE = 30, 300, 200


def shorten(text: str, characters: int = MAX_CHARACTERS) -> str:
    """The text with at most MAX_LINES lines of so many characters."""
    lines = text.split("\n", MAX_LINES)
    if len(lines) > MAX_LINES:
        lines[-1] = f"... and {lines[-1].count(chr(10)) + 1:,} more lines"
    return "\n".join(
        line if len(line) <= characters else f"{line[: characters - 4]} ..."
        for line in lines
    )


class UserError(Exception):
    """An error that the user can fix; printed without a traceback.

    Args:
        message: what is wrong, in one sentence.
        hint: how to fix it.
        place: the location, as ``file:line:col`` or a path.
        code: the exit code of the command (2 recipe or usage, 1 the run failed,
            3 does not fit in memory or on disk).
    """

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        place: str | None = None,
        code: int = USAGE,
    ):
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.place = place
        self.code = code

    def __str__(self) -> str:
        text = shorten(self.message)
        text = f"{shorten(self.place)}: {text}" if self.place else text
        return f"{text}\n    hint: {shorten(self.hint)}" if self.hint else text


class Interrupted(Exception):
    """The user stopped the run; everything needed to resume is on disk."""


def nan_predictions(model: str) -> UserError:
    """The error for a model, such as "the reference", that predicts NaN."""
    return UserError(
        f"{model}'s predictions are NaN",
        hint="its weights are damaged, or too large for its compute dtype",
        code=FAILED,
    )


# Rust libraries raise their panics as an exception of this module, not an Exception.
RUST_PANICS = "pyo3_runtime"
MAX_DETAIL_LINES = 4
# What MLX says of a path that is not UTF-8.
BAD_CAST = "std::bad_cast"
BAD_PATH = "MLX opens no path that is not UTF-8 text"
INTERNAL = (LookupError, ArithmeticError, TypeError, AttributeError, AssertionError)


@contextmanager
def library_errors(
    message: str, *, place: str | Path, hint: str | None = None
) -> Iterator[None]:
    """Turn whatever a library raises about a file of the user into a `UserError`.

    Args:
        message: what does not work; the library's own words follow it.
        place: the file or folder that the library reads.
    """
    try:
        yield
    except (UserError, Interrupted):
        raise
    # Not Exception: some model files of mlx-lm exit if a package is missing.
    except BaseException as error:
        is_library = isinstance(error, Exception | SystemExit)
        if not is_library and type(error).__module__ != RUST_PANICS:
            raise
        text = f"{message}: {error_detail(error)}"
        raise UserError(text, place=str(place), hint=hint) from error


def error_detail(error: BaseException) -> str:
    """The text of a foreign exception in one line of limited length."""
    if str(error) == BAD_CAST:
        return BAD_PATH
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    more = " ..." * (len(lines) > MAX_DETAIL_LINES)
    text = shorten(" ".join(lines[:MAX_DETAIL_LINES]) + more, MAX_VALUE)
    # The text of these speaks of the library's own code, or is a mere name.
    is_internal = isinstance(error, INTERNAL) or not isinstance(error, Exception)
    if is_internal or " " not in text:
        return f"{type(error).__name__}: {text}".removesuffix(": ")
    return text

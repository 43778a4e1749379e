"""`lmx generate`: a prompt in, streamed text on stdout, the timings on stderr."""

import argparse
import os
import sys
from pathlib import Path

from ..errors import INTERRUPTED, UserError
from . import options
from .options import add_arguments

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    """Generate; the exit code is 0, or 130 when interrupted.

    Raises:
        UserError: no such model or file, an impossible setting.
    """
    options.check(args)
    text = _text(args)
    try:
        return _run(args, text)
    except KeyboardInterrupt:
        sys.stdout.write("\n")
        return INTERRUPTED
    except BrokenPipeError:  # as in `| head`: nobody reads on
        # What is still buffered would raise once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _text(args: argparse.Namespace) -> str:
    """The prompt, or the rows; a chat has neither yet."""
    file = args.batch_file or args.prompt_file
    if not file:
        return args.prompt or ""
    if file == "-":
        return sys.stdin.read()
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the prompt cannot be read: {error}", place=file) from error


def _run(args: argparse.Namespace, text: str) -> int:
    from .. import allocator, blas

    allocator.keep()
    blas.use()
    from ..model.folder import served
    from ..model.load import load
    from . import rows
    from .talk import Talk, print_json

    sampling = options.sampling(args)
    parsed = rows.parse(text, place=args.batch_file) if args.batch_file else []
    loaded = load(
        served(args.model),
        revision=args.revision,
        trust_remote_code=args.trust_remote_code,
        adapter=args.adapter,
    )
    generator = options.open_generator(args, loaded)
    asked = {"max_tokens": args.max_tokens, "sampling": sampling, "stop": args.stop}
    if args.batch_file:
        asked |= {"system": args.system, "raw": args.raw}
        for found in rows.answer(generator, parsed, **asked):
            print_json(found)
        return 0
    talk = Talk(args, loaded, generator, asked)
    if args.chat:
        for line in _lines():
            talk.say(line)
    else:
        talk.say(text)
    talk.save()
    return 0


def _lines():
    """Lines of standard input up to /exit; on a terminal they are asked for."""
    while True:
        if sys.stdin.isatty():
            sys.stderr.write("> ")
            sys.stderr.flush()
        line = sys.stdin.readline()
        if not line or line.strip() == "/exit":
            return
        if line.strip():
            yield line.rstrip("\n")

"""`lmx generate`: text on stdout, statistics on stderr."""

import argparse
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from ..config.text_files import read_text
from ..errors import INTERRUPTED, UserError
from ..generation.prompt import utf8_text
from ..run import terminal
from .options import (
    OneValue,
    add_draft_arguments,
    add_kv_arguments,
    draft_argument_faults,
    kv_argument_faults,
    make_generator,
    refuse,
)
from .tensor_parallel import (
    add_tensor_parallel_argument,
    follow,
    join_processes,
    load_part,
)

if TYPE_CHECKING:
    from ..generation.generator import Generator
    from ..generation.grammar import Grammar
    from ..generation.outputs import GenerationResponse, GenerationResult
    from ..generation.sampling import Sampling
    from ..interfaces import Communicator
    from ..models.loader import LoadedModel

# Bytes of a prompt file, or of a file of requests.
MAX_INPUT = 1 << 30
SAMPLING = {
    "temperature": (float, 0.0, "0 = greedy (default)"),
    "top-p": (float, 1.0, "nucleus sampling; 1 = off"),
    "top-k": (int, 0, "0 = off"),
    "min-p": (float, 0.0, "0 = off"),
    "repetition-penalty": (float, 1.0, "divides logits of earlier tokens; 1 = off"),
    "presence-penalty": (float, 0.0, "subtracted from logits of earlier tokens"),
    "frequency-penalty": (float, 0.0, "the same, times the number of occurrences"),
    "seed": (int, 0, "default 0"),
}


def add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `lmx generate`."""
    add, switch = parser.add_argument, {"action": "store_true"}
    folder = {"metavar": "FOLDER", "type": lambda path: Path(os.path.expanduser(path))}
    add("model", metavar="MODEL", help="model folder, run directory or Hub id")
    source = parser.add_mutually_exclusive_group(required=True).add_argument
    source("-p", "--prompt", metavar="TEXT", help="the prompt")
    source("--prompt-file", metavar="FILE", help="- = standard input")
    source("--chat", **switch, help="one turn per line of standard input")
    source(
        "--input-file",
        metavar="FILE",
        help='JSONL requests {"prompt": ...} or {"messages": ...}, generated as a '
        "batch; a request may have max_tokens, temperature, seed and "
        "response_format",
    )
    add("--system", metavar="TEXT", help="system message")
    add("--max-tokens", type=int, default=256, metavar="N", help="default 256")
    add("--stop", action="append", default=[], metavar="TEXT", help="stop string")
    grammar = parser.add_mutually_exclusive_group().add_argument
    grammar(
        "--json-schema",
        metavar="FILE_OR_JSON",
        help="the text is JSON that is valid under this schema",
    )
    grammar("--regex", metavar="TEXT", help="the text matches this expression")
    about = "tokens of the chain of thought at most; with --json-schema or --regex, a "
    about += "model that can do without thinks only with it"
    add("--thinking-budget", type=int, metavar="N", help=about)
    for name, (kind, default, about) in SAMPLING.items():
        # mlx_lm's short form.
        flags = [f"--{name}", *["--temp"] * (name == "temperature")]
        add(*flags, type=kind, default=default, metavar="X", help=about)
    raw = "use the prompt as it is, without chat template"
    add("--ignore-chat-template", **switch, help=raw)
    adapter = "LoRA or DoRA adapter"
    add("--adapter-path", action=OneValue, metavar="FOLDER", help=adapter)
    add_draft_arguments(parser)
    add_tensor_parallel_argument(parser)
    add_kv_arguments(parser)
    add("--save-prompt-cache", **folder, help="save the KV cache at the end")
    add("--prompt-cache-file", **folder, help="continue from a saved KV cache")
    add("--json", **switch, help="print one JSON object instead of text")
    add("--revision", metavar="R", help="branch, tag or commit of a Hub id")
    add("--trust-remote-code", **switch, help="run the model's own Python")


def _keeps_cache(args: argparse.Namespace) -> bool:
    return bool(args.save_prompt_cache or args.prompt_cache_file)


def generate(args: argparse.Namespace) -> int:
    """Generate; the exit code is 0, or 130 after an interrupt.

    Raises:
        UserError: the model or a file does not exist, or an option is invalid.
    """
    raw = args.ignore_chat_template
    template = "{} needs the chat template: remove --ignore-chat-template"
    refuse(
        {
            template.format("--system"): raw and args.system is not None,
            template.format("--chat"): raw and args.chat,
            f"--max-tokens must be 0 or more, got {args.max_tokens}": (
                args.max_tokens < 0
            ),
            "--thinking-budget must be 0 or more": (args.thinking_budget or 0) < 0,
            "--check-parity does not work with --thinking-budget": (
                args.check_parity and args.thinking_budget is not None
            ),
            "--stop is empty": not all(args.stop),
            "--input-file does not work with prompt caches": (
                args.input_file and _keeps_cache(args)
            ),
            "--check-parity compares greedy decoding: remove --temperature": (
                args.check_parity and args.temperature != 0
            ),
            "--check-parity does not work with --json-schema and --regex": (
                args.check_parity and (args.json_schema or args.regex)
            ),
            **draft_argument_faults(args),
            **kv_argument_faults(args),
        }
    )
    ranks = join_processes(
        args, "check_parity", "save_prompt_cache", "prompt_cache_file"
    )
    try:
        with ranks.ends_together():
            return _generate(args, ranks)
    except KeyboardInterrupt:
        terminal.write_out("\n", tolerant=True)
        return INTERRUPTED


@contextmanager
def _standard_input() -> Iterator[TextIO]:
    if sys.stdin is None:
        raise UserError("the standard input is closed", hint="use --prompt")
    try:
        yield sys.stdin
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the prompt: {error}", place="-") from error


def _generate(args: argparse.Namespace, ranks: "Communicator") -> int:
    from ..generation.kv_cache.prefix import PrefixCache
    from ..generation.sampling import Sampling
    from .batch_file import answer_records, parse_requests

    text, requests, file = args.prompt or "", None, args.input_file or args.prompt_file
    if ranks.is_first:
        if file == "-":
            with _standard_input() as stream:
                text = stream.read()
        elif file:
            text = read_text(Path(file), "prompt", max_bytes=MAX_INPUT)
        if args.input_file:
            requests = parse_requests(text, place=args.input_file)
    names = (name.replace("-", "_") for name in SAMPLING)
    sampling = Sampling(**{name: getattr(args, name) for name in names})
    grammar = _grammar(args)
    loaded = load_part(args, ranks, args.adapter_path)
    # Another request may use the prefix.
    reuses = args.chat or _keeps_cache(args)
    prefixes = PrefixCache() if reuses else None
    generator = make_generator(args, loaded, ranks=ranks, prefix_cache=prefixes)
    if not ranks.is_first:
        return follow(generator.engine)
    try:
        if requests is not None:
            for response in answer_records(
                generator,
                requests,
                max_tokens=args.max_tokens,
                sampling=sampling,
                grammar=grammar,
                thinking_budget=args.thinking_budget,
                stop=args.stop,
                system=args.system,
                ignore_chat_template=args.ignore_chat_template,
            ):
                terminal.write_json(response)
            return 0
        session = InteractiveSession(args, loaded, generator, sampling, grammar)
        if args.chat:
            session.chat(_chat_lines())
        else:
            session.respond(text)
        session.save()
    finally:
        generator.engine.close()
    return 0


def _grammar(args: argparse.Namespace) -> "Grammar | None":
    """The grammar of `--json-schema` or `--regex`.

    Raises:
        UserError: the file cannot be read, or the schema is refused.
    """
    from ..generation.grammar import MAX_CHARACTERS, Grammar

    schema = args.json_schema
    if schema is None:
        return None if args.regex is None else Grammar("regex", args.regex)
    place = "--json-schema"
    if not schema.lstrip().startswith("{"):
        place = schema
        path = Path(os.path.expanduser(schema))
        schema = read_text(path, "JSON schema", max_bytes=4 * MAX_CHARACTERS)
    return Grammar.json_schema(schema, place)


def _chat_lines() -> Iterator[str]:
    """Lines of standard input up to /exit; a terminal gets an input prompt."""
    while True:
        with _standard_input() as stream:
            if stream.isatty():
                terminal.write_err("> ")
            line = stream.readline()
        if not line or line.strip() == "/exit":
            return
        if line.strip():
            yield line.rstrip("\n")


class _AnswerStopped(Exception):
    """The user ended an answer."""


class InteractiveSession:
    """Prompts in sequence: a single one, or the turns of a chat."""

    def __init__(
        self,
        args: argparse.Namespace,
        loaded: "LoadedModel",
        generator: "Generator",
        sampling: "Sampling",
        grammar: "Grammar | None" = None,
    ):
        self._args, self._loaded = args, loaded
        self._generator, self._sampling = generator, sampling
        self._grammar = grammar
        self._messages: list[dict[str, str]] = []
        self._output = terminal.StreamedText()
        if args.save_prompt_cache:
            from ..generation.kv_cache.prompt_cache import require_replaceable

            # Before the generation, which would be lost.
            require_replaceable(args.save_prompt_cache)
        if args.prompt_cache_file:
            from ..generation.kv_cache.prompt_cache import load_prompt_cache

            saved = load_prompt_cache(
                generator.engine.prefixes,
                args.prompt_cache_file,
                new_cache=generator.engine.new_cache,
                digest=self._digest(),
            )
            self._messages = saved.messages if args.chat else []
        if args.system is not None and not self._messages:
            self._messages = [{"role": "system", "content": utf8_text(args.system)}]

    def chat(self, turns: Iterator[str]) -> None:
        """Respond to every turn. What was said before an error or Ctrl-C is saved.

        Raises:
            UserError: of a turn, such as one that is too long.
        """
        complete = [*self._messages]
        try:
            for text in turns:
                self.respond(text)
                complete = [*self._messages]
        except (UserError, KeyboardInterrupt):
            self._messages = complete
            with suppress(UserError):
                self.save()
            raise

    def respond(self, text: str) -> None:
        """Generate the response to one prompt and print it."""
        from ..generation.thinking import thinks
        from ..run.signals import stop_requested

        if self._args.ignore_chat_template:
            prompt = self._generator.encode_text(text)
        else:
            self._messages.append({"role": "user", "content": utf8_text(text)})
            thinking = thinks(self._grammar, self._args.thinking_budget)
            prompt = self._generator.encode_chat(self._messages, thinking=thinking)
        texts: list[str] = []

        def on_token(response: "GenerationResponse") -> None:
            texts.append(response.text)
            if not self._args.json:
                self._output.write(response.text)
            if stopping():
                raise _AnswerStopped

        # Ctrl-C in a chat is noted and takes effect after the token, as an interrupted
        # forward pass would leave half a KV cache.
        noted = stop_requested(signal.SIGINT)
        try:
            with noted if self._args.chat else nullcontext(lambda: False) as stopping:
                result = self._generator.generate(
                    prompt,
                    max_tokens=self._args.max_tokens,
                    sampling=self._sampling,
                    grammar=self._grammar,
                    thinking_budget=self._args.thinking_budget,
                    stop=self._args.stop,
                    on_token=on_token,
                )
        except _AnswerStopped:
            # What was said stays in the conversation.
            result = None
            self._output.finish()
            terminal.write_out("\n")
        self._messages.append({"role": "assistant", "content": "".join(texts)})
        if result:
            self._report(prompt, result)

    def save(self) -> None:
        """Save the KV cache if `--save-prompt-cache` is given."""
        if not self._args.save_prompt_cache:
            return
        from ..generation.kv_cache.prompt_cache import save_prompt_cache

        engine = self._generator.engine
        if not any(engine.prefixes.nodes()):
            raise UserError("no prompt was processed, so there is no cache to save")
        save_prompt_cache(
            engine.prefixes,
            self._args.save_prompt_cache,
            kinds=engine.new_cache().kinds,
            digest=self._digest(),
            messages=self._messages if self._args.chat else [],
        )

    def _digest(self) -> str:
        from ..models.checkpoint import weights_digest

        digest, adapter = weights_digest(self._loaded.path), self._args.adapter_path
        if not adapter:
            return digest
        return f"{digest} {weights_digest(Path(os.path.expanduser(adapter)))}"

    def _report(self, prompt: list[int], result: "GenerationResult") -> None:
        import mlx.core as mx

        stats = {"peak_memory_gb": mx.get_peak_memory() / 1e9}
        if speculation := self._generator.speculative_stats:
            stats["speculation"] = speculation.to_json()
        if self._args.check_parity:
            from ..evaluation.parity import check_parity

            cache = self._generator.engine.new_cache()
            report = check_parity(cache, prompt, result.tokens, self._sampling)
            stats["parity"] = report.to_json()
        if self._args.json:
            terminal.write_json(asdict(result) | stats)
            return
        self._output.finish()
        terminal.write_out("\n")
        if not self._args.chat:
            terminal.write_err(summary(result, stats) + "\n")


def summary(result: "GenerationResult", stats: dict) -> str:
    """One or two lines of statistics."""
    parts = [f"{result.prompt_tokens} prompt tokens"]
    if result.ttft_ms is not None:
        parts.append(f"TTFT {result.ttft_ms:.0f} ms")
    for name in ("prefill", "decode"):
        rate = getattr(result, f"{name}_tokens_per_second")
        if rate is not None:
            parts.append(f"{name} {rate:.1f} tokens/s")
    speculation = stats.get("speculation", {})
    for name, form in {
        "acceptance_rate": "acceptance rate {:.0%}",
        "accepted_length": "accepted length {:.2f}",
        "speedup": "{:.2f}x the speed of standard decoding",
    }.items():
        if speculation.get(name) is not None:
            parts.append(form.format(speculation[name]))
    parts.append(f"peak memory {stats['peak_memory_gb']:.2f} GB")
    text = ", ".join(parts)
    return f"{text}\n{parity_line(stats['parity'])}" if "parity" in stats else text


def parity_line(report: dict) -> str:
    """The comparison with standard decoding as one sentence."""
    text = (
        f"{report['mismatches']} of {report['tokens']} tokens differ from standard "
        f"decoding ({report['mismatches_per_1000']:.2f} per 1,000)"
    )
    if first := report["first_mismatch"]:
        text += (
            f"; the first at {first['position']}: {first['token']} instead of "
            f"{first['expected']}, margin {first['margin']:.4f}"
        )
    return text + ("" if report["all_from_rounding"] else ": MORE THAN ROUNDING")

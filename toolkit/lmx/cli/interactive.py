"""Prompts answered one after the other on the terminal, and how that went."""

import argparse
import json
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

import mlx.core as mx

from ..convert.importers import load_model
from ..errors import UserError
from ..generation import prefix_cache
from ..generation.engine import Generator
from ..generation.outputs import GenerationResponse, GenerationResult
from ..generation.speculative.factory import draft_length_controller, proposer_factory
from ..generation.speculative.parity import check_parity
from ..models.checkpoint import quick_digest
from ..models.loader import LoadedModel


class InteractiveSession:
    """Prompts that are answered one after the other: one, or the turns of a chat."""

    def __init__(
        self,
        args: argparse.Namespace,
        loaded: LoadedModel,
        generator: Generator,
        asked: dict,
    ):
        self._args, self._loaded = args, loaded
        self._generator, self._asked = generator, asked
        self._messages: list[dict[str, str]] = []
        if args.prompt_cache_file:
            self._load()
        if args.system is not None and not self._messages:
            self._messages = [{"role": "system", "content": args.system}]

    def info(self, text: str) -> None:
        """Answer on stdout."""
        prompt = self._encode(text)
        if self._args.draft_model and not self._generator.make_proposer:
            self._find_draft(prompt)
        on_token = {} if self._args.json else {"on_token": write}
        generation = self._generator.generate(prompt, **self._asked, **on_token)
        self._messages.append({"role": "assistant", "content": generation.text})
        self._report(prompt, generation)

    def save(self) -> None:
        """Keep what was read, if that is asked for."""
        if not self._args.save_prompt_cache:
            return
        found = self._generator.prefix_cache.most_recent(self._generator.new_cache)
        if not found:
            raise UserError("nothing was read that could be saved")
        session, tokens = found
        prefix_cache.save_prompt_cache(
            session,
            Path(self._args.save_prompt_cache).expanduser(),
            digest=self._digest(),
            tokens=tokens,
            messages=self._messages if self._args.chat else [],
        )

    def _load(self) -> None:
        folder = Path(self._args.prompt_cache_file).expanduser()
        session = self._generator.new_cache()
        tokens = prefix_cache.load_prompt_cache(session, folder, digest=self._digest())
        self._generator.prefix_cache.insert(tokens, session)
        if self._args.chat:
            self._messages = prefix_cache.load_messages(folder)

    def _digest(self) -> str:
        adapter = self._args.adapter_path
        return quick_digest(
            self._loaded.path, Path(adapter).expanduser() if adapter else None
        )

    def _encode(self, text: str) -> list[int]:
        if self._args.ignore_chat_template:
            return self._generator.encode_text(text)
        self._messages.append({"role": "user", "content": text})
        return self._generator.encode_chat(self._messages)

    def _find_draft(self, prompt: list[int]) -> None:
        args, generator = self._args, self._generator
        generator.make_proposer = proposer_factory(
            args.draft_model,
            self._loaded,
            prompt,
            load_draft=partial(load_model, trust_remote_code=args.trust_remote_code),
        )
        if generator.make_proposer is None:
            sys.stderr.write("no draft pays here: decoding plainly\n")
        generator.draft_length = draft_length_controller(args.num_draft_tokens)

    def _report(self, prompt: list[int], generation: GenerationResult) -> None:
        facts = {"peak_memory_gb": mx.get_peak_memory() / 1e9}
        if speculation := self._generator.speculative_stats:
            facts["speculation"] = speculation.to_json()
        if self._args.check_parity:
            facts["parity"] = self._compared(prompt, generation)
        if self._args.json:
            print_json(asdict(generation) | facts)
            return
        sys.stdout.write("\n")
        sys.stdout.flush()
        if not self._args.chat:
            sys.stderr.write(summary(generation, facts) + "\n")

    def _compared(self, prompt: list[int], generation: GenerationResult) -> dict:
        session, sampling = self._generator.new_cache(), self._asked["sampling"]
        return check_parity(session, prompt, generation.tokens, sampling).to_json()


def summary(generation: GenerationResult, facts: dict) -> str:
    """What a person wants to know of an answer, in one line or two."""
    parts = [f"{generation.prompt_tokens} prompt tokens"]
    if generation.ttft_ms is not None:
        parts.append(f"first token after {generation.ttft_ms:.0f} ms")
    for name in ("prefill", "decode"):
        rate = getattr(generation, f"{name}_tokens_per_second")
        if rate is not None:
            parts.append(f"{name} {rate:.1f} tokens/s")
    speculation = facts.get("speculation", {})
    for name, form in {
        "acceptance_rate": "{:.0%} of the guesses stood",
        "accepted_length": "{:.2f} tokens a round",
        "speedup": "{:.2f}x the speed of plain decoding",
    }.items():
        if speculation.get(name) is not None:
            parts.append(form.format(speculation[name]))
    parts.append(f"peak memory {facts['peak_memory_gb']:.2f} GB")
    if "parity" not in facts:
        return ", ".join(parts)
    return ", ".join(parts) + "\n" + flips(facts["parity"])


def flips(found: dict) -> str:
    """A comparison with plain decoding as a sentence."""
    text = (
        f"{found['mismatches']} of {found['tokens']} tokens are not those of plain decoding "
        f"({found['mismatches_per_1000']:.2f} in 1,000)"
    )
    if first := found["first_mismatch"]:
        text += (
            f"; first at {first['position']}: {first['token']} instead of {first['expected']}, "
            f"margin {first['margin']:.4f}"
        )
    return text + ("" if found["all_from_rounding"] else ": MORE THAN ROUNDING")


def write(piece: GenerationResponse) -> None:
    """The text of a token on stdout, at once."""
    sys.stdout.write(piece.text)
    sys.stdout.flush()


def print_json(facts: dict) -> None:
    """One line on stdout, at once."""
    sys.stdout.write(json.dumps(facts, ensure_ascii=False) + "\n")
    sys.stdout.flush()

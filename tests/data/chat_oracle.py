"""What a server and its clients make of a chat template, without any code of lmx.

A server renders the messages before a turn with the generation prompt. The model must
go on so that the text becomes that of the messages with the turn, up to and with the
first stop token. `Oracle.pairs` lists the (prompt, target) pairs that are right for a
turn; `Cell.judge` compares them with examples that lmx made.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from itertools import groupby
from typing import Any

import jinja2
from chat_templates import Family
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

SWITCHES = ("enable_thinking", "thinking")
AFTER = {"role": "user", "content": "Go on."}
RESULT = {"role": "tool", "tool_call_id": "callid001", "name": "f", "content": "ok"}
REASONING = ("reasoning_content", "thinking", "reasoning")
TAGS = (
    ("<think>", "</think>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<|channel>thought", "<channel|>"),
)
OPENING, CLOSING = ("|".join(map(re.escape, tags)) for tags in zip(*TAGS, strict=True))
EMPTY_BLOCK = re.compile(rf"\s*(?:{OPENING})\s*(?:{CLOSING})")
OPENED_BLOCK = re.compile(rf"(\s*)(?:{OPENING})\s*((?:{CLOSING})\s*)?\Z")
BLOCK = re.compile(rf"\s*(?:{OPENING})")


@dataclass(frozen=True)
class Pair:
    """A prompt and the target after it.

    Attributes:
        missing: what the target lacks: content, reasoning or calls.
        verbatim: the target has the reasoning of a content that the template drops.
    """

    prompt: str
    target: str
    missing: frozenset[str] = frozenset()
    verbatim: bool = False


class _Generation(Extension):
    """The markers of what the assistant writes, without a meaning here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(["name:endgeneration"], drop_needle=True)


def _raise(message):
    raise jinja2.TemplateError(message)


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def compiled(template: str) -> jinja2.Template:
    """A template with the filters and globals of transformers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda text: datetime.now().strftime(text)
    return environment.from_string(template)


def served(row: dict) -> list[dict]:
    """The messages of a row as a server gives them to a template."""
    messages = []
    for message in row["messages"]:
        message = {key: value for key, value in message.items() if value is not None}
        message["content"] = message.get("content", "")
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [_with_arguments(call) for call in calls]
        reasons = [message[key] for key in REASONING if key in message]
        if reasons:
            message = {
                "thinking": reasons[0],
                "reasoning_content": reasons[0],
            } | message
        messages.append(message)
    return messages


def _with_arguments(call: dict) -> dict:
    function = call["function"]
    arguments = function["arguments"]
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    return call | {"function": function | {"arguments": arguments}}


def split_reasoning(message: dict) -> tuple[str, str, bool]:
    """(reasoning, content, whether the reasoning stands within the content)."""
    content, reasoning = message["content"], message.get("reasoning_content", "")
    if match := re.match(r"\s*<think>(.*?)</think>", content, re.DOTALL):
        return match[1].strip(), content[match.end() :].strip(), True
    return reasoning.strip(), content.strip(), False


def is_trained(message: dict) -> bool:
    reasoning, content, _ = split_reasoning(message)
    filled = reasoning or content or message.get("tool_calls")
    is_left_out = message.get("weight") == 0
    return message["role"] == "assistant" and bool(filled) and not is_left_out


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _leaves(item)
    else:
        yield value


def _has_value(text: str, value: Any) -> bool:
    """Whether a text has a value in the writing of JSON or Python."""
    writings = {str(value), repr(value), json.dumps(value)}
    if isinstance(value, str):
        writings |= {json.dumps(value, ensure_ascii=a)[1:-1] for a in (False, True)}
    return any(writing in text for writing in writings)


def missing_parts(message: dict, target: str) -> frozenset[str]:
    """The parts of a turn that do not occur in its target."""
    reasoning, content, is_inline = split_reasoning(message)
    missing = set()
    if content not in target:
        missing.add("content")
    if reasoning not in target:
        missing.add("content" if is_inline else "reasoning")
    for call in message.get("tool_calls", []):
        values = [call["function"]["name"], *_leaves(call["function"]["arguments"])]
        if not all(_has_value(target, value) for value in values):
            missing.add("calls")
    return frozenset(missing)


class Oracle:
    """The texts that a server and its clients make with one template."""

    def __init__(self, family: Family):
        self.stops = family.stops.split()
        self._template = compiled(family.template)
        self._specials = {"eos_token": self.stops[0]}
        if family.bos:
            self._specials["bos_token"] = family.bos
        switches = [s for s in SWITCHES if re.search(rf"\b{s}\b", family.template)]
        self.options = [{}, *({s: on} for s in switches for on in (False, True))]

    def text(
        self, messages: Sequence[dict], tools, options, prompt=False
    ) -> str | None:
        """What the template prints; None if it fails."""
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=tools,
                documents=None,
                add_generation_prompt=prompt,
                **self._specials,
                **options,
            )
        # A template is a program, with errors of all kinds.
        except Exception:
            return None

    def pairs(self, messages: list[dict], tools, index: int) -> list[Pair]:
        """What a server sends for turn `index`, and what it expects; first the exact
        pairs of all options, then those with a cut prompt."""
        turn, exact, cut, verbatim = messages[index], [], [], []
        has_exact = False
        for options in self.options:
            prompt = self.text(messages[:index], tools, options, prompt=True)
            whole = self.text(messages[: index + 1], tools, options)
            # The first token of a text has no prompt, and cannot be trained.
            if not prompt or whole is None:
                continue
            if whole.startswith(prompt):
                borders = self._borders(messages, tools, index, options, prompt)
                exact += [(options, border, whole) for border in borders]
                # Thinking that is switched on is a way to ask, but not a usual one.
                has_exact |= True not in options.values()
                border = len(prompt)
            elif (border := self._before_block(prompt, whole)) is not None:
                cut.append((options, border, whole))
            if border is not None:
                verbatim += self._verbatim(turn, prompt, whole, border)
        found = [
            Pair(whole[:border], target, missing_parts(turn, target))
            for options, border, whole in exact + ([] if has_exact else cut)
            for target in self._ended(messages, tools, index, options, border, whole)
        ]
        is_needed = not has_exact or all(pair.missing for pair in found)
        return found + (verbatim if is_needed else [])

    def _borders(self, messages, tools, index, options, prompt: str) -> list[int]:
        """Where the target may begin.

        After an empty block that the template inserts, and before, within or after the
        template's own whitespace behind it. The prompt may have opened the block.
        """
        turn, start = messages[index], len(prompt)
        reasoning, _, is_inline = split_reasoning(turn)
        if reasoning and not is_inline:
            return [start]
        # The whitespace of the content is no part of the border.
        bare = turn | {"content": turn["content"].lstrip()}
        whole = self.text([*messages[:index], bare], tools, options) or ""
        opened = OPENED_BLOCK.search(prompt)
        is_open = opened is not None and not opened[2]
        block = EMPTY_BLOCK.match(whole, opened.start() if is_open else start)
        if not block:
            return [start]
        space = re.compile(r"\s*").match(whole, block.end())
        borders = list(range(block.end(), space.end() + 1))
        # Also before a block that the template inserts before one of the content.
        return [start] * (is_open or is_inline) + borders

    def _before_block(self, prompt: str, whole: str) -> int | None:
        """Where the prompt has a block at its end that the rendered turn lacks."""
        block = OPENED_BLOCK.search(prompt)
        if not block:
            return None
        for border in range(block.end(1), block.start(1) - 1, -1):
            if whole.startswith(prompt[:border]):
                return None if BLOCK.match(whole, border) else border
        return None

    def _verbatim(self, turn: dict, prompt: str, whole: str, border: int) -> list[Pair]:
        """The content as it is, after a prompt that opens its block of reasoning."""
        _, answer, is_inline = split_reasoning(turn)
        opened = OPENED_BLOCK.search(prompt)
        if not (is_inline and opened) or opened[2]:
            return []
        written = turn["content"].split("<think>", 1)[1].rstrip()
        texts = {written, written.lstrip("\n"), written.lstrip()}
        pairs = []
        for place in re.finditer(re.escape(answer), whole[border:]):
            rest = whole[border + place.end() :]
            stop = self._first_stop(rest)
            end_of_turn = self.stops[0] if stop is None else rest[:stop]
            pairs += [Pair(prompt, t + end_of_turn, verbatim=True) for t in texts]
        return pairs

    def _ended(self, messages, tools, index, options, border, whole) -> set[str]:
        """The target from `border` on, up to and with a stop token."""
        answer = whole[border:]
        stop = self._first_stop(answer)
        if stop is not None:
            return {answer[:stop]}
        before = messages[: index + 1]
        ends = self._following(before, AFTER, tools, options, whole) or {self.stops[0]}
        # What follows in the data, or would follow, is right in any case.
        others = messages[index + 1 : index + 2]
        others += [RESULT] * bool(messages[index].get("tool_calls"))
        for message in others:
            ends |= self._following(before, message, tools, options, whole)
        return {answer + end for end in ends}

    def _following(self, before, message, tools, options, whole) -> set[str]:
        """The stop token that follows the text of `before` when `message` follows."""
        longer = self.text([*before, message], tools, options) or ""
        rest = longer[len(whole) :] if longer.startswith(whole) else ""
        return {stop for stop in self.stops if rest.startswith(stop)}

    def _first_stop(self, text: str) -> int | None:
        """The end of the first stop token."""
        places = [(text.find(stop), len(stop)) for stop in self.stops if stop in text]
        return sum(min(places)) if places else None

    def cell(self, row: dict) -> "Cell":
        """What is right for the turns of a row that are trained."""
        messages, tools, pairs, rejected = served(row), row.get("tools"), {}, set()
        for index, message in enumerate(messages):
            if is_trained(message):
                pairs[index] = self.pairs(messages, tools, index)
                texts = [
                    self.text(messages[: index + 1], tools, o) for o in self.options
                ]
                rejected |= {index} if None in texts else set()
        return Cell(pairs, frozenset(rejected), tuple(self.stops))

    def _rejects(self, messages, tools) -> bool:
        return any(
            self.text(messages, tools, options) is None for options in self.options
        )


@dataclass(frozen=True)
class Cell:
    """A template and a chat.

    Attributes:
        pairs: those of every trained turn, also the incomplete ones.
        rejected: the turns for which the template raises an exception.
    """

    pairs: dict[int, list[Pair]]
    rejected: frozenset[int]
    stops: tuple[str, ...]

    @property
    def complete(self) -> dict[int, list[Pair]]:
        return {
            index: [pair for pair in pairs if not pair.missing]
            for index, pairs in self.pairs.items()
        }

    @property
    def reasons(self) -> set[str]:
        """Why the chat must be refused; none if it can be trained: content, reasoning,
        calls, raises, changes, first."""
        reasons = set()
        for index, complete in self.complete.items():
            if complete:
                continue
            reasons |= {part for pair in self.pairs[index] for part in pair.missing}
            if index in self.rejected:
                reasons.add("raises")
            elif not self.pairs[index]:
                reasons.add("changes")
            if index == 0:
                reasons.add("first")
        return reasons

    @property
    def may_be_refused(self) -> bool:
        """No request begins with an answer, and a reasoning that the template drops
        from the content is only trained in a text that no template prints."""
        verbatim = [all(p.verbatim for p in pairs) for pairs in self.complete.values()]
        return bool(self.reasons) or 0 in self.pairs or any(verbatim)

    def judge(self, examples: Sequence[Any], tokenizer) -> str:
        """What is wrong with the examples; "" if every trained turn occurs once in
        them, as it is served, and nothing else is trained."""
        waiting = self.complete
        ids = {tokenizer.convert_tokens_to_ids(stop) for stop in self.stops}
        for example in examples:
            runs, tokens = list(_runs(example, ids)), example.tokens.tolist()
            if not runs:
                return "an example has no trained turn"
            start = runs[0][0]
            prompt = tokenizer.decode(tokens[:start])
            if tokenizer.encode(prompt, add_special_tokens=False) != tokens[:start]:
                return f"other tokens than those of the prompt {prompt!r}"
            for start, end in runs:
                found = (
                    tokenizer.decode(tokens[:start]),
                    tokenizer.decode(tokens[start:end]),
                )
                turn = next(
                    (i for i, pairs in waiting.items() if _has(pairs, found)), None
                )
                if turn is None:
                    return "silent:\n  prompt {!r}\n  target {!r}".format(*found)
                del waiting[turn]
        if waiting:
            index, pairs = next(iter(waiting.items()))
            return f"untrained: turns {[*waiting]}; of turn {index}: {pairs[:1]}"
        return ""


def _has(pairs: list[Pair], found: tuple[str, str]) -> bool:
    return any((pair.prompt, pair.target) == found for pair in pairs)


def _runs(example: Any, stops: set[int]) -> Iterator[tuple[int, int]]:
    """The trained runs of an example, which also end after a stop token."""
    pairs = zip(example.tokens.tolist(), example.mask.tolist(), strict=True)
    turn, turns = 0, []
    for token, trained in pairs:
        turns.append(turn if trained else -1)
        turn += not trained or token in stops
    start = 0
    for turn, members in groupby(turns):
        end = start + len(list(members))
        if turn >= 0:
            yield start, end
        start = end


@cache
def _base_tokenizer() -> str:
    """A byte-level tokenizer with some merges, as JSON."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = "user assistant system the name of tool\n\n Ahoy, I am: Echo ping  \n"
    tokenizer.train_from_iterator([text] * 9, trainer)
    return tokenizer.to_str()


def build_tokenizer(family: Family):
    """A tokenizer with the tokens and the template of a family, in mlx-lm's wrapper."""
    from mlx_lm.tokenizer_utils import TokenizerWrapper
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerFast

    tokenizer, stops = Tokenizer.from_str(_base_tokenizer()), family.stops.split()
    added = [AddedToken(token, normalized=False) for token in family.tokens.split()]
    tokenizer.add_special_tokens(added)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=stops[0],
        bos_token=family.bos,
        chat_template=family.template,
        clean_up_tokenization_spaces=False,
    )
    return TokenizerWrapper(fast, eos_token_ids=fast.convert_tokens_to_ids(stops))

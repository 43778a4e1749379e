"""What a server and its clients make of a chat template, without any code of lmx.

A server renders the messages before a turn with the generation prompt: by default with
a chain of thought if the tokenizer has its tags, and as a request switches it. The
model must go on so that the text becomes that of the messages with the turn, up to and
with the first stop token. `Oracle.pairs` lists the (prompt, target) pairs that are
right for a turn; `Cell.judge` compares them with examples that lmx made.
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
EMPTY_BLOCK = re.compile(rf"\s*(?:(?:{OPENING})\s*)?(?:{CLOSING})")
OPENED = re.compile(rf"({OPENING})(\s*)\Z")
CLOSED = re.compile(rf"(?:(?:{OPENING})\s*)?(?:{CLOSING})\s*\Z")
THOUGHT = "So be it."


@dataclass(frozen=True)
class Pair:
    """A prompt and the target after it.

    Attributes:
        missing: what the target lacks: content, reasoning or calls.
    """

    prompt: str
    target: str
    missing: frozenset[str] = frozenset()


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
        self.switches = [s for s in SWITCHES if re.search(rf"\b{s}\b", family.template)]
        thinks = bool({"<think>", "<|channel>"} & {*family.tokens.split()})
        self.default = {"enable_thinking": thinks}

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

    def requests(self, turn: dict) -> list[dict]:
        """The options with which a server may be asked for a turn."""
        thinks = bool(split_reasoning(turn)[0])
        return [self.default, *(self.default | {s: thinks} for s in self.switches)]

    def pairs(self, messages: list[dict], tools, index: int) -> list[Pair]:
        """What a server sends for turn `index`, and what it expects. An empty block of
        the template is written by the model only if no prompt has it."""
        turn, found = messages[index], []
        for options in self.requests(turn):
            prompt = self.text(messages[:index], tools, options, prompt=True)
            # The first token of a text has no prompt, and cannot be trained.
            for rest in self._rests(messages, tools, index, options) if prompt else ():
                for target in self._ended(messages, tools, index, options, rest):
                    pair = Pair(prompt, target, missing_parts(turn, target))
                    if not OPENED.search(prompt) or re.search(CLOSING, target):
                        found.append(pair)
        complete = [pair for pair in found if not pair.missing]
        alone = [pair for pair in complete if not EMPTY_BLOCK.match(pair.target)]
        others = [pair for pair in found if pair.missing]
        return (alone or complete) + others

    def _rests(self, messages, tools, index, options) -> Iterator[str]:
        """What may follow the prompt, up to where the template stops."""
        turn, before = messages[index], messages[:index]
        prompt = self.text(before, tools, options, prompt=True)
        reasoning, answer, is_inline = split_reasoning(turn)

        def rest(message: dict, start: str) -> str | None:
            text = self.text([*before, message], tools, options)
            is_start = text is not None and text.startswith(start)
            return text[len(start) :] if is_start else None

        def bare(message: dict, block: re.Match) -> str | None:
            """Without the block of the prompt."""
            before_block = prompt[: block.start()]
            for start in (before_block, before_block.rstrip()):
                text = rest(message, start)
                if text is not None and not re.match(rf"\s*(?:{OPENING})", text):
                    return re.sub(rf"^\s*(?:{CLOSING})", "", text)
            return None

        exact = rest(turn, prompt)
        if exact is not None:
            yield exact
        if opened := OPENED.search(prompt):
            space, closing = opened[2], dict(TAGS)[opened[1]]
            plain = {k: v for k, v in turn.items() if k not in REASONING}
            if is_inline:
                plain["content"] = answer
                written = turn["content"].split("<think>", 1)[-1]
                written = written[: written.rindex("</think>") + len("</think>")]
                spaces = turn["content"].split("</think>")[-1]
                written += spaces[: len(spaces) - len(spaces.lstrip())]
                thoughts = {written, written.lstrip()}
            else:
                thoughts = {reasoning + space + closing + 2 * space}
            shown = {key: THOUGHT for key in ("reasoning_content", "thinking")}
            closed = rest(turn | shown, prompt) or ""
            if not reasoning and THOUGHT in closed:
                yield closed.replace(THOUGHT, "", 1)
            elif (text := bare(plain, opened)) is not None:
                yield from (thought + text for thought in thoughts)
        elif not reasoning and exact is None and (closed := CLOSED.search(prompt)):
            yield from filter(None, [bare(turn, closed)])
        system = before[0]["content"] if before[0]["role"] == "system" else ""
        if exact is None and system and system in prompt:
            # The template moves the system message.
            head, tail = prompt.split(system, 1)
            if (text := rest(turn, head + tail.lstrip("\n"))) is not None:
                yield text

    def lacking(self, messages: list[dict], tools, index: int) -> set[str]:
        """What the prompt of a turn lacks: a message, or the tools."""
        lacking = set()
        text = self.text(messages[:index], tools, self.default, prompt=True) or ""
        names = [tool["function"]["name"] for tool in tools or ()]
        if not all(name in text for name in names):
            lacking.add("tools")
        for message in messages[:index]:
            is_written = _has_value(text, message["content"].strip())
            if message["role"] != "assistant" and not is_written:
                lacking.add("message")
        return lacking

    def _ended(self, messages, tools, index, options, answer: str) -> set[str]:
        """A target up to and with a stop token."""
        stop = self._first_stop(answer)
        if stop is not None:
            return {answer[:stop]}
        before = messages[: index + 1]
        whole = self.text(before, tools, options)
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
        lacking = set()
        for index, message in enumerate(messages):
            if is_trained(message) and index:
                pairs[index] = self.pairs(messages, tools, index)
                lacking |= self.lacking(messages, tools, index)
                texts = [
                    self.text(messages[: index + 1], tools, options)
                    for options in self.requests(message)
                ]
                rejected |= {index} if None in texts else set()
            elif is_trained(message):
                pairs[index] = []
        stops = tuple(self.stops)
        return Cell(pairs, frozenset(rejected), stops, frozenset(lacking))


@dataclass(frozen=True)
class Cell:
    """A template and a chat.

    Attributes:
        pairs: those of every trained turn, also the incomplete ones.
        rejected: the turns for which the template raises an exception.
        lacking: what the prompts lack.
    """

    pairs: dict[int, list[Pair]]
    rejected: frozenset[int]
    stops: tuple[str, ...]
    lacking: frozenset[str]

    @property
    def complete(self) -> dict[int, list[Pair]]:
        return {
            index: [pair for pair in pairs if not pair.missing]
            for index, pairs in self.pairs.items()
        }

    @property
    def reasons(self) -> set[str]:
        """Why the chat must be refused; none if it can be trained: content, reasoning,
        calls, raises, changes, first, message, tools."""
        reasons = set(self.lacking)
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

    def judge(self, examples: Sequence[Any], tokenizer) -> str:
        """What is wrong with the examples; "" if every trained turn occurs once in
        them, as it is served, and nothing else is trained."""
        waiting = self.complete
        for example in examples:
            runs, tokens = runs_of(example, tokenizer), example.tokens.tolist()
            if not runs:
                return "an example has no trained turn"
            for start, end in runs:
                prompt = tokenizer.decode(tokens[:start])
                if tokenizer.encode(prompt, add_special_tokens=False) != tokens[:start]:
                    return f"other tokens than those of the prompt {prompt!r}"
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


def runs_of(example: Any, tokenizer) -> list[tuple[int, int]]:
    """The trained runs of an example, which also end after a stop token."""
    return list(_runs(example, tokenizer.eos_token_ids))


def _runs(example: Any, stops: set[int]) -> Iterator[tuple[int, int]]:
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
    ids = fast.convert_tokens_to_ids(stops)
    # Without a format of calls, a server refuses tools.
    calls = {"tool_call_start": "<tool_call>", "tool_call_end": "</tool_call>"}
    return TokenizerWrapper(fast, eos_token_ids=ids, **calls)

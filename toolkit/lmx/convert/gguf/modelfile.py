"""The Modelfile with which Ollama imports a GGUF file: prompt template and stop texts.

Ollama's templates are Go's. The parts of the chat template (what stands before and
after a message of each role) are found by rendering probes. The converted template is
used only if it renders whole conversations as the chat template does.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

SYSTEM, USER, ANSWER, QUESTION = "Ⓢ1", "Ⓤ1", "Ⓐ1", "Ⓤ2"
ROLES = {SYSTEM: "system", USER: "user", ANSWER: "assistant", QUESTION: "user"}
# Conversations that a model answers.
CONVERSATIONS = (
    (USER,),
    (SYSTEM, USER),
    (USER, ANSWER, QUESTION),
    (SYSTEM, USER, ANSWER, QUESTION),
    (SYSTEM, USER, ANSWER, QUESTION, ANSWER, USER),
)
# A text with one of these would end Go's text, or the template in the Modelfile.
MARKS = ("{{", "}}", '"""')

Render = Callable[..., str]


@dataclass(frozen=True)
class ChatParts:
    """The fixed texts of a chat template.

    Attributes:
        no_system: before a conversation without a system message.
        before: before the content of a message, by role.
        after: after the content, by role.
        generation: after the last message, before the answer.
    """

    no_system: str
    before: dict[str, str]
    after: dict[str, str]
    generation: str

    def render(self, contents: tuple[str, ...]) -> str:
        """The prompt of a conversation of probes that ends with a question."""
        text = "" if SYSTEM in contents else self.no_system
        for content in contents:
            role = ROLES[content]
            text += self.before[role] + content + self.after[role]
        return text + self.generation

    def to_go(self) -> str:
        """The template in Go's language; `$last` is the last message."""
        last = "{{ $last := eq (len (slice $.Messages $i)) 1 }}"
        text = f"{{{{ if not .System }}}}{self.no_system}{{{{ end }}}}"
        text += f"{{{{ range $i, $_ := .Messages }}}}{last}"
        word = "if"
        for role, after in self.after.items():
            text += f'{{{{ {word} eq .Role "{role}" }}}}{self.before[role]}'
            text += "{{ .Content }}"
            if role == "user":
                text += f"{after}{{{{ if $last }}}}{self.generation}{{{{ end }}}}"
            elif role == "assistant":
                text += f"{{{{ if not $last }}}}{after}{{{{ end }}}}"
            else:
                text += after
            word = "else if"
        return text + "{{ end }}{{ end }}"


def modelfile(file: str, tokenizer: Any) -> str:
    """The text of a Modelfile.

    Args:
        file: name of the GGUF file beside it.
        tokenizer: mlx-lm's TokenizerWrapper.
    """
    from jinja2 import TemplateError

    # The metadata of the file says so too, and Ollama then adds a BOS.
    adds_bos = tokenizer.encode("a")[0] == tokenizer.bos_token_id

    def render(contents: tuple[str, ...], generation: bool = False) -> str:
        messages = [{"role": ROLES[text], "content": text} for text in contents]
        if "strftime_now" in (tokenizer.chat_template or ""):
            raise ValueError("the template writes the date")
        try:
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=generation
            )
        except (TemplateError, TypeError) as error:
            raise ValueError(str(error)) from error
        return text.removeprefix(tokenizer.bos_token or "") if adds_bos else text

    lines = [f"FROM ./{file}"]
    if tokenizer.has_chat_template:
        if parts := chat_parts(render):
            lines.append(f'TEMPLATE """{parts.to_go()}"""')
        else:
            lines.append("# The chat template in the GGUF file has no equivalent here.")
    ends = tokenizer.convert_ids_to_tokens(sorted(tokenizer.eos_token_ids))
    texts = [text for text in ends if text and '"' not in text]
    lines += [f'PARAMETER stop "{text}"' for text in texts]
    return "\n".join(lines) + "\n"


def chat_parts(render: Render) -> ChatParts | None:
    """The parts of a chat template; None if it is more than such parts.

    Args:
        render: the text of probes; with `generation=True` as a prompt.
    """
    try:
        # The texts between the probes of three conversations.
        start, ending = _between(render((USER,)), USER)
        prompt = render((USER,), generation=True)
        with_system = render((SYSTEM, USER))
        before_system, system_to_user, _ = _between(with_system, SYSTEM, USER)
        chat = render((USER, ANSWER, QUESTION))
        _, to_answer, to_question, _ = _between(chat, USER, ANSWER, QUESTION)
        ends = (text[::-1] for text in (start, system_to_user, to_question))
        columns = zip(*ends, strict=False)
        common = takewhile(lambda letters: len({*letters}) == 1, columns)
        before_user = "".join(letters[0] for letters in common)[::-1]
        parts = ChatParts(
            no_system=start.removesuffix(before_user),
            before={
                "system": before_system,
                "user": before_user,
                "assistant": to_answer.removeprefix(ending),
            },
            after={
                "system": system_to_user.removesuffix(before_user),
                "user": ending,
                "assistant": to_question.removesuffix(before_user),
            },
            generation=prompt.removeprefix(start + USER + ending),
        )
        same = all(
            parts.render(contents) == render(contents, generation=True)
            for contents in CONVERSATIONS
        )
    except ValueError:  # a template that rejects a role, or leaves a message out
        return None
    texts = [parts.no_system, parts.generation]
    texts += [*parts.before.values(), *parts.after.values()]
    has_mark = any(mark in text for text in texts for mark in MARKS)
    return parts if same and not has_mark else None


def _between(text: str, *probes: str) -> list[str]:
    """The texts around the probes, in order.

    Raises:
        ValueError: a probe is missing.
    """
    parts = []
    for probe in probes:
        before, separator, text = text.partition(probe)
        if not separator:
            raise ValueError(f"the template leaves out {ROLES[probe]} messages")
        parts.append(before)
    return [*parts, text]

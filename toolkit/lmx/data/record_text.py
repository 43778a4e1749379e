"""Records as text, with the spans of the trained completions."""

from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import UserError
from .chat.completeness import REASONING, TAG, missing_part
from .chat.messages import is_completion
from .chat.rendering import ChatTemplate, NoTrainableTokens
from .chat.sequences import Chat, Span
from .chat.windows import find_sequences
from .record_formats import DataRecord


@dataclass(frozen=True)
class RecordText:
    """A training sequence as text.

    Attributes:
        spans: (start, end) of the trained completions in characters, in order.
        bare: the text has no chat template, so BOS and EOS must be added.
        add_eos: the last completion ends without a stop token, so EOS must be added.
    """

    record: DataRecord
    text: str
    spans: tuple[Span, ...]
    bare: bool = False
    add_eos: bool = False

    def segments(self) -> Iterator[tuple[str, bool]]:
        """The parts of the text, and whether each is a completion."""
        last = 0
        for start, end in self.spans:
            yield self.text[last:start], False
            yield self.text[start:end], True
            last = end
        yield self.text[last:], False


def texts_of(
    record: DataRecord, template: ChatTemplate, *, everything: bool = False
) -> list[RecordText]:
    """The training sequences of a record: several for a chat whose turns do not nest.

    Args:
        everything: treat the whole text as one completion.

    Raises:
        NoTrainableTokens: a turn cannot be trained as it is served, or the template
            leaves out a part of it.
        UserError: the record is a chat and the tokenizer has no chat template.
    """
    if record.text is not None:
        return [RecordText(record, record.text, ((0, len(record.text)),), bare=True)]
    if record.messages is not None:
        if not template.exists:
            raise UserError(
                "chat examples need a chat template, which this model's tokenizer "
                "lacks",
                hint="use an instruct model, or examples with prompt and completion, "
                "and without system",
                place=record.where,
            )
        return _chat(record, [*record.messages], template, everything)
    if template.exists:
        user = {"role": "user", "content": record.prompt}
        assistant = {"role": "assistant", "content": record.completion}
        return _chat(record, [user, assistant], template, everything)
    text = record.prompt + record.completion
    return [RecordText(record, text, ((len(record.prompt), len(text)),), bare=True)]


def _chat(
    record: DataRecord, messages: list[dict], template: ChatTemplate, everything: bool
) -> list[RecordText]:
    chat = Chat(template, messages, record.tools, record.chat_template_kwargs or {})
    if everything:
        return [_whole(record, chat)]
    turns = [
        index
        for index, message in enumerate(messages)
        if index >= record.prompt_messages and is_completion(message)
    ]
    del messages[turns[-1] + 1 :]
    return [
        RecordText(record, sequence.text, sequence.spans, add_eos=sequence.add_eos)
        for sequence in find_sequences(chat, turns)
    ]


def _whole(record: DataRecord, chat: Chat) -> RecordText:
    """The text of all messages. Templates may drop reasoning from earlier turns, as a
    server does."""
    text = chat.render(len(chat.messages))
    for message in filter(is_completion, chat.messages):
        answer = {k: v for k, v in message.items() if k not in REASONING}
        answer["content"] = TAG.split(answer["content"])[-1]
        if missing := missing_part(answer, text):
            raise NoTrainableTokens(f"the chat template does not write its {missing}")
    return RecordText(record, text, ((0, len(text)),))

"""System messages where a chat template takes them: most take one, at the start.

Training and serving use the same function, so that a turn is trained as it is served.
"""

from dataclasses import replace

from .rendering import NoTrainableTokens
from .turns import NEXT, Chat


def merge_system_messages(chat: Chat) -> list[dict]:
    """The messages of a chat, with those of the system that its template takes.

    If it does not take several at the start, they become one, with blank lines. If it
    does not take later ones, they join the user's message that follows, else the one
    before, else become one.
    """
    messages = [*chat.messages]
    roles = [message["role"] for message in messages]
    first = next((n for n, role in enumerate(roles) if role != "system"), len(roles))
    if first > 1 and not _takes(chat, [*messages[:first], NEXT]):
        messages[:first] = [_with_contents(messages[0], messages[:first])]
        first = 1
    if "system" in roles[first:] and not _takes(chat, messages):
        messages = [*messages[:first], *_folded(messages[first:])]
    return messages


def _takes(chat: Chat, messages: list[dict]) -> bool:
    """Whether the template writes all of these messages."""
    options = {"add_generation_prompt": messages[-1]["role"] != "assistant"}
    try:
        chat.render_messages(messages, **options)
    except NoTrainableTokens:
        return False
    return not replace(chat, messages=messages).missing_from(len(messages), **options)


def _folded(messages: list[dict]) -> list[dict]:
    """Messages without those of the system, whose text is the user's."""
    folded: list[dict] = []
    waiting: list[dict] = []
    # The end of the messages is followed by no user's message.
    for message in [*messages, {"role": ""}]:
        if message["role"] == "system":
            waiting.append(message)
            continue
        if message["role"] == "user":
            message = _with_contents(message, [*waiting, message])
        elif waiting and folded and folded[-1]["role"] == "user":
            folded[-1] = _with_contents(folded[-1], [folded[-1], *waiting])
        elif waiting:
            folded.append(_with_contents({"role": "user"}, waiting))
        waiting = []
        folded.append(message)
    return folded[:-1]


def _with_contents(message: dict, others: list[dict]) -> dict:
    """A message with the contents of all others."""
    contents = (other["content"] for other in others)
    return message | {"content": "\n\n".join(filter(None, contents))}

"""The answers in OpenAI's form: whole, and as chunks of a stream."""

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from ..version import __version__
from .choice import Choice, Piece


class Answer:
    """The answer to a request.

    Args:
        model: the name that the request gave.
        choices: all completions.
        prompt_tokens: of every prompt.
    """

    PREFIX, KIND, CHUNK = "cmpl", "text_completion", "text_completion"

    def __init__(
        self, model: str, choices: Sequence[Choice], prompt_tokens: Sequence[int]
    ):
        self.choices = choices
        self._prompt_tokens = prompt_tokens
        self.id = f"{self.PREFIX}-{uuid.uuid4().hex}"
        self._head = {
            "id": self.id,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"lmx-{__version__}",
        }
        self._pieces: dict[Choice, list[Piece]] = {c: [] for c in choices}

    def add_piece(self, piece: Piece) -> None:
        """Keep a piece for the whole answer."""
        self._pieces[piece.choice].append(piece)

    def whole(self) -> dict:
        """The body of the answer, when all completions have ended."""
        choices = []
        for choice, pieces in self._pieces.items():
            has_logprobs = choice.request.logprobs is not None
            logprobs = self._logprobs(pieces) if has_logprobs else None
            choices.append(self._whole(choice, pieces) | {"logprobs": logprobs})
        return self._body(self.KIND, choices) | {"usage": self.usage()}

    def start(self, choice: Choice) -> list[dict]:
        """The chunks before the first token of a completion."""
        return []

    def chunks(self, piece: Piece) -> Iterator[dict]:
        """The chunks of a piece."""
        deltas: list[dict[str, Any]] = [*piece.fields]
        if not deltas and (piece.logprobs or piece.finish_reason):
            deltas = [{}]
        for number, delta in enumerate(deltas):
            is_last = number == len(deltas) - 1
            # Log-probabilities belong to the tokens of all deltas.
            has_logprobs = piece.logprobs and not number
            logprobs = self._logprobs([piece]) if has_logprobs else None
            reason = piece.finish_reason if is_last else None
            choice = {
                "index": piece.choice.index,
                **self._delta(delta),
                "logprobs": logprobs,
                "finish_reason": reason,
            }
            yield self._body(self.CHUNK, [choice])

    def usage_chunk(self) -> dict:
        """The last chunk of a stream with `include_usage`."""
        return self._body(self.CHUNK, []) | {"usage": self.usage()}

    def usage(self) -> dict:
        """Counts of tokens."""
        prompt = sum(self._prompt_tokens)
        completion = sum(choice.tokens for choice in self.choices)
        cached = {c.prompt_index: c.cached_tokens for c in reversed(self.choices)}
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(cached.values())},
            "completion_tokens_details": {
                "reasoning_tokens": sum(c.reasoning_tokens for c in self.choices),
                "accepted_prediction_tokens": sum(
                    c.accepted_tokens for c in self.choices
                ),
            },
        }

    def _body(self, kind: str, choices: list[dict]) -> dict:
        return self._head | {"object": kind, "choices": choices}

    def _whole(self, choice: Choice, pieces: Sequence[Piece]) -> dict:
        text = "".join(f["text"] for piece in pieces for f in piece.fields)
        return {
            "index": choice.index,
            "text": text,
            "finish_reason": choice.finish_reason,
        }

    def _delta(self, delta: dict) -> dict:
        return {"text": delta.get("text", "")}

    def _logprobs(self, pieces: Sequence[Piece]) -> dict:
        """Log-probabilities in the form of the older endpoint.

        The token of the completion is always among those of `top_logprobs`.
        """
        entries = [entry for piece in pieces for entry in piece.logprobs]
        return {
            "tokens": [_name(entry) for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [_top(entry) for entry in entries],
            "text_offset": [at for piece in pieces for at in piece.text_offsets],
        }


def _top(entry: dict) -> dict | None:
    """The likely tokens and the one that came; the first of a prompt has none."""
    if entry["logprob"] is None:
        return None
    return {_name(t): t["logprob"] for t in (*entry["top_logprobs"], entry)}


def _name(entry: dict) -> str:
    """The key of a token: OpenAI's for bytes that are no character, so that no two
    tokens share one."""
    raw = bytes(entry["bytes"])
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class ChatAnswer(Answer):
    """The answer to a chat."""

    PREFIX, KIND, CHUNK = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def start(self, choice: Choice) -> list[dict]:
        delta = {"role": "assistant", "content": ""}
        head = {"index": choice.index, "delta": delta}
        return [
            self._body(self.CHUNK, [head | {"logprobs": None, "finish_reason": None}])
        ]

    def _delta(self, delta: dict) -> dict:
        return {"delta": delta}

    def _whole(self, choice: Choice, pieces: Sequence[Piece]) -> dict:
        message: dict[str, Any] = {"role": "assistant", "content": None}
        fields = [f for piece in pieces for f in piece.fields]
        for name in ("content", "reasoning_content"):
            parts = [f[name] for f in fields if name in f]
            if parts:
                message[name] = "".join(parts)
        calls = [call for f in fields for call in f.get("tool_calls", ())]
        if calls:
            # Only chunks have an index.
            message["tool_calls"] = [
                {key: value for key, value in call.items() if key != "index"}
                for call in calls
            ]
        elif message["content"] is None:
            message["content"] = ""
        message["refusal"] = None
        return {
            "index": choice.index,
            "message": message,
            "finish_reason": choice.finish_reason,
        }

    def _logprobs(self, pieces: Sequence[Piece]) -> dict:
        entries = [entry for piece in pieces for entry in piece.logprobs]
        return {"content": entries, "refusal": None}

"""Harmony, the format of gpt-oss: messages in channels, each with a header.

An answer is `<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final
<|message|>...<|return|>`, and a call has its function in the header and ends with
`<|call|>` (https://cookbook.openai.com/articles/openai-harmony).
"""

from typing import Any

MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"
CLOSING = "<|end|>"
CALL = "<|call|>"
NEXT = "<|start|>assistant"


def is_harmony(tokenizer: Any) -> bool:
    """Whether a tokenizer has the marks of Harmony."""
    # Each request asks: a look at all added tokens would take milliseconds.
    ids = tokenizer.convert_tokens_to_ids([*MARKS])
    # A text that is no token has no number, or that of the unknown token.
    return None not in ids and tokenizer.convert_ids_to_tokens(ids) == [*MARKS]

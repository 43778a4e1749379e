"""Chat templates in the styles of public model families: those without reasoning and
without calls of tools, and what a family is."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """A chat template and the tokenizer that it needs.

    Attributes:
        tokens: the added tokens, separated by spaces.
        stops: the tokens that end a turn; the first is the tokenizer's end of sequence.
        bos: the beginning of sequence.
    """

    template: str
    tokens: str
    stops: str
    bos: str | None = None


CHATML_TOKENS = "<|endoftext|> <|im_start|> <|im_end|>"
CHATML_STOPS = "<|im_end|> <|endoftext|>"

CHATML = r"""
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""

# The turn of the user ends with the header of the assistant, whoever comes next.
YI = r"""
{%- for m in messages %}
{%- if m.role == 'system' %}{{- m.content }}
{%- elif m.role == 'user' %}
{{- '<|im_start|>user\n' + m.content + '<|im_end|>\n<|im_start|>assistant\n' }}
{%- elif m.role == 'assistant' %}{{- m.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
"""

LLAMA2 = r"""
{%- set system = '' %}{%- set turns = messages %}
{%- if messages and messages[0].role == 'system' %}
{%- set system = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' %}
{%- set turns = messages[1:] %}
{%- endif %}
{%- for m in turns %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Roles must alternate user/assistant') }}
{%- endif %}
{%- set text = system + m.content if loop.first else m.content %}
{%- if m.role == 'user' %}{{- bos_token + '[INST] ' + text.strip() + ' [/INST]' }}
{%- else %}{{- ' ' + text.strip() + ' ' + eos_token }}
{%- endif %}
{%- endfor %}
"""

LLAMA3 = r"""
{%- for m in messages %}
{%- set text = '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n'
    + m.content | trim + '<|eot_id|>' %}
{%- if loop.first %}{%- set text = bos_token + text %}{%- endif %}
{{- text }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""

GEMMA2 = r"""
{{- bos_token }}
{%- if messages[0].role == 'system' %}
{{- raise_exception('System role not supported') }}
{%- endif %}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/...') }}
{%- endif %}
{%- set role = 'model' if m.role == 'assistant' else m.role %}
{{- '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}
"""

PHI4 = r"""
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant<|im_sep|>' }}{%- endif %}
"""

# The space after the colon belongs to the answer.
DEEPSEEK_V2 = r"""
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- 'User: ' + m.content + '\n\n' }}
{%- elif m.role == 'assistant' %}{{- 'Assistant: ' + m.content + eos_token }}
{%- elif m.role == 'system' %}{{- m.content + '\n\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'Assistant:' }}{%- endif %}
"""

# The header of the next turn ends this one.
GLM4 = r"""
{{- '[gMASK]<sop>' }}
{%- for m in messages %}
{%- set role = 'observation' if m.role == 'tool' else m.role %}
{{- '<|' + role + '|>\n' + m.content }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}{%- endif %}
"""

# One token begins the text and ends the turns; the last turn has no newline after it.
OLMO2 = r"""
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{{- '<|assistant|>\n' + m.content + eos_token }}
{%- if not loop.last %}{{- '\n' }}{%- endif %}
{%- else %}{{- '<|' + m.role + '|>\n' + m.content + '\n' }}
{%- endif %}
{%- if loop.last and add_generation_prompt %}{{- '<|assistant|>\n' }}{%- endif %}
{%- endfor %}
"""

VICUNA = r"""
{%- for m in messages %}
{%- if m.role == 'system' %}{{- m.content + '\n\n' }}
{%- elif m.role == 'user' %}{{- 'USER: ' + m.content.strip() + '\n' }}
{%- elif m.role == 'assistant' %}{{- 'ASSISTANT: ' + m.content.strip() + '\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'ASSISTANT:' }}{%- endif %}
"""

ERNIE = r"""
{{- '<|begin_of_sentence|>' }}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- 'User: ' + m.content + '\n' }}
{%- elif m.role == 'assistant' %}
{{- 'Assistant: ' + m.content + '<|end_of_sentence|>' }}
{%- elif m.role == 'system' %}{{- m.content + '\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'Assistant: ' }}{%- endif %}
"""

NO_END_OF_TURN = r"""
{%- for m in messages %}
{{- '<|' + m.role + '|>' + m.content }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""

# Markers of what the assistant writes, for the masks of trainers. Reasoning is dropped.
MARKED = r"""
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{{- '<|im_start|>assistant\n' }}
{%- generation %}
{{- m.content.split('</think>')[-1].lstrip() + '<|im_end|>' }}
{%- endgeneration %}
{{- '\n' }}
{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""

COHERE_TOKENS = (
    "<EOS_TOKEN> <BOS_TOKEN> <|START_OF_TURN_TOKEN|> <|END_OF_TURN_TOKEN|> "
    "<|USER_TOKEN|> <|CHATBOT_TOKEN|> <|SYSTEM_TOKEN|>"
)
_GEMMA = "<eos> <bos> <start_of_turn> <end_of_turn>", "<eos> <end_of_turn>", "<bos>"
_LLAMA3_TOKENS = (
    "<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|>"
)
_ROLES = "<|system|> <|user|> <|assistant|> <|observation|>"

PLAIN = {
    "chatml": Family(CHATML, CHATML_TOKENS, CHATML_STOPS),
    "yi": Family(YI, CHATML_TOKENS, CHATML_STOPS),
    "llama2": Family(LLAMA2, "<s> </s>", "</s>", "<s>"),
    "llama3": Family(
        LLAMA3, _LLAMA3_TOKENS, "<|eot_id|> <|end_of_text|>", "<|begin_of_text|>"
    ),
    "gemma2": Family(GEMMA2, *_GEMMA),
    "phi4": Family(PHI4, f"{CHATML_TOKENS} <|im_sep|>", "<|im_end|>"),
    "deepseek_v2": Family(
        DEEPSEEK_V2,
        "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        "<｜begin▁of▁sentence｜>",
    ),
    "glm4": Family(
        GLM4,
        f"<|endoftext|> [gMASK] <sop> {_ROLES}",
        "<|endoftext|> <|user|> <|observation|>",
    ),
    "olmo2": Family(OLMO2, "<|endoftext|>", "<|endoftext|>", "<|endoftext|>"),
    "vicuna": Family(VICUNA, "<s> </s>", "</s>", "<s>"),
    "ernie": Family(
        ERNIE,
        "<|begin_of_sentence|> <|end_of_sentence|> </s>",
        "</s> <|end_of_sentence|>",
    ),
    "no_end_of_turn": Family(
        NO_END_OF_TURN, f"<|endoftext|> {_ROLES}", "<|endoftext|>"
    ),
    "marked": Family(MARKED, CHATML_TOKENS, CHATML_STOPS),
}

"""Chat templates whose prompts are no start of the turns' texts, or lack a message."""

from chat_templates import CHATML_STOPS, CHATML_TOKENS, COHERE_TOKENS, Family
from chat_templates_tools import DEEPSEEK, MISTRAL

THINK = "<think> </think>"

# Only the prompt has a block: an open one, or an empty one without thinking.
SWITCHED = r"""
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{{- '<think>\n\n</think>\n\n' if enable_thinking is false else '<think>\n' }}
{%- endif %}
"""

# The tags are unknown to mlx-lm, so a server asks without thinking.
COMMAND_R7B = r"""
{%- set start, end = '<|START_OF_TURN_TOKEN|>', '<|END_OF_TURN_TOKEN|>' %}
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{{- start + '<|CHATBOT_TOKEN|>' }}
{%- if m.reasoning_content %}
{{- '<|START_THINKING|>' + m.reasoning_content + '<|END_THINKING|>' }}
{%- endif %}
{{- '<|START_RESPONSE|>' + m.content + '<|END_RESPONSE|>' + end }}
{%- else %}{{- start + '<|' + m.role | upper + '_TOKEN|>' + m.content + end }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- start + '<|CHATBOT_TOKEN|>' }}
{{- '<|START_THINKING|><|END_THINKING|>' if not enable_thinking }}
{%- endif %}
"""

# Without thinking, the prompt ends with a closing tag, which no turn has.
DEEPSEEK_V32 = r"""
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'system' %}{{- m.content }}
{%- elif m.role == 'user' %}{{- '<｜User｜>' + m.content }}
{%- elif m.role == 'assistant' %}
{{- '<｜Assistant｜>' + m.content.split('</think>')[-1] + eos_token }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<｜Assistant｜>' + ('<think>' if thinking else '</think>') }}
{%- endif %}
"""

# Reasoning is only known as content.
OLMO3 = r"""
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\n' + m.content }}
{{- '\n' + tools | tojson if tools and loop.first }}{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>' }}{%- endif %}
"""

# The system message stands before the last message, if that is the user's.
NEMO = r"""
{{- bos_token }}
{%- set system, turns = '', messages %}
{%- if messages[0].role == 'system' %}
{%- set system, turns = messages[0].content + '\n\n', messages[1:] %}
{%- endif %}
{%- for m in turns %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('After the system message, roles must alternate') }}
{%- endif %}
{%- if m.role == 'user' %}
{{- '[INST]' + (system if loop.last else '') + m.content + '[/INST]' }}
{%- else %}{{- ' ' + m.content | trim + eos_token }}
{%- endif %}
{%- endfor %}
"""

NO_SYSTEM = r"""
{%- for m in messages if m.role != 'system' %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""

FIRST_SYSTEM = r"""
{%- for m in messages %}
{%- if m.role != 'system' or loop.first %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""

# No text of a user.
ANSWER_ONLY = r"""
{{- '<|im_start|>assistant\n' }}
{{- messages[-1].content + '<|im_end|>' if not add_generation_prompt }}
"""

# White space stands before the header that ends a turn.
LINES = r"""
{%- for m in messages %}
{{- '\n<|' + m.role + '|>\n' + m.content }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '\n<|assistant|>\n' }}{%- endif %}
"""

PROMPTS = {
    "switched": Family(SWITCHED, f"{CHATML_TOKENS} {THINK}", CHATML_STOPS),
    "command_r7b": Family(
        COMMAND_R7B,
        f"{COHERE_TOKENS} <|START_THINKING|> <|END_THINKING|> <|START_RESPONSE|> "
        "<|END_RESPONSE|>",
        "<|END_OF_TURN_TOKEN|>",
        "<BOS_TOKEN>",
    ),
    "deepseek_v32": Family(DEEPSEEK_V32, *DEEPSEEK),
    "olmo3": Family(OLMO3, f"{CHATML_TOKENS} {THINK}", CHATML_STOPS),
    "nemo": Family(NEMO, *MISTRAL),
    "no_system": Family(NO_SYSTEM, CHATML_TOKENS, CHATML_STOPS),
    "first_system": Family(FIRST_SYSTEM, CHATML_TOKENS, CHATML_STOPS),
    "answer_only": Family(ANSWER_ONLY, CHATML_TOKENS, CHATML_STOPS),
    "lines": Family(
        LINES,
        "<|endoftext|> <|system|> <|user|> <|assistant|> <|tool|>",
        "<|endoftext|> <|user|>",
    ),
}

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

CHATML_DEFAULT_SYSTEM = r"""
{%- for m in messages %}
{%- if loop.first and messages[0]['role'] != 'system' %}
{{- '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}
{%- endif %}
{{- '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}
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

INTERNLM2 = r"""
{{- bos_token }}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""

SMOLLM2 = r"""
{%- if messages[0].role != 'system' %}
{{- '<|im_start|>system\nYou are SmolLM, a small assistant.<|im_end|>\n' }}
{%- endif %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{{- '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
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

MISTRAL_V1 = r"""
{{- bos_token }}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate') }}
{%- endif %}
{%- if m.role == 'user' %}{{- '[INST] ' + m.content + ' [/INST]' }}
{%- elif m.role == 'assistant' %}{{- m.content + eos_token + ' ' }}
{%- else %}{{- raise_exception('Only user and assistant roles') }}
{%- endif %}
{%- endfor %}
"""

MIXTRAL = r"""
{%- if messages[0].role == 'system' %}
{%- set system = messages[0].content + '\n\n' %}{%- set turns = messages[1:] %}
{%- else %}{%- set system = '' %}{%- set turns = messages %}
{%- endif %}
{{- bos_token }}
{%- for m in turns %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate after the optional system message') }}
{%- endif %}
{%- if m.role == 'user' %}
{{- ' [INST] ' + (system if loop.first else '') + m.content + ' [/INST]' }}
{%- else %}{{- ' ' + m.content | trim + eos_token }}
{%- endif %}
{%- endfor %}
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

GEMMA3 = r"""
{{- bos_token }}
{%- if messages[0].role == 'system' %}
{%- set prefix = messages[0].content + '\n\n' %}{%- set turns = messages[1:] %}
{%- else %}{%- set prefix = '' %}{%- set turns = messages %}
{%- endif %}
{%- for m in turns %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/...') }}
{%- endif %}
{%- set role = 'model' if m.role == 'assistant' else m.role %}
{{- '<start_of_turn>' + role + '\n' + (prefix if loop.first else '') }}
{%- if m.content is string %}{{- m.content | trim }}
{%- else %}{{- raise_exception('Invalid content type') }}
{%- endif %}
{{- '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}
"""

# The whole text ends with the end of sequence, after the end of the turn.
PHI3 = r"""
{%- for m in messages %}
{{- '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}
{%- else %}{{- eos_token }}
{%- endif %}
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

COMMAND_R = r"""
{{- bos_token }}
{%- set start, end = '<|START_OF_TURN_TOKEN|>', '<|END_OF_TURN_TOKEN|>' %}
{%- set turns = messages %}
{%- if messages[0].role == 'system' %}
{%- set turns = messages[1:] %}
{{- start + '<|SYSTEM_TOKEN|>' + messages[0].content + end }}
{%- endif %}
{%- for m in turns %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate') }}
{%- endif %}
{%- set role = '<|USER_TOKEN|>' if m.role == 'user' else '<|CHATBOT_TOKEN|>' %}
{{- start + role + m.content.strip() + end }}
{%- endfor %}
{%- if add_generation_prompt %}{{- start + '<|CHATBOT_TOKEN|>' }}{%- endif %}
"""

AYA = r"""
{{- bos_token }}
{%- if messages[0].role != 'system' %}
{{- '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>You are Aya.<|END_OF_TURN_TOKEN|>' }}
{%- endif %}
{%- for m in messages %}
{%- set roles = {'user': 'USER', 'assistant': 'CHATBOT', 'system': 'SYSTEM'} %}
{{- '<|START_OF_TURN_TOKEN|><|' + roles.get(m.role, 'USER') + '_TOKEN|>' }}
{{- m.content + '<|END_OF_TURN_TOKEN|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}
{%- endif %}
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

FALCON3 = r"""
{%- for m in messages %}
{{- '<|' + m.role + '|>\n' + m.content }}
{%- if m.role == 'assistant' and not loop.last %}{{- eos_token }}{%- endif %}
{{- '\n' if not loop.last or add_generation_prompt }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}
{%- elif messages and messages[-1].role == 'assistant' %}{{- eos_token }}
{%- endif %}
"""

ZEPHYR = r"""
{%- for m in messages %}
{{- '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}
{%- if loop.last and add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
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

ALPACA = r"""
{%- for m in messages %}
{%- if m.role == 'system' %}{{- m.content + '\n\n' }}
{%- elif m.role == 'user' %}{{- '### Instruction:\n' + m.content + '\n\n' }}
{%- elif m.role == 'assistant' %}{{- '### Response:\n' + m.content + '\n\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '### Response:\n' }}{%- endif %}
"""

STARCODER = r"""
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{- '### Response\n' + m.content + '<|endoftext|>\n\n' }}
{%- elif m.role == 'system' %}{{- m.content + '\n\n' }}
{%- else %}{{- '### Instruction\n' + m.content + '\n\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '### Response\n' }}{%- endif %}
"""

OPENCHAT = r"""
{{- bos_token }}
{%- for m in messages %}
{{- 'GPT4 Correct ' + m.role.title() + ': ' + m.content + '<|end_of_turn|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'GPT4 Correct Assistant:' }}{%- endif %}
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

# Turns have numbers, and every result of a tool starts another round.
LONGCAT = r"""
{%- set ns = namespace(round=0) %}
{%- for m in messages %}
{%- if m.role == 'system' %}{{- 'SYSTEM:' + m.content + ' ' }}
{%- elif m.role == 'assistant' %}{{- ' ASSISTANT:' + m.content + '</longcat_s>' }}
{%- else %}
{{- '[Round ' + ns.round | string + '] USER:' + m.content }}
{%- set ns.round = ns.round + 1 %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- ' ASSISTANT:' }}{%- endif %}
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
    "chatml_default_system": Family(CHATML_DEFAULT_SYSTEM, CHATML_TOKENS, CHATML_STOPS),
    "yi": Family(YI, CHATML_TOKENS, CHATML_STOPS),
    "internlm2": Family(
        INTERNLM2, f"<s> </s> {CHATML_TOKENS}", "</s> <|im_end|>", "<s>"
    ),
    "smollm2": Family(SMOLLM2, CHATML_TOKENS, "<|im_end|>"),
    "llama2": Family(LLAMA2, "<s> </s>", "</s>", "<s>"),
    "llama3": Family(
        LLAMA3, _LLAMA3_TOKENS, "<|eot_id|> <|end_of_text|>", "<|begin_of_text|>"
    ),
    "mistral_v1": Family(MISTRAL_V1, "<s> </s>", "</s>", "<s>"),
    "mixtral": Family(MIXTRAL, "<s> </s>", "</s>", "<s>"),
    "gemma2": Family(GEMMA2, *_GEMMA),
    "gemma3": Family(GEMMA3, *_GEMMA),
    "phi3": Family(
        PHI3,
        "<|endoftext|> <|system|> <|user|> <|assistant|> <|end|>",
        "<|endoftext|> <|end|>",
    ),
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
    "command_r": Family(
        COMMAND_R, COHERE_TOKENS, "<|END_OF_TURN_TOKEN|>", "<BOS_TOKEN>"
    ),
    "aya": Family(AYA, COHERE_TOKENS, "<|END_OF_TURN_TOKEN|>", "<BOS_TOKEN>"),
    "olmo2": Family(OLMO2, "<|endoftext|>", "<|endoftext|>", "<|endoftext|>"),
    "falcon3": Family(FALCON3, f"<|endoftext|> {_ROLES}", "<|endoftext|>"),
    "zephyr": Family(ZEPHYR, "<s> </s>", "</s>", "<s>"),
    "vicuna": Family(VICUNA, "<s> </s>", "</s>", "<s>"),
    "alpaca": Family(ALPACA, "<|endoftext|>", "<|endoftext|>"),
    "starcoder": Family(STARCODER, "<|endoftext|>", "<|endoftext|>", "<|endoftext|>"),
    "openchat": Family(OPENCHAT, "<s> </s> <|end_of_turn|>", "<|end_of_turn|>", "<s>"),
    "ernie": Family(
        ERNIE,
        "<|begin_of_sentence|> <|end_of_sentence|> </s>",
        "</s> <|end_of_sentence|>",
    ),
    "longcat": Family(LONGCAT, "<longcat_s> </longcat_s>", "</longcat_s>"),
    "no_end_of_turn": Family(
        NO_END_OF_TURN, f"<|endoftext|> {_ROLES}", "<|endoftext|>"
    ),
    "marked": Family(MARKED, CHATML_TOKENS, CHATML_STOPS),
}

"""Chat templates in the styles of public model families: those with calls of tools."""

from chat_templates import CHATML_STOPS, CHATML_TOKENS, Family

# The tools belong to the first user turn; a call replaces the content.
LLAMA31 = r"""
{{- bos_token }}
{%- set system, turns = '', messages %}
{%- if messages[0]['role'] == 'system' %}
{%- set system, turns = messages[0]['content'] | trim, messages[1:] %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December' }}
{{- ' 2023\nToday Date: ' + strftime_now('%d %b %Y') + '\n\n' + system + '<|eot_id|>' }}
{%- for m in turns %}
{%- set header = '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' %}
{%- if m.tool_calls is defined %}
{%- if m.tool_calls | length != 1 %}
{{- raise_exception('This model only supports single tool-calls at once!') }}
{%- endif %}
{%- set call = m.tool_calls[0].function %}
{{- header + '{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson + '}<|eot_id|>' }}
{%- elif m.role in ['tool', 'ipython'] %}
{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + m.content | tojson }}
{{- '<|eot_id|>' }}
{%- elif tools and loop.first %}
{{- header + 'Answer with JSON of a call of one of these functions.\n\n' }}
{%- for t in tools %}{{- t | tojson(indent=4) + '\n\n' }}{%- endfor %}
{{- m.content | trim + '<|eot_id|>' }}
{%- else %}{{- header + m.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""

# The tools and the system message stand before the last user turn.
MISTRAL_V3 = r"""
{{- bos_token }}
{%- set system, turns = '', messages %}
{%- if messages[0].role == 'system' %}
{%- set system, turns = messages[0].content + '\n\n', messages[1:] %}
{%- endif %}
{%- set users = turns | selectattr('role', 'equalto', 'user') | list %}
{%- set ns = namespace(index=0) %}
{%- for m in turns if m.role in ['user', 'assistant'] and not m.tool_calls %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('After the system message, roles must alternate') }}
{%- endif %}
{%- endfor %}
{%- for m in turns %}
{%- if m.role == 'user' %}
{%- set ns.index = ns.index + 1 %}
{%- if ns.index == users | length %}
{%- if tools %}
{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
{%- endif %}
{{- '[INST] ' + system + m.content + '[/INST]' }}
{%- else %}{{- '[INST] ' + m.content + '[/INST]' }}
{%- endif %}
{%- elif m.tool_calls %}
{{- '[TOOL_CALLS] [' }}
{%- for call in m.tool_calls %}
{%- if call.id is not defined or call.id | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
{%- endif %}
{%- set text = (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' %}
{{- text + (']' + eos_token if loop.last else ', ') }}
{%- endfor %}
{%- elif m.role == 'assistant' %}{{- ' ' + m.content | trim + eos_token }}
{%- elif m.role == 'tool' %}
{{- '[TOOL_RESULTS] {"content": ' + m.content | tojson + ', "call_id": "' }}
{{- m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- else %}{{- raise_exception('Unexpected role') }}
{%- endif %}
{%- endfor %}
"""

MISTRAL_V7 = r"""
{{- bos_token }}
{%- if messages[0].role == 'system' %}
{{- '[SYSTEM_PROMPT]' + messages[0].content + '[/SYSTEM_PROMPT]' }}
{%- set turns = messages[1:] %}
{%- else %}
{{- '[SYSTEM_PROMPT]Be concise.[/SYSTEM_PROMPT]' }}{%- set turns = messages %}
{%- endif %}
{%- if tools %}
{{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
{%- endif %}
{%- for m in turns %}
{%- if m.role == 'user' %}{{- '[INST]' + m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}
{{- '[TOOL_RESULTS]' + m.tool_call_id + '[TOOL_CONTENT]' + m.content }}
{{- '[/TOOL_RESULTS]' }}
{%- elif m.role == 'assistant' %}
{%- if m.tool_calls %}
{{- '[TOOL_CALLS][' }}
{%- for c in m.tool_calls %}
{{- '{"name": "' + c.function.name + '", "arguments": ' }}
{{- c.function.arguments | tojson + '}' + (']' if loop.last else ', ') }}
{%- endfor %}
{{- eos_token }}
{%- else %}{{- m.content + eos_token }}
{%- endif %}
{%- else %}{{- raise_exception('Only user, assistant and tool roles') }}
{%- endif %}
{%- endfor %}
"""

MISTRAL_V13 = r"""
{{- bos_token }}
{{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' if tools }}
{%- for m in messages %}
{%- if m.role == 'system' %}
{{- '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}
{%- elif m.role == 'user' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'user' %}
{{- '[INST]' }}
{%- endif %}
{{- m.content }}
{%- if loop.last or loop.nextitem.role != 'user' %}{{- '[/INST]' }}{%- endif %}
{%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}
{%- elif m.role == 'assistant' %}
{%- if not m.content and not m.tool_calls %}
{{- raise_exception('Assistant message must have content or tool calls') }}
{%- endif %}
{{- m.content or '' }}
{%- for c in m.tool_calls or [] %}
{{- '[TOOL_CALLS]' + c.function.name + '[ARGS]' + c.function.arguments | tojson }}
{%- endfor %}
{{- eos_token }}
{%- endif %}
{%- endfor %}
"""

QWEN25 = r"""
{%- if messages[0].role == 'system' %}
{%- set system, turns = messages[0].content, messages[1:] %}
{%- else %}{%- set system, turns = 'You are Qwen.', messages %}
{%- endif %}
{{- '<|im_start|>system\n' + system }}
{%- if tools %}
{{- '\n\n# Tools\n\n<tools>' }}
{%- for t in tools %}{{- '\n' + t | tojson }}{%- endfor %}
{{- '\n</tools>' }}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- for m in turns %}
{%- if m.role == 'tool' %}
{{- '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' }}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{{- '<|im_end|>\n' if loop.last or loop.nextitem.role != 'tool' }}
{%- elif m.role == 'assistant' and m.tool_calls %}
{{- '<|im_start|>assistant' }}
{{- '\n' + m.content if m.content }}
{%- for c in m.tool_calls %}
{{- '\n<tool_call>\n{"name": "' + c.function.name + '", "arguments": ' }}
{{- c.function.arguments | tojson + '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""

GRANITE4 = r"""
{%- set start, end = '<|start_of_role|>', '<|end_of_text|>\n' %}
{%- set turns = messages[1:] if messages[0].role == 'system' else messages %}
{%- set system = messages[0].content if turns != messages else 'Be helpful.' %}
{{- start + 'system<|end_of_role|>' + system }}
{%- if tools %}{{- '\n<tools>\n' + tools | join('\n') + '\n</tools>' }}{%- endif %}
{{- end }}
{%- for m in turns %}
{%- if m.role == 'tool' %}
{{- start + 'user<|end_of_role|>\n<tool_response>\n' + m.content }}
{{- '\n</tool_response>' + end }}
{%- else %}
{{- start + m.role + '<|end_of_role|>' + m.content }}
{%- for c in m.tool_calls or [] %}
{{- '\n' if m.content or not loop.first }}
{{- '<tool_call>\n{"name": "' + c.function.name + '", "arguments": ' }}
{{- c.function.arguments | tojson + '}\n</tool_call>' }}
{%- endfor %}
{{- end }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- start + 'assistant<|end_of_role|>' }}{%- endif %}
"""

# Answers to results have no header of their own.
DEEPSEEK_V3 = r"""
{{- bos_token }}
{%- for m in messages if m.role == 'system' %}{{- m.content + '\n\n' }}{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '<｜User｜>' + m.content }}
{%- elif m.role == 'tool' %}
{{- '<｜tool▁outputs▁begin｜>' if loop.previtem.role != 'tool' }}
{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
{{- '<｜tool▁outputs▁end｜>' if loop.last or loop.nextitem.role != 'tool' }}
{%- elif m.role == 'assistant' %}
{{- '<｜Assistant｜>' if loop.first or loop.previtem.role != 'tool' }}
{{- m.content }}
{%- for c in m.tool_calls or [] %}
{{- '<｜tool▁calls▁begin｜>' if loop.first }}
{{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + c.function.name + '\n```json\n' }}
{{- c.function.arguments | tojson + '\n```<｜tool▁call▁end｜>' }}
{{- '<｜tool▁calls▁end｜>' if loop.last }}
{%- endfor %}
{{- eos_token }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}
{{- '<｜Assistant｜>' }}
{%- endif %}
"""

# Only the id names the function: ids are to be functions.<name>:<number>.
KIMI_K2 = r"""
{%- if tools %}
{{- '<|im_system|>tool_declare<|im_middle|>' + tools | tojson + '<|im_end|>' }}
{%- endif %}
{%- for m in messages %}
{%- if loop.first and m.role != 'system' %}
{{- '<|im_system|>system<|im_middle|>You are Kimi.<|im_end|>' }}
{%- endif %}
{%- if m.role == 'assistant' %}
{{- '<|im_assistant|>assistant<|im_middle|>' + m.content }}
{%- for c in m.tool_calls or [] %}
{{- '<|tool_calls_section_begin|>' if loop.first }}
{{- '<|tool_call_begin|>' + c.id + '<|tool_call_argument_begin|>' }}
{{- c.function.arguments | tojson + '<|tool_call_end|>' }}
{{- '<|tool_calls_section_end|>' if loop.last }}
{%- endfor %}
{%- elif m.role == 'tool' %}
{{- '<|im_system|>' + (m.name or 'tool') + '<|im_middle|>## Return of ' }}
{{- m.tool_call_id + '\n' + m.content }}
{%- else %}{{- '<|im_' + m.role + '|>' + m.role + '<|im_middle|>' + m.content }}
{%- endif %}
{{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_assistant|>assistant<|im_middle|>' }}
{%- endif %}
"""

FALCON_H1 = r"""
{{- bos_token }}
{%- if tools %}
{{- '<|im_start|>system\nYou are a function calling model. <tools>' }}
{{- tools | map('tojson') | join('\n') + '</tools>\n' }}
{{- messages[0].content if messages[0].role == 'system' }}{{- '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for m in messages if m.role != 'system' %}
{{- '<|im_start|>' + m.role + '\n' + m.content }}
{%- if m.tool_calls %}
{{- '\n' if m.content }}
{%- for c in m.tool_calls %}
{{- '<tool_call>\n' + c.function | tojson + '\n</tool_call>' }}
{%- if not loop.last %}{{- '\n' }}{%- endif %}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""

# Calls are printed as Python, and no newline follows the last turn.
PHI4_MINI = r"""
{%- for m in messages %}
{%- if m.role == 'system' and tools %}
{{- '<|system|>' + m.content + '<|tool|>' + tools | tojson + '<|/tool|><|end|>' }}
{%- elif m.tool_calls %}
{{- '<|assistant|>' + m.content + '<|tool_call|>' }}
{{- m.tool_calls | map(attribute='function') | list | string }}
{{- '<|/tool_call|><|end|>' }}
{%- elif m.role == 'tool' %}
{{- '<|tool_response|>' + m.content + '<|end|>' }}
{%- else %}{{- '<|' + m.role + '|>' + m.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|assistant|>' }}
{%- else %}
{{- eos_token }}
{%- endif %}
"""

# Tools are listed, but calls only occur as content.
LFM2 = r"""
{{- bos_token }}
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- if tools %}
{%- set system = system + ('\n' if system else '') + 'List of tools: '
    + '<|tool_list_start|>' + tools | tojson + '<|tool_list_end|>' %}
{%- endif %}
{%- if system %}{{- '<|im_start|>system\n' + system + '<|im_end|>\n' }}{%- endif %}
{%- for m in messages if m.role != 'system' %}
{%- set text = m.content %}
{%- if m.role == 'tool' %}
{%- set text = '<|tool_response_start|>' + text + '<|tool_response_end|>' %}
{%- endif %}
{{- '<|im_start|>' + m.role + '\n' + text + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""

_MISTRAL_TOKENS = (
    "<s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS] "
    "[TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CONTENT] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] "
    "[ARGS]"
)
MISTRAL = _MISTRAL_TOKENS, "</s>", "<s>"
DEEPSEEK_TOKENS = (
    "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜> "
    "<｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> "
    "<｜tool▁call▁end｜> <｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> "
    "<｜tool▁output▁begin｜> <｜tool▁output▁end｜> <｜tool▁sep｜> <think> </think>"
)
DEEPSEEK = DEEPSEEK_TOKENS, "<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>"
KIMI_TOKENS = (
    "[BOS] [EOS] <|im_end|> <|im_user|> <|im_assistant|> <|im_system|> <|im_middle|> "
    "<|tool_calls_section_begin|> <|tool_calls_section_end|> <|tool_call_begin|> "
    "<|tool_call_argument_begin|> <|tool_call_end|>"
)
GRANITE = "<|end_of_text|> <|start_of_role|> <|end_of_role|>", "<|end_of_text|>"
TOOL_TAGS = "<tool_call> </tool_call> <tool_response> </tool_response>"

TOOLS = {
    "llama31": Family(
        LLAMA31,
        "<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> "
        "<|eom_id|> <|eot_id|>",
        "<|eot_id|> <|eom_id|> <|end_of_text|>",
        "<|begin_of_text|>",
    ),
    "mistral_v3": Family(MISTRAL_V3, *MISTRAL),
    "mistral_v7": Family(MISTRAL_V7, *MISTRAL),
    "mistral_v13": Family(MISTRAL_V13, *MISTRAL),
    "qwen25": Family(QWEN25, f"{CHATML_TOKENS} {TOOL_TAGS}", CHATML_STOPS),
    "granite4": Family(GRANITE4, *GRANITE),
    "deepseek_v3": Family(DEEPSEEK_V3, *DEEPSEEK),
    "kimi_k2": Family(KIMI_K2, KIMI_TOKENS, "[EOS] <|im_end|>", "[BOS]"),
    "falcon_h1": Family(
        FALCON_H1,
        f"<|begin_of_text|> {CHATML_TOKENS}",
        CHATML_STOPS,
        "<|begin_of_text|>",
    ),
    "phi4_mini": Family(
        PHI4_MINI,
        "<|endoftext|> <|system|> <|user|> <|assistant|> <|end|> <|tool|> <|/tool|> "
        "<|tool_call|> <|/tool_call|> <|tool_response|>",
        "<|endoftext|> <|end|>",
    ),
    "lfm2": Family(
        LFM2,
        f"<|startoftext|> {CHATML_TOKENS} <|tool_list_start|> <|tool_list_end|> "
        "<|tool_response_start|> <|tool_response_end|>",
        "<|im_end|>",
        "<|startoftext|>",
    ),
}

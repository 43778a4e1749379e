"""Chat templates in the styles of public model families: those with reasoning in other
tags, or in a channel."""

from chat_templates import COHERE_TOKENS, Family

COMMAND_A = r"""
{%- set start, end = '<|START_OF_TURN_TOKEN|>', '<|END_OF_TURN_TOKEN|>' %}
{{- bos_token + start + '<|SYSTEM_TOKEN|>Be safe.' }}
{{- tools | tojson if tools }}{{- end }}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{{- start + '<|CHATBOT_TOKEN|>' if loop.first or loop.previtem.role != 'tool' }}
{%- if m.reasoning_content %}
{{- '<|START_THINKING|>' + m.reasoning_content + '<|END_THINKING|>' }}
{%- endif %}
{%- if m.tool_calls %}
{{- m.content + '<|START_ACTION|>[' }}
{%- for c in m.tool_calls %}
{{- '{"tool_name": "' + c.function.name + '", "parameters": ' }}
{{- c.function.arguments | tojson + '}' + (']' if loop.last else ',\n') }}
{%- endfor %}
{{- '<|END_ACTION|>' + end }}
{%- else %}{{- '<|START_RESPONSE|>' + m.content + '<|END_RESPONSE|>' + end }}
{%- endif %}
{%- elif m.role == 'tool' %}
{{- start + '<|SYSTEM_TOKEN|><|START_TOOL_RESULT|>' + m.content }}
{{- '<|END_TOOL_RESULT|>' + end + start + '<|CHATBOT_TOKEN|>' }}
{%- else %}{{- start + '<|' + m.role | upper + '_TOKEN|>' + m.content + end }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}
{{- start + '<|CHATBOT_TOKEN|>' }}
{%- endif %}
"""

# Results of tools stay within the turn of the assistant, which ends with an answer.
APERTUS = r"""
{%- set ns = namespace(inside=false) %}
{{- bos_token + '<|developer_start|>Deliberation: ' }}
{{- 'enabled' if enable_thinking else 'disabled' }}
{{- '\nTool Capabilities:' + (tools | tojson if tools else ' disabled') }}
{{- '<|developer_end|>' }}
{%- for m in messages %}
{%- if m.role in ['system', 'user'] %}
{{- '<|assistant_end|>' if ns.inside }}{%- set ns.inside = false %}
{{- '<|' + m.role + '_start|>' + m.content + '<|' + m.role + '_end|>' }}
{%- elif m.role == 'assistant' %}
{{- '<|assistant_start|>' if not ns.inside }}{%- set ns.inside = true %}
{%- if m.reasoning_content %}
{{- '<|inner_prefix|>' + m.reasoning_content + '<|inner_suffix|>' }}
{%- endif %}
{{- m.content }}
{%- for c in m.tool_calls or [] %}
{{- '<|tools_prefix|>[' if loop.first else ', ' }}
{{- '{"' + c.function.name + '": ' + c.function.arguments | tojson + '}' }}
{{- ']<|tools_suffix|>' if loop.last }}
{%- endfor %}
{%- if not m.tool_calls %}
{{- '<|assistant_end|>' }}{%- set ns.inside = false %}
{%- endif %}
{%- elif m.role == 'tool' %}
{%- if not ns.inside %}
{{- raise_exception('Tool message outside assistant') }}
{%- endif %}
{{- '[' + m.content + ']' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt and not ns.inside %}
{{- '<|assistant_start|>' }}
{%- endif %}
"""

# Channels: only the last turn has its reasoning, and a token that ends the generation.
GPT_OSS = r"""
{{- '<|start|>system<|message|>You are ChatGPT.\nCurrent date: ' }}
{{- strftime_now('%Y-%m-%d') + '\nReasoning: ' + (reasoning_effort or 'medium') }}
{{- '<|end|>' }}
{%- if messages[0].role == 'system' or tools %}
{{- '<|start|>developer<|message|>' }}
{{- messages[0].content if messages[0].role == 'system' }}
{{- '# Tools\n' + tools | tojson if tools }}{{- '<|end|>' }}
{%- endif %}
{%- set ns = namespace(tool='') %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- if '<|channel|>' in m.content %}{{- raise_exception('Use thinking') }}{%- endif %}
{%- set start = '<|start|>assistant<|channel|>' %}
{%- set answers = messages[loop.index0:] | selectattr('role', 'equalto', 'assistant')
    | rejectattr('tool_calls') | list %}
{%- if m.tool_calls %}
{%- if m.content and m.thinking %}
{{- raise_exception('Cannot pass both content and thinking with a call') }}
{%- elif (m.content or m.thinking) and not answers %}
{{- start + 'analysis<|message|>' + (m.content or m.thinking) + '<|end|>' }}
{%- endif %}
{%- set ns.tool = m.tool_calls[0].function.name %}
{{- '<|start|>assistant to=functions.' + ns.tool + '<|channel|>commentary json' }}
{{- '<|message|>' + m.tool_calls[0].function.arguments | tojson + '<|call|>' }}
{%- elif loop.last and not add_generation_prompt %}
{{- start + 'analysis<|message|>' + m.thinking + '<|end|>' if m.thinking }}
{{- start + 'final<|message|>' + m.content + '<|return|>' }}
{%- else %}{{- start + 'final<|message|>' + m.content + '<|end|>' }}
{%- endif %}
{%- elif m.role == 'tool' %}
{%- if not ns.tool %}{{- raise_exception('No call before this result') }}{%- endif %}
{{- '<|start|>functions.' + ns.tool + ' to=assistant<|channel|>commentary<|message|>' }}
{{- m.content | tojson + '<|end|>' }}
{%- elif m.role == 'user' %}{{- '<|start|>user<|message|>' + m.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
"""

# Results continue the turn. The prompt without thinking has a block no turn has.
GEMMA4 = r"""
{{- bos_token }}
{%- set ns = namespace(before='', last=-1) %}
{%- for m in messages %}
{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- if enable_thinking or tools or messages[0].role == 'system' %}
{{- '<|turn>system\n' + ('<|think|>\n' if enable_thinking else '') }}
{{- messages[0].content | trim if messages[0].role == 'system' }}
{%- for t in tools or [] %}
{{- '<|tool>declaration:' + t | tojson + '<tool|>' }}
{%- endfor %}
{{- '<turn|>\n' }}
{%- endif %}
{%- for m in messages if m.role != 'system' %}
{%- if m.role == 'tool' %}
{{- '<|tool_response>' if ns.before != 'call' }}
{{- 'response:' + (m.name or 'unknown') + '{value:<|"|>' + m.content }}
{{- '<|"|>}<tool_response|>' }}{%- set ns.before = 'result' %}
{%- else %}
{{- '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\n'
    if ns.before != 'result' or m.role == 'user' }}
{%- if m.reasoning_content and loop.index0 >= ns.last %}
{{- '<|channel>thought\n' + m.reasoning_content + '\n<channel|>' }}
{%- endif %}
{%- for c in m.tool_calls or [] %}
{{- '<|tool_call>call:' + c.function.name + '{' }}
{%- for name, value in c.function.arguments | dictsort %}
{{- name + ':' + ('<|"|>' + value + '<|"|>' if value is string else value | tojson) }}
{{- ',' if not loop.last }}
{%- endfor %}
{{- '}<tool_call|>' }}
{%- endfor %}
{{- m.content | trim }}
{%- if m.tool_calls %}{{- '<|tool_response>' }}{%- set ns.before = 'call' %}
{%- else %}{{- '<turn|>\n' }}{%- set ns.before = '' %}
{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt and ns.before != 'result' %}
{{- '<|turn>model\n' + ('' if enable_thinking else '<|channel>thought\n<channel|>') }}
{%- endif %}
"""

# All turns keep their reasoning; a budget of zero closes the block in the prompt.
SEED_OSS = r"""
{%- if tools %}
{{- bos_token + 'system\n' + tools | tojson + eos_token }}
{%- endif %}
{%- if thinking_budget is defined %}
{{- bos_token + 'system\nThinking budget: ' + thinking_budget | string + eos_token }}
{%- endif %}
{%- for m in messages %}
{{- bos_token + m.role + '\n' }}
{%- if m.role == 'assistant' and m.reasoning_content %}
{{- '<seed:think>' + m.reasoning_content | trim + '</seed:think>' }}
{%- endif %}
{{- m.content | trim if m.role == 'assistant' else m.content }}
{%- for c in m.tool_calls or [] %}
{{- '\n<seed:tool_call>\n<function=' + c.function.name + '>\n' }}
{%- for name, value in c.function.arguments | items %}
{{- '<parameter=' + name + '>' + value | string + '</parameter>\n' }}
{%- endfor %}
{{- '</function>\n</seed:tool_call>' }}
{%- endfor %}
{{- eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- bos_token + 'assistant\n' }}
{%- if thinking_budget == 0 %}{{- '<seed:think></seed:think>' }}{%- endif %}
{%- endif %}
"""

MAGISTRAL = r"""
{{- bos_token }}
{{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' if tools }}
{%- if messages[0].role != 'system' %}
{{- '[SYSTEM_PROMPT]First draft your thinking: [THINK]thoughts[/THINK]' }}
{{- '[/SYSTEM_PROMPT]' }}
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'system' %}{{- '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}
{%- elif m.role == 'user' %}{{- '[INST]' + m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}
{%- else %}
{{- '[THINK]' + m.reasoning_content + '[/THINK]' if m.reasoning_content }}
{{- m.content }}
{%- for c in m.tool_calls or [] %}
{{- '[TOOL_CALLS]' + c.function.name + '[ARGS]' + c.function.arguments | tojson }}
{%- endfor %}
{{- eos_token }}
{%- endif %}
{%- endfor %}
"""

_COHERE = (
    f"{COHERE_TOKENS} <|START_THINKING|> <|END_THINKING|> <|START_RESPONSE|> "
    "<|END_RESPONSE|> <|START_ACTION|> <|END_ACTION|> <|START_TOOL_RESULT|> "
    "<|END_TOOL_RESULT|>"
)
_APERTUS = (
    "<s> </s> <|developer_start|> <|developer_end|> <|system_start|> <|system_end|> "
    "<|user_start|> <|user_end|> <|assistant_start|> <|assistant_end|> "
    "<|inner_prefix|> "
    "<|inner_suffix|> <|tools_prefix|> <|tools_suffix|>"
)
_HARMONY = (
    "<|startoftext|> <|start|> <|end|> <|message|> <|channel|> <|return|> <|call|>"
)
_GEMMA4 = (
    "<bos> <eos> <|turn> <turn|> <|channel> <channel|> <|tool> <tool|> <|tool_call> "
    '<tool_call|> <|tool_response> <tool_response|> <|think|> <|"|>'
)

CHANNELS = {
    "command_a": Family(
        COMMAND_A,
        _COHERE,
        "<|END_OF_TURN_TOKEN|>",
        "<BOS_TOKEN>",
    ),
    "apertus": Family(
        APERTUS,
        _APERTUS,
        "<|assistant_end|> <|tools_suffix|>",
        "<s>",
    ),
    "gpt_oss": Family(GPT_OSS, _HARMONY, "<|return|> <|call|>"),
    "gemma4": Family(
        GEMMA4,
        _GEMMA4,
        "<eos> <turn|> <|tool_response>",
        "<bos>",
    ),
    "seed_oss": Family(
        SEED_OSS,
        "<seed:bos> <seed:eos> <seed:think> </seed:think>",
        "<seed:eos>",
        "<seed:bos>",
    ),
    "magistral": Family(
        MAGISTRAL,
        "<s> </s> [INST] [/INST] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_RESULTS] "
        "[/TOOL_RESULTS] [TOOL_CALLS] [ARGS] [THINK] [/THINK]",
        "</s>",
        "<s>",
    ),
}

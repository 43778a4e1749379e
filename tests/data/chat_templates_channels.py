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

_COHERE = (
    f"{COHERE_TOKENS} <|START_THINKING|> <|END_THINKING|> <|START_RESPONSE|> "
    "<|END_RESPONSE|> <|START_ACTION|> <|END_ACTION|> <|START_TOOL_RESULT|> "
    "<|END_TOOL_RESULT|>"
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
    "gpt_oss": Family(GPT_OSS, _HARMONY, "<|return|> <|call|>"),
    "gemma4": Family(
        GEMMA4,
        _GEMMA4,
        "<eos> <turn|> <|tool_response>",
        "<bos>",
    ),
}

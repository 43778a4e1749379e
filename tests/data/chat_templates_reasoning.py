"""Chat templates in the styles of public model families: those with reasoning
in <think> tags."""

from chat_templates import CHATML_STOPS, CHATML_TOKENS, Family
from chat_templates_tools import DEEPSEEK, KIMI_TOKENS, TOOL_TAGS

# After the last question, the last turn has a block even without reasoning.
QWEN3 = r"""
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}
{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- if tools %}
{{- '<|im_start|>system\n# Tools\n' + tools | tojson + '<|im_end|>\n' }}
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set thought, text = m.reasoning_content or '', m.content %}
{%- if '</think>' in text and not thought %}
{%- set thought = text.split('</think>')[0].split('<think>')[-1].strip('\n') %}
{%- set text = text.split('</think>')[-1].lstrip('\n') %}
{%- endif %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.last and (loop.last or thought) %}
{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + text.lstrip('\n') }}
{%- else %}{{- text }}
{%- endif %}
{%- for c in m.tool_calls or [] %}
{{- '\n' if text or not loop.first }}
{{- '<tool_call>\n' + c.function | tojson + '\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}
{{- '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' }}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{{- '<|im_end|>\n' if loop.last or loop.nextitem.role != 'tool' }}
{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\n\n</think>\n\n' }}
{%- endif %}
{%- endif %}
"""
QWEN3_THINKING = QWEN3.replace(
    "{%- if enable_thinking is defined and enable_thinking is false %}\n"
    r"{{- '<think>\n\n</think>\n\n' }}"
    "\n{%- endif %}",
    r"{{- '<think>\n' }}",
)

# The prompt opens a block, and no turn has one.
QWQ = r"""
{{- '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' if tools }}
{%- for m in messages %}
{%- set text = m.content %}
{%- if m.role == 'assistant' %}
{%- set text = text.split('</think>')[-1].lstrip('\n') %}
{%- endif %}
{{- '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\n' + text }}
{%- for c in m.tool_calls or [] %}
{{- '\n<tool_call>\n' + c.function | tojson + '\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{%- endif %}
"""

DEEPSEEK_R1 = r"""
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'system' %}{{- m.content }}
{%- elif m.role == 'user' %}{{- '<｜User｜>' + m.content }}
{%- elif m.role == 'tool' %}
{{- '<｜tool▁outputs▁begin｜>' + m.content + '<｜tool▁outputs▁end｜>' }}
{%- elif m.role == 'assistant' %}
{{- '<｜Assistant｜>' + m.content.split('</think>')[-1].lstrip() }}
{%- for c in m.tool_calls or [] %}
{{- '<｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' }}
{{- c.function.arguments | tojson + '<｜tool▁call▁end｜>' }}
{%- endfor %}
{{- eos_token }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜><think>\n' }}{%- endif %}
"""

# Without thinking, the prompt ends with a closing tag, as every turn begins.
DEEPSEEK_V31 = r"""
{%- if thinking is not defined %}{%- set thinking = false %}{%- endif %}
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'system' %}{{- m.content }}
{%- elif m.role == 'user' %}{{- '<｜User｜>' + m.content }}
{%- elif m.role == 'tool' %}
{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
{%- elif m.role == 'assistant' %}
{{- '<｜Assistant｜></think>' if loop.first or loop.previtem.role != 'tool' }}
{{- m.content.split('</think>')[-1] }}
{%- for c in m.tool_calls or [] %}
{{- '<｜tool▁calls▁begin｜>' if loop.first }}
{{- '<｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' }}
{{- c.function.arguments | tojson + '<｜tool▁call▁end｜>' }}
{{- '<｜tool▁calls▁end｜>' if loop.last }}
{%- endfor %}
{{- eos_token }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}
{{- '<｜Assistant｜>' + ('<think>' if thinking else '</think>') }}
{%- endif %}
"""

# No end of turn; a turn without reasoning has an empty block, on a line of its own.
GLM45 = r"""
{{- '[gMASK]<sop>' }}
{%- if tools %}{{- '<|system|>\n# Tools\n' + tools | tojson }}{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}
{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}
{{- '<|user|>\n' + m.content }}
{{- '/nothink' if enable_thinking is defined and not enable_thinking }}
{%- elif m.role == 'assistant' %}
{%- set thought, text = m.reasoning_content or '', m.content %}
{%- if '</think>' in text %}
{%- set thought = text.split('</think>')[0].split('<think>')[-1].strip() %}
{%- set text = text.split('</think>')[-1].strip() %}
{%- endif %}
{{- '<|assistant|>' }}
{%- if loop.index0 > ns.last and thought %}
{{- '\n<think>' + thought.strip() + '</think>' }}
{%- else %}{{- '\n<think></think>' }}
{%- endif %}
{{- '\n' + text.strip() if text.strip() }}
{%- for c in m.tool_calls or [] %}
{{- '\n<tool_call>' + c.function.name + '\n' }}
{%- for name, value in c.function.arguments.items() %}
{{- '<arg_key>' + name + '</arg_key>\n<arg_value>' }}
{{- (value if value is string else value | tojson) + '</arg_value>\n' }}
{%- endfor %}
{{- '</tool_call>' }}
{%- endfor %}
{%- elif m.role == 'tool' %}
{{- '<|observation|>' if loop.first or loop.previtem.role != 'tool' }}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- else %}{{- '<|system|>\n' + m.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|assistant|>' }}
{{- '\n<think></think>' if enable_thinking is defined and not enable_thinking }}
{%- endif %}
"""

# An empty block in the prompt that no turn has.
HUNYUAN = r"""
{{- bos_token }}{{- tools | tojson if tools }}
{%- for m in messages %}
{%- if m.role == 'system' %}{{- m.content + '<｜hy_place▁holder▁no▁3｜>' }}
{%- elif m.role == 'user' %}{{- '<｜hy_User｜>' + m.content }}
{%- elif m.role == 'tool' %}{{- '<｜hy_User｜><tool_response>' + m.content }}
{%- elif m.role == 'assistant' %}
{%- set text = m.content %}
{%- if '</think>' in text %}
{%- set text = text.split('</think>')[-1].strip() %}
{%- endif %}
{{- '<｜hy_Assistant｜>' + text }}
{%- for c in m.tool_calls or [] %}
{{- '<tool_call>' + c.function.name + '\n' + c.function.arguments | tojson }}
{{- '</tool_call>' }}
{%- endfor %}
{{- eos_token }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<｜hy_Assistant｜>' }}
{%- if enable_thinking is defined and not enable_thinking %}
{{- '<think>\n\n</think>\n' }}
{%- endif %}
{%- endif %}
"""

# Either prompt has a block; earlier turns and turns without reasoning have none.
NEMOTRON_H = r"""
{%- set ns = namespace(thinking=true) %}
{%- for m in messages if '/no_think' in m.content %}{%- set ns.thinking = false %}
{%- endfor %}
{%- set ns.thinking = enable_thinking if enable_thinking is defined else ns.thinking %}
{{- '<SPECIAL_10>System\n' }}
{{- messages[0].content.strip() if messages[0].role == 'system' }}
{{- "\n<AVAILABLE_TOOLS>" + tools | tojson if tools }}
{{- '\n' }}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '<SPECIAL_11>User\n' + m.content.strip() + '\n' }}
{%- elif m.role == 'tool' %}
{{- '<SPECIAL_11>User\n<TOOL_RESPONSE>' + m.content + '</TOOL_RESPONSE>\n' }}
{%- elif m.role == 'assistant' %}
{%- set text = m.content %}
{%- if '</think>' in text and not loop.last %}
{%- set text = text.split('</think>')[1] %}
{%- endif %}
{{- '<SPECIAL_11>Assistant\n' + text.strip() }}
{%- for c in m.tool_calls or [] %}
{{- ('<TOOLCALL>[' if loop.first else ', ') + c.function | tojson }}
{{- ']</TOOLCALL>' if loop.last }}
{%- endfor %}
{{- '\n<SPECIAL_12>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<SPECIAL_11>Assistant\n' + ('<think>\n' if ns.thinking else '<think></think>') }}
{%- endif %}
"""

# Every turn has a block, which is empty without reasoning and before a question.
NEMOTRON_3 = r"""
{%- set enable_thinking = enable_thinking if enable_thinking is defined else true %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}
{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{{- '<|im_start|>system\n' }}
{{- messages[0].content if messages[0].role == 'system' }}
{{- '\n# Tools\n' + tools | tojson if tools }}{{- '<|im_end|>\n' }}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>' + m.content + '</tool_response><|im_end|>\n' }}
{%- elif m.role == 'assistant' %}
{%- set text = m.content | trim %}
{%- if m.reasoning_content %}
{%- set text = '<think>\n' + m.reasoning_content + '\n</think>\n' + text %}
{%- elif '<think>' not in text %}{%- set text = '<think></think>' + text %}
{%- endif %}
{%- if loop.index0 < ns.last %}
{%- set text = '<think></think>' + text.split('</think>')[-1] | trim %}
{%- endif %}
{{- '<|im_start|>assistant\n' + text }}
{%- for c in m.tool_calls or [] %}
{{- '\n<tool_call>\n<function=' + c.function.name + '>\n' }}
{%- for name, value in c.function.arguments | items %}
{{- '<parameter=' + name + '>\n' + value | string + '\n</parameter>\n' }}
{%- endfor %}
{{- '</function>\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{{- '<think>\n' if enable_thinking else '<think></think>' }}
{%- endif %}
"""

# Reasoning stays until the next answer without a call.
KIMI_K2_THINKING = r"""
{%- if tools %}
{{- '<|im_system|>tool_declare<|im_middle|>' + tools | tojson + '<|im_end|>' }}
{%- endif %}
{%- set ns = namespace(answer=-1) %}
{%- for m in messages %}
{%- if m.role == 'assistant' and not m.tool_calls and not loop.last %}
{%- set ns.answer = loop.index0 %}
{%- endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set thought = m.reasoning_content or '' if loop.index0 > ns.answer else '' %}
{{- '<|im_assistant|>assistant<|im_middle|><think>' + thought + '</think>' }}
{{- m.content }}
{%- for c in m.tool_calls or [] %}
{{- '<|tool_calls_section_begin|>' if loop.first }}
{{- '<|tool_call_begin|>functions.' + c.function.name + ':' + loop.index0 | string }}
{{- '<|tool_call_argument_begin|>' + c.function.arguments | tojson }}
{{- '<|tool_call_end|>' + ('<|tool_calls_section_end|>' if loop.last else '') }}
{%- endfor %}
{%- elif m.role == 'tool' %}
{{- '<|im_system|>tool<|im_middle|>## Return of ' + m.tool_call_id + '\n' }}
{{- m.content }}
{%- else %}{{- '<|im_' + m.role + '|>' + m.role + '<|im_middle|>' + m.content }}
{%- endif %}
{{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_assistant|>assistant<|im_middle|>' }}
{%- endif %}
"""

MINIMAX_M2 = r"""
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}
{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{{- ']~!b[]~b]system\n' }}
{{- messages[0].content if messages[0].role == 'system' else 'You are MiniMax.' }}
{{- '\n<tools>' + tools | tojson + '</tools>' if tools }}{{- '[e~[\n' }}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- ']~b]user\n' + m.content + '[e~[\n' }}
{%- elif m.role == 'tool' %}
{{- ']~b]tool\n<response>' + m.content + '</response>[e~[\n' }}
{%- elif m.role == 'assistant' %}
{%- set thought, text = m.reasoning_content or '', m.content %}
{%- if not thought and '</think>' in text %}
{%- set thought = text.split('</think>')[0].split('<think>')[-1].strip('\n') %}
{%- set text = text.split('</think>')[-1].strip('\n') %}
{%- endif %}
{{- ']~b]ai\n' }}
{{- '<think>\n' + thought + '\n</think>\n\n' if thought and loop.index0 > ns.last }}
{{- text }}
{%- for c in m.tool_calls or [] %}
{{- '\n<minimax:tool_call><invoke name="' + c.function.name + '">\n' }}
{%- for name, value in c.function.arguments.items() %}
{%- set value = value if value is string else value | tojson %}
{{- '<parameter name="' + name + '">' + value + '</parameter>\n' }}
{%- endfor %}
{{- '</invoke></minimax:tool_call>' }}
{%- endfor %}
{{- '[e~[\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- ']~b]ai\n<think>\n' }}{%- endif %}
"""

# A turn with reasoning can only follow the prompt with thinking.
EXAONE4 = r"""
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}
{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- if tools %}{{- '[|system|]\n' + tools | tojson + '[|endofturn|]\n' }}{%- endif %}
{%- for m in messages %}
{{- '[|' + m.role + '|]' + ('' if m.role == 'assistant' else '\n') }}
{%- if m.role == 'assistant' and loop.index0 > ns.last %}
{{- '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}
{%- endif %}
{{- m.content }}
{%- for c in m.tool_calls or [] %}
{{- '<tool_call>' + c.function | tojson + '</tool_call>' }}
{%- endfor %}
{{- '[|endofturn|]\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '[|assistant|]<think>\n' + ('' if enable_thinking else '\n</think>\n\n') }}
{%- endif %}
"""

THINK = "<think> </think>"
_QWEN3 = f"{CHATML_TOKENS} {TOOL_TAGS} {THINK}", CHATML_STOPS
_KIMI = f"{KIMI_TOKENS} {THINK}", "[EOS] <|im_end|>", "[BOS]"
_ROLES = "<|system|> <|user|> <|assistant|> <|observation|>"
_HUNYUAN = (
    "<｜hy_begin▁of▁sentence｜> <｜hy_place▁holder▁no▁2｜> <｜hy_place▁holder▁no▁3｜> "
    "<｜hy_User｜> <｜hy_Assistant｜>"
)

REASONING = {
    "qwen3": Family(QWEN3, *_QWEN3),
    "qwen3_thinking": Family(QWEN3_THINKING, *_QWEN3),
    "qwq": Family(QWQ, *_QWEN3),
    "deepseek_r1": Family(DEEPSEEK_R1, *DEEPSEEK),
    "deepseek_v31": Family(DEEPSEEK_V31, *DEEPSEEK),
    "glm45": Family(
        GLM45,
        f"<|endoftext|> [gMASK] <sop> {_ROLES} {THINK} {TOOL_TAGS} /nothink",
        "<|endoftext|> <|user|> <|observation|>",
    ),
    "hunyuan": Family(
        HUNYUAN,
        f"{_HUNYUAN} {THINK}",
        "<｜hy_place▁holder▁no▁2｜>",
        _HUNYUAN.split()[0],
    ),
    "nemotron_h": Family(
        NEMOTRON_H,
        f"<s> <SPECIAL_10> <SPECIAL_11> <SPECIAL_12> {THINK}",
        "<SPECIAL_12>",
    ),
    "nemotron_3": Family(NEMOTRON_3, *_QWEN3),
    "kimi_k2_thinking": Family(KIMI_K2_THINKING, *_KIMI),
    "minimax_m2": Family(MINIMAX_M2, f"]~!b[ ]~b] [e~[ {THINK}", "[e~[", "]~!b["),
    "exaone4": Family(
        EXAONE4,
        f"[BOS] [|system|] [|user|] [|assistant|] [|endofturn|] {THINK}",
        "[|endofturn|]",
    ),
}

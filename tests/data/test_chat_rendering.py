"""Templates that loop for ever or print endless text are stopped, in any thread."""

import threading
import time

import pytest
from lmx.data import tokenization
from lmx.data.chat import rendering
from lmx.data.chat.rendering import ChatTemplate, NoTrainableTokens
from lmx.errors import UserError
from test_tokenization import CHATML, build_tokenizer, chat

MESSAGES = [{"role": "user", "content": "Hi"}]
LOOP = "{% for i in range(99999) %}"
NESTED = LOOP * 3 + "{% endfor %}" * 3
HOSTILE = {
    "product": "{{ 'a' * 10**13 }}",
    "power": "{{ 10 ** (10 ** 9) }}",
    "nested_loops": NESTED,
    "silent_loops": NESTED.replace("%}{% endfor", "%}{% set x = i %}{% endfor", 1),
    "text_in_loops": LOOP * 2 + "a" * 20_000 + "{% endfor %}" * 2,
    "bytes": "{{ ('a' * 10**6).encode('utf-32') | string }}",
    "joiner": "{% set j = joiner('a' * 3 * 10**6) %}" + LOOP + "{{ j() }}{% endfor %}",
    "replace": "{{ ('a' * 9999) | replace('a', 'b' * 999) }}",
    "list": "{{ (['ab'] * 10 ** 7) | join }}{{ messages * 10 ** 6 }}",
    "width": "{{ 'x' | center(3 * 10 ** 7) }}{{ '%*d' | format(3 * 10 ** 7, 1) }}",
    "doubling": "{% set n = namespace(t='ab') %}{% for i in range(24) %}"
    "{% set n.t = n.t + n.t %}{% endfor %}{{ n.t }}",
    "range": "{{ range(10**12) | list }}",
    "recursion": "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
    "recursion_deep": (
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}"
        "{% endmacro %}{{ m(60) }}"
    ),
    "select": "{{ range(99999)|select('in', range(99999)|list)|list|length }}" * 40,
    "parentheses": "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
    "blocks": "{% if 1 %}" * 3_000 + "{% endif %}" * 3_000,
    "digits": "{{ " + "9" * 5_000 + " }}",
    "zero": "{{ 1 // 0 }}",
    "key": "{{ {}['a'].b.c }}",
    "syntax": "{% for %}",
}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Limits that are reached soon, and none remembered from another test."""
    monkeypatch.setattr(rendering, "MAX_SECONDS", 0.25)
    monkeypatch.setattr(rendering, "_exceeded", rendering.Counter())


def stopped(template):
    start = time.process_time()
    with pytest.raises(NoTrainableTokens) as caught:
        ChatTemplate(build_tokenizer(template)).render(MESSAGES)
    assert time.process_time() - start < 5
    return str(caught.value)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_template_is_stopped(name):
    reason = stopped(HOSTILE[name])
    assert reason.startswith("the chat template ")
    assert len(reason) < 400


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nested_loops", "it takes more than 0.25 seconds"),
        ("joiner", "it prints more than 1,00"),
    ],
)
def test_hostile_template_is_stopped_in_a_thread(name, reason):
    reasons = []
    thread = threading.Thread(target=lambda: reasons.append(stopped(HOSTILE[name])))
    thread.start()
    thread.join(20)
    assert reasons[0].startswith(f"the chat template is stopped: {reason}")


def test_template_that_is_stopped_three_times_ends_the_run():
    tokenizer = build_tokenizer(HOSTILE["bytes"])
    rows = [chat("a", "b")] * 9
    with pytest.raises(UserError, match="stopped for 3 chats: it prints more than 1"):
        tokenization.encode_all(rows, tokenizer, max_seq_length=99)


def test_a_long_chat_may_print_a_long_text():
    tokenizer = build_tokenizer(CHATML)
    long = [{"role": "user", "content": "a" * 2_000_000}]
    assert len(ChatTemplate(tokenizer).render(long)) > 2_000_000


@pytest.mark.parametrize(
    "template",
    [
        CHATML,
        "{% for m in messages %}{{ m.content.replace('i', 'o').strip() }}{% endfor %}",
        "{% for m in messages %}{{ ' '.join(m.values()) }}{% endfor %}",
        "{{ messages | tojson(indent=1) | length }}",
        "{{ '%s, %05.1f' % ('a', 2) }}{{ '{:>4}|{}'.format('a', 'b') }}",
        "{% generation %}a{% endgeneration %}",
        "{% for a in [1, 2] %}{% continue %}{% endfor %}",
        "{% macro m(a) %}{{ a }}{{ caller() }}{% endmacro %}"
        "{% call m('x') %}y{% endcall %}{% filter upper %}z{% endfilter %}",
        "{{ raise_exception('no system turns') }}",
    ],
)
def test_limits_leave_ordinary_templates_alone(template):
    from transformers.utils import chat_template_utils

    tokenizer = build_tokenizer(template)
    rendered = outcome(lambda: ChatTemplate(tokenizer).render(MESSAGES))
    compiled = chat_template_utils._cached_compile_jinja_template
    assert rendered == outcome(lambda: compiled(template).render(messages=MESSAGES))


def outcome(render):
    try:
        return render()
    except Exception as error:
        return str(error).removeprefix("the chat template rejects these messages: ")


def test_template_for_tools_is_used_with_tools():
    tokenizer = build_tokenizer({"default": "plain", "tool_use": "tools: {{ tools }}"})
    template = ChatTemplate(tokenizer)
    assert template.exists
    assert template.render(MESSAGES) == "plain"
    assert template.render(MESSAGES, tools=[{"a": 1}]) == "tools: [{'a': 1}]"

"""Chat templates that loop for ever or make endless text are stopped, in any thread."""

import threading
import time

import pytest
from lmx.data import chat_rendering, template_limits, tokenization
from lmx.data.chat_rendering import NoTrainableTokens, render_messages
from lmx.errors import UserError
from test_tokenization import CHATML, build_tokenizer, chat

MESSAGES = [{"role": "user", "content": "Hi"}]
LOOP = "{% for i in range(99999) %}"
NESTED = LOOP * 3 + "{% endfor %}" * 3
DOUBLE = (
    "{% set ns = namespace(s=['a', 'a']) %}{% for i in range(60) %}"
    "{% set ns.s = STEP %}{% endfor %}"
)
HOSTILE = {
    "product": "{{ 'a' * 10**11 }}",
    "list": "{{ [1] * 10**11 }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "nested_loops": NESTED,
    "silent_loops": NESTED.replace("%}{% endfor", "%}{% set x = i %}{% endfor", 1),
    "text_in_loops": LOOP * 2 + "a" * 20_000 + "{% endfor %}" * 2,
    "center": "{{ 'a' | center(10**10) }}",
    "center_constant": "{{ 'a' | center(10000000000) }}",
    "center_map": "{{ range(99999) | map('center', 99999) | join }}",
    "center_method": "{{ 'a'.center(10**10) }}",
    "ljust_kept": LOOP + "{% set _ = cycler('a'.ljust(99999)) %}{% endfor %}" + NESTED,
    "zfill": "{{ '1'.zfill(10**11) }}",
    "expandtabs": "{{ ('\t' * 100000).expandtabs(100000) }}",
    "indent": "{{ ('\n' * 100000) | indent(100000) }}",
    "indent_text": "{{ ('\n' * 100000) | indent('a' * 100000) }}",
    "join": "{{ range(99999) | join('a' * 99999) }}",
    "join_method": "{{ ('a' * 99999).join(range(99999) | map('string')) }}",
    "replace": "{{ ('a' * 99999) | replace('a', 'b' * 99999) }}",
    "replace_method": "{{ ('a' * 99999).replace('', 'b' * 99999) }}",
    "translate": "{{ ('a' * 99999).translate({97: 'b' * 99999}) }}",
    "format": "{{ '%10000000000d' % 1 }}",
    "format_width": "{{ '%*d' % (10**10, 1) }}",
    "format_filter": "{{ '%10000000000s' | format('a') }}",
    "format_method": "{{ '{:>10000000000}'.format('a') }}",
    "format_nested": "{{ '{:>{}}'.format('a', 10**10) }}",
    "format_map": "{{ '{a:>10000000000}'.format_map({'a': 'a'}) }}",
    "tojson": "{{ range(99999) | list | tojson(indent=99999) }}",
    "batch": "{{ [1] | batch(10**10, 'a') | list }}",
    "batch_fill": "{{ [1] | batch(99999, 'a' * 99999) | list | string }}",
    "slice": "{{ [1] | slice(10**10) | list }}",
    "sum": "{{ ([range(99999) | list] * 9999) | sum(start=[]) }}",
    "lists": LOOP + "{% set x = range(99999) | list %}{% endfor %}",
    "round": "{{ 1.5 | round(10**10, 'ceil') }}",
    "to_bytes": "{{ (1).to_bytes(10**10, 'big') }}",
    "range": "{{ range(10**12) | list }}",
    "concat": DOUBLE.replace("STEP", "ns.s ~ ns.s"),
    "add": DOUBLE.replace("STEP", "ns.s + ns.s"),
    "shared_lists": DOUBLE.replace("STEP", "[ns.s, ns.s]") + "{{ ns.s }}",
    "shared_dicts": DOUBLE.replace("STEP", "{'a': ns.s, 'b': ns.s}"),
    "shared_keywords": DOUBLE.replace("STEP", "dict(a=ns.s, b=ns.s)"),
    "recursion": "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
    "recursion_deep": (
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}"
        "{% endmacro %}{{ m(60) }}"
    ),
    "recursive_loop": (
        "{% for x in [[1, 1]] recursive %}{{ loop([[1, 1], [1, 1]]) }}{% endfor %}"
    ),
    "select": "{{ range(99999)|select('in', range(99999)|list)|list|length }}" * 40,
    "lipsum": "{{ lipsum(10**9) }}",
    "length": "{# " + "a" * 10**6 + " #}",
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
    monkeypatch.setattr(template_limits, "MAX_STEPS", 50_000)
    monkeypatch.setattr(template_limits, "MAX_CHARACTERS", 1_000_000)
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 1)
    monkeypatch.setattr(chat_rendering, "_exceeded", chat_rendering.Counter())


def stopped(template):
    start = time.process_time()
    with pytest.raises(NoTrainableTokens) as caught:
        render_messages(MESSAGES, build_tokenizer(template))
    assert time.process_time() - start < 5
    return str(caught.value)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_template_is_stopped(name):
    reason = stopped(HOSTILE[name])
    assert reason.startswith("the chat template ")
    assert len(reason) < 400


def test_hostile_template_is_stopped_in_a_thread():
    reasons = []
    thread = threading.Thread(target=lambda: reasons.append(stopped(NESTED)))
    thread.start()
    thread.join(20)
    assert reasons == ["the chat template is stopped: it takes too many steps"]


def test_time_is_limited(monkeypatch):
    monkeypatch.setattr(template_limits, "MAX_STEPS", 10**12)
    assert "takes more than 1 seconds" in stopped(NESTED)


def test_template_that_is_stopped_three_times_ends_the_run():
    tokenizer = build_tokenizer(NESTED)
    rows = [chat("a", "b")] * 9
    with pytest.raises(UserError, match="stopped for 3 chats: it takes too many steps"):
        tokenization.encode_all(rows, tokenizer, max_seq_length=99)


def test_a_long_chat_has_a_larger_budget():
    """Templates look at all messages for each message, which takes n**2 steps."""
    template = "{% for m in messages %}{% for n in messages %}{% endfor %}{% endfor %}"
    assert render_messages(MESSAGES * 400, build_tokenizer(template)) == ""


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (CHATML, "<|im_start|>user\nHi<|im_end|>\n"),
        ("{{ messages | tojson(indent=1) | length }}", "45"),
        ("{{ '%s, %05.1f' % ('a', 2) }}{{ '{:>4}|{}'.format('a', 'b') }}", None),
        ("{{ messages[0].content.replace('H', 'h') | center(6) | indent(2) }}", "  hi"),
        ("{{ ['a', 1] + [2] * 2 }}{{ 'a' ~ 1 ~ [2] }}{{ 7 % 4 + 2 ** 3 * 2 }}", None),
        ("{{ messages | map(attribute='role') | join(', ') | upper }}", "USER"),
        ("{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}", None),
        ("{% set a, b = 1, 2 %}{{ (a, b) }}{{ {'a': [b]} }}{{ [1, 2, 3][1:] }}", None),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "1"),
        ("{{ [1, 2, 3] | sum }}{{ 10**12 }}{{ None | default(10**12, true) }}", None),
        ("{% generation %}a{% endgeneration %}", "a"),
        ("{% for a in [1, 2] %}{% continue %}{% endfor %}", ""),
        ("{% macro m(a) %}{{ a }}{{ caller() }}{% endmacro %}"
         "{% call m('x') %}y{% endcall %}{% filter upper %}z{% endfilter %}", "xyZ"),
    ],
)  # fmt: skip
def test_limits_leave_ordinary_templates_alone(template, text):
    from transformers.utils import chat_template_utils

    rendered = outcome(lambda: render_messages(MESSAGES, build_tokenizer(template)))
    compiled = chat_template_utils._cached_compile_jinja_template
    plain = outcome(lambda: compiled(template).render(messages=MESSAGES))
    assert rendered == plain
    assert text is None or rendered.strip() == text.strip()


def outcome(render):
    try:
        return render()
    except Exception as error:
        return str(error).removeprefix("the chat template rejects it: ")

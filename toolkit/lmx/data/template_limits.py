"""Limits of time and size for chat templates, which are programs from the Hub.

Jinja's sandbox hides Python's internals from a template. It does not end a loop, and it
lets a template build a string of any length. Here each block, filter and call counts as
a step, and an operation whose result can be much longer than its operands announces its
length before it starts. So the limits hold in any thread, without signals.
"""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, wraps
from typing import Any

from jinja2 import Template, TemplateRuntimeError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.environment import Environment
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment

# A template has MAX_STEPS and MAX_CHARACTERS, and more for each character of a chat.
MAX_STEPS, STEPS_PER_CHARACTER = 2_000_000, 50
MAX_CHARACTERS, CHARACTERS_PER_CHARACTER = 100_000_000, 64
# Of the processor, not of the clock: a busy machine skips the same chats.
MAX_SECONDS, STEPS_PER_CHECK = 10.0, 64
MAX_TEMPLATE = 300_000
# Integers that a filter or method may take (widths, counts), and bits of a product.
MAX_ARGUMENT = MAX_BITS = 100_000
# Levels of indented JSON.
MAX_LEVELS = 10
# No chat template uses these, and their time or length has no simple bound.
REMOVED = ("urlize", "wordwrap", "xmlattr", "pprint", "striptags")
TO_TEXT = (
    *("tojson", "string", "escape", "e", "forceescape", "upper", "lower", "title"),
    *("capitalize", "trim", "center", "wordcount", "truncate", "urlencode"),
)
_WIDTHS = re.compile(r"\d+")
_OTHER_WIDTHS = re.compile(r"%[^a-zA-Z%]*\*|:[^{}]*\{")


class TemplateLimitError(TemplateRuntimeError):
    """A chat template has reached a limit."""


class TemplateBudget:
    """What is left of the steps, the characters and the time of one rendering."""

    def __init__(self, size: int):
        self._steps = MAX_STEPS + STEPS_PER_CHARACTER * size
        self._characters = MAX_CHARACTERS + CHARACTERS_PER_CHARACTER * size
        self._deadline = time.thread_time() + MAX_SECONDS

    def step(self, characters: int = 0) -> None:
        """Count a step that makes some characters.

        Raises:
            TemplateLimitError: nothing is left.
        """
        self._steps -= 1
        self._characters -= characters
        if self._characters < 0:
            raise TemplateLimitError("it makes too long a text")
        if self._steps < 0:
            raise TemplateLimitError("it takes too many steps")
        late = self._steps % STEPS_PER_CHECK == 0 or characters > MAX_ARGUMENT
        if late and time.thread_time() > self._deadline:
            raise TemplateLimitError(f"it takes more than {MAX_SECONDS:.0f} seconds")

    def text(self, *values: Any) -> int:
        """The length of values as text, as soon as it is above what is left."""
        return size_of(values, self._characters)


_budget: ContextVar[TemplateBudget] = ContextVar("template_budget")


def size_of(value: Any, limit: float = float("inf")) -> int:
    """About the number of characters of a value as text; stops above `limit`."""
    total, stack = 0, [value]
    while stack and total <= limit:
        value = stack.pop()
        if isinstance(value, str | bytes):
            total += len(value)
        elif isinstance(value, dict):
            total += 4 * len(value)
            stack += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple | set | frozenset):
            total += 4 * len(value)
            stack += value
        else:
            total += value.bit_length() // 3 + 1 if isinstance(value, int) else 16
    return total


def _format_bound(pattern: Any, values: Any) -> int:
    """A bound of the length of `pattern % values` and `pattern.format(values)`."""
    text = pattern.decode("latin-1") if isinstance(pattern, bytes) else str(pattern)
    if _OTHER_WIDTHS.search(text):
        raise TemplateLimitError("it takes the width of a format from a value")
    widths = sum(int(digits[:18]) for digits in _WIDTHS.findall(text))
    repeats = text.count("%") + text.count("{")
    return len(text) + widths + repeats * _budget.get().text(values)


def _replace_bound(text: Any, old: Any = "", new: Any = "", *_: Any) -> int:
    count = text.count(old) if old else len(text) + 1
    return len(text) + count * len(new)


def _join_bound(separator: Any, values: Any) -> int:
    return _budget.get().text(values) + len(values) * len(separator)


METHODS: dict[str, Callable[..., int]] = {
    "format": lambda text, *args, **kwargs: _format_bound(text, [args, kwargs]),
    "replace": _replace_bound,
    "join": _join_bound,
    "expandtabs": lambda text, tabsize=8: len(text) + text.count("\t") * tabsize,
    "translate": lambda text, table: len(text) * (1 + size_of(table)),
    "fromkeys": lambda _, keys, value=None: len(keys) * (1 + size_of(value)),
}
METHODS["format_map"] = METHODS["format"]
"""Bounds of the length of the result of a method that multiplies lengths."""


def _filter_bound(name: str, value: Any, args: tuple, kwargs: dict) -> int:
    """A bound of the length of the result of a filter that makes text."""
    if name in TO_TEXT:
        indented = name == "tojson" and len(args) + len(kwargs) > 0
        factor = MAX_LEVELS * (1 + _widths(args, kwargs)) if indented else 1
        return _budget.get().text(value) * factor
    if name == "replace":
        return _replace_bound(str(value), *map(str, args), *map(str, kwargs.values()))
    if name == "format":
        return _format_bound(value, [args, kwargs])
    if name == "join":
        separators = args[:1] or [kwargs.get("d", "")]
        return _join_bound(str(separators[0]), value)
    if name == "indent":
        widths = args[:1] or [kwargs.get("width", 4)]
        width = widths[0] if isinstance(widths[0], int) else len(widths[0])
        return len(str(value)) + (str(value).count("\n") + 1) * width
    if name in ("batch", "slice"):
        return MAX_ARGUMENT * size_of([*args[1:], *kwargs.values()])
    start = kwargs.get("start", args[1] if len(args) > 1 else 0)
    if name == "sum" and not isinstance(start, int | float):
        raise TemplateLimitError("it adds up values that are no numbers")
    return 0


def _widths(args: tuple, kwargs: dict) -> int:
    """The sum of all arguments that may be a width or a count."""
    numbers = [v for v in (*args, *kwargs.values()) if isinstance(v, int)]
    if any(abs(number) > MAX_ARGUMENT for number in numbers):
        raise TemplateLimitError(f"it asks for a width or count above {MAX_ARGUMENT:,}")
    return sum(map(abs, numbers))


def _limited_filter(name: str, function: Callable) -> Callable:
    """A filter that checks its arguments and the length of its result."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)  # keeps jinja_pass_arg
    def limited(*args: Any, **kwargs: Any) -> Any:
        before, value, rest = args[:first], args[first], args[first + 1 :]
        widths = 0 if name in ("default", "d") else _widths(rest, kwargs)
        if name == "join" and not hasattr(value, "__len__"):
            value = list(value)
        _budget.get().step(widths + _filter_bound(name, value, rest, kwargs))
        result = function(*before, value, *rest, **kwargs)
        if isinstance(result, list):
            _budget.get().step(len(result))
        return result

    return limited


def _limited_test(function: Callable) -> Callable:
    @wraps(function)
    def limited(*args: Any, **kwargs: Any) -> bool:
        _budget.get().step()
        return function(*args, **kwargs)

    return limited


class LimitedCodeGenerator(CodeGenerator):
    """Adds a step to every block: the bodies of loops, branches and macros."""

    def blockvisit(self, nodes_: Any, frame: Frame) -> None:
        """Write a block, which first counts a step and the text in the template."""
        outputs = [node for node in nodes_ if isinstance(node, nodes.Output)]
        data = [
            n for o in outputs for n in o.nodes if isinstance(n, nodes.TemplateData)
        ]
        self.writeline(f"environment.step({sum(len(n.data) for n in data)})")
        super().blockvisit(nodes_, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        """Write `a ~ b` as a call that checks the length."""
        self._call("environment.concatenate((", node.nodes, frame, "))")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        """Write a list as a call that checks what it holds."""
        self._call("environment.made([", node.items, frame, "])")

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        """Write a tuple as a call that checks what it holds; targets as they are."""
        if node.ctx != "load":
            return super().visit_Tuple(node, frame)
        return self._call("environment.made((", node.items, frame, "))")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        """Write a dict as a call that checks what it holds."""
        self.write("environment.made(")
        super().visit_Dict(node, frame)
        self.write(")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        """Write `a[i:j]` as a call that counts the copy."""
        if not isinstance(node.arg, nodes.Slice):
            return super().visit_Getitem(node, frame)
        self.write("environment.sliced(")
        super().visit_Getitem(node, frame)
        return self.write(")")

    def _call(self, before: str, parts: list, frame: Frame, after: str) -> None:
        self.write(before)
        for part in parts:
            self.visit(part, frame)
            self.write(", ")
        self.write(after)


class LimitedTemplate(Template):
    """A template with a new budget for every rendering."""

    def render(self, **variables: Any) -> str:
        """See `Template.render`."""
        with self._limits(variables):
            return super().render(**variables)

    def generate(self, **variables: Any) -> Iterator[str]:
        """See `Template.generate`; the whole text is made at the first step."""
        with self._limits(variables):
            yield from super().generate(**variables)

    @contextmanager
    def _limits(self, variables: dict) -> Iterator[None]:
        token = _budget.set(TemplateBudget(size_of(variables)))
        try:
            yield
        finally:
            _budget.reset(token)


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with limits, and with the filters and globals of `base`."""

    code_generator_class = LimitedCodeGenerator
    template_class = LimitedTemplate
    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, base: Environment):
        super().__init__(
            trim_blocks=base.trim_blocks,
            lstrip_blocks=base.lstrip_blocks,
            extensions=[type(extension) for extension in base.extensions.values()],
            finalize=self._printed,
            # Constants would be computed before there is a budget.
            optimized=False,
        )
        known = {n: f for n, f in base.filters.items() if n not in REMOVED}
        self.filters = {n: _limited_filter(n, f) for n, f in known.items()}
        self.tests = {n: _limited_test(f) for n, f in base.tests.items()}
        self.globals = {n: v for n, v in base.globals.items() if n != "lipsum"}

    def step(self, characters: int = 0) -> None:
        """Count a step."""
        _budget.get().step(characters)

    def made(self, value: Any) -> Any:
        """A new list, tuple or dict. Ones that share a part can hold 2**n values."""
        budget = _budget.get()
        budget.step(budget.text(value))
        return value

    def sliced(self, value: Any) -> Any:
        """A copied part of a text or a list."""
        _budget.get().step(len(value) if hasattr(value, "__len__") else 0)
        return value

    def concatenate(self, values: tuple) -> str:
        """`a ~ b`."""
        budget = _budget.get()
        budget.step(budget.text(values))
        return "".join(map(str, values))

    def _printed(self, value: Any) -> Any:
        if budget := _budget.get(None):
            budget.step(budget.text(value))
        return value

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Check the length of a result, then compute it."""
        _budget.get().step(_operator_bound(operator, left, right))
        return super().call_binop(context, operator, left, right)

    # The names are private, so that a call may have arguments of any other name.
    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Check the arguments and the length of the result, then call."""
        method = getattr(__obj, "__wrapped__", __obj)
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str | bytes | int | float | dict):
            widths = _widths(args, kwargs)
            if args and not hasattr(args[0], "__len__") and _is(method, "join"):
                args = (list(args[0]),)
            bound = METHODS.get(method.__name__)
            size = len(owner) if isinstance(owner, str | bytes) else 0
            size = bound(owner, *args, **kwargs) if bound else size
            _budget.get().step(widths + size)
        elif isinstance(__obj, type) or not hasattr(__obj, "name"):
            __self.made([args, kwargs])  # such as dict(a=b); a macro has a name
        return SandboxedEnvironment.call(__self, __context, __obj, *args, **kwargs)


def _is(method: Any, name: str) -> bool:
    return getattr(method, "__name__", "") == name


def _operator_bound(operator: str, left: Any, right: Any) -> int:
    """A bound of the length of the result of a binary operator."""
    if operator == "%":
        is_text = isinstance(left, str | bytes)
        return _format_bound(left, right) if is_text else 0
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length(), right.bit_length()
        power = bits[0] * abs(right) if operator == "**" else sum(bits)
        if power > MAX_BITS:
            raise TemplateLimitError("it makes too large a number")
        return 0
    sizes = [len(v) if hasattr(v, "__len__") else 1 for v in (left, right)]
    if operator == "*":
        counts = [v if isinstance(v, int) else 1 for v in (left, right)]
        return max(0, sizes[0] * sizes[1] * max(counts))
    return sum(sizes)


@lru_cache
def compile_template(source: str) -> LimitedTemplate:
    """A chat template with limits.

    Raises:
        TemplateLimitError: it is too long.
        jinja2.TemplateError: it has an error.
    """
    from transformers.utils import chat_template_utils

    if len(source) > MAX_TEMPLATE:
        raise TemplateLimitError(f"it has more than {MAX_TEMPLATE:,} characters")
    base = chat_template_utils._cached_compile_jinja_template("").environment
    return LimitedEnvironment(base).from_string(source)


def limit_templates() -> None:
    """Let transformers compile every chat template of this process with limits."""
    from transformers.utils import chat_template_utils

    chat_template_utils._compile_jinja_template = compile_template

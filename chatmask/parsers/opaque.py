"""Rendering with strings that report what a template asks of them.

A template's output depends on a string in two ways: by writing it, and by asking it something. `Watcher` renders a template with
`Opaque` strings in place of real ones and notes every question (does it begin with this, is it equal to that). What a string is
asked by its own methods and operators, it notes itself. What asks a string from outside is watched by the sandbox: a search for it in
another string, methods of plain strings, `%`, filters, tests and functions that are handed one. A question that only this very
string could answer so (its length, its case, a character) *spoils* the rendering: nothing is to be concluded from it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from types import MethodType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import Macro

from ..errors import TemplateError
from ..templates.codegen import InlineLookups
from ..templates.environment import Sandbox, TemplateNamespace, environment
from ..templates.tracing import JOIN, JoiningCalls, call, guarded

# filters and tests that ask a string through its own methods, or not at all
FILTERS = frozenset({"trim", "string", "default", "d", "list", "items", "length", "count", "join", "first", "last"})
TESTS = frozenset(
    {"defined", "undefined", "none", "string", "mapping", "iterable", "boolean", "true", "false", "number", "eq", "ne"}
)
_IN = "__chatmask_in"


class Log:
    """What was asked of a shape's strings: whether one holds a text or equals it, and which were trimmed of blanks.

    `spoiled`: something was done that other strings might answer otherwise.
    """

    def __init__(self) -> None:
        self.held: set[str] = set()
        self.equal: set[str] = set()
        self.trimmed: set[str] = set()
        self.spoiled = False


class Opaque(str):
    """A string that reports what is asked of it. It holds and begins with nothing that a template asks for, and has no blanks to trim."""

    log: Log

    def __new__(cls, text: str, log: Log) -> Opaque:
        """A string that reports to `log`."""
        self = super().__new__(cls, text)
        self.log = log
        return self

    def __str__(self) -> str:
        return self  # so that it stays what it is in the buffers of macros

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        self.log.spoiled = True  # written as a part of a list or dictionary, with quotes that depend on it
        return str.__repr__(self)

    def __hash__(self) -> int:
        self.log.spoiled = True  # looked for among keys, which asks nothing of it
        return str.__hash__(self)

    def __add__(self, other: str) -> str:
        return composed([self, other])

    def __radd__(self, other: str) -> str:
        return composed([other, self])

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Opaque):
            self.log.spoiled = True
        if isinstance(other, str):
            self.log.equal.add(str.__str__(other))
            return str.__eq__(self, other)
        return False

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __contains__(self, part: object) -> bool:
        return self._holds(part)

    def _holds(self, part: Any) -> bool:
        if isinstance(part, str) and not isinstance(part, Opaque) and part and not str.__contains__(self, part):
            self.log.held.add(str.__str__(part))
        else:
            self.log.spoiled = True
        return False

    def _begins(self, parts: Any, *limits: int) -> bool:
        for part in parts if isinstance(parts, tuple) else (parts,):
            self._holds(part)
        self.log.spoiled = self.log.spoiled or bool(limits)
        return False

    startswith = endswith = _begins  # type: ignore[assignment]

    def _trimmed(self, chars: str | None = None) -> Opaque:
        self.log.trimmed.add(str.__str__(self))
        self.log.spoiled = self.log.spoiled or bool(chars and chars.strip())
        return self

    strip = lstrip = rstrip = _trimmed

    def split(self, sep: Any = None, maxsplit: Any = -1) -> list[str]:
        """Of a string that does not hold `sep`."""
        self._holds(sep)
        return [self]

    rsplit = split

    def replace(self, old: Any, new: Any, count: Any = -1) -> Opaque:
        """Of a string that does not hold `old`."""
        self._holds(old)
        return self


def _spoiling(name: str) -> Any:
    def method(self: Opaque, *args: Any, **kwargs: Any) -> Any:
        self.log.spoiled = True
        return getattr(str, name)(self, *args, **kwargs)

    return method


class _Watched:
    """Iterates over a string and says so; to be iterable alone tells nothing of a string."""

    def __init__(self, text: Opaque) -> None:
        self.text, self.inner = text, iter(str.__str__(text))

    def __iter__(self) -> _Watched:
        return self

    def __next__(self) -> str:
        self.text.log.spoiled = True
        return next(self.inner)


class Composed(Opaque):
    """Opaque strings joined with others. It may be written out and joined further; any question spoils, since what would be asked
    of the parts is not known."""


def composed(parts: Iterable[Any]) -> str:
    """Values joined as text, of which some may be opaque; one alone stays what it is."""
    pieces = [part if isinstance(part, str) else str(part) for part in parts]
    filled = [piece for piece in pieces if isinstance(piece, Opaque) or piece]
    if len(filled) == 1:
        return filled[0]
    log = next((piece.log for piece in filled if isinstance(piece, Opaque)), None)
    return "".join(filled) if log is None else Composed("".join(filled), log)


# what else a string can be asked; writing it out is not among these
_ORDER = {"__lt__", "__le__", "__gt__", "__ge__", "__format__"}
for _name in ((set(dir(str)) - set(dir(object))) | _ORDER) - set(vars(Opaque)) - {"__add__", "__getnewargs__"}:
    setattr(Opaque, _name, _spoiling(_name))
for _name in {
    "__eq__",
    "__ne__",
    "__contains__",
    "startswith",
    "endswith",
    "strip",
    "lstrip",
    "rstrip",
    "split",
    "rsplit",
    "replace",
}:
    setattr(Composed, _name, _spoiling(_name))
setattr(Opaque, "__iter__", _Watched)  # noqa: B010  (mypy takes an assignment for a mistake)


# --- the sandbox that watches -----------------------------------------------------------------------------------------------


class _Asking(JoiningCalls):
    """`a in b` becomes a call, too, so that it can be watched."""

    def visit_Compare(self, node: nodes.Compare) -> Any:  # noqa: N802
        """`in` and `not in`; in a chain of comparisons they cannot be told apart, so it is none of theirs."""
        self.generic_visit(node)
        if not any(operand.op in ("in", "notin") for operand in node.ops):
            return node
        if len(node.ops) > 1:
            raise TemplateError("a chain of comparisons with `in`")
        asked = call(_IN, [node.expr, node.ops[0].expr], node.lineno)
        return asked if node.ops[0].op == "in" else nodes.Not(asked, lineno=node.lineno)


class _Reporting(InlineLookups):
    reports = frozenset({_IN, JOIN})


class _Watching(Sandbox):
    """The sandbox with an eye on whatever could ask an `Opaque` something from outside."""

    code_generator_class = _Reporting
    intercepted_binops = frozenset({"//", "%", "**", "/", "*", "-"})  # `+` asks the string itself
    log: Log

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """`'..' % x` writes x as it likes."""
        if isinstance(left, str) or isinstance(right, str):
            self.log.spoiled = True
        return super().call_binop(context, operator, left, right)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """A method of a plain string may be handed an opaque one; those with constant arguments are called in line."""
        if type(obj) is str:
            self.log.spoiled = True
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Likewise."""
        if type(obj) is str and isinstance(argument, str):
            self.log.spoiled = True
        return super().getitem(obj, argument)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805  (as jinja2 declares it)
        """A function may do anything with an opaque string; the template's own macros are watched themselves."""
        own = isinstance(__obj, Macro) or __obj is TemplateNamespace
        if not own and not (isinstance(__obj, MethodType) and isinstance(__obj.__self__, Opaque)) and _hold([args, kwargs]):
            __self.log.spoiled = True
        return super().call(__context, __obj, *args, **kwargs)


def _hold(value: Any) -> bool:
    """Is there an opaque string in a value."""
    if isinstance(value, Opaque):
        return True
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return any(map(_hold, items))


class Watcher:
    """A template that is rendered with opaque strings.

    Args:
        source: the Jinja text.
        variables: what every rendering gets besides messages.
        date: as `environment`.

    Raises:
        TemplateError: it cannot be watched.
    """

    def __init__(self, source: str, variables: Mapping[str, Any], date: str | None) -> None:
        self.variables = variables
        env = environment(date, _Watching)
        assert isinstance(env, _Watching)
        self.env = env
        env.log = Log()
        env.concat = staticmethod(composed)  # type: ignore[method-assign]
        env.filters = {name: self._watched(name in FILTERS, name, own) for name, own in env.filters.items()}
        env.filters["join"] = self._join
        env.tests = {name: self._watched(name in TESTS, name, own) for name, own in env.tests.items()}
        tree = _Asking().visit(env.parse(source))
        tree.set_environment(env)
        self.template = jinja2.Template.from_code(env, env.compile(tree), env.globals.copy())

    def render(self, messages: Sequence[Mapping[str, Any]], log: Log, **kwargs: Any) -> str:
        """The text, all messages' opaque strings reporting to `log`.

        Raises:
            TemplateError: the template refuses them.
        """
        self.env.log = log
        given = {**self.variables, **kwargs, "messages": list(messages), "tools": None, "documents": None}
        given |= {"add_generation_prompt": False, _IN: self._contains, JOIN: lambda *parts: composed(parts)}
        return "".join(guarded(lambda: list(self.template.root_render_func(self.template.new_context(given)))))

    def _watched(self, known: bool, name: str, own: Any) -> Any:
        """A filter or test; an unknown one spoils when it meets an opaque string, a known one when it is handed one as an argument."""
        passed = hasattr(own, "jinja_pass_arg")

        @functools.wraps(own)
        def function(*args: Any, **kwargs: Any) -> Any:
            others = args[1 + passed :] if known else args[passed:]
            if name not in ("default", "d", "eq", "ne") and _hold([others, kwargs]):
                self.env.log.spoiled = True
            return own(*args, **kwargs)

        return function

    def _join(self, value: Any, d: str = "", attribute: Any = None) -> Any:
        parts = list(value)
        if attribute is not None or not all(isinstance(part, str) for part in [d, *parts]):
            self.env.log.spoiled = True
        return composed([piece for part in parts for piece in (d, part)][1:])

    def _contains(self, part: Any, whole: Any) -> bool:
        if isinstance(part, Opaque) and isinstance(whole, str):
            self.env.log.spoiled = True
        return part in whole

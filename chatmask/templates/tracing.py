"""Traced rendering: which part of the text belongs to which message, from the template's own structure.

The template's syntax tree is instrumented before it is compiled: every loop iteration, every macro call and every
`set x = messages[i]` reports the value it works on. Where that value *is* one of the messages (by identity), the report becomes
a mark in the output stream; a mark is an empty string of a subclass, so **the text cannot differ from the untraced rendering
and no content can imitate a mark**. Macros and `set` blocks collect their output in strings first; there the marks travel
inside `MarkedText`, a string that keeps its marks through concatenation and stripping, and drops them (never the text) in any
other operation.

What comes out is an ownership list: from this character on, the text was written while the template worked on that message.

Some templates never hold a message in their hands: they reach it by index, rebuild it, or take its content out first. For those
the input strings themselves carry marks (`tagged` tracing): each string of a message is a MarkedText that says whose it is, from
where to where. A rebuilt message is then known by its strings; and where even that fails, the text between one message's strings
and the next one's is the template's own (a *gap*), in which a header cannot be forged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import Any

import jinja2
from jinja2 import nodes, pass_eval_context
from jinja2.visitor import NodeTransformer

from ..errors import ChatmaskError, TemplateError
from .codegen import InlineLookups
from .environment import environment

_MARK, _END, JOIN = "__chatmask_mark", "__chatmask_end", "__chatmask_join"
Mark = tuple[int, int | None, bool]  # scope, message index (None: the scope ends), is it an assignment
_OWN = -1  # scope of the marks of an input string: (_OWN, message, True) where it begins, (_OWN, message, False) where it ends
TOOL_SCHEMAS = -2  # owner of strings that belong to no message: tool schemas


class MarkedText(str):
    """Text with marks at character offsets. Equal to, and as long as, the plain text."""

    marks: tuple[tuple[int, Mark], ...]

    def __new__(cls, text: str, marks: tuple[tuple[int, Mark], ...]) -> MarkedText:
        """Text with (offset, mark) pairs, ascending."""
        self = super().__new__(cls, text)
        self.marks = marks
        return self

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> str:
        return _join((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> str:
        return _join((other, self)) if isinstance(other, str) else NotImplemented

    def _cut(self, text: str, start: int) -> MarkedText:
        return MarkedText(text, tuple((min(max(at - start, 0), len(text)), mark) for at, mark in self.marks))

    def lstrip(self, chars: str | None = None) -> MarkedText:
        """As `str.lstrip`; marks in the stripped part move to the new edge."""
        text = str.lstrip(self, chars)
        return self._cut(text, len(self) - len(text))

    def rstrip(self, chars: str | None = None) -> MarkedText:
        """As `str.rstrip`, likewise."""
        return self._cut(str.rstrip(self, chars), 0)

    def _owned(self, text: str) -> str:
        """Other text made of this one: whose it is stays known, where the template worked does not."""
        owners = dict.fromkeys(message for _, (scope, message, _) in self.marks if scope == _OWN)
        marks = [(0, (_OWN, owner, True)) for owner in owners] + [(len(text), (_OWN, owner, False)) for owner in owners]
        return MarkedText(text, tuple(marks)) if owners else text

    def replace(self, *args: Any, **kwargs: Any) -> str:
        """As `str.replace`."""
        return self._owned(str.replace(self, *args, **kwargs))

    def split(self, *args: Any, **kwargs: Any) -> list[str]:
        """As `str.split`."""
        return [self._owned(part) for part in str.split(self, *args, **kwargs)]

    def __getitem__(self, key: Any) -> str:
        return self._owned(str.__getitem__(self, key))

    def strip(self, chars: str | None = None) -> MarkedText:
        """As `str.strip`, likewise."""
        return self.lstrip(chars).rstrip(chars)


def _join(parts: Iterable[Any]) -> str:
    """Concatenate; plain text when no part holds a mark."""
    pieces = [part if isinstance(part, str) else str(part) for part in parts]
    if not any(type(piece) is MarkedText for piece in pieces):
        return "".join(pieces)
    marks: list[tuple[int, Mark]] = []
    length = 0
    for piece in pieces:
        if type(piece) is MarkedText:
            marks.extend((length + at, mark) for at, mark in piece.marks)
        length += len(piece)
    return MarkedText("".join(pieces), tuple(marks))


def call(function: str, arguments: list[nodes.Expr], lineno: int) -> nodes.Call:
    """A call of a function of chatmask's own in a syntax tree."""
    return nodes.Call(nodes.Name(function, "load", lineno=lineno), arguments, [], None, None, lineno=lineno)


class JoiningCalls(NodeTransformer):
    """`a ~ b` becomes a call of `JOIN`, so that strings of other classes than `str` are not lost in it."""

    def visit_Concat(self, node: nodes.Concat) -> Any:
        """`a ~ b`."""
        self.generic_visit(node)
        return call(JOIN, list(node.nodes), node.lineno)


class _Instrument(JoiningCalls):
    """Adds the reports to a syntax tree. Each loop and macro is a scope; entering it again ends what it had opened."""

    def __init__(self) -> None:
        self.scopes = 0
        self.inside: list[int] = []

    def _report(self, function: str, arguments: list[nodes.Expr], lineno: int) -> nodes.Output:
        return nodes.Output([call(function, arguments, lineno)], lineno=lineno)

    def _scoped(self, node: Any, names: list[str]) -> int:
        self.scopes += 1
        scope = self.scopes
        self.inside.append(scope)
        self.generic_visit(node)
        self.inside.pop()
        values: list[nodes.Expr] = [nodes.Name(name, "load", lineno=node.lineno) for name in names]
        node.body = [self._report(_MARK, [nodes.Const(scope), nodes.Const(False), *values], node.lineno), *node.body]
        return scope

    def visit_For(self, node: nodes.For) -> Any:
        """Each iteration is a piece of work on its loop variable."""
        targets = node.target.items if isinstance(node.target, nodes.Tuple) else [node.target]
        scope = self._scoped(node, [target.name for target in targets if isinstance(target, nodes.Name)])
        return [node, self._report(_END, [nodes.Const(scope)], node.lineno)]

    def visit_Macro(self, node: nodes.Macro) -> Any:
        """A call is a piece of work on its arguments."""
        scope = self._scoped(node, [argument.name for argument in node.args])
        node.body = [*node.body, self._report(_END, [nodes.Const(scope)], node.lineno)]
        return node

    def visit_Assign(self, node: nodes.Assign) -> Any:
        """`set x = messages[i]` begins work on a message; elements and filtered elements count."""
        self.generic_visit(node)
        if isinstance(node.target, nodes.Name) and isinstance(node.node, (nodes.Getitem, nodes.Filter)):
            scope = self.inside[-1] if self.inside else 0
            value = nodes.Name(node.target.name, "load", lineno=node.lineno)
            return [node, self._report(_MARK, [nodes.Const(scope), nodes.Const(True), value], node.lineno)]
        return node


@dataclass(frozen=True)
class Gap:
    """Where a message's own strings stand, for a message that structure does not show.

    Attributes:
        before: end of what the previous message (or tool schema) wrote; from here to `first` the text is the template's.
        first, last: begin and end of the message's own strings.
        after: begin of what the next message wrote, or the end of the text.
    """

    before: int
    first: int
    last: int
    after: int


@dataclass(frozen=True)
class Traced:
    """A rendering and who wrote it.

    Attributes:
        text: exactly what the untraced template renders.
        owners: (offset, message index or None), ascending; the owner holds from that character to the next offset.
        strings: (owner, start, end) of the input strings in the text, in order; only where they were tagged.
        json: what was written as JSON, by the identity of the value; of those that outlive the rendering, none stands for another.
    """

    text: str
    owners: tuple[tuple[int, int | None], ...]
    strings: tuple[tuple[int, int, int], ...] = ()
    json: Mapping[int, str] = field(default_factory=dict)

    def ranges(self) -> dict[int, list[tuple[int, int]]]:
        """By message: the character ranges (half open, ascending, not empty) written while the template worked on it."""
        found: dict[int, list[tuple[int, int]]] = {}
        for (start, owner), (end, _) in zip(self.owners, [*self.owners[1:], (len(self.text), None)], strict=True):
            if owner is not None and end > start:
                own = found.setdefault(owner, [])
                if own and own[-1][1] == start:
                    start = own.pop()[0]
                own.append((start, end))
        return found

    def gaps(self) -> dict[int, list[Gap]]:
        """By message: each run of its own strings, with the template's text before and behind it."""
        runs: list[list[int]] = []
        for owner, start, end in self.strings:
            if runs and runs[-1][0] == owner:
                runs[-1][2] = max(end, runs[-1][2])
            else:
                runs.append([owner, start, end])
        found: dict[int, list[Gap]] = {}
        for i, (owner, first, last) in enumerate(runs):
            before = runs[i - 1][2] if i else 0
            after = runs[i + 1][1] if i + 1 < len(runs) else len(self.text)
            found.setdefault(owner, []).append(Gap(before, first, last, after))
        return found


class ChatTemplate:
    """A chat template, compiled twice: as it is, and traced.

    Args:
        source: the Jinja text.
        variables: what every rendering gets besides messages and tools (special tokens, kwargs are given per call).
        date: pinned date for `strftime_now`.

    Attributes:
        tagged: tracing tags the input strings too (see the module); set by `calibrate`.

    Raises:
        TemplateError: the text is not valid Jinja.
    """

    def __init__(self, source: str, variables: dict[str, Any] | None = None, date: str | None = None) -> None:
        self.source = source
        self.variables = dict(variables or {})
        self.tagged = self._tagging = False
        self._json: dict[int, str] = {}
        self._remembered: dict[Any, tuple[Any, str]] | None = None
        self.env = environment(date)
        self.env.concat = staticmethod(_join)  # type: ignore[method-assign]
        plain_json, plain_join = self.env.filters["tojson"], self.env.filters["join"]

        def to_json(value: Any, *args: Any, **kwargs: Any) -> str:
            text = self._json_text(plain_json, value, args, kwargs)
            self._json[id(value)] = text
            owner = _owner_of(value) if self._tagging else None
            return text if owner is None else _tag(text, owner)

        @pass_eval_context
        def join(context: Any, value: Any, d: str = "", attribute: Any = None) -> Any:
            if attribute is None and d is not None:
                parts = list(value)
                if any(isinstance(part, MarkedText) for part in parts):
                    spaced = [piece for part in parts for piece in (d, part)]
                    return _join(spaced[1:])
                value = parts
            return plain_join(context, value, d, attribute)

        self.env.filters.update(tojson=to_json, join=join)
        try:
            plain, traced = _codes(source)
            self._plain = jinja2.Template.from_code(self.env, plain, self.env.globals.copy())
            self._traced = jinja2.Template.from_code(self.env, traced, self.env.globals.copy())
        except (
            jinja2.TemplateError,
            SyntaxError,
            RecursionError,
            ValueError,
        ) as error:  # the latter: nested beyond Python's limits
            line = getattr(error, "lineno", None)
            raise TemplateError(f"chat template{f', line {line}' if line else ''}: {error}") from None

    @contextmanager
    def remembering(self) -> Iterator[None]:
        """Within it, what is written as JSON again is not encoded again; for renderings of the same objects, which must not change."""
        self._remembered = {}
        try:
            yield
        finally:
            self._remembered = None

    def _json_text(self, encode: Callable[..., str], value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        if self._remembered is None or type(value) not in (dict, list):
            return encode(value, *args, **kwargs)
        key = (id(value), repr(args), repr(kwargs))
        if key not in self._remembered:
            self._remembered[key] = value, encode(value, *args, **kwargs)  # holds the value, so that its id is not another's
        return self._remembered[key][1]

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
        **kwargs: Any,
    ) -> str:
        """The plain rendering; raises TemplateError when the template refuses the conversation."""
        with_messages = self._given(messages, tools, add_generation_prompt, kwargs)
        return "".join(guarded(lambda: list(self._plain.root_render_func(self._plain.new_context(with_messages)))))

    def trace(
        self,
        messages: Sequence[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        *,
        tagged: bool | None = None,
        **kwargs: Any,
    ) -> Traced:
        """The traced rendering (without a generation prompt). The messages must be distinct objects; errors as `render`.

        `tagged` overrides the template's own way of tracing.
        """
        tagged = self.tagged if tagged is None else tagged
        if tagged:
            messages = [_tagged(message, i) for i, message in enumerate(messages)]
            tools = _tagged(tools, TOOL_SCHEMAS)
        index = {id(message): i for i, message in enumerate(messages)}
        if len(index) != len(messages):
            raise ValueError("each message must be an object of its own: tracing tells them apart by identity")

        opened: set[int] = set()  # scopes that a message has begun in; the others have nothing to end

        def mark(scope: int, assigned: bool, *values: Any) -> str:
            for value in values:
                at = index.get(id(value))
                if at is None and tagged and isinstance(value, dict) and "role" in value:
                    at = _owner_of(value)  # a message that the template rebuilt
                if at is not None:
                    opened.add(scope)
                    return _mark(scope, at, assigned)
            return "" if assigned or scope not in opened else _mark(scope, None, False)

        def end(scope: int) -> str:
            return _mark(scope, None, False) if scope in opened else ""

        given = self._given(messages, tools, False, kwargs)
        given.update({_MARK: mark, _END: end, JOIN: lambda *parts: _join(parts)})
        self._tagging, self._json = tagged, {}
        pieces = self._pieces(given)
        self._tagging = False
        traced = _owned(pieces, self._json)
        if tagged and traced.text != self.render(_untagged(messages), _untagged(tools), **kwargs):
            raise TemplateError("the template renders marked strings otherwise than plain ones, so its text cannot be traced")
        return traced

    def _pieces(self, given: dict[str, Any]) -> list[str]:
        return guarded(lambda: list(self._traced.root_render_func(self._traced.new_context(given))))

    def calibrate(self, conversations: Iterable[tuple[list[dict[str, Any]], Any]], **kwargs: Any) -> None:
        """Find out whether structure alone shows every assistant message of these (messages, tools); if not, tag from now on."""
        for messages, tools in conversations:
            try:
                traced = self.trace(messages, tools, **kwargs)
            except TemplateError:
                continue
            ranges = traced.ranges()
            for i, message in enumerate(messages):
                content = message.get("content")
                if message["role"] != "assistant" or not content or content not in traced.text:
                    continue
                if not any(content in traced.text[a:b] for a, b in ranges.get(i, ())):
                    self.tagged = True
                    return

    def _given(self, messages: Any, tools: Any, add_generation_prompt: bool, kwargs: dict[str, Any]) -> dict[str, Any]:
        return {
            **self.variables,
            **kwargs,
            "messages": list(messages),
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }


class _TaggedDict(dict[Any, Any]):
    """A dictionary of a message: `owner` tells whose, for what is written of it as JSON."""

    owner: int


class _TaggedList(list[Any]):
    """A list of a message, likewise."""

    owner: int


def _tag(text: str, owner: int) -> MarkedText:
    return MarkedText(text, ((0, (_OWN, owner, True)), (len(text), (_OWN, owner, False))))


def _tagged(value: Any, owner: int) -> Any:
    """A copy of a JSON value whose strings, dictionaries and lists know their owner. Roles are structure and stay plain."""
    if isinstance(value, str):
        return _tag(value, owner)
    if isinstance(value, dict):
        copy = _TaggedDict(
            (_tag(key, owner) if isinstance(key, str) else key, item if key == "role" else _tagged(item, owner))
            for key, item in value.items()
        )
        copy.owner = owner
        return copy
    if isinstance(value, list):
        items = _TaggedList(_tagged(item, owner) for item in value)
        items.owner = owner
        return items
    return value


def _untagged(value: Any) -> Any:
    if isinstance(value, MarkedText):
        return str.__str__(value)
    if isinstance(value, dict):
        return {_untagged(key): _untagged(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_untagged(item) for item in value]
    return value


def _owner_of(value: Any) -> int | None:
    """Whose a tagged value is; for one that the template made, whose strings are in it."""
    if isinstance(value, MarkedText):
        return next((message for _, (scope, message, _) in value.marks if scope == _OWN), None)
    owner = getattr(value, "owner", None) if isinstance(value, (_TaggedDict, _TaggedList)) else None
    if owner is not None:
        return int(owner)
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return next((found for found in map(_owner_of, items) if found is not None), None)


class _Reporting(InlineLookups):
    reports = frozenset({_MARK, _END, JOIN})


@lru_cache(maxsize=1 << 16)
def _mark(scope: int, message: int | None, assigned: bool) -> MarkedText:
    return MarkedText("", ((0, (scope, message, assigned)),))


@lru_cache(maxsize=256)
def _codes(source: str) -> tuple[Any, Any]:
    """A template's compiled code, as it is and traced; the environment it runs in is given later."""
    env, traced = environment(), environment()
    traced.code_generator_class = _Reporting
    tree = _Instrument().visit(traced.parse(source))
    tree.set_environment(traced)
    return env.compile(source), traced.compile(tree)


def guarded(render: Callable[[], list[str]]) -> list[str]:
    """What a template gives; whatever it raises is a TemplateError."""
    try:
        return render()
    except ChatmaskError:
        raise
    except RecursionError:
        raise TemplateError("the template recurses without end on this conversation") from None
    except Exception as error:  # a template may raise anything: its own raise_exception, TypeError, UndefinedError, ...
        raise TemplateError(f"{type(error).__name__}: {error}") from None


def _owned(pieces: list[str], json: Mapping[int, str]) -> Traced:
    """Replay the marks in order: a stack of (scope, message, assigned), whose top owns what is written next."""
    stack: list[tuple[int, int, bool]] = []
    owners: list[tuple[int, int | None]] = [(0, None)]
    strings: list[tuple[int, int, int]] = []
    opened: dict[int, int] = {}
    starts = accumulate(map(len, pieces), initial=0)
    marked = [(start, piece) for piece, start in zip(pieces, starts, strict=False) if type(piece) is MarkedText]
    for start, piece in marked:
        for at, (scope, message, assigned) in piece.marks:
            position = start + at
            if scope == _OWN:
                assert message is not None
                if assigned:
                    opened[message] = position
                elif message in opened:
                    strings.append((message, opened.pop(message), position))
                continue
            if assigned and any(not entry[2] or entry[0] == scope for entry in stack):
                continue  # a look-up of a neighbour while a message is being written, not a new message
            for depth, entry in enumerate(stack):
                if entry[0] == scope:  # the scope starts anew: what it and everything inside it had opened is over
                    del stack[depth:]
                    break
            else:
                if message is None:
                    continue  # it had opened nothing
            if message is not None:
                stack.append((scope, message, assigned))
            owner = stack[-1][1] if stack else None
            if owners[-1][1] != owner:
                if owners[-1][0] == position:
                    owners.pop()
                owners.append((position, owner))
    return Traced("".join(pieces), tuple(owners), tuple(strings), json)

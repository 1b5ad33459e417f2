"""Plain chats without the template: a conversation's *shape* is rendered once, and its strings are put into place.

Two conversations have the same shape when they have the same roles, and reasoning in the same turns, and nothing but text. A
template's output can only differ between them by their strings. So each shape is rendered once, with strings that report what is
done with them (`Opaque`): written out as they are, trimmed, asked whether they begin with something or hold something. If that is
all, then any other strings that answer those questions alike, and have nothing to be trimmed, take the template the same way, and
come out in the same places: its control flow has nothing else to go by. What is asked of a string in a way that cannot be seen
(`_seen_through`), or done otherwise (its length, a slice, JSON), makes the shape an ordinary one, for the template.

The spans of a shape are those that the ordinary way finds for it, and rows that a build checks are done both ways and compared.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from jinja2 import nodes

from ..conversation import Conversation
from ..errors import RejectedRow, TemplateError
from ..templates.codegen import DICT_ATTRIBUTES, SAFE_STRING_METHODS
from ..templates.environment import environment
from ..templates.tracing import Watched
from ..trajectories import KNOWN_TAGS
from .turns import Turn

if TYPE_CHECKING:
    from .parser import Layout, Parser

MAX_MESSAGES = 16  # longer conversations seldom share a shape
MAX_SHAPES = 2000
# filters and tests that ask a string through its own methods, or not at all; `tojson` is watched (`ChatTemplate.json_written`)
FILTERS = frozenset({"trim", "tojson", "string", "default", "d", "list", "items", "length", "count", "join", "first", "last"})
TESTS = frozenset(
    {"defined", "undefined", "none", "string", "mapping", "iterable", "boolean", "true", "false", "number", "eq", "ne"}
)
Anchor = tuple[int, str]  # a border: behind which control token, and the text between


@dataclass(frozen=True)
class Shape:
    """What all conversations of one shape have in common.

    Attributes:
        parts: the text without the strings: the template's own text before, between and behind them.
        fields: which string stands between two parts: (message, key, is it trimmed).
        silent: likewise, strings that are not written (reasoning of earlier turns, where the template drops it).
        controls: ids of the control tokens, in order.
        spans: for each turn: its message, where it begins and where it ends.
        asked: matches a string that would answer a question otherwise than the shape's did.
        equal: strings that the shape's were found to differ from.
        rewritten: message -> `context` or `emission`.
        reasons: why a turn is not trained, by message.
        notes: counts of the row.
        turns, thinking: the assistant messages, and those with reasoning.
    """

    parts: tuple[str, ...]
    fields: tuple[tuple[int, str, bool], ...]
    silent: tuple[tuple[int, str, bool], ...]
    controls: tuple[int, ...]
    spans: tuple[tuple[int, Anchor, Anchor], ...]
    asked: re.Pattern[str]
    equal: frozenset[str]
    rewritten: Mapping[int, str]
    reasons: Mapping[int, str]
    notes: Mapping[str, int]
    turns: frozenset[int]
    thinking: frozenset[int]

    @cached_property
    def anchors(self) -> list[Anchor]:
        """The borders of all turns, in order."""
        return [border for _, *borders in self.spans for border in borders]

    def takes(self, text: Any, trimmed: bool) -> bool:
        """Would this string be treated as the shape's was?"""
        return (
            isinstance(text, str)
            and not (text.isspace() or text == "")
            and not (trimmed and (text[0].isspace() or text[-1].isspace()))
            and text not in self.equal
            and not self.asked.search(text)
        )


@dataclass(frozen=True, slots=True)
class Filled:
    """A shape with the strings of one conversation."""

    shape: Shape
    text: str
    conversation: Conversation

    @property
    def characters(self) -> int:
        """Length of the text."""
        return len(self.text)


class Shapes:
    """The shapes that a parser has seen.

    Args:
        parser: compiled, its probe passed.
    """

    def __init__(self, parser: Parser) -> None:
        self.parser = parser
        self._known: dict[tuple[str, ...], Shape | None] = {}
        spec = parser.spec
        self.usable = not (
            parser.template.tagged
            or parser.encoder.whole_only
            or spec.specforge is not None
            or spec.system is not None
            or spec.thinking.join is not None
            or spec.thinking.inline == "keep"
            or not _seen_through(parser.template_text)
        )

    def fill(self, conversation: Conversation) -> Filled | None:
        """The conversation's text by its shape, or None where it must go the ordinary way."""
        if not self.usable or conversation.tools or conversation.part_flags or len(conversation.messages) > MAX_MESSAGES:
            return None
        key = []
        for message, flag in zip(conversation.messages, conversation.flags, strict=True):
            size = len(message)
            if flag is not None or not (size == 2 or (size == 3 and "reasoning_content" in message)):
                return None
            key.append(message["role"] if size == 2 else message["role"] + "+")
        shape = self._shape(tuple(key), conversation)
        if shape is None:
            return None
        messages, parts = conversation.messages, shape.parts
        pieces = [parts[0]]
        equal, search, behind = shape.equal, shape.asked.search, iter(parts)
        next(behind)
        for i, name, trimmed in shape.fields:
            text = messages[i][name]
            # as `takes`, written out: this is done for every string
            if type(text) is not str or text == "" or text.isspace() or (equal and text in equal) or search(text):
                return None
            if trimmed and (text[0].isspace() or text[-1].isspace()):
                return None
            pieces += (text, next(behind))
        if not all(shape.takes(messages[i][name], trimmed) for i, name, trimmed in shape.silent):
            return None
        return Filled(shape, "".join(pieces), conversation)

    def _shape(self, key: tuple[str, ...], conversation: Conversation) -> Shape | None:
        if key not in self._known:
            if len(self._known) >= MAX_SHAPES or any(not isinstance(v, str) for m in conversation.messages for v in m.values()):
                return None
            self._known[key] = self._made(conversation)
        return self._known[key]

    def _made(self, conversation: Conversation) -> Shape | None:
        """Render the shape and look at what became of its strings; None where they are not just put into place."""
        strings: dict[str, tuple[int, str]] = {}
        messages = []
        for i, message in enumerate(conversation.messages):
            copy = dict(message)
            for name in message.keys() - {"role"}:
                # as long as real text, so that no check takes it for a chance find; letters, so that no tokenizer trims or joins
                copy[name] = f"Q{i}q{'abcdefghijklmnopqrstuvwxyz' if name == 'content' else 'zyxwvutsrqponmlkjihgfedcba'}Q{i}q"
                strings[copy[name]] = (i, name)
            messages.append(copy)
        try:
            layout = self.parser.layout(replace(conversation, messages=messages, notes={}))
        except (RejectedRow, TemplateError):
            return None
        return self._looked_at(layout, strings)

    def _looked_at(self, layout: Layout, strings: Mapping[str, tuple[int, str]]) -> Shape | None:
        sample = layout.sample
        rendering, prepared = sample.rendering, sample.prepared
        log, template = _Log(), self.parser.template
        shown = [
            {name: Opaque(value, log) if value in strings else value for name, value in message.items()}
            for message in sample.shown
        ]
        written = template.json_written
        try:
            text = template.watch(shown, **prepared.spec.kwargs)
        except TemplateError:
            return None
        if log.spoiled or template.json_written > written or text != rendering.text or rendering.quoted or rendering.gaps:
            return None
        parts, fields, position = [], [], 0
        for match in re.finditer("|".join(map(re.escape, strings)), text):
            parts.append(text[position : match.start()])
            fields.append((*strings[match.group()], match.group() in log.trimmed or strings[match.group()][1] != "content"))
            position = match.end()
        parts.append(text[position:])
        silent = {(i, name, True) for i, name in strings.values()} - {(i, name, True) for i, name, _ in fields}
        if any(name == "content" or layout.rewritten.get(i) != "emission" for i, name, _ in silent):
            return None  # something is not written at all: the ordinary way says what that means
        spans = []
        for turn in sample.turns:
            start, end = _anchor(rendering.controls, turn.start, text), _anchor(rendering.controls, turn.end, text)
            if start is None or end is None or any(string in start[1] + end[1] for string in strings) or _odd(turn):
                return None
            spans.append((turn.message, start, end))
        thinking = prepared.spec.thinking
        known = [tag for pair in KNOWN_TAGS for tag in pair]  # `trajectories` may read what lies between them as reasoning
        asked = {*log.held, *known, *thinking.option_text.values(), *(tag for tag in (thinking.open, thinking.close) if tag)}
        return Shape(
            tuple(parts),
            tuple(fields),
            tuple(sorted(silent)),
            tuple(identity for _, _, identity in rendering.controls),
            tuple(spans),
            re.compile("|".join(map(re.escape, sorted(asked))) or r"(?!)"),
            frozenset(log.equal),
            dict(layout.rewritten),
            {emission.message: emission.reason for emission in layout.emissions if emission.reason},
            self.parser.notes_of(sample),
            frozenset(turn.message for turn in sample.turns),
            frozenset(i for i, name in strings.values() if name == "reasoning_content"),
        )


def _anchor(controls: Sequence[tuple[int, int, int]], border: int, text: str) -> Anchor | None:
    found = [i for i, (_, end, _) in enumerate(controls) if end <= border]
    return (found[-1], text[controls[found[-1]][1] : border]) if found else None


def _odd(turn: Turn) -> bool:
    return not turn.stopped or turn.end_rewritten or bool(turn.reason)


# --- strings that report ----------------------------------------------------------------------------------------------------


class _Log:
    """What was asked of a shape's strings: whether one holds a text or equals it, and which were trimmed of blanks.

    `spoiled`: something was done that other strings might answer otherwise.
    """

    def __init__(self) -> None:
        self.held: set[str] = set()
        self.equal: set[str] = set()
        self.trimmed: set[str] = set()
        self.spoiled = False


class Opaque(Watched):
    """A string that reports what is asked of it. It holds and begins with nothing that a template asks for, and has no blanks to trim."""

    log: _Log

    def __new__(cls, text: str, log: _Log) -> Opaque:
        """A string that reports to `log`."""
        self = super().__new__(cls, text)
        self.log = log
        return self

    def __str__(self) -> str:
        return self  # so that it stays what it is in the buffers of macros

    def __bool__(self) -> bool:
        return True

    def __hash__(self) -> int:
        self.log.spoiled = True  # looked for among keys, which asks nothing of it
        return str.__hash__(self)

    def join_with(self, parts: Sequence[str]) -> str:
        """As `composed`."""
        return composed(parts)

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


def composed(parts: Sequence[str]) -> str:
    """Strings joined, of which some are opaque; one alone stays what it is."""
    filled = [part for part in parts if isinstance(part, Opaque) or part]
    if len(filled) == 1:
        return filled[0]
    log = next(part.log for part in filled if isinstance(part, Opaque))
    return Composed("".join(filled), log)


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


def _seen_through(source: str) -> bool:
    """Does a template ask its strings nothing that `Opaque` does not notice?"""
    tree = environment().parse(source)
    if any(node.name not in FILTERS for node in tree.find_all(nodes.Filter)):
        return False
    if any(node.name not in TESTS for node in tree.find_all(nodes.Test)):
        return False
    # methods of strings that are handed others: `', '.join(parts)`, `'abc'.count(content)`
    for call in tree.find_all(nodes.Call):
        arguments = [*call.args, *(keyword.value for keyword in call.kwargs)]
        plain = all(isinstance(argument, nodes.Const) for argument in arguments) and not (call.dyn_args or call.dyn_kwargs)
        if isinstance(call.node, nodes.Getattr) and call.node.attr in SAFE_STRING_METHODS - DICT_ATTRIBUTES and not plain:
            return False
    # a search for the string in a constant
    searched = (operand for node in tree.find_all(nodes.Compare) for operand in node.ops if operand.op in ("in", "notin"))
    return not any(isinstance(operand.expr, nodes.Const) for operand in searched)

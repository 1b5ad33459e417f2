"""Plain chats without the template: a conversation's *shape* is rendered once, and its strings are put into place.

Two conversations have the same shape when they have the same roles, and reasoning in the same turns, and nothing but text. A
template's output can only differ between them by their strings. So each shape is rendered once, with strings that report what is
done with them (`opaque.py`): written out as they are, trimmed, asked whether they begin with something or hold something. If that is
all, then any other strings that answer those questions alike, and have nothing to be trimmed, take the template the same way, and
come out in the same places: its control flow has nothing else to go by. What is done otherwise with a string (its length, a slice,
JSON) makes the shape an ordinary one, for the template.

The spans of a shape are those that the ordinary way finds for it, and rows that a build checks are done both ways and compared.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..conversation import Conversation
from ..errors import RejectedRow, TemplateError
from ..trajectories import KNOWN_TAGS
from .opaque import Log, Opaque, Watcher
from .turns import Turn

if TYPE_CHECKING:
    from .parser import Layout, Parser

MAX_MESSAGES = 16  # longer conversations seldom share a shape
MAX_SHAPES = 2000
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
        )

    @cached_property
    def watcher(self) -> Watcher | None:
        """The template for opaque strings; None where it cannot be watched."""
        parser = self.parser
        try:
            return Watcher(parser.template_text, parser.template.variables, parser.spec.date)
        except TemplateError:
            return None

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
        log = Log()
        if self.watcher is None:
            return None
        shown = [
            {name: Opaque(value, log) if value in strings else value for name, value in message.items()}
            for message in sample.shown
        ]
        try:
            text = self.watcher.render(shown, log, **prepared.spec.kwargs)
        except TemplateError:
            return None
        if log.spoiled or text != rendering.text or rendering.quoted or rendering.gaps:
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

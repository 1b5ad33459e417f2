"""Shielding: control tokens quoted in content cannot be read as structure, by the template or by the tokenizer.

Before rendering, every literal of a control token inside an input string is swapped for a placeholder (plain letters and digits
that the row does not hold). What the template then writes as a control token is its own. Afterwards the literals are put back as
*text*; only emission markers (think and tool-call tags) inside assistant content keep their ids, since the model sampled them so.
"""

from __future__ import annotations

import bisect
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

Control = tuple[int, int, int]  # start, end, id


@dataclass
class Shield:
    """The placeholders of one row.

    Attributes:
        pattern: matches any control literal.
        markers: emission markers, whose ids assistant content keeps.
        untouched: literals that assistant content may show to the template (think tags under `inline: keep`).
        nonce: begins every placeholder; 64 random bits, so that no row can hold or complete one.
        quoted: the literals taken out, in order; a placeholder holds an index into this list.
    """

    pattern: re.Pattern[str]
    markers: frozenset[str]
    untouched: frozenset[str]
    nonce: str
    quoted: list[tuple[str, bool]] = field(default_factory=list)
    kept: set[int] = field(default_factory=set)

    def text(self, value: str, sampled: bool = False) -> str:
        """`value` with its control literals swapped; `sampled` for assistant content."""

        def swap(match: re.Match[str]) -> str:
            literal = match.group()
            if sampled and literal in self.untouched:
                return literal
            self.quoted.append((literal, sampled and literal in self.markers))
            return f"{self.nonce}{len(self.quoted) - 1}z"

        return self.pattern.sub(swap, value)

    def value(self, value: Any) -> Any:
        """Any JSON value with the literals in its strings and keys swapped."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(key) if isinstance(key, str) else key: self.value(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.value(item) for item in value]
        return value

    def message(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message with all its strings shielded; the role is structure and stays."""
        assistant = message.get("role") == "assistant"
        return {
            key: value
            if key == "role"
            else self.text(value, sampled=True)
            if assistant and key == "content" and isinstance(value, str)
            else self.value(value)
            for key, value in message.items()
        }

    def restore(self, text: str, control: dict[str, int]) -> tuple[str, list[Control], _Map]:
        """Put the literals back.

        Returns:
            The final text, the control tokens in it (the template's own and kept emission markers), and a map from positions in
            `text` to positions in the final text. `self.kept` then holds where the kept emission markers begin.
        """
        self.kept = set()
        found = re.compile(f"{self.nonce}([0-9]+)z|{self.pattern.pattern}")
        pieces: list[str] = []
        controls: list[Control] = []
        shifts: list[tuple[int, int]] = [(0, 0)]
        position = length = 0
        for match in found.finditer(text):
            pieces.append(text[position : match.start()])
            length += match.start() - position
            literal, keep = self.quoted[int(match.group(1))] if match.group(1) else (match.group(), True)
            if keep:
                controls.append((length, length + len(literal), control[literal]))
            if keep and match.group(1):
                self.kept.add(length)
            pieces.append(literal)
            length += len(literal)
            position = match.end()
            shifts.append((position, length))
        pieces.append(text[position:])
        return "".join(pieces), controls, _Map(shifts)


class _Map:
    """Positions before restoring -> positions after."""

    def __init__(self, shifts: list[tuple[int, int]]) -> None:
        self.before = [before for before, _ in shifts]
        self.after = [after for _, after in shifts]

    def __call__(self, position: int) -> int:
        i = bisect.bisect_right(self.before, position) - 1
        return self.after[i] + position - self.before[i]


def find_quoted(
    strings: Sequence[str], pattern: re.Pattern[str], markers: frozenset[str], untouched: frozenset[str]
) -> Shield | None:
    """A Shield for a row when any of its strings quotes a control token, else None (the usual case)."""
    if not any(map(pattern.search, strings)):
        return None
    return Shield(pattern, markers, untouched, f"q{secrets.token_hex(8)}q")


def strings_of(messages: Sequence[dict[str, Any]], tools: Any) -> list[str]:
    """Every string of a row, keys included; roles are structure and left out."""
    strings: list[str] = []
    for message in messages:
        for key, value in message.items():
            if key != "role":
                _collect(value, strings)
    _collect(tools, strings)
    return strings


class Fragments:
    """Finds rows in which a control token could be put together: `'<' ~ key ~ '>'` makes one of the key `tool_call`.

    A token that is put together begins in one string and ends in another, of the row or of the template. So one of them must end
    with what a literal begins with, one must begin with what a literal ends with, and one of the row's must have a part in it.

    Args:
        literals: the control tokens' literals.
        constants: the strings that the template itself writes.
    """

    def __init__(self, literals: Iterable[str], constants: Iterable[str] = ()) -> None:
        literals = [literal for literal in literals if len(literal) > 1]
        self.inside = {literal[a:b] for literal in literals for a in range(len(literal)) for b in range(a + 1, len(literal) + 1)}
        self.heads = {literal[:k] for literal in literals for k in range(1, len(literal))}
        self.tails = {literal[k:] for literal in literals for k in range(1, len(literal))}
        self.first = tuple({literal[0] for literal in literals})
        self.last = tuple({literal[-1] for literal in literals})
        self.longest = max(map(len, literals), default=0)
        constants = list(constants)
        self.opens = any(map(self._ends_with_head, constants))
        self.closes = any(map(self._begins_with_tail, constants))

    def in_any(self, strings: Sequence[str]) -> bool:
        """Could a control token be put together with a part of these strings?"""
        opens = any(map(self._ends_with_head, strings))
        if not (opens or self.opens):
            return False
        closes = any(map(self._begins_with_tail, strings))
        if not (closes or self.closes):
            return False
        return opens or closes or any(text.strip() in self.inside for text in strings if len(text) <= self.longest + 8)

    def _ends_with_head(self, text: str) -> bool:
        end = text.rstrip()[-self.longest :]  # a template may trim
        return any(char in end for char in self.first) and any(end[k:] in self.heads for k in range(len(end)))

    def _begins_with_tail(self, text: str) -> bool:
        start = text.lstrip()[: self.longest]
        return any(char in start for char in self.last) and any(start[:k] in self.tails for k in range(1, len(start) + 1))


def _collect(value: Any, into: list[str]) -> None:
    if isinstance(value, str):
        into.append(value)
    elif isinstance(value, dict):
        into.extend(key for key in value if isinstance(key, str))
        for item in value.values():
            _collect(item, into)
    elif isinstance(value, list):
        for item in value:
            _collect(item, into)

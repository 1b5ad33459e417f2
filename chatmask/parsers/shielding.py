"""Shielding: control tokens quoted in content cannot be read as structure, by the template or by the tokenizer.

Before rendering, every literal of a control token inside an input string is swapped for a placeholder (plain letters and digits
that the row does not hold). What the template then writes as a control token is its own. Afterwards the literals are put back as
*text*; only emission markers (think and tool-call tags) inside assistant content keep their ids, since the model sampled them so.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Sequence
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
        nonce: begins every placeholder; occurs nowhere in the row.
        quoted: the literals taken out, in order; a placeholder holds an index into this list.
    """

    pattern: re.Pattern[str]
    markers: frozenset[str]
    untouched: frozenset[str]
    nonce: str
    quoted: list[tuple[str, bool]] = field(default_factory=list)

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
            `text` to positions in the final text.
        """
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
    messages: Sequence[dict[str, Any]], tools: Any, pattern: re.Pattern[str], markers: frozenset[str], untouched: frozenset[str]
) -> Shield | None:
    """A Shield for the row when any of its strings quotes a control token, else None (the usual case)."""
    strings: list[str] = []
    for message in messages:
        for key, value in message.items():
            if key != "role":
                _collect(value, strings)
    _collect(tools, strings)
    if not any(map(pattern.search, strings)):
        return None
    joined = "\0".join(strings)
    number = 0
    while f"zq{number}q" in joined:
        number += 1
    return Shield(pattern, markers, untouched, f"zq{number}q")


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

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
from functools import cached_property
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


def find_quoted(joined: str, pattern: re.Pattern[str], markers: frozenset[str], untouched: frozenset[str]) -> Shield | None:
    """A Shield for a row when any of its strings (`joined_strings`) quotes a control token, else None (the usual case)."""
    if not pattern.search(joined):
        return None
    return Shield(pattern, markers, untouched, f"q{secrets.token_hex(8)}q")


SEPARATOR = "\0"  # between the strings of a row; one that holds it itself is only looked at more closely than it need be


def joined_strings(messages: Sequence[dict[str, Any]], tools: Any) -> str:
    """Every string of a row, keys included, in one text, a separator before and behind each; roles are structure and left out."""
    strings: list[str] = []
    level: list[Any] = [tools] if tools else []
    for message in messages:
        for key, value in message.items():
            if type(value) is str:
                if key != "role":
                    strings.append(value)
            elif value is not None and key != "role":
                level.append(value)
    while level:
        below: list[Any] = []
        for node in level:
            if isinstance(node, str):
                strings.append(node)
            elif isinstance(node, dict):
                strings += [key for key in node if isinstance(key, str)]
                below += node.values()
            elif isinstance(node, (list, tuple)):
                below += node
        level = below
    return SEPARATOR + SEPARATOR.join(strings) + SEPARATOR


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
        self.literals = literals
        heads = {literal[:k] for literal in literals for k in range(1, len(literal))}
        tails = {literal[k:] for literal in literals for k in range(1, len(literal))}
        # a template may trim
        self.heads = re.compile(f"(?:{_alternatives(heads)})\\s*{SEPARATOR}")
        self.tails = re.compile(f"{SEPARATOR}\\s*(?:{_alternatives(tails)})")
        written = SEPARATOR + SEPARATOR.join(constants) + SEPARATOR
        self.opens = bool(self.heads.search(written))
        self.closes = bool(self.tails.search(written))

    @cached_property
    def inside(self) -> re.Pattern[str]:
        """Matches a string that is a part of a literal; made when it is first needed, since it is large."""
        parts = {one[a:b] for one in self.literals for a in range(len(one)) for b in range(a + 1, len(one) + 1)}
        return re.compile(f"{SEPARATOR}\\s*(?:{_alternatives(parts)})\\s*{SEPARATOR}")

    def in_any(self, joined: str) -> bool:
        """Could a control token be put together with a part of these strings (`joined_strings`)?"""
        opens = bool(self.heads.search(joined))
        if not (opens or self.opens):
            return False
        closes = bool(self.tails.search(joined))
        if not (closes or self.closes):
            return False
        return opens or closes or bool(self.inside.search(joined))


def _alternatives(literals: Iterable[str]) -> str:
    return "|".join(map(re.escape, sorted(literals, key=len, reverse=True))) or "(?!)"

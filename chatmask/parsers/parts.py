"""Flags of content parts -> characters of a rendered turn that are not trained.

A flag belongs to a range of a message's content (`Conversation.part_flags`). On the way to the text the content may be taken apart
(a think block becomes the reasoning), joined again, and trimmed by the template; so it goes along as *pieces*, each with the flags
of its own characters, and the pieces are looked for in the turn, in order, among the strings that are known to be this message's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ..conversation import PartFlags, flags_within
from ..errors import RejectedRow, RejectReason
from ..templates.spec import Thinking

if TYPE_CHECKING:
    from .turns import Turn

Range = tuple[int, int]
PART_FLAG = "part_flag"  # the reason of what a part's own flag takes from the training


@dataclass(frozen=True)
class Piece:
    """A run of a message's content that stands in one run in the text, too.

    Attributes:
        text: the characters.
        flags: what parts say of them.
        kind: `content`, `reasoning`, or `tag` (think tags: written by content, template or prompt, so it need not be in the turn).
        behind: what the spec's `thinking.join` writes behind it.
    """

    text: str
    flags: PartFlags = ()
    kind: str = "content"
    behind: str = ""

    def says(self, position: int) -> bool:
        """Is the character at `position` not to be trained."""
        return any(start <= position < end and not train for start, end, train in self.flags)


@dataclass(frozen=True)
class Marked:
    """One assistant message with flags of parts.

    Attributes:
        pieces: in the order in which templates write them.
        rest: whether the turn is trained where no part says otherwise; False in a prompt of which a part is to be trained.
    """

    pieces: tuple[Piece, ...]
    rest: bool = True

    @property
    def reason(self) -> str:
        """Why what is not trained is not."""
        return PART_FLAG if self.rest else "flag"


def marked(
    before: Mapping[str, Any], after: Mapping[str, Any], flags: PartFlags, said: bool | None, thinking: Thinking
) -> Marked:
    """A message's content as pieces.

    Args:
        before, after: the message as the conversation has it, and with a leading think block taken out of its content.
        flags: of its content's parts.
        said: the message's own flag, or what its place in `prompt` or `completion` says.
        thinking: of the spec.
    """
    content, answer = before.get("content") or "", after.get("content") or ""
    behind = thinking.join.rpartition("{content}")[2] if thinking.join else ""
    begin = len(content) - len(answer)  # what is taken away stands in front
    last = Piece(answer, flags_within(flags, begin, len(content)), behind=behind)
    pieces: list[Piece] = []
    reasoning = after.get("reasoning_content") or ""
    if begin:
        opening, closing = str(thinking.open), str(thinking.close)
        lead = len(content) - len(content.lstrip())
        inside = lead + len(opening) * content.startswith(opening, lead)
        close = content.index(closing, inside)
        found = content.find(reasoning, inside, close) if reasoning.strip() else -1
        pieces = [
            Piece(opening, flags_within(flags, lead, inside), "tag"),
            Piece(reasoning, flags_within(flags, found, found + len(reasoning)) if found >= 0 else (), "reasoning"),
            Piece(closing, flags_within(flags, close, close + len(closing)), "tag"),
        ]
    elif reasoning.strip():
        pieces = [Piece(reasoning, (), "reasoning"), Piece(thinking.close or "", (), "tag")]
    return Marked((*pieces, last), said is not False)


def untrained_ranges(
    text: str,
    turns: Sequence[Turn],
    found: Marked,
    strings: Callable[[], Sequence[Range]],
    shows_reasoning: bool,
    index: int,
    may_lack: bool = False,
) -> tuple[Range, ...]:
    """Which characters of one message's turns are not trained, ascending and without overlap.

    Args:
        text: the rendering.
        turns: the message's turns (several only under SpecForge's rules).
        found: the message's pieces.
        strings: gives where input strings of the message stand in the text.
        shows_reasoning: the turn holds its reasoning; where history dropped it there is nothing to find.
        index: the message, as the data counts.
        may_lack: the spec declares that the template leaves content of such a message out (`drops`).

    Raises:
        RejectedRow: `part_not_found`, where a piece with a flag that matters stands nowhere in the turn, or where it cannot be told
            which of several places is its own.
    """
    pieces = [piece for piece in found.pieces if shows_reasoning or piece.kind == "content"]
    if found.rest and not any(not train for piece in pieces for _, _, train in piece.flags):
        return ()
    start, stop = min(turn.start for turn in turns), max(turn.end for turn in turns)
    own = sorted((max(a, start), min(b, stop)) for a, b in strings() if a < stop and b > start)
    cursor = start
    placed: list[tuple[Piece, int, int, int]] = []  # with where its first character would stand, and what of it stands there
    for piece in pieces:
        core = piece.text.strip()
        if not core:
            continue
        at = _tag(text, core, cursor, stop) if piece.kind == "tag" else _find(text, piece, own, cursor, stop)
        if at < 0 and (piece.kind == "tag" or not piece.flags):
            continue
        if at < 0 and may_lack and piece.kind == "content" and _lacks(text, core, piece, own, start, stop):
            continue
        if at < 0:
            raise RejectedRow(
                RejectReason.PART_NOT_FOUND,
                f"a part with a training flag stands nowhere, or at several places, in the rendered turn: {core[:80]!r}",
                index,
            )
        lead = len(piece.text) - len(piece.text.lstrip())
        left, right = at, at + len(core)
        while left > cursor and left > at - lead and text[left - 1] == piece.text[lead - (at - left) - 1]:
            left -= 1
        first = at - lead
        while right < stop and right - first < len(piece.text) and text[right] == piece.text[right - first]:
            right += 1
        placed.append((piece, first, left, right))
        cursor = right
    if found.rest:
        return merged([*_ranges(placed, False), *_glue(text, placed)])
    trained = merged(_ranges(placed, True))
    edges = [start, *(edge for pair in trained for edge in pair), stop]
    return tuple((a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if b > a)


def _lacks(text: str, core: str, piece: Piece, own: Sequence[Range], start: int, stop: int) -> bool:
    """Is a content left out of the turn: neither it, nor in a string of the message anything that a part's flag is about."""
    bits = [bit for a, b, _ in piece.flags if (bit := piece.text[a:b].strip())]
    return text.find(core, start, stop) < 0 and not any(bit in text[a:b] for a, b in own for bit in bits)


def _tag(text: str, tag: str, cursor: int, stop: int) -> int:
    """Where a think tag stands, with only white space before it; else -1."""
    at = text.find(tag, cursor, stop)
    return at if at >= 0 and not text[cursor:at].strip() else -1


def _find(text: str, piece: Piece, own: Sequence[Range], cursor: int, stop: int) -> int:
    """Where a piece begins (without white space at its edges): in a string of the message, else where it can stand but once."""
    core = piece.text.strip()
    inside = [(max(a, cursor), b) for a, b in own if b > cursor]
    exact = next((a for a, b in inside if text[a:b].strip() == core), None)
    if exact is not None:
        return text.index(core, exact)
    whole = (piece.text.lstrip() + piece.behind).rstrip()
    for a, b in inside:
        # content is the last that a string holds, reasoning the first
        at = text.find(core, a, b) if piece.kind == "reasoning" else max(text.rfind(whole, a, b), -1)
        if at < 0:
            at = text.find(core, a, b) if text.count(core, a, b) == 1 else -1
        if at >= 0:
            return at
    at = text.find(core, cursor, stop)
    return at if at >= 0 and text.find(core, at + 1, stop) < 0 else -1


def _ranges(placed: Sequence[tuple[Piece, int, int, int]], train: bool) -> list[Range]:
    """The ranges of the text that parts with this flag cover; what a template trimmed away is cut off."""
    return [
        (max(first + a, left), min(first + b, right))
        for piece, first, left, right in placed
        for a, b, flag in piece.flags
        if flag is train
    ]


def _glue(text: str, placed: Sequence[tuple[Piece, int, int, int]]) -> list[Range]:
    """White space between two pieces, where one beside it is not trained."""
    found = []
    for (before, first, _, right), (after, next_first, left, _) in pairwise(placed):
        if not text[right:left].strip() and (before.says(right - first - 1) or after.says(left - next_first)):
            found.append((right, left))
    return found


def merged(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Ranges in ascending order, those that touch as one; empty ones are left out."""
    result: list[Range] = []
    for a, b in sorted((a, b) for a, b in ranges if b > a):
        if result and a <= result[-1][1]:
            a, b = result[-1][0], max(b, result.pop()[1])
        result.append((a, b))
    return tuple(result)

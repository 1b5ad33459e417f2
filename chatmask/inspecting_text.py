"""An inspected row for the terminal: blocks with a word and a bar at the left, and nothing invisible.

Text in data is hostile until shown otherwise: an escape sequence could repaint the screen, a bidi override could turn a sentence
round. `visible` lets neither through.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .inspecting_view import Inspected, InspectedSpan, Segment

FOLD = 12
"""Display lines of a block from which on it is folded, unless the caller says otherwise."""

LABELS = {"header": "header", "supervised": "TRAINED", "context": "context", "untrained": "masked"}
_COLORS = {"header": "36", "supervised": "1;32", "context": "", "untrained": "33", "head": "1", "note": "2", "reject": "1;31"}
_MIN_WIDTH = 10
_GUTTER = 11  # "TRAINED  │ "

_WORDS = {
    "flag": "a flag in the data says so",
    "part_flag": "a flag of this part of the content says so",
    "history_rewritten": "the template leaves out a part of this turn when it is history, so it is not what was served",
    "context_rewritten": "the text before this turn is not what was served",
    "end_rewritten": "history replaces the end token",
    "tool_error": "its tool call failed",
    "empty_tool_call": "its tool call is empty",
    "bare_text_tool_call": "it writes a tool call as plain text",
    "not_last": "only the last turns are trained",
    "straddle": "a token straddles the border between header and turn",
}

# Characters that draw nothing although Unicode files them under letters, marks or symbols.
_BLANK = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u2800\u3164\uffa0")


def in_words(reason: str) -> str:
    """A reason code of an untrained span as a clause; codes that are not in the table are spelled out."""
    return _WORDS.get(reason, reason.replace("_", " "))


def visible(char: str) -> str:
    """How one character is shown: itself, or a sign for a character that cannot be seen or that moves others about."""
    code = ord(char)
    if code < 0x20:
        return {"\n": "⏎", "\t": "⇥"}.get(char, chr(0x2400 + code))
    if code == 0x7F:
        return "␡"
    if char == " " or (0x20 < code < 0x7F):
        return char
    hidden = unicodedata.category(char) in ("Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp", "Zs") or char in _BLANK
    if hidden or 0xFE00 <= code <= 0xFE0D or 0xE0100 <= code <= 0xE01EF:
        return f"⟨U+{code:04X}⟩"
    return char


def visible_text(text: str) -> str:
    """A text on one line, with `visible` characters only."""
    return text if text.isascii() and text.isprintable() else "".join(map(visible, text))


def visible_lines(text: str) -> list[str]:
    """A segment's text as the lines that a reader sees.

    A line break inside the segment breaks the line; at its start and at its end it is also shown as `⏎`, since what stands at a
    border is what is trained or not. Spaces at the end of a line, and at the start of the segment, are shown as `·`.
    """
    lines = text.split("\n")
    border = len(lines) > 1 and not lines[-1]
    if border:
        lines.pop()
    shown = []
    for number, line in enumerate(lines):
        body = line.rstrip(" ")
        trailing = "·" * (len(line) - len(body))
        leading = ""
        if number == 0:
            bare = body.lstrip(" ")
            leading, body = "·" * (len(body) - len(bare)), bare
        shown.append(leading + visible_text(body) + trailing)
    if text.startswith("\n"):
        shown[0] = "⏎"
    if border and text != "\n":
        shown[-1] += "⏎"
    return shown


def folded(lines: list[str], fold: int | None, keep: bool) -> tuple[list[str], int, list[str]]:
    """Cut a long block: its first lines, how many are left out, its last lines. `keep` leaves the block whole."""
    if keep or fold is None or len(lines) <= max(fold, 3):
        return lines, 0, []
    head = max(fold - 1, 2) // 2
    tail = max(fold - 1, 2) - head
    return lines[:head], len(lines) - head - tail, lines[-tail:]


def headline(item: Inspected) -> list[str]:
    """What stands above a row: row, source, tokens, spec, tokenizer."""
    source = f"row {item.row}  {visible_text(item.file)}:{item.line}"
    if item.sample or item.variant:
        source += f"  sample {item.sample}, variant {item.variant}"
    names = [f"spec {visible_text(item.spec)}", visible_text(item.tokenizer)]
    if item.reject is not None:
        return [source, f"REJECTED {item.reject.reason}", *names]
    share = item.supervised_tokens / max(item.tokens, 1)
    return [source, f"{item.tokens:,} tokens, {item.supervised_tokens:,} supervised ({share:.1%})", *names]


def verdict(span: InspectedSpan) -> str:
    """One assistant turn in words: trained or why not, and what is odd about it."""
    words = ["trained" if span.trained else f"not trained: {span.reason} ({in_words(span.reason)})"]
    if span.start == span.end:
        words.append("no whole token lies in it")
    if span.reason in ("history_rewritten", "context_rewritten"):
        pass  # the reason says it already
    elif span.rewritten == "context":
        words.append("rewritten in history: what precedes it is not what was served (context)")
    elif span.rewritten == "emission":
        words.append("rewritten in history: a part of it is gone (emission)")
    if span.straddles:
        words.append(in_words("straddle"))
    return "; ".join(words)


def render_text(item: Inspected, color: bool, width: int | None, fold: int | None = FOLD) -> str:
    """A row for the terminal.

    Args:
        item: the row.
        color: add ANSI colours; the kinds are told apart by word and bar without them.
        width: columns of the terminal; longer lines are wrapped, with `┆` for the bar. None does not wrap.
        fold: blocks longer than this many lines show their ends only; trained text and headers are never folded. None shows all.

    Returns:
        Lines, the last one ended too. Without colour no control character but the line break is in it.
    """
    lines: list[tuple[str, str]] = [("  ·  ".join(headline(item)), "head")]
    blocks: list[str] = []
    if item.reject is not None:
        where = "" if item.reject.message is None else f"message {item.reject.message}: "
        lines.append((f"  {where}{visible_text(item.reject.detail)}", "reject"))
        lines.append((f"  what to do: {item.reject.advice}", "note"))
    for segment in item.segments:
        blocks += _block(segment, color, width, fold)
    for span in item.spans:
        plain = span.trained and not (span.rewritten or span.straddles)
        text = f"  message {span.message}, tokens {span.start} to {span.end} ({span.end - span.start:,}): {verdict(span)}"
        lines.append((text, "note" if plain else "untrained"))
    lines += [(f"  note: {visible_text(note)}", "note") for note in item.notes]
    head, *rest = (_paint(_flow(text, width), kind, color) for text, kind in lines)
    return "\n".join([head, *blocks, *rest]) + "\n"


def _flow(line: str, width: int | None) -> str:
    """A line about the row, wrapped with its further lines set in."""
    pieces = wrap(line, None if width is None else max(width - 4, _MIN_WIDTH))
    return "\n    ".join(piece.rstrip() for piece in pieces)


def _block(segment: Segment, color: bool, width: int | None, fold: int | None) -> Iterable[str]:
    room = None if width is None else max(width - _GUTTER, _MIN_WIDTH)
    word = f"{LABELS[segment.kind]:<9}"
    bar = "┃" if segment.kind == "supervised" else "│"
    lines = []
    for line in visible_lines(segment.text):
        for number, part in enumerate(wrap(line, room)):
            lines.append(f"{word}{'┆' if number else bar} {part}" if part else f"{word}{bar}")
    head, hidden, tail = folded(lines, fold, segment.kind in ("supervised", "header"))
    if hidden:
        head = [*head, f"{word}{bar} … {hidden:,} lines"]
    return (_paint(line, segment.kind, color) for line in [*head, *tail])


def wrap(line: str, room: int | None) -> list[str]:
    """Cut a line into pieces of at most `room` columns, behind a space where there is one; joined they are the line."""
    if room is None or (len(line) <= room and line.isascii()):
        return [line]
    pieces = []
    start = used = space = 0
    for i, char in enumerate(line):
        cells = _cells(char)
        if used + cells > room and i > start:
            cut = space if space > start else i
            pieces.append(line[start:cut])
            start, used = cut, sum(map(_cells, line[cut:i]))
        used += cells
        if char == " ":
            space = i + 1
    return [*pieces, line[start:]]


def _cells(char: str) -> int:
    if char.isascii():
        return 1
    if unicodedata.category(char) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in ("W", "F") else 1


def _paint(text: str, kind: str, color: bool) -> str:
    code = _COLORS[kind]
    return f"\x1b[{code}m{text}\x1b[0m" if color and code else text

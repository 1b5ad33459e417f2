"""Assistant turns in a rendering: the spec's header asserted at the message's own boundary, its end token found inside it.

Nothing here searches the text for a header. The boundaries come from tracing (`templates/tracing.py`), the control tokens from
what the template wrote itself (`shielding.py`); so a header or an end token that content quotes is just text.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import RejectedRow, RejectReason
from ..templates.spec import TemplateSpec
from ..templates.tracing import Gap
from .shielding import Control


@dataclass(frozen=True)
class Rendering:
    """Text of one sample and who wrote it.

    Attributes:
        text: final text, quoted literals in place.
        controls: (start, end, id) of the control tokens, ascending.
        ranges: character ranges by message index.
        gaps: by message index, where its own strings stand; only for templates that structure alone does not show.
        quoted: number of control literals in content that became text or kept their id on purpose.
    """

    text: str
    controls: tuple[Control, ...]
    ranges: Mapping[int, list[tuple[int, int]]]
    gaps: Mapping[int, list[Gap]]
    quoted: int = 0


@dataclass(frozen=True)
class Turn:
    """One assistant turn, in character offsets (half open).

    Attributes:
        message: index in the template's messages.
        header: where the header starts.
        start: end of the header: the first character that the model sampled.
        end: end of the end-of-turn token (and of the trailing text if the spec supervises it).
        form: `served` when the header is the generation prompt, `history` when it is the history header.
        stopped: False when no end-of-turn token follows (last turn under `end_owner: next`).
    """

    message: int
    header: int
    start: int
    end: int
    form: Literal["served", "history"]
    stopped: bool = True


def locate(rendering: Rendering, message: int, spec: TemplateSpec, ends: Mapping[str, int]) -> Turn:
    """Find one assistant turn.

    Args:
        rendering: the sample.
        message: index of the assistant message.
        spec: concrete spec.
        ends: ids of those end-of-turn literals that are control tokens.

    Raises:
        RejectedRow: `no_assistant_span`, `header_not_found` or `end_not_found`, with expected and found text.
    """
    ranges = rendering.ranges.get(message, [])
    gaps = rendering.gaps.get(message, [])
    if not ranges and not gaps:
        raise RejectedRow(RejectReason.NO_ASSISTANT_SPAN, "the template writes nothing for this message", message)
    for start, stop in ranges:
        for header in spec.assistant.headers:
            at = _header_end(rendering, header, start, stop)
            if at is not None:
                end, stopped = _end(rendering, message, spec, ends, at, stop)
                form: Literal["served", "history"] = "served" if header == spec.assistant.header else "history"
                return Turn(message, at - len(header), at, end, form, stopped)
    for gap in gaps:
        turn = _in_gap(rendering, gap, message, spec, ends)
        if turn is not None:
            return turn
    start = ranges[0][0] if ranges else gaps[0].before
    expected = " or ".join(repr(header) for header in spec.assistant.headers)
    found = rendering.text[start : start + 200]
    raise RejectedRow(RejectReason.HEADER_NOT_FOUND, f"expected {expected}, found {found!r}", message)


def _in_gap(rendering: Rendering, gap: Gap, message: int, spec: TemplateSpec, ends: Mapping[str, int]) -> Turn | None:
    """A turn by its own strings: the last header in the template's text before them, the first end token behind them."""
    text, assistant = rendering.text, spec.assistant
    found = [(text.rfind(header, gap.before, gap.first), header) for header in assistant.headers if header]
    at, header = max(found, default=(-1, ""), key=lambda item: (item[0] + len(item[1]) if item[0] >= 0 else -1, len(item[1])))
    if at < 0:
        return None
    start = at + len(header)
    form: Literal["served", "history"] = "served" if header == assistant.header else "history"
    ids = set(ends.values())
    i = bisect.bisect_left(rendering.controls, (gap.last, -1, -1))
    end = next((stop for begin, stop, identity in rendering.controls[i:] if stop <= gap.after and identity in ids), None)
    if end is None:
        literals = [literal for literal in assistant.ends if literal not in ends]
        plain = [
            text.find(literal, gap.last, gap.after) + len(literal)
            for literal in literals
            if literal in text[gap.last : gap.after]
        ]
        end = min(plain) if plain else None
    if end is None:
        if assistant.end_owner == "next" and gap.after == len(text):
            return Turn(message, at, start, len(text), form, stopped=False)
        raise RejectedRow(
            RejectReason.END_NOT_FOUND,
            f"expected {list(assistant.ends)} behind {text[gap.last - 40 : gap.after][:200]!r}",
            message,
        )
    if assistant.trailing and not text.startswith(assistant.trailing, end):
        raise RejectedRow(
            RejectReason.END_NOT_FOUND,
            f"behind the end-of-turn token: expected {assistant.trailing!r}, found {text[end : end + 40]!r}",
            message,
        )
    if assistant.supervise_trailing:
        end += len(assistant.trailing or "")
    return Turn(message, at, start, end, form)


def _header_end(rendering: Rendering, header: str, start: int, stop: int) -> int | None:
    """Where the header ends, if it stands at the boundary `start`: behind it (usual), before it (Yi: the user's turn writes it),
    or across it."""
    text = rendering.text
    candidates: list[int] = [start + len(header), *range(start, start + len(header))]
    for at in candidates:
        if at <= stop and at >= len(header) and text.startswith(header, at - len(header)):
            return at
    return None


def _end(
    rendering: Rendering, message: int, spec: TemplateSpec, ends: Mapping[str, int], start: int, stop: int
) -> tuple[int, bool]:
    text, assistant = rendering.text, spec.assistant
    if assistant.end_owner == "next":
        follows = next((end for end in assistant.ends if _control_at(rendering.controls, stop, ends.get(end))), None)
        if follows is not None:
            return stop + len(follows), True
        if stop == len(text):
            return stop, False
        raise RejectedRow(
            RejectReason.END_NOT_FOUND,
            f"expected one of {list(assistant.ends)} right behind the turn, found {text[stop : stop + 60]!r}",
            message,
        )
    end: int | None = _last_control(rendering.controls, start, stop, set(ends.values()))
    if end is None:
        plain = [text.rfind(literal, start, stop) + len(literal) for literal in assistant.ends if literal not in ends]
        found = [at for at in plain if at > start]
        end = max(found) if found else None
    if end is None:
        raise RejectedRow(
            RejectReason.END_NOT_FOUND, f"expected {list(assistant.ends)} in the turn, found {text[start:stop][-200:]!r}", message
        )
    rest = text[end:stop]
    if rest.strip() if assistant.trailing is None else rest != assistant.trailing:
        expected = "white space only" if assistant.trailing is None else repr(assistant.trailing)
        raise RejectedRow(
            RejectReason.END_NOT_FOUND, f"behind the end-of-turn token: expected {expected}, found {rest[:200]!r}", message
        )
    return (stop if assistant.supervise_trailing else end), True


def _control_at(controls: Sequence[Control], position: int, identity: int | None) -> bool:
    i = bisect.bisect_left(controls, (position, -1, -1))
    return i < len(controls) and controls[i][0] == position and controls[i][2] == identity


def _last_control(controls: Sequence[Control], start: int, stop: int, ids: set[int]) -> int | None:
    for i in range(bisect.bisect_left(controls, (stop, -1, -1)) - 1, -1, -1):
        begin, end, identity = controls[i]
        if begin < start:
            return None
        if identity in ids and end <= stop:
            return end
    return None


# --- what the rendering kept ------------------------------------------------------------------------------------------------


def keeps_reasoning(
    rendering: Rendering, turn: Turn, message: Mapping[str, Any], spec: TemplateSpec, close_id: int | None
) -> bool:
    """Does the emission hold the message's own reasoning, before its first close tag (anywhere, where the spec names no tag)?"""
    reasoning = (message.get("reasoning_content") or "").strip()
    if not reasoning:
        return True
    stop = turn.end
    if close_id is not None:
        i = bisect.bisect_left(rendering.controls, (turn.start, -1, -1))
        closes = (start for start, _, identity in rendering.controls[i:] if start >= turn.end or identity == close_id)
        stop = next(closes, turn.end)
        if stop >= turn.end:
            return False
    elif spec.thinking.close is not None:
        stop = rendering.text.find(spec.thinking.close, turn.start, turn.end)
        if stop < 0:
            return False
    return reasoning in rendering.text[turn.start : stop]


def dropped_parts(rendering: Rendering, turn: Turn, message: Mapping[str, Any]) -> list[str]:
    """Names of the fields of an assistant message (content, tool calls) that its emission does not show."""
    emission = rendering.text[turn.start : turn.end]
    missing = []
    content = message.get("content")
    if isinstance(content, str) and content.strip() not in emission:
        missing.append("content")
    for n, call in enumerate(message.get("tool_calls") or ()):
        function = call["function"]
        if function["name"] not in emission:
            missing.append(f"tool_calls[{n}].function.name")
        arguments = function.get("arguments")
        if isinstance(arguments, dict):
            missing += [
                f"tool_calls[{n}].function.arguments.{key}"
                for key, value in arguments.items()
                if not _shown(key, emission) or (isinstance(value, str) and not _shown(value, emission))
            ]
        elif isinstance(arguments, str) and not _shown(arguments, emission):
            missing.append(f"tool_calls[{n}].function.arguments")
    return missing


def _shown(value: str, text: str) -> bool:
    """Is a string in the text, as it is or as JSON would write it."""
    return value.strip() in text or json.dumps(value, ensure_ascii=False)[1:-1] in text or json.dumps(value)[1:-1] in text

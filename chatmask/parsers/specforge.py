"""Spans by SpecForge's rules, for `specforge/*` specs: so that a run that was begun with SpecForge's masks can go on with ours.

SpecForge searches the rendered text for the assistant header and trains all that follows it up to the next end marker (SpecForge,
`specforge/data/parse.py`, August 2026; described in docs/specforge.md). Here the same header must stand at a message's own
boundary and the end marker must be the template's: so the spans are SpecForge's, and text in content opens or ends none.
A header that is not there trains nothing, which is SpecForge's silent zero; here the turn is listed as `header_not_found`.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Collection, Iterator

from ..encoding import Encoder
from ..errors import RejectReason
from ..templates.spec import TemplateSpec
from .turns import Rendering, Stops, Turn, find_header

# what SpecForge hands to the template of a message (`_sanitize_message`); harmony's text is written from role and content alone.
# `general` drops reasoning without a word: here it stays, so that the spec's thinking mode refuses it (or `thinking.strip` drops it)
_GENERAL = ("role", "content", "tool_calls", "reasoning_content", "thinking")
_THINKING = (*_GENERAL, "name", "tool_call_id")
KEPT_FIELDS = {
    "general": _GENERAL,
    "thinking": _THINKING,
    "glm": _THINKING,
    "openai-harmony": ("role", "content", "role_in_data", "reasoning_content"),
}


def turns_of(rendering: Rendering, assistants: Collection[int], spec: TemplateSpec, stops: Stops, encoder: Encoder) -> list[Turn]:
    """The supervised stretches of one sample, in order, each under the assistant message that it belongs to.

    A span that runs over later assistant messages (tool steps of `glm` and harmony) is parted where these begin, so each message
    has its own; together they are SpecForge's span. A message of which the header is not found gives an empty turn with a reason.
    """
    turns: list[Turn] = []
    covered = 0
    for message in assistants:
        found = find_header(rendering, message, spec, stops)
        starts = [start for start, _ in rendering.ranges.get(message, [])] or [
            gap.first for gap in rendering.gaps.get(message, [])
        ]
        begin = found[1] - len(found[0]) if found else min(starts, default=covered)
        if begin < covered and turns:
            turns[-1] = turns[-1]._replace(end=begin)
            turns.append(Turn(message, begin, begin, covered, "served"))
        elif found is None:
            turns.append(Turn(message, begin, begin, begin, "served", reason=RejectReason.HEADER_NOT_FOUND.value))
        else:
            covered = _end(rendering, found[1], spec, encoder)
            turns.append(Turn(message, begin, found[1], covered, "served"))
    return [piece for turn in turns for piece in _without_ignored(rendering, turn, spec, encoder)]


def _end(rendering: Rendering, start: int, spec: TemplateSpec, encoder: Encoder) -> int:
    """Where the span that begins at `start` ends: at the first end marker that the template wrote, else at the end of the text."""
    assert spec.specforge is not None
    if spec.specforge.until is None:
        tail = (spec.assistant.trailing or "") if spec.assistant.supervise_trailing else ""
        found = [end for literal in spec.assistant.ends for _, end in _structural(rendering, literal + tail, start, encoder)]
    else:
        untils = [spec.specforge.until] if isinstance(spec.specforge.until, str) else spec.specforge.until
        found = [
            pair[spec.specforge.until_included] for until in untils for pair in _structural(rendering, until, start, encoder)
        ]
    return min(found, default=len(rendering.text))


def _structural(rendering: Rendering, literal: str, start: int, encoder: Encoder) -> Iterator[tuple[int, int]]:
    """The first place behind `start` where the template wrote `literal`: (begin, end), at most one.

    Its control tokens must be structure; a literal without any must stand where a message begins.
    """
    controls = len(encoder.cut(literal))
    edges = sorted(edge for found in rendering.ranges.values() for edge, _ in found)
    for match in re.compile(re.escape(literal).replace(r"\{n\}", r"\d+")).finditer(rendering.text, start):
        begin, end = match.span()
        edge = edges[bisect.bisect_right(edges, begin) - 1] if edges and edges[0] <= begin else -1
        at_edge = edge >= 0 and not rendering.text[edge:begin].strip()
        if rendering.count_controls(begin, end) == controls if controls else at_edge:
            yield begin, end
            return


def _without_ignored(rendering: Rendering, turn: Turn, spec: TemplateSpec, encoder: Encoder) -> Iterator[Turn]:
    """The turn without the text that SpecForge ignores (the empty think block of Qwen3, say)."""
    assert spec.specforge is not None
    cuts = sorted(
        match.span()
        for literal in spec.specforge.ignore
        for match in re.compile(re.escape(literal)).finditer(rendering.text, turn.start, turn.end)
        if rendering.count_controls(*match.span()) == len(encoder.cut(literal)) and match.start() not in rendering.kept
    )
    position = turn.start
    kept = False
    for begin, end in [*cuts, (turn.end, turn.end)]:
        if begin > position or (begin == turn.end and not kept):
            yield turn._replace(start=position, end=max(begin, position))
            kept = True
        position = max(position, end)

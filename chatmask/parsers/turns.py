"""Assistant turns in a rendering: the spec's header asserted at the message's own boundary, its end token found inside it.

Nothing here searches the text for a header. The boundaries come from tracing (`templates/tracing.py`), the control tokens from
what the template wrote itself (`shielding.py`); so a header or an end token that content quotes is just text.
"""

from __future__ import annotations

import bisect
import itertools
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from json.encoder import encode_basestring, encode_basestring_ascii
from typing import Any, Literal, NamedTuple

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
        kept: where the latter begin (emission markers in assistant content).
        json: what the template wrote as JSON, by the identity of the value.
    """

    text: str
    controls: tuple[Control, ...]
    ranges: Mapping[int, list[tuple[int, int]]]
    gaps: Mapping[int, list[Gap]]
    quoted: int = 0
    kept: frozenset[int] = frozenset()
    json: Mapping[int, str] = field(default_factory=dict)

    @cached_property
    def _starts(self) -> list[int]:
        return sorted(start for found in self.ranges.values() for start, _ in found)

    @cached_property
    def _control_starts(self) -> list[int]:
        return [start for start, _, _ in self.controls]

    @cached_property
    def unowned_text(self) -> str:
        """What the template wrote outside of any message's range, in one string."""
        covered = sorted(pair for found in self.ranges.values() for pair in found)
        edges = [0, *(edge for pair in covered for edge in pair), len(self.text)]
        return "\n".join(self.text[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True))

    def unowned_until(self, position: int) -> int:
        """Where the next message's text begins, at or after `position`; before that the text is the template's alone."""
        i = bisect.bisect_left(self._starts, position)
        return self._starts[i] if i < len(self._starts) else len(self.text)

    def controls_from(self, position: int) -> Iterator[Control]:
        """The control tokens that begin at or after a position."""
        for i in range(bisect.bisect_left(self._control_starts, position), len(self.controls)):
            yield self.controls[i]

    def count_controls(self, start: int, stop: int) -> int:
        """How many control tokens begin in [start, stop)."""
        return bisect.bisect_left(self._control_starts, stop) - bisect.bisect_left(self._control_starts, start)

    def first_control(self, ids: Collection[int], start: int, stop: int) -> Control | None:
        """The first control token with one of these ids that begins in [start, stop)."""
        for i in range(bisect.bisect_left(self._control_starts, start), len(self.controls)):
            control = self.controls[i]
            if control[0] >= stop:
                return None
            if control[2] in ids:
                return control
        return None

    def last_control(self, ids: Collection[int], start: int, stop: int) -> Control | None:
        """The last control token with one of these ids in [start, stop)."""
        for i in range(bisect.bisect_left(self._control_starts, stop) - 1, -1, -1):
            if self.controls[i][0] < start:
                return None
            if self.controls[i][2] in ids and self.controls[i][1] <= stop:
                return self.controls[i]
        return None


class Turn(NamedTuple):
    """One assistant turn, in character offsets (half open).

    Attributes:
        message: index in the template's messages.
        header: where the header starts.
        start: end of the header: the first character that the model sampled.
        end: end of the end-of-turn token (and of the trailing text if the spec supervises it).
        form: `served` when the header is the generation prompt, `history` when it is the history header.
        stopped: False when the template writes no end-of-turn token (last turn under `end_owner: next`).
        end_rewritten: True when history writes another token in place of the sampled one; the turn then ends before it.
        reason: why the turn cannot be trained, where its text does not allow it (`specforge/*`); empty otherwise.
    """

    message: int
    header: int
    start: int
    end: int
    form: Literal["served", "history"]
    stopped: bool = True
    end_rewritten: bool = False
    reason: str = ""


@dataclass(frozen=True)
class Stops:
    """Ids by which turns end: the spec's end-of-turn literals that are control tokens, and the id that replaces them in history;
    and how many control tokens each header has, so that a header quoted in content is not taken for one."""

    ids: Mapping[str, int]
    history: int | None = None
    in_headers: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def own(self) -> frozenset[int]:
        """The end-of-turn ids."""
        return frozenset(self.ids.values())


def locate(
    rendering: Rendering, message: int, spec: TemplateSpec, stops: Stops, after_tool: bool = False, before_tool: bool = False
) -> Turn:
    """Find one assistant turn.

    Args:
        rendering: the sample.
        message: index of the assistant message.
        spec: concrete spec.
        stops: ids that end turns.
        after_tool, before_tool: does a tool's result stand before this message, and behind it.

    Raises:
        RejectedRow: `no_assistant_span`, `header_not_found` or `end_not_found`, with expected and found text.
    """
    ranges = rendering.ranges.get(message, [])
    gaps = rendering.gaps.get(message, [])
    if not ranges and not gaps:
        raise RejectedRow(RejectReason.NO_ASSISTANT_SPAN, "the template writes nothing for this message", message)
    found = find_header(rendering, message, spec, stops, after_tool)
    if found is None:
        start = ranges[0][0] if ranges else gaps[0].before
        expected = " or ".join(repr(header) for header in spec.assistant.headers_of(after_tool))
        text = rendering.text[start : start + 200]
        raise RejectedRow(RejectReason.HEADER_NOT_FOUND, f"expected {expected}, found {text!r}", message)
    header, at, floor, stop = found
    form: Literal["served", "history"] = "served" if header == spec.assistant.served_header(after_tool) else "history"
    turn = Turn(message, at - len(header), at, at, form)
    return _ended(rendering, turn, spec, stops, floor, stop, before_tool and spec.assistant.results_in_turn)


def find_header(
    rendering: Rendering, message: int, spec: TemplateSpec, stops: Stops, after_tool: bool = False
) -> tuple[str, int, int, int] | None:
    """The header of an assistant message at its own boundary.

    Returns:
        The header, where it ends, and the stretch (from, to) in which the turn's end token is to be looked for; None where no
        header of the spec stands there.
    """
    headers = spec.assistant.headers_of(after_tool)
    for start, stop in rendering.ranges.get(message, []):
        for header in headers:
            at = _header_end(rendering, header, start, stop, stops.in_headers.get(header, 0))
            if at is not None:
                return header, at, at, stop
    for gap in rendering.gaps.get(message, []):
        # the template's own text before the message's strings: its last header is this message's
        ends = [(rendering.text.rfind(header, gap.before, gap.first) + len(header), header) for header in headers if header]
        found = [(at, header) for at, header in ends if at >= gap.before + len(header)]
        if found:
            at, header = max(found, key=lambda item: (item[0], len(item[1])))
            return header, at, gap.last, gap.after
    return None


def _header_end(rendering: Rendering, header: str, start: int, stop: int, controls: int) -> int | None:
    """Where the header ends, if it stands at the boundary `start`: behind it (usual), behind white space and tokens with which the
    template closes the message before (Jamba), before it (Yi: the user's turn writes it), or across it."""
    at = start + len(header)
    if at <= stop and rendering.text.startswith(header, start) and rendering.count_controls(start, at) == controls:
        return at
    if header and rendering.text.find(header, max(0, start - len(header)), stop) < 0:
        return None
    for at in _candidates(rendering, header, start, stop):
        begin = at - len(header)
        if (
            begin >= 0
            and at <= stop
            and rendering.text.startswith(header, begin)
            and rendering.count_controls(begin, at) == controls
        ):
            return at
    return None


def _candidates(rendering: Rendering, header: str, start: int, stop: int) -> Iterator[int]:
    """Where a header at the boundary `start` could end, besides right behind it, in the order in which they are tried."""
    text, lead = rendering.text, start
    for begin, end, _ in itertools.chain(rendering.controls_from(start), [(stop, stop, 0)]):
        blank = text[lead:begin]
        if begin > stop or (blank.strip() and not text.startswith(header, lead + len(blank) - len(blank.lstrip()))):
            break
        yield lead + len(blank) - len(blank.lstrip()) + len(header)
        if blank.strip():
            break
        yield begin + len(header)
        lead = end
    begin = max(0, start - len(header))
    while (begin := text.find(header, begin, start + len(header) - 1)) >= 0:
        yield begin + len(header)
        begin += 1


def _ended(
    rendering: Rendering, turn: Turn, spec: TemplateSpec, stops: Stops, floor: int, stop: int, results_follow: bool = False
) -> Turn:
    """The turn with its end: the end token in [floor, stop), else in the template's text up to the next message.

    `stop` is where the message's text ends. The first end token counts: what the template writes behind it while it still works
    on this message (a tool's result, a reminder) is not the model's. Of the tokens that history puts in place of it the last one
    counts, since harmony's emissions hold several messages; so it does where content may hold end tokens (`allow`).
    """
    text, assistant = rendering.text, spec.assistant
    ids = stops.own
    find = rendering.last_control if spec.special_in_content == "allow" else rendering.first_control
    own = None if assistant.end_owner == "next" else find(ids, floor, stop)
    if own is not None and results_follow:
        return turn._replace(end=own[1])
    if own is not None:
        return _with_trailing(rendering, turn, spec, own[1], stop)
    if stops.history is not None:
        replaced = rendering.last_control({stops.history}, floor, stop)
        if replaced is not None:
            return turn._replace(end=replaced[0], end_rewritten=True)
    if assistant.end_owner == "self":
        plain = [text.rfind(literal, floor, stop) + len(literal) for literal in assistant.ends if literal not in stops.ids]
        plain = [at for at in plain if at > floor]
        if plain:
            return _with_trailing(rendering, turn, spec, max(plain), stop)
    limit = rendering.unowned_until(stop) if assistant.end_owner == "self" else len(text)
    after = rendering.first_control(ids, stop, limit)
    if after is not None and not text[stop : after[0]].strip():
        return turn._replace(end=after[1])
    if assistant.end_owner == "next":
        behind = rendering.first_control(ids, floor, stop)  # a range that runs up to the next message's text
        if behind is not None and not text[behind[1] : stop].strip():
            return turn._replace(end=behind[1])
    if (assistant.end_owner == "next" and stop == len(text)) or assistant.allow_untrained_stop or assistant.final_stop == "add":
        # in a message's own range up to its last character; in a gap no further than its own strings
        own_range = stop in {b for _, b in rendering.ranges.get(turn.message, [])}
        return turn._replace(end=max(turn.start, len(text[:stop].rstrip()) if own_range else floor), stopped=False)
    raise RejectedRow(
        RejectReason.END_NOT_FOUND,
        f"expected {list(assistant.ends)} at the end of the turn, found {text[turn.start : stop][-160:]!r} + {text[stop : stop + 60]!r}",
        turn.message,
    )


def _with_trailing(rendering: Rendering, turn: Turn, spec: TemplateSpec, end: int, stop: int) -> Turn:
    """The turn ending at `end`, after a look at what the template writes behind it up to `stop`."""
    trailing = spec.assistant.trailing
    rest = rendering.text[end:stop]
    if (rest == trailing or (trailing is None and not rest)) and not spec.assistant.supervise_trailing:
        return turn._replace(end=end)  # the usual case
    inside = stop in {b for a, b in rendering.ranges.get(turn.message, [])}
    # a gap runs into the next message's header, and an iteration may go on with another message's: a control token then
    next_control = next(rendering.controls_from(end), (stop, stop, 0))[0]
    behind = rendering.text[end : min(next_control, stop)]
    if trailing is None:
        fits = not inside or not behind.strip()
    else:
        goes_on = rendering.count_controls(end + len(trailing), end + len(trailing) + 1) > 0
        fits = rest == trailing or (rest.startswith(trailing) and (goes_on or not inside))
    if not fits:
        expected = "white space only" if trailing is None else repr(trailing)
        raise RejectedRow(
            RejectReason.END_NOT_FOUND, f"behind the end-of-turn token: expected {expected}, found {rest[:200]!r}", turn.message
        )
    if spec.assistant.supervise_trailing:
        end += len(behind if trailing is None else trailing)
    return turn._replace(end=end)


def irregular(messages: Sequence[Mapping[str, Any]]) -> bool:
    """An assistant turn without a question before it or right behind another one, or a system message later than the first."""
    roles = ["system", *(message["role"] for message in messages)]
    odd = any(role == "assistant" and before in ("system", "assistant") for before, role in itertools.pairwise(roles))
    return odd or "system" in roles[2:]


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
        closes = (
            start
            for start, _, identity in rendering.controls_from(turn.start)
            if start >= turn.end or (identity == close_id and start not in rendering.kept)
        )
        stop = next(closes, turn.end)
        if stop >= turn.end:
            return False
    elif spec.thinking.close is not None:
        stop = turn.start - 1
        for _ in range(reasoning.count(spec.thinking.close) + 1):  # those that the reasoning itself quotes do not close it
            stop = rendering.text.find(spec.thinking.close, stop + 1, turn.end)
            if stop < 0:
                return False
    return reasoning in rendering.text[turn.start : stop]


def dropped_parts(rendering: Rendering, turn: Turn, message: Mapping[str, Any]) -> list[str]:
    """Names of the fields of an assistant message (content, tool calls) that its emission does not show.

    A call's name must stand there more often than reasoning and content mention it in words.
    """
    emission = rendering.text[turn.start : turn.end]
    missing = []
    content = message.get("content")
    content = content.strip() if isinstance(content, str) else ""
    if not emission.startswith(content) and content not in emission:
        missing.append("content")
    calls = message.get("tool_calls")
    if not calls:
        return missing
    reasoning = str(message.get("reasoning_content") or "").strip()
    words = content if not missing else ""
    if reasoning and reasoning in emission:
        words += "\n" + reasoning
    for n, call in enumerate(calls):
        function = call["function"]
        if emission.count(function["name"]) <= words.count(function["name"]):
            missing.append(f"tool_calls[{n}].function.name")
        arguments = function.get("arguments")
        written = rendering.json.get(id(arguments))
        if written is not None and written in emission:
            continue  # the template wrote all of it in one piece
        if isinstance(arguments, dict):
            missing += [
                f"tool_calls[{n}].function.arguments.{key}"
                for key, value in arguments.items()
                if not _shown(str(key), emission) or not _value_shown(value, emission)
            ]
        elif isinstance(arguments, str) and not _shown(arguments, emission):
            missing.append(f"tool_calls[{n}].function.arguments")
    return missing


def _value_shown(value: Any, text: str) -> bool:
    """Is an argument's value in the text: strings as `_shown`, numbers, booleans and null in JSON's or Python's spelling."""
    if isinstance(value, str):
        return _shown(value, text)
    if isinstance(value, dict):
        return all(_shown(str(key), text) and _value_shown(item, text) for key, item in value.items())
    if isinstance(value, list):
        return all(_value_shown(item, text) for item in value)
    return json.dumps(value) in text or str(value) in text


def _shown(value: str, text: str) -> bool:
    """Is a string in the text, as it is or as JSON would write it."""
    written = encode_basestring(value)[1:-1]
    # the likely one first: what JSON escapes seldom stands there unescaped
    return (
        (len(written) != len(value) and written in text) or value.strip() in text or encode_basestring_ascii(value)[1:-1] in text
    )

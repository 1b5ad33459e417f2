"""What the rendering leaves out: every message's content, every call and every tool must show, or the spec must declare it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import RejectedRow, RejectReason
from ..templates.tracing import TOOL_SCHEMAS, Traced
from .turns import dropped_parts

if TYPE_CHECKING:
    from .parser import Parser, Sample

Leads = dict[str, int]  # by role: how far behind the begin of a range the last content stood
UNLIKELY_CHANCE = 20  # characters: a text of this length does not stand in a template's constants by chance


def check_foreign(parser: Parser, sample: Sample) -> None:
    """Refuse a turn in which the template writes another message's text, before its end token.

    Raises:
        RejectedRow: `foreign_text`.
    """
    messages, text = sample.prepared.messages, sample.rendering.text
    foreign: list[tuple[int, int, int]] | None = None
    for turn in sample.turns:
        emission = text[turn.start : turn.end]
        follows = messages[turn.message + 1].get("content") if turn.message + 1 < len(messages) else None
        quoted = isinstance(follows, str) and bool(follows.strip()) and follows.strip() in emission
        if not quoted and not sample.rendering.gaps:
            continue
        if foreign is None:
            traced = _tagged_trace(parser, sample)
            at = sample.shield.restore(traced.text, parser.control)[2] if sample.shield else int
            foreign = [(owner, at(a), at(b)) for owner, a, b in traced.strings if owner != TOOL_SCHEMAS and b > a]
        for owner, start, end in foreign:
            if owner != turn.message and start < turn.end and end > turn.start:
                role = messages[owner]["role"]
                raise RejectedRow(RejectReason.FOREIGN_TEXT, f"holds text of message {owner} ({role})", turn.message)


def check_dropped(parser: Parser, sample: Sample) -> None:
    """Refuse a conversation of which the rendering shows less than it holds, unless the spec declares it.

    Raises:
        RejectedRow: `template_drops_content`, with the message and the missing parts.
    """
    prepared, rendering = sample.prepared, sample.rendering
    allowed = set(prepared.spec.drops)
    turns = {turn.message: turn for turn in sample.turns}
    if prepared.spec.specforge is not None:
        # its spans need not hold a whole message; what is dropped is told from what the template writes for it
        for i, turn in turns.items():
            edges = [edge for pair in rendering.ranges.get(i, []) for edge in pair] or [turn.start, turn.end]
            turns[i] = turn._replace(start=min(edges), end=max(*edges, turn.end))
    dropped = 0
    leads: Leads = {}
    for i, message in enumerate(prepared.messages):
        if i in turns and turns[i].reason:
            undeclared = []  # nothing of it is trained
        elif i in turns:
            missing = dropped_parts(rendering, turns[i], message)
            if "content" not in missing and message.get("tool_calls") and not _shows(parser, sample, i, leads, UNLIKELY_CHANCE):
                missing.append("content")  # its few words stand in the call, not by themselves
            called = bool(message.get("tool_calls"))
            if called and prepared.spec.assistant.results_in_turn and (message.get("content") or "").strip():
                raise RejectedRow(
                    RejectReason.TEMPLATE_DROPS_CONTENT,
                    "assistant message: the template writes the text beside a call behind it, where it was not sampled",
                    i,
                )
            declared = {"content": "content" in allowed or (called and "content_with_tool_calls" in allowed)}
            undeclared = [m for m in missing if not declared.get(m, "tool_calls" in allowed)]
            dropped += bool(missing)
            if undeclared and _inline_kept(parser, message):
                undeclared = []
        else:
            undeclared = [] if _shows(parser, sample, i, leads) else ["content"]
            if undeclared and message["role"] in allowed:
                dropped, undeclared = dropped + 1, []
        if undeclared:
            raise RejectedRow(
                RejectReason.TEMPLATE_DROPS_CONTENT,
                f"{message['role']} message: the rendering lacks {', '.join(undeclared)}",
                i,
            )
    for tool in prepared.tools or ():
        name = (tool.get("function") or tool).get("name")
        if "tools" not in allowed and (not parser.renders_tools or (isinstance(name, str) and name not in rendering.text)):
            raise RejectedRow(RejectReason.TEMPLATE_DROPS_CONTENT, f"the rendering lacks the tool {name!r}")
    if dropped:
        prepared.notes["content_dropped"] = dropped


def _shows(parser: Parser, sample: Sample, message: int, leads: Leads, short: int = 0) -> bool:
    """Is a message's content in the text: in its own range, in the template's (system texts), or by its own marks.

    A content of less than `short` characters must show by its marks: it may stand in the range by chance.
    """
    rendering, given = sample.rendering, sample.prepared.messages[message]
    content, role = given.get("content"), given["role"]
    if not isinstance(content, str) or not (plain := content.strip()):
        return True
    ranges = rendering.ranges.get(message, ())
    if len(plain) >= short:
        blanks = content.index(plain[0])
        for start, stop in ranges:
            begin = start + leads.get(role, 0) + blanks  # where it stands if it stands as the last one did
            if begin + len(plain) <= stop and rendering.text.startswith(plain, begin):
                return True
            found = rendering.text.find(plain, start, stop)
            if found >= 0:
                leads[role] = found - start - blanks
                return True
    tool = role == "tool"
    content = next((text for text in _spellings(content, tool) if text in rendering.text), "")
    if not content:
        return False
    if len(content) >= short and any(content in rendering.text[a:b] for a, b in ranges):
        return True
    if len(content) >= UNLIKELY_CHANCE and content in rendering.unowned_text:
        return True
    # short, or inside another message's range: whose it is, only tagged strings can tell
    traced = _tagged_trace(parser, sample)
    mine = [(a, b) for owner, a, b in traced.strings if owner == message]
    if mine:
        own = sample.shown[message]["content"].strip()
        if short:
            parts = [traced.text[a:b].strip() for a, b in mine]
            # joined content may be written without its think block
            return any(part == own or (sample.prepared.spec.thinking.join and part.endswith(content)) for part in parts)
        shown = "".join(traced.text[a:b] for a, b in mine)
        return any(text in shown for text in _spellings(own, tool)) or shown.strip() in own
    others = [(a, b) for owner, a, b in traced.strings]
    rest = "".join(traced.text[a:b] for a, b in zip([0, *(b for _, b in others)], [*(a for a, _ in others), None], strict=True))
    return any(text in rest for text in _spellings(sample.shown[message]["content"], tool))


def _spellings(content: str, tool: bool) -> list[str]:
    """How a content may be written: as it is; a tool's result also as a JSON string (Llama 3.x, gpt-oss)."""
    content = content.strip()
    return [content, *(json.dumps(content, ensure_ascii=escaped)[1:-1] for escaped in (False, True) if tool)]


def _tagged_trace(parser: Parser, sample: Sample) -> Traced:
    if sample.tagged is None:
        sample.tagged = parser.template.trace(sample.shown, sample.tools, tagged=True, **sample.prepared.spec.kwargs)
    return sample.tagged


def strings_of_message(parser: Parser, sample: Sample, message: int) -> list[tuple[int, int]]:
    """Where the input strings of a message stand in the final text, as far as the template lets them be followed."""
    traced = _tagged_trace(parser, sample)
    at = sample.shield.restore(traced.text, parser.control)[2] if sample.shield else int
    return [(at(a), at(b)) for owner, a, b in traced.strings if owner == message and b > a]


def _inline_kept(parser: Parser, message: Mapping[str, Any]) -> bool:
    """Think tags left in content on purpose: the template may move what is between them."""
    content = message.get("content")
    return bool(parser.untouched) and isinstance(content, str) and any(tag in content for tag in parser.untouched)

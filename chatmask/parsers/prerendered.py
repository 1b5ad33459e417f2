"""Text that a chat template has already rendered -> the conversation that it was rendered from.

What the template writes between the contents of two messages is learned from renderings of probe conversations, whose contents are
placeholders. A text is cut at those pieces, and taken only if the spec, given the messages found, renders the same bytes.

A text does not say everything. Whether control text in it was quoted or is structure: where a message that was found holds any, it is
refused. Whether an earlier turn had reasoning that the template left out: where it could have, the turn is not trained.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ..canonical import first_unequal
from ..conversation import MAX_MESSAGES, REASONING_UNKNOWN, Conversation, normalise, refuse_flags_of_record
from ..errors import RejectedRow, RejectReason, TemplateError
from ..records import loads
from .messages import joined, prepare
from .shielding import SEPARATOR, joined_strings
from .thinking import reasoning_of

if TYPE_CHECKING:
    from .parser import Parser, Sample

_OTHER_SHAPES = ("messages", "conversations", "prompt", "completion", "history", "trajectory")
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_ARGUMENT = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_START, _END = "", " "  # what stands before the first message and behind the last, in place of a role
_SHAPES = ("su-a-u-a", "u-a-u-a", "suA-tt-a-u-a", "uA-t-a", "uC-t-A-t-a", "u-a-a", "s-u-C-t-a-u-C-t-t-a")
_ROLES = {"s": "system", "u": "user", "a": "assistant", "A": "assistant", "C": "assistant", "t": "tool"}


def is_prerendered(data: Mapping[str, Any]) -> bool:
    """Whether a record is a rendered text: `text` is a string, and nothing else in it claims to be a conversation."""
    return isinstance(data.get("text"), str) and not any(data.get(key) for key in _OTHER_SHAPES)


@dataclass
class Learned:
    """What a template writes around contents.

    Attributes:
        between: (role before, role behind) -> texts between the two contents, each with what closes a reasoning that begins there.
        call_gaps: texts between an assistant's content and its first call.
        tools: texts before the first tool schema, between two, and behind the last, up to the next message; None where it writes
            schemas otherwise than as JSON.
    """

    between: dict[tuple[str, str], dict[str, set[str]]] = field(default_factory=dict)
    call_gaps: set[str] = field(default_factory=set)
    tools: tuple[str, str, str] | None = None

    def after(self, role: str) -> tuple[re.Pattern[str], list[tuple[str, set[str]]]]:
        """A pattern for whatever may follow a content of this role, and for each of its groups the role behind and the closings."""
        found = [(text, end, closes) for (a, end), texts in self.between.items() if a == role for text, closes in texts.items()]
        found.sort(key=lambda one: (-len(one[0]), one[1]))
        parts = [f"({re.escape(text)}{chr(92) + 'Z' if end == _END else ''})" for text, end, _ in found]
        return re.compile("|".join(parts) or r"(?!)"), [(end, closes) for _, end, closes in found]


def read_prerendered(data: Mapping[str, Any], parser: Parser, max_messages: int = MAX_MESSAGES) -> Conversation:
    """Turn a rendered text back into its conversation.

    Args:
        data: `{"text": ...}`, and `tools` where they are known; else they are read from the text.
        parser: the compiled spec.
        max_messages: most messages allowed.

    Raises:
        RejectedRow: `text_not_reproduced`, where the text cannot be cut into messages, or these render otherwise; whatever refuses
            the conversation that was found.
    """
    refuse_flags_of_record(data)
    text: str = data["text"]
    system = data.get("system")
    if isinstance(system, str) and system.strip() not in text:
        _refuse(f"the record has a `system` beside the text that does not stand in it: {system[:60]!r}")
    layout = parser.learned
    messages, tools = _messages(text, layout)
    given = data.get("tools") or tools
    conversation = normalise({"messages": messages, **({"tools": given} if given else {})}, parser.spec.roles, max_messages)
    _refuse_control_text(conversation, parser)
    sample = parser.sample(conversation)
    plain = parser.template.render(sample.prepared.given, sample.prepared.tools, **sample.prepared.spec.kwargs)
    if text not in (sample.rendering.text, plain):
        at = first_unequal(text, plain)
        start = max(0, at - 30)
        _refuse(
            f"{len(messages)} messages were found, but they render otherwise: at character {at} the text has "
            f"{text[start : at + 40]!r}, the template writes {plain[start : at + 40]!r}"
        )
    lost = _may_have_thought(parser, sample, text)
    found = [{**m, REASONING_UNKNOWN: True} if i in lost else m for i, m in enumerate(conversation.messages)]
    return replace(conversation, messages=found)


def _may_have_thought(parser: Parser, sample: Sample, text: str) -> set[int]:
    """Messages (as the data counts) that show no reasoning, and would show none if they had had some: the template drops it from
    history. What the model sampled there cannot be told from the text, so they must not be trained (docs/rules.md, 5)."""
    if parser.spec.specforge is not None or parser.spec.thinking.mode not in ("on", "auto"):
        return set()
    spec, messages = parser.spec.for_sample(True), sample.prepared.messages
    silent = [i for i, m in enumerate(messages) if m["role"] == "assistant" and not reasoning_of(m)]
    if not silent or spec.rewritten.emission == "train":
        return set()
    asked = list(messages)
    for i in silent:
        asked[i] = {**asked[i], "reasoning_content": _slot(i), "thinking": _slot(i)}
    given = [joined(message, spec.thinking) for message in asked]
    try:
        shown = parser.template.render(given, sample.prepared.tools, **spec.kwargs)
    except TemplateError:
        shown = text
    return {i - sample.prepared.added_system for i in silent if shown.count(_slot(i)) <= text.count(_slot(i))}


def _refuse(detail: str) -> None:
    raise RejectedRow(RejectReason.TEXT_NOT_REPRODUCED, detail)


def _refuse_control_text(conversation: Conversation, parser: Parser) -> None:
    for i, message in enumerate(conversation.messages):
        allowed = parser.markers if message["role"] == "assistant" else frozenset[str]()
        for string in joined_strings([message], None).split(SEPARATOR):
            for found in parser.encoder.pattern.finditer(string):
                if found.group() not in allowed:
                    raise RejectedRow(
                        RejectReason.TEXT_NOT_REPRODUCED,
                        f"holds {found.group()!r}, and a text does not say whether it was quoted or is structure",
                        i,
                    )


# --- cutting ------------------------------------------------------------------------------------------------------------


def _messages(text: str, layout: Learned) -> tuple[list[dict[str, Any]], list[Any]]:
    """The messages of a text, and the tools that its system text lists."""
    patterns = {role: layout.after(role) for role in (_START, "system", "user", "assistant", "tool")}
    messages: list[dict[str, Any]] = []
    tools: list[Any] = []
    role, position, closings = _START, 0, set[str]()
    while role != _END:
        pattern, behind = patterns[role]
        found = pattern.match(text) if role == _START else pattern.search(text, position)
        if found is None:
            what = "it begins" if role == _START else f"behind the {role} text at character {position} it goes on"
            shown = text[position : position + 60] if role == _START else text[-60:]
            _refuse(f"{what} as this template does not write, or the text ends within a turn: {shown!r}")
            break
        content = text[position : found.start()]
        if role == "assistant":
            messages.append(_assistant(content, closings, layout))
        elif role == "system" and layout.tools is not None and not messages:
            content, tools, listed = _listed_tools(content, layout.tools)
            messages += [] if listed and not content else [{"role": role, "content": content}]
        elif role != _START:
            messages.append({"role": role, "content": content})
        assert found.lastindex is not None
        role, closings = behind[found.lastindex - 1]
        position = found.end()
    return messages, tools


def _assistant(body: str, closings: set[str], layout: Learned) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant"}
    places = [(at, -len(closing), closing) for closing in closings if (at := body.find(closing)) >= 0]
    if places:
        at, _, closing = min(places)
        message["reasoning_content"], body = body[:at], body[at + len(closing) :]
    at = body.find(_OPEN)
    if at < 0:
        return {**message, "content": body}
    content = body[:at]
    gap = next((gap for gap in sorted(layout.call_gaps, key=len, reverse=True) if content.endswith(gap)), "")
    return {**message, "content": content[: len(content) - len(gap)], "tool_calls": list(_calls(body[at:]))}


def _calls(text: str) -> Iterator[dict[str, Any]]:
    """The calls between tags: JSON with name and arguments, or a name with `arg_key` and `arg_value` pairs."""
    for piece in text.split(_OPEN)[1:]:
        inner, closed, rest = piece.partition(_CLOSE)
        if not closed or rest.strip():
            _refuse(f"a call is not closed, or text stands behind it: {piece[:80]!r}")
        call: Any = None
        if inner.lstrip().startswith("{"):
            with suppress(RejectedRow):
                call = loads(inner.strip().encode("utf-8", "surrogatepass"))
        else:
            name, tag, arguments = inner.partition("<arg_key>")
            pairs = list(_ARGUMENT.finditer(tag + arguments))
            if "".join(pair.group() for pair in pairs).strip() == (tag + arguments).strip():
                call = {"name": name.strip(), "arguments": {pair.group(1): pair.group(2) for pair in pairs}}
        if not isinstance(call, dict) or set(call) != {"name", "arguments"}:
            _refuse(f"a call is in a form that is not read back: {inner[:80]!r}")
        yield {"type": "function", "function": call}


def _listed_tools(content: str, around: tuple[str, str, str]) -> tuple[str, list[Any], bool]:
    """A system text without the list of tools that the template put behind it; the tools; whether there is such a list."""
    before, between, behind = around
    at = content.find(before)
    begin = at + len(before)
    if at < 0 and content.startswith(before.lstrip()):
        at, begin = 0, len(before.lstrip())
    if at < 0 or not content.endswith(behind):
        return content, [], False
    try:
        tools = [
            loads(line.encode("utf-8", "surrogatepass")) for line in content[begin : len(content) - len(behind)].split(between)
        ]
    except RejectedRow:
        return content, [], False
    return content[:at], tools, True


# --- learning -----------------------------------------------------------------------------------------------------------


def learn(parser: Parser) -> Learned:
    """Learn the layout of a parser's template from probe conversations; those that it refuses teach nothing."""
    layout = Learned()
    for shape in _SHAPES:
        for thinks in ("", "all", "last"):
            _learn_from(parser, layout, [c for c in shape if c != "-"], thinks)
    _learn_tools(parser, layout)
    return layout


def _slot(number: int) -> str:
    return f"zqslot{number}x"


def _tool(number: int) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": f"zqtool{number}x", "description": "d", "parameters": {"type": "object", "properties": {}}},
    }


def _rendered(parser: Parser, messages: list[dict[str, Any]], tools: list[Any] | None) -> str | None:
    try:
        prepared = prepare(normalise({"messages": messages, "tools": tools}), parser.spec, parser.null_content)
        return parser.template.render(prepared.given, prepared.tools, **prepared.spec.kwargs)
    except (RejectedRow, TemplateError):
        return None


def _learn_from(parser: Parser, layout: Learned, shape: Sequence[str], thinks: str) -> None:
    messages: list[dict[str, Any]] = []
    last = max(i for i, kind in enumerate(shape) if _ROLES[kind] == "assistant")
    for i, kind in enumerate(shape):
        message: dict[str, Any] = {"role": _ROLES[kind], "content": "" if kind == "C" else _slot(i)}
        if kind in "AC":
            message["tool_calls"] = [{"type": "function", "function": {"name": "zqcall", "arguments": {"x": "y"}}}]
        if message["role"] == "assistant" and (thinks == "all" or (thinks == "last" and i == last)):
            message["reasoning_content"] = _slot(i + 100)
        messages.append(message)
    text = _rendered(parser, messages, None)
    if text is None:
        return
    runs: list[tuple[str, int, int, set[str]]] = [(_START, 0, 0, set())]  # role, where its text begins and ends, closings
    for i, kind in enumerate(shape):
        position, closes = runs[-1][2], set[str]()
        thought = text.find(_slot(i + 100), position)
        own = _OPEN if kind == "C" else _slot(i)
        begin = text.find(own, position if thought < 0 else thought)
        if begin < 0:
            return
        end = begin + len(own)
        if kind in "AC":
            opened, end = text.find(_OPEN, begin), text.find(_CLOSE, begin) + len(_CLOSE)
            if not begin <= opened < end:
                return
            if kind == "A":
                layout.call_gaps.add(text[begin + len(own) : opened])
        if thought >= 0:
            closes.add(text[thought + len(_slot(i + 100)) : begin])
            begin = thought
        runs.append((_ROLES[kind], begin, end, closes))
    runs.append((_END, len(text), len(text), set()))
    for (before, _, edge, _), (role, begin, _, closes) in pairwise(runs):
        gap = text[edge:begin]
        if gap or role == _END:
            layout.between.setdefault((before, role), {}).setdefault(gap, set()).update(closes)


def _learn_tools(parser: Parser, layout: Learned) -> None:
    messages = [{"role": role, "content": _slot(i)} for i, role in enumerate(("system", "user", "assistant"))]
    tools = [_tool(1), _tool(2)]
    text, plain = _rendered(parser, messages, tools), _rendered(parser, messages, None)
    if text is None or plain is None:
        return
    written = [json.dumps(tool, ensure_ascii=False) for tool in tools]
    places = [text.find(part) for part in (_slot(0), written[0], written[1], _slot(1))]
    gap = plain[plain.find(_slot(0)) + len(_slot(0)) : plain.find(_slot(1))]
    if min(places) < 0 or places != sorted(places) or not text[: places[3]].endswith(gap):
        return
    layout.tools = (
        text[places[0] + len(_slot(0)) : places[1]],
        text[places[1] + len(written[0]) : places[2]],
        text[places[2] + len(written[1]) : places[3] - len(gap)],
    )

"""Conversation -> what the template is given: by the spec's roles, thinking mode, tool-argument form and null content."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..conversation import REASONING_UNKNOWN, Conversation
from ..errors import RejectedRow, RejectReason
from ..records import loads
from ..templates.spec import TemplateSpec, Thinking
from .parts import Marked, marked
from .specforge import KEPT_FIELDS
from .thinking import check_option, reasoning_of, split_inline, unwrapped


@dataclass(frozen=True)
class Prepared:
    """What one sample hands to the template.

    Attributes:
        spec: the concrete spec (never `auto`).
        messages: distinct dictionaries in OpenAI form, arguments in the template's form.
        tools: tool schemas or None.
        added_system: True when the spec's system text was put in front (message indices are then one higher than in the data).
        notes: counts, such as `reasoning_stripped`.
        excluded: assistant messages that the data keeps from training as a whole, and why (`Conversation.excluded`).
        parts: assistant messages whose content has parts with flags of their own.
    """

    spec: TemplateSpec
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    added_system: bool = False
    notes: dict[str, int] = field(default_factory=dict)
    excluded: Mapping[int, str] = field(default_factory=dict)
    parts: Mapping[int, Marked] = field(default_factory=dict)

    @property
    def given(self) -> list[dict[str, Any]]:
        """The messages as the template gets them: reasoning inside content where the spec says so."""
        return [joined(message, self.spec.thinking) for message in self.messages]


def prepare(conversation: Conversation, spec: TemplateSpec, null_content: str | None = None) -> Prepared:
    """Bring a conversation into the form that the spec's template wants; the input is not changed.

    Args:
        conversation: as `conversation.normalise` gives it.
        spec: any spec; `auto` is resolved by whether an assistant message holds reasoning.
        null_content: what a null content becomes (None stays None), found out by the probe.

    Raises:
        RejectedRow: reasoning in a spec without thinking, conflicts, arguments that are no JSON object.
    """
    notes = dict(conversation.notes)
    messages = [
        split_inline(message, i, spec.thinking, spec.assistant.header) if message["role"] == "assistant" else message
        for i, message in enumerate(conversation.messages)
    ]
    answers: dict[int, int] = {}
    if spec.thinking.strip:
        contents = [
            (given.get("content") or "", left.get("content") or "")
            for given, left in zip(conversation.messages, messages, strict=True)
        ]
        answers = {i: len(given) - len(left) for i, (given, left) in enumerate(contents)}
        stripped = sum(1 for message in messages if reasoning_of(message))
        if stripped:
            notes["reasoning_stripped"] = stripped
        messages = [{k: v for k, v in message.items() if k != "reasoning_content"} for message in messages]
    spec = spec.for_sample(any(reasoning_of(message) for message in messages))
    if spec.tool_call_ids is not None:
        messages = with_call_ids(messages, spec.tool_call_ids, notes)
    added_system = spec.system is not None and (not messages or messages[0]["role"] != "system")
    excluded, parts = {}, {}
    for i, message in enumerate(conversation.messages):
        if message["role"] == "assistant" and (why := conversation.excluded(i, answers.get(i))):
            excluded[i + added_system] = why
        elif message["role"] == "assistant" and (said := conversation.parts_of(i)):
            parts[i + added_system] = marked(message, messages[i], said, conversation.flags[i], spec.thinking)
    if added_system:
        messages = [{"role": "system", "content": spec.system}, *messages]
    check_option(messages, spec)
    prepared = [_message(message, i - added_system, spec, null_content) for i, message in enumerate(messages)]
    if spec.specforge is not None:
        prepared = [{key: message[key] for key in KEPT_FIELDS[spec.specforge.parser] if key in message} for message in prepared]
    return Prepared(
        spec,
        prepared,
        loads(json.dumps(conversation.tools, sort_keys=True).encode())
        if spec.sort_tools and conversation.tools
        else conversation.tools,
        added_system,
        notes,
        excluded,
        parts,
    )


def with_call_ids(messages: list[dict[str, Any]], form: str, notes: dict[str, int]) -> list[dict[str, Any]]:
    """The messages with call ids in the form that the template relies on, results following their calls; counted.

    A call whose id has the form already (with its own name and any number) keeps it; others are numbered through the conversation,
    past numbers that are taken. A result belongs to the first open call of its id, one without an id to the first open call.
    """

    def number(call: dict[str, Any]) -> str | None:
        pattern = re.escape(form).replace(r"\{name\}", re.escape(str(call["function"]["name"]))).replace(r"\{index\}", "([0-9]+)")
        found = re.fullmatch(pattern, str(call.get("id") or ""))
        return found.group(1) if found else None

    taken = {int(n) for m in messages for call in m.get("tool_calls") or () if (n := number(call)) is not None}
    index = 0
    open_calls: list[tuple[Any, str]] = []  # the id in the data, the id that is written
    result = []
    for message in messages:
        if message.get("tool_calls"):
            calls = []
            open_calls = []
            for call in message["tool_calls"]:
                given = call.get("id")
                if number(call) is None:
                    while index in taken:
                        index += 1
                    call = {**call, "id": form.replace("{name}", str(call["function"]["name"])).replace("{index}", str(index))}
                    notes["call_ids_rewritten"] = notes.get("call_ids_rewritten", 0) + 1
                    index += 1
                open_calls.append((given, call["id"]))
                calls.append(call)
            message = {**message, "tool_calls": calls}
        elif message["role"] == "tool":
            given = message.get("tool_call_id")
            found = next((pair for pair in open_calls if given in (None, pair[0])), None)
            if found is not None:
                open_calls.remove(found)
                message = {**message, "tool_call_id": found[1]}
        result.append(message)
    return result


def joins(message: dict[str, Any], thinking: Thinking) -> bool:
    """Is the think block put into this message's content? Where the form leaves the open tag to the template, a turn without
    reasoning gets the rest all the same: it closes the block."""
    if thinking.join is None or message["role"] != "assistant":
        return False
    return bool(reasoning_of(message)) or (thinking.mode == "on" and str(thinking.open) not in thinking.join)


def joined(message: dict[str, Any], thinking: Thinking) -> dict[str, Any]:
    """What a template that knows reasoning only inside content is given (`thinking.join`); any other message as it is."""
    if thinking.join is None or message["role"] != "assistant":
        return message
    result = {key: value for key, value in message.items() if key not in ("reasoning_content", "thinking")}
    content = message.get("content") or ""
    if joins(message, thinking):
        # line breaks at the edges belong to the tags, as in `split_inline`
        parts = {"{reasoning}": reasoning_of(message).strip("\n"), "{content}": unwrapped(content, thinking)}
        content = re.sub(r"\{reasoning\}|\{content\}", lambda match: parts[match.group()], thinking.join)
    result["content"] = content
    return result


def _message(message: dict[str, Any], index: int, spec: TemplateSpec, null_content: str | None) -> dict[str, Any]:
    result = {key: value for key, value in message.items() if key != REASONING_UNKNOWN}
    if result.get("content") is None:
        result["content"] = null_content
    reasoning = result.pop("reasoning_content", None)
    if reasoning is not None and (spec.thinking.mode not in ("none", "off") or reasoning.strip()):
        # templates read one of these names; transformers fills the same two (5.24, `_alias_reasoning_fields`)
        result["reasoning_content"] = result["thinking"] = reasoning
    if result.get("tool_calls"):
        result["tool_calls"] = [_call(call, index, n, spec.tool_arguments) for n, call in enumerate(result["tool_calls"])]
    return result


def _call(call: dict[str, Any], index: int, number: int, form: str) -> dict[str, Any]:
    function = dict(call["function"])
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        parsed = _object(arguments, index, number)
        function["arguments"] = parsed if form == "dict" else arguments
    else:
        parsed = {} if arguments is None else arguments
        function["arguments"] = parsed if form == "dict" else json.dumps(parsed, ensure_ascii=False)
    return {**call, "function": function}


def _object(text: str, index: int, number: int) -> dict[str, Any]:
    if not text.strip():
        return {}  # an empty string can only mean: no arguments
    try:
        value = loads(text.encode("utf-8", "surrogatepass"))
    except RejectedRow as error:
        reason = RejectReason.BAD_TOOL_ARGUMENTS if error.reason is RejectReason.INVALID_JSON else error.reason
        raise RejectedRow(
            reason, f"tool_calls[{number}].function.arguments: {error.reason}: {error.detail}: {text[:80]!r}", index
        ) from None
    if not isinstance(value, dict):
        twice = " (encoded twice?)" if isinstance(value, str) else ""
        raise RejectedRow(
            RejectReason.BAD_TOOL_ARGUMENTS,
            f"tool_calls[{number}].function.arguments: a JSON {type(value).__name__}, not an object{twice}: {text[:80]!r}",
            index,
        )
    return value

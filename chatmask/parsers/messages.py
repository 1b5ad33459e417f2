"""Conversation -> what the template is given: by the spec's roles, thinking mode, tool-argument form and null content."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from ..conversation import Conversation
from ..errors import RejectedRow, RejectReason
from ..records import loads
from ..templates.spec import TemplateSpec
from .thinking import check_option, reasoning_of, split_inline


@dataclass(frozen=True)
class Prepared:
    """What one sample hands to the template.

    Attributes:
        spec: the concrete spec (never `auto`).
        messages: distinct dictionaries in OpenAI form, arguments in the template's form.
        tools: tool schemas or None.
        flags: one training flag per message; None where the data does not say.
        added_system: True when the spec's system text was put in front (message indices are then one higher than in the data).
        notes: counts, such as `reasoning_stripped`.
    """

    spec: TemplateSpec
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    flags: tuple[bool | None, ...]
    added_system: bool = False
    notes: dict[str, int] = field(default_factory=dict)


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
    if spec.thinking.strip:
        stripped = sum(1 for message in messages if reasoning_of(message))
        if stripped:
            notes["reasoning_stripped"] = stripped
        messages = [{k: v for k, v in message.items() if k != "reasoning_content"} for message in messages]
    spec = spec.for_sample(any(reasoning_of(message) for message in messages))
    flags = conversation.flags
    added_system = spec.system is not None and (not messages or messages[0]["role"] != "system")
    if added_system:
        messages = [{"role": "system", "content": spec.system}, *messages]
        flags = (None, *flags)
    check_option(messages, spec)
    return Prepared(
        spec,
        [_message(message, i - added_system, spec, null_content) for i, message in enumerate(messages)],
        conversation.tools,
        flags,
        added_system,
        notes,
    )


def _message(message: dict[str, Any], index: int, spec: TemplateSpec, null_content: str | None) -> dict[str, Any]:
    result = dict(message)
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

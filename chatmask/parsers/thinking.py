"""Reasoning: inline tags into `reasoning_content`, the thinking option of a sample, and what a spec without thinking refuses."""

from __future__ import annotations

from typing import Any

from ..errors import RejectedRow, RejectReason
from ..templates.spec import TemplateSpec, Thinking


def reasoning_of(message: dict[str, Any]) -> str:
    """The message's reasoning, or ''. White space alone is no reasoning."""
    value = message.get("reasoning_content") or ""
    return value if value.strip() else ""


def split_inline(message: dict[str, Any], index: int, thinking: Thinking, header: str) -> dict[str, Any]:
    """Move a leading think block of an assistant's content into `reasoning_content`.

    `<think>reasoning</think>answer` is understood always, `reasoning</think>answer` where the header opens the tag.
    One line break at each inner edge of the block and those before the answer belong to the tags.

    Raises:
        RejectedRow: text before the open tag or an unclosed one (`inline_thinking_unclear`); other reasoning in the field
            (`reasoning_conflict`).
    """
    content = message.get("content")
    opening, closing = thinking.open, thinking.close
    if thinking.inline != "split" or not opening or not closing or not isinstance(content, str):
        return message
    if closing not in content and opening not in content:
        return message
    body = content.lstrip()
    opened = body.startswith(opening)
    if not opened and reasoning_of(message):
        return message  # the reasoning is given apart, so a tag further on is quoted text
    before, closed, answer = body.partition(closing)
    if opened and not closed:
        raise RejectedRow(RejectReason.INLINE_THINKING_UNCLEAR, f"content: {opening!r} is never closed", index)
    if not opened and opening in before:
        if closed:
            raise RejectedRow(
                RejectReason.INLINE_THINKING_UNCLEAR, f"content: text stands before {opening!r}: {body[:60]!r}", index
            )
        return message
    if not closed:
        return message
    if not opened and not header.rstrip().endswith(opening):
        raise RejectedRow(
            RejectReason.INLINE_THINKING_UNCLEAR,
            f"content: {closing!r} without {opening!r}, which this template's prompt does not open",
            index,
        )
    # what stands at the edges belongs to the tags: line breaks, and the blanks that `join` will put there
    edge = "\n" + "".join(char for char in thinking.join or "" if char.isspace())
    reasoning = before.removeprefix(opening).strip(edge)
    given = reasoning_of(message)
    if given and given.strip() != reasoning.strip():
        raise RejectedRow(
            RejectReason.REASONING_CONFLICT,
            f"reasoning_content is {given[:60]!r}, the inline block in content {reasoning[:60]!r}",
            index,
        )
    result = {**message, "content": answer.lstrip(edge)}
    if reasoning.strip():
        result["reasoning_content"] = reasoning
    return result


def unwrapped(answer: str, thinking: Thinking) -> str:
    """The answer without what `thinking.join` will put around it (`<response>`, `<answer>`), where the data has it already."""
    if thinking.join is None or str(thinking.close) not in thinking.join:
        return answer
    before, _, behind = thinking.join.rpartition(str(thinking.close))[2].partition("{content}")
    before, behind = before.strip(), behind.strip()
    body = answer.strip()
    if (before or behind) and body.startswith(before) and body.endswith(behind) and len(body) >= len(before) + len(behind):
        return body[len(before) : len(body) - len(behind)].strip("\n")
    return answer


def check_option(messages: list[dict[str, Any]], spec: TemplateSpec) -> None:
    """Refuse a sample whose system text sets the other thinking option than the spec (`thinking_option_conflict`)."""
    thinking = spec.thinking
    other = {"on": "off", "off": "on"}.get(thinking.mode)
    if thinking.conflict == "allow" or other is None or not messages or messages[0]["role"] != "system":
        return
    text = thinking.option_text.get(other)  # type: ignore[call-overload]
    content = messages[0].get("content")
    if text and isinstance(content, str) and text in content:
        raise RejectedRow(
            RejectReason.THINKING_OPTION_CONFLICT,
            f"the system text says {text!r} but the spec {spec.name} has thinking {thinking.mode}",
            0,
        )

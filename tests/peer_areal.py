"""AReaL's way from a record to ids and masks, restated in plain Python from a description of its behaviour; for tests only.

Pair mode makes one sample of each turn that did not fail, the turns before it without their reasoning. Trajectory mode makes one
sample of a record, failed turns masked. The text comes from a Qwen3 template that keeps think blocks, and the mask from the
rendered text: from behind each role header to the end token, by the tokenizer's offsets.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jinja2

TURN = re.compile(r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", re.DOTALL)
BLOCK = re.compile(r"\s*<think(?:ing)?>(.*?)</think(?:ing)?>", re.DOTALL)
NOTHING_THOUGHT = "\n"  # a field that is there and empty: the template writes its empty block

Message = dict[str, Any]


@dataclass(frozen=True)
class Sample:
    """Ids and mask of one sample."""

    ids: list[int]
    mask: list[int]


@dataclass(frozen=True)
class Turn:
    """An assistant message with its reasoning apart; `inline` if it stood in content, where stripping it trims the answer."""

    message: Message
    reasoning: str
    answer: str
    inline: bool

    def without(self) -> Message:
        """As context of a pair."""
        return {**self.message, "content": self.answer.strip() if self.inline else self.answer}

    def whole(self) -> Message:
        """As it is trained: its reasoning, or an empty block."""
        return {**self.message, "content": self.answer, "reasoning_content": self.reasoning or NOTHING_THOUGHT}


def read(message: Message) -> Turn:
    """Reasoning from a block that content begins with, else from the field; arguments that are objects become JSON text."""
    content, field = message.get("content") or "", message.get("reasoning_content") or ""
    rest = {key: value for key, value in message.items() if key not in ("reasoning_content", "content")}
    if calls := message.get("tool_calls"):
        rest["tool_calls"] = [{**call, "function": _with_text(call["function"])} for call in calls]
    found = BLOCK.match(content)
    if found:
        return Turn(rest, found.group(1).strip("\n") if found.group(1).strip() else "", content[found.end() :].lstrip("\n"), True)
    return Turn(rest, field if field.strip() else "", content, False)


def _with_text(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function["arguments"]
    return {**function, "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments)}


def failed(messages: list[Message], turn: int) -> bool:
    """One of the results right behind the turn says so."""
    for message in messages[turn + 1 :]:
        if message["role"] != "tool":
            return False
        if message.get("is_error"):
            return True
    return False


class Peer:
    """The peer for one template and one tokenizer (of the `tokenizers` package)."""

    def __init__(self, template: str, tokenizer: Any) -> None:
        environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        self._template = environment.from_string(template)
        self._tokenizer = tokenizer

    def pairs(self, messages: list[Message], tools: Any = None, max_length: int | None = None) -> Iterator[Sample]:
        """Pair mode."""
        turns = {i: read(m) for i, m in enumerate(messages) if m["role"] == "assistant"}
        for target in turns:
            if failed(messages, target):
                continue
            shown = [turns[i].without() if i in turns else m for i, m in enumerate(messages[:target])]
            text, encoded = self._render([*shown, turns[target].whole()], tools)
            spans = [match.span(1) for match in TURN.finditer(text)][-1:]
            yield from self._sample(encoded, spans, max_length)

    def trajectory(self, messages: list[Message], tools: Any = None, max_length: int | None = None) -> Iterator[Sample]:
        """Trajectory mode; no sample where the text shows another number of turns than there are."""
        turns = {i: read(m) for i, m in enumerate(messages) if m["role"] == "assistant"}
        text, encoded = self._render([turns[i].whole() if i in turns else m for i, m in enumerate(messages)], tools)
        spans = [match.span(1) for match in TURN.finditer(text)]
        if len(spans) == len(turns):
            kept = [span for span, i in zip(spans, turns, strict=True) if not failed(messages, i)]
            yield from self._sample(encoded, kept, max_length)

    def _render(self, messages: list[Message], tools: Any) -> tuple[str, Any]:
        shown = [{**m, "content": m.get("content") or ""} for m in messages]
        text = self._template.render(messages=shown, tools=tools, enable_thinking=True, preserve_thinking=True)
        return text, self._tokenizer.encode(text, add_special_tokens=False)

    def _sample(self, encoded: Any, spans: list[tuple[int, int]], max_length: int | None) -> Iterator[Sample]:
        if max_length is not None and len(encoded.ids) > max_length:
            return
        mask = [int(any(start <= a and b <= end for start, end in spans)) for a, b in encoded.offsets]
        yield Sample(encoded.ids, mask)

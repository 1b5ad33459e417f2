"""SpecForge's own way, written anew from its description: search the rendered text, then measure token positions by encoding prefixes.

Slow and forgeable, and for that reason a good witness for what `specforge/*` specs must give on harmless conversations.
"""

from __future__ import annotations

import re
from typing import Any

from chatmask.parsers.parser import Parser
from chatmask.templates.spec import TemplateSpec


def rendered(parser: Parser, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
    """What SpecForge renders: its system text where the data has none, and only the fields that its parser keeps."""
    spec = parser.spec
    assert spec.specforge is not None
    keep = {"role", "content", "tool_calls"} | (
        {"reasoning_content", "name", "tool_call_id"} if spec.thinking.mode == "on" else set()
    )
    given = [{**{k: v for k, v in m.items() if k in keep}, "content": m.get("content") or ""} for m in messages]
    for message in given:
        if "reasoning_content" in message:
            message["thinking"] = message["reasoning_content"]  # transformers gives a template both names
    if given[0]["role"] != "system" and spec.system:
        given.insert(0, {"role": "system", "content": spec.system})
    return parser.template.render(given, tools, **spec.kwargs)


def mask(parser: Parser, text: str) -> tuple[list[int], list[int]]:
    """Token ids and loss mask of a rendered text by regular expression and prefix lengths."""
    spec, whole = parser.spec, parser.loaded.whole

    def position(at: int) -> int:
        return len(whole.encode(text[:at], add_special_tokens=False).ids)

    ids = whole.encode(text, add_special_tokens=False).ids
    found = [0] * len(ids)
    for match in re.finditer(_pattern(spec), text):
        for k in range(position(match.start(1)), min(position(match.end(1)), len(ids))):
            found[k] = 1
    assert spec.specforge is not None
    for literal in spec.specforge.ignore:
        for match in re.finditer(re.escape(literal), text):
            for k in range(position(match.start()), min(position(match.end()), len(ids))):
                found[k] = 0
    return ids, found


def _pattern(spec: TemplateSpec) -> str:
    rules = spec.specforge
    assert rules is not None
    if rules.until is None:
        end = spec.assistant.ends[0] + ((spec.assistant.trailing or "") if spec.assistant.supervise_trailing else "")
        tail = rf"(?:{re.escape(end)}|\Z)"
    else:
        untils = [rules.until] if isinstance(rules.until, str) else rules.until
        any_of = "|".join(re.escape(until).replace(r"\{n\}", r"\d+") for until in untils)
        tail = rf"(?:{any_of}|\Z)" if rules.until_included else rf"(?={any_of}|\Z)"
    return rf"{re.escape(spec.assistant.header)}([\s\S]*?{tail})"

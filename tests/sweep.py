"""What every public chat template does under tracing and `infer`: used by tests and by `scripts/conformance.py`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from chatmask.errors import RejectedRow, SpecError, TemplateError
from chatmask.parsers.parser import Parser
from chatmask.templates.infer import Inferred, infer
from chatmask.templates.tracing import ChatTemplate
from tests.pairing import SPECIAL, paired

Messages = list[dict[str, Any]]
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _answer(text: str, reasoning: str = "", calls: list[Any] | None = None) -> dict[str, Any]:
    thought = {"reasoning_content": reasoning, "thinking": reasoning} if reasoning else {}
    return {"role": "assistant", "content": text, **thought, **({"tool_calls": calls} if calls else {})}


def _call(number: int, arguments: Any) -> dict[str, Any]:
    return {"id": f"call0000{number}", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}


def _result(number: int, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call0000{number}", "name": "get_weather", "content": text}


def shapes() -> Iterator[tuple[str, Messages, Any]]:
    """The shapes of conversation that a template may render: name, messages, tools."""
    plain = [_user("What is 2+2?"), _answer("It is 4."), _user("And 3+3?"), _answer("That is 6.")]
    yield "plain", plain, None
    yield "system", [{"role": "system", "content": "Be nice."}, *plain], None
    thought = [
        _user("What is 2+2?"),
        _answer("It is 4.", "two and two"),
        _user("And 3+3?"),
        _answer("That is 6.", "three and three"),
    ]
    yield "reasoning", thought, None
    for form, arguments in (("dict", {"city": "Zurich"}), ("JSON", '{"city": "Zurich"}')):
        chat = [
            _user("Weather?"),
            _answer("Let me look.", calls=[_call(0, arguments)]),
            _result(0, "RESULT one"),
            _answer("It is 21."),
        ]
        yield f"tools, {form} arguments", chat, _TOOLS
    both = [_call(0, {"city": "Zurich"}), _call(1, {"city": "Tokyo"})]
    yield (
        "parallel calls",
        [_user("Weather?"), _answer("", calls=both), _result(0, "RESULT one"), _result(1, "RESULT two"), _answer("Done 21.")],
        _TOOLS,
    )


@dataclass(frozen=True)
class Tracing:
    """One template and shape: is every assistant message's text found, and is the text the untraced one."""

    shape: str
    found: bool
    equal: bool


def trace(source: str) -> Iterator[Tracing]:
    """Trace a template in every shape that it renders with the assistant's content."""
    try:
        template = ChatTemplate(source, dict(SPECIAL), "2026-01-01")
    except TemplateError:
        return
    for shape, messages, tools in shapes():
        try:
            text = template.render(messages, tools)
        except TemplateError:
            continue
        own = {i: m["content"] or "Zurich" for i, m in enumerate(messages) if m["role"] == "assistant"}
        if not all(words in text for words in own.values()):
            continue
        template.tagged = False
        template.calibrate([(messages, tools)])
        traced = template.trace(messages, tools)
        texts = {i: [text[a:b] for a, b in traced.ranges().get(i, [])] for i in own}
        for i in own:
            texts[i] += [text[gap.before : gap.after] for gap in traced.gaps().get(i, [])]
        yield Tracing(shape, all(any(words in t for t in texts[i]) for i, words in own.items()), traced.text == text)


_MODES: tuple[dict[str, Any], ...] = (
    {},
    {"enable_thinking": True},
    {"enable_thinking": False},
    {"thinking": True},
    {"thinking": False},
)


def exact_mode(source: str) -> bool:
    """Is there a mode, with or without reasoning, in which each turn's prefix is what the server sends? Asked of the template alone."""
    try:
        template = ChatTemplate(source, dict(SPECIAL), "2026-01-01")
    except TemplateError:
        return False
    conversations = {shape: messages for shape, messages, _ in shapes() if shape in ("plain", "reasoning")}
    for kwargs in _MODES:
        for shape, messages in conversations.items():
            try:
                text = template.render(messages, **kwargs)
                prompts = [template.render(messages[:i], add_generation_prompt=True, **kwargs) for i in (1, 3)]
            except TemplateError:
                continue
            wanted = [messages[i]["content"] for i in range(4)] + [
                m["reasoning_content"] for m in messages[1::2] if shape == "reasoning"
            ]
            whole = all(words in text for words in wanted)
            after = [text[len(prompt) :] for prompt in prompts]
            if (
                whole
                and all(map(text.startswith, prompts))
                and all(messages[i]["content"] in rest for i, rest in zip((1, 3), after, strict=True))
            ):
                return True
    return False


@dataclass(frozen=True)
class Verdict:
    """What `infer` says of a template, and whether the trained spans of its spec begin where the served prompts end."""

    inferred: Inferred | None
    refusal: str
    wrong: tuple[str, ...]


def verdict(source: str, name: str) -> Verdict:
    """Infer a spec over a paired tokenizer, and check it against the template itself on chats that the proof did not use."""
    try:
        tokenizer = paired(source, name)
        found = infer(tokenizer)
    except (SpecError, TemplateError) as error:
        return Verdict(None, str(error), ())
    parser = Parser(found.spec, tokenizer)
    wrong = []
    for shape, messages, _ in shapes():
        if shape not in ("plain", "reasoning"):
            continue
        try:
            example = parser.parse({"messages": [{k: v for k, v in m.items() if k != "thinking"} for m in messages]})
        except RejectedRow:
            continue
        for span, turn in zip(example.spans, example.turns, strict=True):
            served = parser.template.render(messages[: turn.message], add_generation_prompt=True, **found.spec.kwargs)
            if span.trained and example.rewritten.get(span.message) is None and example.text[: turn.start] != served:
                wrong.append(f"{shape}, message {span.message}")
    return Verdict(found, "", tuple(wrong))

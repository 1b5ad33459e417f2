"""Checks on templates that were made up for one purpose, where no packaged one does what must be noticed."""

from __future__ import annotations

from typing import Any

import chatmask
from chatmask.parsers.parser import Parser
from chatmask.templates.spec import TemplateSpec
from chatmask.tokenizers import demo_tokenizer

from .oracles import supervised

_IM_TURN = "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
_IM_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
DROPPING = {
    "the text beside a tool call": "{% for m in messages %}{% if m.tool_calls %}{{ '<|im_start|>assistant\\n' }}{% for c in m.tool_calls %}"
    "{{ c.function.name + ' ' + c.function.arguments|tojson }}{% endfor %}{{ '<|im_end|>\\n' }}{% else %}"
    + _IM_TURN
    + "{% endif %}{% endfor %}",
    "tool calls": "{% for m in messages %}" + _IM_TURN + "{% endfor %}",
    "tool messages": "{% for m in messages if m.role != 'tool' %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name + ' ' + c.function.arguments|tojson }}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}",
}


def made_up(template: str, **fields: Any) -> Parser:
    """A parser for a ChatML-like template that was made up for a test, over the demo tokenizer."""
    data = {"name": "made-up", "assistant": {"header": "<|im_start|>assistant\n", "end_of_turn": "<|im_end|>"}, **fields}
    return Parser(TemplateSpec.model_validate(data), demo_tokenizer(template + _IM_PROMPT), check=False)


def check_drops() -> None:
    """A template that leaves a part of a message out is caught, whichever part it is, unless the spec declares it."""
    messages = [
        {"role": "user", "content": "Question."},
        {
            "role": "assistant",
            "content": "Let me look.",
            "tool_calls": [{"function": {"name": "find", "arguments": {"what": "it"}}}],
        },
        {"role": "tool", "content": "Found nothing."},
        {"role": "assistant", "content": "Answer."},
    ]
    declared = {"the text beside a tool call": "content_with_tool_calls", "tool calls": "tool_calls", "tool messages": "tool"}
    for what, template in DROPPING.items():
        try:
            made_up(template).parse({"messages": messages})
        except chatmask.RejectedRow as error:
            assert error.reason.value == "template_drops_content", error
        else:
            raise AssertionError(f"nobody noticed that {what} went missing")
        example = made_up(template, drops=[declared[what]]).parse({"messages": messages})
        assert example.content_dropped == 1


def check_added_system() -> None:
    """A system text that the spec adds is rendered, and indices and flags still are those of the data."""
    parser = made_up("{% for m in messages %}" + _IM_TURN + "{% endfor %}", system="Added.")
    talk = [{"role": role, "content": f"{role} {n}"} for n in range(2) for role in ("user", "assistant")]
    talk[1]["train"] = False  # type: ignore[assignment]
    example = parser.parse({"messages": talk})
    assert "Added." in example.text
    assert [(s.message, s.trained, s.reason) for s in example.spans] == [(1, False, "flag"), (3, True, "")]
    assert parser.loaded.decode(supervised(example)[0]) == "assistant 1<|im_end|>"
    own = parser.parse({"messages": [{"role": "system", "content": "Mine."}, *talk]})
    assert "Added." not in own.text
    assert [s.message for s in own.spans] == [2, 4]


def check_argument_forms() -> None:
    """A template that wants arguments as JSON text gets text, one that wants an object gets an object, whatever the data holds."""
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name ~ (' text ' if c.function.arguments is string else ' object ') ~ c.function.arguments }}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
    )
    for form, shown in (("json", 'text {"a": "b"}'), ("dict", "object {'a': 'b'}")):
        parser = made_up(template, tool_arguments=form)
        for given in ({"a": "b"}, '{"a": "b"}'):
            call = {"function": {"name": "f", "arguments": given}}
            example = parser.parse(
                {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "f: ", "tool_calls": [call]}]}
            )
            assert parser.loaded.decode(supervised(example)[0]) == f"f: f {shown}<|im_end|>"

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


def assert_refused(parser: Parser, messages: list[dict[str, Any]], reason: str, unnoticed: str) -> None:
    """Fails, saying what nobody noticed, unless the parser rejects the messages for this reason."""
    try:
        parser.parse({"messages": messages})
    except chatmask.RejectedRow as error:
        assert error.reason.value == reason, error
    else:
        raise AssertionError(unnoticed)


def check_drops() -> None:
    """A template that leaves a part of a message out is caught, whichever part it is, unless the spec declares it."""
    messages = [
        {"role": "user", "content": "Question."},
        {
            "role": "assistant",
            "content": "Let me look at it with the tool before I answer.",
            "tool_calls": [{"function": {"name": "find", "arguments": {"what": "it"}}}],
        },
        {"role": "tool", "content": "Found nothing."},
        {"role": "assistant", "content": "Answer."},
    ]
    cutting = made_up(
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content[:9] + '<|im_end|>\\n' }}{% endfor %}"
    )
    long_answer = [{"role": "user", "content": "Question."}, {"role": "assistant", "content": "A longer answer."}]
    assert_refused(cutting, long_answer, "template_drops_content", "nobody noticed that a part of the answer went missing")
    # a call's name that stands in text which the template drops is no call
    short = [messages[0], {**messages[1], "content": "I find it."}, *messages[2:]]
    made_up(DROPPING["the text beside a tool call"], drops=["content_with_tool_calls"]).parse({"messages": short})
    declared = {"the text beside a tool call": "content_with_tool_calls", "tool calls": "tool_calls", "tool messages": "tool"}
    for what, template in DROPPING.items():
        assert_refused(made_up(template), messages, "template_drops_content", f"nobody noticed that {what} went missing")
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


def check_calls_named_in_words() -> None:
    """A call that the template leaves out is missed even where the content mentions its name."""
    template = "{% for m in messages %}" + _IM_TURN + "{% endfor %}"
    call = {"function": {"name": "get", "arguments": {}}}
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "I call get now.", "tool_calls": [call]}]
    assert_refused(made_up(template), messages, "template_drops_content", "nobody noticed that the call went missing")


def check_what_follows_the_end() -> None:
    """A turn ends with its first end token, whatever else the template writes while it works on the message."""
    template = (
        "{% for m in messages %}{% if m.role != 'tool' %}" + _IM_TURN + "{% endif %}"
        "{% if not loop.last and loop.nextitem.role == 'tool' %}{{ '<|im_start|>tool\\n' + loop.nextitem.content + '<|im_end|>\\n' }}"
        "{% endif %}{% endfor %}"
    )
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "I look."},
        {"role": "tool", "content": "TOOL RESULT of some length"},
        {"role": "assistant", "content": "Done."},
    ]
    parser = made_up(template)
    example = parser.parse({"messages": messages})
    assert [parser.loaded.decode(ids) for ids in supervised(example)] == ["I look.<|im_end|>", "Done.<|im_end|>"]


def check_composed() -> None:
    """A control token that a template puts together around content, or out of two contents, is text."""
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + (m.name or '') + m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% for k, v in c.function.arguments.items() %}"
        "{{ '<' ~ k ~ '>' ~ v }}{% endfor %}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}{# <tool_call> #}"
    )
    parser = made_up(template)

    def controls(name: str, content: str, key: str) -> list[int]:
        call = {"function": {"name": "zz_zz", "arguments": {key: "Zz zz"}}}
        messages = [
            {"role": "user", "name": name, "content": content},
            {"role": "assistant", "content": "Zz zz", "tool_calls": [call]},
        ]
        example = parser.parse({"messages": messages})
        assert parser.loaded.decode(example.ids) == example.text
        return [i for i in example.input_ids if i in parser.control.values()]

    # words that are no part of any control token, so that each row is suspect for one string only
    harmless = controls("Zz", "Zz zz", "zz_key")
    for name, content, key in (
        ("Zz", "Zz zz", "|im_end|"),
        ("Zz", "Zz zz", "|im_start|"),
        ("<|im_", "end|>\n<|im_start|>system", "zz_key"),
        ("Zz", "Zz zz", "x<|im_end|>y"),
        ("<|im_end", "|>", "|endoftext|"),
    ):
        assert controls(name, content, key) == harmless, (name, content, key)


def check_foreign_text() -> None:
    """A turn into which the template writes the next message's text, before its end token, is refused."""
    template = (
        "{% for m in messages %}{% if m.role != 'tool' %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
        "{% if not loop.last and loop.nextitem.role == 'tool' %}{{ '<res>' + loop.nextitem.content }}{% endif %}"
        "{{ '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    )
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "I look."},
        {"role": "tool", "content": "TOOL RESULT of some length"},
        {"role": "assistant", "content": "Done."},
    ]
    assert_refused(made_up(template), messages, "foreign_text", "a tool's result was trained")

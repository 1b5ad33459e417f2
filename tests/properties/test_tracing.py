"""Tracing: the text is the plain rendering byte for byte, and each message owns what the template wrote for it.

Templates of many styles are put together from small parts; the messages hold unique words, so that a word in the wrong range shows.
"""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmask.errors import TemplateError
from chatmask.templates.environment import environment
from chatmask.templates.registry import packaged_template
from chatmask.templates.tracing import ChatTemplate, MarkedText
from tests import assets
from tests.conversations import benign, conversations

_TURN = "'<|' + m.role + '|>' + (m.content or '')"
_CALLS = "{% for call in m.tool_calls or [] %}{{ '<call>' + call.function.name }}{% for k, v in call.function.arguments.items() %}{{ k ~ '=' ~ v|tojson }}{% endfor %}{{ '</call>' }}{% endfor %}"
_BODY = "{{ " + _TURN + " }}" + _CALLS + "{{ '<|end|>' }}"

STYLES = {
    "plain loop": "{% for m in messages %}" + _BODY + "{% endfor %}",
    "text outside": "{{ 'BEGIN' }}{% for m in messages %}" + _BODY + "{{ '\\n' }}{% endfor %}{{ 'FINISH' }}",
    "macro": "{% macro turn(m) %}" + _BODY + "{% endmacro %}{% for m in messages %}{{ turn(m) }}{% endfor %}",
    "macro, concatenated": "{% macro turn(m) %}"
    + _BODY
    + "{% endmacro %}{% for m in messages %}{{ '[' + turn(m) + ']' }}{% endfor %}",
    "macro, tilde": "{% macro turn(m) %}"
    + _BODY
    + "{% endmacro %}{% for m in messages %}{{ '[' ~ turn(m) ~ ']' ~ 1 }}{% endfor %}",
    "macro, trimmed": "{% macro turn(m) %}  " + _BODY + "  {% endmacro %}{% for m in messages %}{{ turn(m) | trim }}{% endfor %}",
    "macro within macro": "{% macro body(x) %}{{ x.content }}{% endmacro %}{% macro turn(m) %}{{ m.role }}:{{ body(m) }}{% endmacro %}"
    "{% for m in messages %}{{ turn(m) }};{% endfor %}",
    "macro given an index": "{% macro turn(i) %}{% set m = messages[i] %}" + _BODY + "{% endmacro %}"
    "{% for i in range(messages|length) %}{{ turn(i) }}{% endfor %}",
    "set block": "{% for m in messages %}{% set text %}" + _BODY + "{% endset %}{{ text }}{% endfor %}",
    "set block, trimmed": "{% for m in messages %}{% set text %}  "
    + _BODY
    + " {% endset %}{{ text | trim }}{{ '\\n' }}{% endfor %}",
    "set block around the loop": "{% set all %}{% for m in messages %}"
    + _BODY
    + "{% endfor %}{% endset %}{{ 'A' }}{{ all }}{{ 'B' }}",
    "namespace": "{% set ns = namespace(n=0, last='') %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }}"
    + _BODY
    + "{% set ns.last = m.role %}{% endfor %}",
    "call block": "{% macro wrap(role) %}{{ '<' + role + '>' }}{{ caller() }}{{ '</>' }}{% endmacro %}"
    "{% for m in messages %}{% call wrap(m.role) %}" + _BODY + "{% endcall %}{% endfor %}",
    "generation tags": "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|assistant|>' }}{% generation %}{{ m.content }}"
    + _CALLS
    + "{{ '<|end|>' }}{% endgeneration %}{% else %}"
    + _BODY
    + "{% endif %}{% endfor %}",
    "continue": "{% for m in messages %}{% if m.role == 'system' %}{{ 'S:' + m.content }}{% continue %}{% endif %}"
    + _BODY
    + "{% endfor %}",
    "break in an inner loop": "{% for m in messages %}"
    + _BODY
    + "{% for x in [1, 2, 3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}{{ '|' }}{% endfor %}",
    "loop filter": "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}{% for m in messages if m.role != 'system' %}"
    + _BODY
    + "{% endfor %}",
    "sliced list": "{% if messages[0].role == 'system' %}{{ 'S:' + messages[0].content }}{% set rest = messages[1:] %}{% else %}"
    "{% set rest = messages %}{% endif %}{% for m in rest %}" + _BODY + "{% endfor %}",
    "first taken out": "{% set first = messages[0] %}{{ '<|' + first.role + '|>' + first.content + '<|end|>' }}{% for m in messages[1:] %}"
    + _BODY
    + "{% endfor %}",
    "index loop": "{% for i in range(messages|length) %}{% set m = messages[i] %}" + _BODY + "{% endfor %}",
    "neighbours looked at": "{% for m in messages %}{% if not loop.first %}{% set before = messages[loop.index0 - 1] %}{{ '-' if before.role == 'tool' else '' }}"
    "{% endif %}"
    + _BODY
    + "{% if not loop.last %}{% set after = messages[loop.index0 + 1] %}{{ '+' if after.role == m.role else '.' }}{% endif %}"
    "{{ '\\n' }}{% endfor %}",
    "last looked at": "{% for m in messages %}{% set last = messages | last %}{{ '!' if last.role == 'tool' else '?' }}"
    + _BODY
    + "{% endfor %}",
    "previtem and nextitem": "{% for m in messages %}{% if loop.first or loop.previtem.role != m.role %}{{ '(' }}{% endif %}"
    + _BODY
    + "{% if loop.last or loop.nextitem.role != m.role %}{{ ')' }}{% endif %}{% endfor %}",
    "two passes": "{% set ns = namespace(users=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.users = ns.users + 1 %}{% endif %}{% endfor %}"
    "{{ ns.users }}{% for m in messages %}" + _BODY + "{% endfor %}",
    "filter block": "{% for m in messages %}{% filter trim %} " + _BODY + " {% endfilter %}{{ '\\n' }}{% endfor %}",
    "if expression": "{% for m in messages %}{{ ("
    + _TURN
    + ") if m.content else '-' }}"
    + _CALLS
    + "{{ '<|end|>' }}{% endfor %}",
}


@cache
def _template(style: str) -> ChatTemplate:
    return ChatTemplate(STYLES[style])


@cache
def _untraced(source: str) -> Any:
    return environment().from_string(source)


def _messages(texts: list[str]) -> list[dict[str, Any]]:
    """Roles in a usual order; every third assistant turn calls a tool."""
    roles = itertools.chain(["system"], itertools.cycle(["user", "assistant", "user", "assistant", "tool", "assistant"]))
    found: list[dict[str, Any]] = []
    for i, (role, text) in enumerate(zip(roles, texts, strict=False)):
        message: dict[str, Any] = {"role": role, "content": text}
        if role == "assistant" and i % 3 == 1:
            message["tool_calls"] = [
                {"function": {"name": f"tool{n}x{i}x", "arguments": {"a": i, "b": f"v{i}"}}} for n in range(2)
            ]
        found.append(message)
    return found


def _owned(traced: Any) -> dict[int, str]:
    return {i: "".join(traced.text[a:b] for a, b in ranges) for i, ranges in traced.ranges().items()}


def _check(template: ChatTemplate, messages: list[dict[str, Any]], tools: Any = None, **kwargs: Any) -> dict[int, str]:
    """Traced text is the plain text of an environment that knows nothing of tracing; ranges are apart and in bounds."""
    traced = template.trace(messages, tools, **kwargs)
    given = {
        **template.variables,
        **kwargs,
        "messages": messages,
        "tools": tools,
        "documents": None,
        "add_generation_prompt": False,
    }
    assert traced.text == _untraced(template.source).render(**given)
    assert type(traced.text) is str
    assert traced.text == template.render(messages, tools, **kwargs)
    flat = sorted(piece for ranges in traced.ranges().values() for piece in ranges)
    assert all(0 <= a < b <= len(traced.text) for a, b in flat)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(flat))
    return _owned(traced)


@pytest.mark.parametrize("style", STYLES)
def test_each_message_owns_its_words(style: str) -> None:
    """In every style a message's range holds its content and tool names, and no other message's."""
    template = ChatTemplate(STYLES[style])
    for n in (1, 2, 3, 5, 8, 14):
        words = [f"word{i}x" for i in range(n)]
        messages = _messages(words)
        owned = _check(template, messages)
        assert not [text for text in owned.values() if "BEGIN" in text or "FINISH" in text]
        for i, message in enumerate(messages):
            if i == 0 and style in ("sliced list",):  # written by `messages[0].content`: nothing tells whose it is
                assert i not in owned
                continue
            if style != "macro within macro":
                names = [call["function"]["name"] for call in message.get("tool_calls", ())]
                assert all(name in owned[i] for name in names)
            assert words[i] in owned[i]
            assert not [word for word in words if word != words[i] and word in owned[i]]


@pytest.mark.parametrize("style", STYLES)
def test_order_of_ranges_is_order_of_messages(style: str) -> None:
    """Ranges come in the order of the messages, whatever the style."""
    traced = ChatTemplate(STYLES[style]).trace(_messages([f"w{i}" for i in range(9)]))
    starts = [ranges[-1][0] for _, ranges in sorted(traced.ranges().items())]
    assert starts == sorted(starts)


TEXTS = st.lists(
    st.one_of(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
        st.sampled_from(
            ["", "\0", "\ue000", "__chatmask_mark", "{{ x }}", "{% endfor %}", "<|end|>", "<|assistant|>", " \n ", "zq0q0z"]
        ),
    ),
    min_size=1,
    max_size=9,
)


@given(texts=TEXTS, style=st.sampled_from(sorted(STYLES)))
@settings(max_examples=200, deadline=None)
def test_no_content_forges_a_mark(texts: list[str], style: str) -> None:
    """Whatever the texts are, a message's own piece is what the template writes for it, and the text is untouched."""
    messages = _messages([f"<{i}{text}{i}>" for i, text in enumerate(texts)])
    owned = _check(_template(style), messages)
    for i, message in enumerate(messages):
        if not (i == 0 and style == "sliced list"):
            assert message["content"] in owned[i]


def test_equal_messages_are_told_apart() -> None:
    """Two messages that are equal have a range each; the same object twice is refused."""
    template = ChatTemplate(STYLES["plain loop"])
    twins = [{"role": "user", "content": "same"}, {"role": "user", "content": "same"}]
    assert _owned(template.trace(twins)) == {0: "<|user|>same<|end|>", 1: "<|user|>same<|end|>"}
    with pytest.raises(ValueError, match="object of its own"):
        template.trace([twins[0], twins[0]])


def test_marks_that_get_lost_take_no_text_with_them() -> None:
    """Where a string operation cannot carry marks, the enclosing loop still owns the text; without one, nobody does."""
    macro = "{% macro turn(m) %}" + _BODY + "{% endmacro %}{% for m in messages %}{{ turn(m) | upper }}{% endfor %}"
    messages = _messages(["one", "two", "three"])
    owned = _check(ChatTemplate(macro), messages)
    assert owned[0] == "<|SYSTEM|>ONE<|END|>"
    assert "TWO" in owned[1]
    block = "{% set all %}{% for m in messages %}" + _BODY + "{% endfor %}{% endset %}{{ all | upper }}"
    assert _check(ChatTemplate(block), messages) == {}


@given(
    st.lists(st.tuples(st.text("ab \n", max_size=6), st.integers(0, 5)), min_size=1, max_size=5),
    st.sampled_from([None, " ", "a", "\n a"]),
)
@settings(max_examples=150, deadline=None)
def test_marked_text_behaves_as_the_string_it_is(parts: list[tuple[str, int]], chars: str | None) -> None:
    """Concatenation and stripping give what plain strings give, and marks stay inside the text, in order."""
    plain, marked = "", MarkedText("", ())
    places: list[int] = []
    for text, scope in parts:
        places.append(len(plain))
        plain += text
        marked = marked + MarkedText("", ((0, (scope, scope, False)),)) + text  # type: ignore[assignment]
    assert marked == plain
    assert (marked.strip(chars), marked.lstrip(chars), marked.rstrip(chars)) == (
        plain.strip(chars),
        plain.lstrip(chars),
        plain.rstrip(chars),
    )
    assert "[" + marked + "]" == f"[{plain}]"
    lead = len(plain) - len(plain.lstrip(chars))
    for cut, gone in ((marked, 0), (marked.strip(chars), lead), (marked.lstrip(chars), lead), (marked.rstrip(chars), 0)):
        assert [at for at, _ in cut.marks] == [min(max(at - gone, 0), len(cut)) for at in places]


def _real_templates() -> dict[str, str]:
    return {
        "qwen3": assets.qwen3_template(),
        "ling3": assets.ling3_template(),
        "ling_flash2": assets.ling_flash2_template(),
        **{name: packaged_template(f"{name}.jinja") for name in ("qwen3", "ling-3.0", "ling-flash-2.0")},
    }


@pytest.mark.parametrize("name", ["qwen3", "ling3", "ling_flash2", "ling-3.0", "ling-flash-2.0"])
def test_real_templates_own_their_messages(name: str) -> None:
    """On the real and the packaged templates every message of a good conversation owns its content."""
    template = ChatTemplate(_real_templates()[name])
    for conversation in benign(21, 30):
        owned = _check(template, conversation["messages"], conversation["tools"], **conversation["kwargs"])
        for i, message in enumerate(conversation["messages"]):
            if not (i == 0 and message["role"] == "system"):  # written before the loop over messages
                assert message["content"] in owned[i]


@pytest.mark.parametrize("name", ["qwen3", "ling3", "ling_flash2", "ling-3.0", "ling-flash-2.0"])
def test_real_templates_on_odd_conversations(name: str) -> None:
    """Traced and untraced renderings agree on malformed conversations too, in text or in refusing."""
    template = ChatTemplate(_real_templates()[name])
    refused = 0
    for conversation in conversations(22, 200):
        messages, kwargs = conversation["messages"], conversation["kwargs"]
        try:
            text = template.render(messages, conversation["tools"], **kwargs)
        except TemplateError:
            refused += 1
            with pytest.raises(TemplateError):
                template.trace(messages, conversation["tools"], **kwargs)
            continue
        assert template.trace(messages, conversation["tools"], **kwargs).text == text
    assert refused < 170

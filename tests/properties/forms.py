"""Checks of the forms in which templates write turns, on templates made up for one purpose each. `CHECKS` holds them all."""

from __future__ import annotations

from typing import Any

import chatmask
from chatmask.parsers.parser import Parser
from chatmask.templates.spec import TemplateSpec
from chatmask.tokenizers import demo_tokenizer

from .made_up import assert_refused, made_up
from .oracles import supervised

_TURN = "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
_CALLS = "{% for c in m.tool_calls or [] %}{{ '<tool_call>' ~ c.id ~ ' ' ~ c.function.name ~ c.function.arguments|tojson ~ '</tool_call>' }}{% endfor %}"
_THINK = {"mode": "on", "open": "<think>", "close": "</think>"}


def _compiled(template: str, **fields: Any) -> Parser:
    """As `made_up`, but the probe is run, and the template writes its own prompt."""
    data = {"name": "made-up", "assistant": {"header": "<|im_start|>assistant\n", "end_of_turn": "<|im_end|>"}, **fields}
    return Parser(TemplateSpec.model_validate(data), demo_tokenizer(template))


def _trained(parser: Parser, messages: list[dict[str, Any]], **more: Any) -> list[str]:
    """Supervised text of each trained span, as its token ids say it."""
    return [parser.loaded.decode(ids) for ids in supervised(parser.parse({"messages": messages, **more}))]


def _agent(result: str = "Found.", name: str = "find") -> list[dict[str, Any]]:
    call = {"id": "call_1", "type": "function", "function": {"name": name, "arguments": {"what": "it"}}}
    return [
        {"role": "user", "content": "Question."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": result, "tool_call_id": "call_1"},
        {"role": "assistant", "content": "Answer."},
    ]


def check_joined_reasoning() -> None:
    """Reasoning goes into content in the spec's form, however the data gives it, and its tags keep their ids; quoted ones do not."""
    form = "<think>\n{reasoning}\n</think>\n\n{content}"
    parser = _compiled("{% for m in messages %}" + _TURN + "{% endfor %}" + _PROMPT, thinking={**_THINK, "join": form})
    close = parser.control["</think>"]
    for given in (
        {"content": "A.", "reasoning_content": "Why."},
        {"content": "<think>Why.</think>A."},
        {"content": "<think>\nWhy.\n</think>\n\nA."},
        {"content": "A.", "reasoning_content": "Why. 1 <"},  # a string that could complete a control token
    ):
        example = parser.parse({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", **given}]})
        shown = str(given.get("reasoning_content", "Why."))
        assert parser.loaded.decode(supervised(example)[0]) == f"<think>\n{shown}\n</think>\n\nA.<|im_end|>"
        assert example.input_ids.count(close) == 1
    quoted = {"role": "assistant", "content": "A {content} </think>.", "reasoning_content": "Why {content}."}
    example = parser.parse({"messages": [{"role": "user", "content": "q"}, quoted]})
    assert "Why {content}.\n</think>\n\nA {content} </think>.<|im_end|>" in example.text
    plain = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "A."}]
    assert _trained(parser, plain) == ["A.<|im_end|>"]


def check_joined_forms_survive() -> None:
    """Data in the spec's own form comes out as it is, given inline or in fields: blanks, wrapped answers, quoted closing tags."""
    template = "{% for m in messages %}" + _TURN + "{% endfor %}" + _PROMPT
    for form in ("<think> {reasoning} </think> {content}", "<think>{reasoning}</think><tool_call>{content}</tool_call>"):
        parser = _compiled(template, thinking={**_THINK, "join": form})
        whole = form.format(reasoning="Why.", content="A.")
        answer = whole.partition("</think>")[2].strip()
        for given in ({"content": whole}, {"content": answer, "reasoning_content": "Why."}):
            assert _trained(parser, [{"role": "user", "content": "q"}, {"role": "assistant", **given}]) == [f"{whole}<|im_end|>"]
    # a close tag that is plain text in the vocabulary, quoted by the reasoning
    parser = _compiled(template, thinking={"mode": "on", "open": "{{", "close": "}}", "join": "{{ {reasoning} }}{content}"})
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "A.", "reasoning_content": "see }} and"}]
    assert [span.trained for span in parser.parse({"messages": [*turns, *turns]}).spans] == [True, True]


def check_a_block_that_the_prompt_opens_is_closed() -> None:
    """Where the template opens the block itself, a turn without reasoning closes it, with the tag's own id, whatever the row holds."""
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{{ '<think>' }}{% endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>' }}{% endif %}"
    )
    assistant = {"header": "<|im_start|>assistant\n<think>", "end_of_turn": "<|im_end|>"}
    parser = _compiled(template, assistant=assistant, thinking={**_THINK, "join": "{reasoning}</think>\n\n{content}"})
    close = parser.control["</think>"]
    for answer in ("A.", "> quoted\nYes.", "a", "ends <"):
        example = parser.parse({"messages": [{"role": "user", "content": "q <"}, {"role": "assistant", "content": answer}]})
        assert parser.loaded.decode(supervised(example)[0]) == f"</think>\n\n{answer}<|im_end|>"
        assert example.input_ids.count(close) == 1
        assert example.control_text == 0


def check_joined_reasoning_that_history_cuts() -> None:
    """Where the template cuts the joined block from earlier turns, these are emission-rewritten and not trained."""
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if loop.last %}{{ m.content }}{% else %}"
        "{{ m.content.split('</think>')[-1].lstrip('\\n') }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}" + _PROMPT
    )
    form = "<think>\n{reasoning}\n</think>\n\n{content}"
    parser = _compiled(template, thinking={**_THINK, "join": form, "in_history": "dropped"}, prefix_stable=False)
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "A.", "reasoning_content": "Why."}]
    example = parser.parse({"messages": [*turns, *turns]})
    assert [(span.trained, span.reason) for span in example.spans] == [(False, "history_rewritten"), (True, "")]
    assert example.rewritten[1] == "emission"


def check_join_is_refused_where_a_field_is_read() -> None:
    """A spec that joins reasoning into content of a template that reads the field fails its probe."""
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + (m.reasoning_content or '') + m.content + '<|im_end|>\\n' }}{% endfor %}"
        + _PROMPT
    )
    try:
        _compiled(template, thinking={**_THINK, "join": "<think>{reasoning}</think>{content}"})
    except chatmask.SpecError as error:
        assert "no field of reasoning" in str(error), error
    else:
        raise AssertionError("the template would have written the reasoning twice")


_BARE_AFTER_TOOL = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ '<tool_response>' + m.content + '</tool_response>' }}"
    "{% elif m.role == 'assistant' and loop.index0 and messages[loop.index0 - 1].role == 'tool' %}{{ LEAD + m.content + '<|im_end|>\\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}" + _CALLS + "{{ '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ LEAD if messages[-1].role == 'tool' else '<|im_start|>assistant\\n' }}{% endif %}"
)


def check_header_behind_a_tool() -> None:
    """A turn behind a tool's result begins with its own header, which may be empty, and only there."""
    for lead in ("", "<tool_call>", "So:\n"):
        template = _BARE_AFTER_TOOL.replace("LEAD", repr(lead))
        assistant = {"header": "<|im_start|>assistant\n", "end_of_turn": "<|im_end|>", "after_tool": {"header": lead}}
        parser = _compiled(template, assistant=assistant)
        messages = [*_agent(), {"role": "user", "content": "More?"}, {"role": "assistant", "content": "No."}]
        spans = _trained(parser, messages)
        assert spans[1:] == ["Answer.<|im_end|>", "No.<|im_end|>"], spans
        assert spans[0].startswith("<tool_call>call_1 find"), spans
        for wrong in ("Wrong: ", "</tool_response>" if lead else "<|im_start|>"):
            try:
                _compiled(template, assistant={**assistant, "after_tool": {"header": wrong}})
            except chatmask.SpecError as error:
                assert "after_tool" in str(error) or "header" in str(error), error
            else:
                raise AssertionError(f"the header {wrong!r} is not what the template writes behind a result")


def check_results_within_the_turn() -> None:
    """Where the template writes results behind a call's end token, in the same turn, they are allowed there and never trained."""
    template = (
        "{% for m in messages %}{% if m.role == 'tool' %}{% elif m.tool_calls %}{{ '<|im_start|>assistant\\n' }}"
        + _CALLS
        + "{{ '<tool_response>' }}"
        "{{ messages[loop.index0 + 1].content if not loop.last else '' }}{{ '</tool_response>' if not loop.last else '' }}"
        "{% elif m.role == 'assistant' and loop.index0 and messages[loop.index0 - 1].role == 'tool' %}{{ m.content + '<|im_end|>\\n' }}"
        "{% else %}" + _TURN + "{% endif %}{% endfor %}"
        "{% if add_generation_prompt and messages[-1].role != 'tool' %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    assistant = {
        "header": "<|im_start|>assistant\n",
        "end_of_turn": ["<|im_end|>", "<tool_response>"],
        "after_tool": {"header": ""},
        "results_in_turn": True,
    }
    parser = made_up(template, assistant=assistant)
    beside = _agent("The result.")
    beside[1]["content"] = "Let me look."
    for messages in (beside, beside[:2]):
        assert_refused(parser, messages, "template_drops_content", "text beside a call is not where the model said it")
    spans = _trained(parser, _agent("The result."))
    assert spans == ['<tool_call>call_1 find{"what": "it"}</tool_call><tool_response>', "Answer.<|im_end|>"], spans


def check_results_as_json() -> None:
    """A result that the template writes as a JSON string is shown; one that it cuts is not."""
    for cut, refused in (("", False), ("[:4]", True)):
        template = (
            "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{{ (m.content"
            + cut
            + ")|tojson if m.role == 'tool' else m.content }}"
            + _CALLS
            + "{{ '<|im_end|>\\n' }}{% endfor %}"
        )
        try:
            spans = _trained(made_up(template), _agent('{"a": "ü\n"}'))
        except chatmask.RejectedRow as error:
            assert (error.reason.value, refused) == ("template_drops_content", True), error
        else:
            assert not refused
            assert spans[1] == "Answer.<|im_end|>"


def check_call_ids() -> None:
    """Ids that the template relies on are written in its form and counted; ids that have it stay; results follow their calls."""
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.id ~ c.function.arguments|tojson }}{% endfor %}{{ ' for ' + m.tool_call_id if m.tool_call_id else '' }}{{ '<|im_end|>\\n' }}{% endfor %}"
    )
    parser = made_up(template, tool_call_ids="functions.{name}:{index}")
    example = parser.parse({"messages": _agent()})
    assert 'functions.find:0{"what": "it"}' in example.text
    assert "Found. for functions.find:0" in example.text
    assert example.notes["call_ids_rewritten"] == 1
    two = _agent()
    first = two[1]["tool_calls"][0]
    for ids, written in (
        (("functions.find:1", "x"), ("1", "0")),
        (("x", "functions.find:0"), ("1", "0")),
        (("x", "x"), ("0", "1")),
        ((None, None), ("0", "1")),
    ):
        calls = [{k: v for k, v in {**first, "id": given}.items() if v is not None} for given in ids]
        results = [{"role": "tool", "content": f"Found {n}.", **({"tool_call_id": g} if g else {})} for n, g in enumerate(ids)]
        example = parser.parse({"messages": [two[0], {**two[1], "tool_calls": calls}, *results, two[3]]})
        for n, number in enumerate(written):
            assert f"Found {n}. for functions.find:{number}<" in example.text, example.text
    own = _agent()
    own[1]["tool_calls"][0]["id"] = own[2]["tool_call_id"] = "functions.find:7"
    example = parser.parse({"messages": own})
    assert "Found. for functions.find:7" in example.text
    assert "call_ids_rewritten" not in example.notes


def check_blanks_before_an_added_stop() -> None:
    """A last answer that ends in white space keeps it and gets its stop token."""
    template = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}{% if not loop.last %}{{ '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    assistant = {"header": "<|im_start|>assistant\n", "end_of_turn": "<|im_end|>", "final_stop": "add"}
    parser = made_up(template, assistant=assistant)
    for text in ("ok", "ok \n", "ok\n\n"):
        example = parser.parse({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]})
        assert example.text.endswith(f"assistant\n{text}<|im_end|>")
        assert example.input_ids[-1] == parser.control["<|im_end|>"]
        assert example.loss_mask[-1] == 1
        assert "untrained_stops" not in example.notes


def check_specforge_rules() -> None:
    """SpecForge's spans: from a header to the declared end, ignored text left out, a missing header listed, nothing forged."""
    template = "{% for m in messages %}{{ ('<|im_start|>' if m.content != 'odd' else '') + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"

    def spans(messages: list[dict[str, Any]], **rules: Any) -> list[tuple[int, bool, str]]:
        tail = {} if "until" in rules else {"trailing": "\n", "supervise_trailing": True}
        assistant = {"header": "<|im_start|>assistant\n", "end_of_turn": "<|im_end|>", **tail}
        parser = made_up(template, assistant=assistant, specforge={"parser": "general", **rules})
        example = parser.parse({"messages": messages})
        assert [span.trained for span in example.spans].count(True) == len(supervised(example))
        return [
            (span.message, span.trained, example.text[turn.start : turn.end])
            for span, turn in zip(example.spans, example.turns, strict=True)
        ]

    quote = "x<|im_end|>\n<|im_start|>assistant\ny"
    talk = [{"role": "user", "content": quote}, {"role": "assistant", "content": f"A {quote}"}]
    assert spans(talk) == [(1, True, f"A {quote}<|im_end|>\n")]
    more = [*talk, {"role": "user", "content": "q"}, {"role": "assistant", "content": "odd"}]
    assert spans(more)[1] == (3, False, "")
    until = spans([*talk, *talk], until="<|im_start|>user\n")
    assert until == [(1, True, f"A {quote}<|im_end|>\n"), (3, True, f"A {quote}<|im_end|>\n")]
    included = spans([*talk, *talk], until="<|im_start|>user\n", until_included=True)
    assert included[0] == (1, True, f"A {quote}<|im_end|>\n<|im_start|>user\n")
    steps = spans([*_agent()[:1], {"role": "assistant", "content": "a"}, *_agent()[2:]], until="<|im_start|>user\n")
    assert [text for _, _, text in steps] == [
        "a<|im_end|>\n<|im_start|>tool\nFound.<|im_end|>\n",
        "<|im_start|>assistant\nAnswer.<|im_end|>\n",
    ]
    assert spans(talk, ignore=["<|im_end|>\n"]) == [(1, True, f"A {quote}")]


def check_parts() -> None:
    """Parts with a flag against them are not trained, nor is a token across their border; the rest of the turn is."""
    parser = chatmask.load_parser("qwen3-instruct", demo=True)
    user = {"role": "user", "content": "Go."}
    for parts, kept in (
        ([("Well.\n", None), ("Not this.\n", False), ("Yes.", True)], ["Well.\n", "Yes.<|im_end|>"]),
        ([("Well", None), (".", False), (" Yes.", None)], ["Well", " Yes.<|im_end|>"]),
        ([("It i", None), ("s", False), (" 4.", None)], ["It", " 4.<|im_end|>"]),
    ):
        content = [{"type": "text", "text": text, **({} if train is None else {"train": train})} for text, train in parts]
        found = parser.parse({"messages": [user, {"role": "assistant", "content": content}]})
        shown = [parser.loaded.decode(found.ids[span.start : span.end]) for span in found.spans if span.trained]
        assert shown == kept, shown


CHECKS = (
    check_parts,
    check_joined_reasoning,
    check_joined_forms_survive,
    check_a_block_that_the_prompt_opens_is_closed,
    check_joined_reasoning_that_history_cuts,
    check_join_is_refused_where_a_field_is_read,
    check_header_behind_a_tool,
    check_results_within_the_turn,
    check_results_as_json,
    check_call_ids,
    check_blanks_before_an_added_stop,
    check_specforge_rules,
)

"""The short ways against the long ones, on records of all sorts: helpers of `test_short_ways.py` and of the mutants' checker."""

from __future__ import annotations

import itertools
import random
from typing import Any

import chatmask
from chatmask.conversation import normalise
from chatmask.parsers.parser import Parser
from chatmask.parsers.shapes import Filled
from chatmask.policy import load_policy
from chatmask.sampling import begin, complete, encode
from tests.conversations import benign

from .made_up import made_up
from .oracles import fitting, parser_of

SPECS = (
    "qwen3-instruct",
    "qwen3-thinking",
    "qwen3-preserved",
    "ling-3.0",
    "ling-3.0-thinking",
    "ling-3.0-auto",
    "ling-flash-2.0",
)


def fast(spec: str, source: str = "demo") -> Parser:
    """A parser with the fast tokenizer on."""
    parser: Parser = parser_of(spec, source)
    assert parser.encoder.speed_up() == ""
    return parser


def _records(seed: int, n: int, spec: str) -> list[dict[str, Any]]:
    """Conversations with tools and plain chats, some with blanks at the ends or tags in them."""
    rng = random.Random(f"{spec}-{seed}")
    records: list[dict[str, Any]] = [{"messages": one["messages"], "tools": one["tools"]} for one in benign(seed, n)]
    words = [
        "It is 4.",
        " so",
        "\n",
        "\n\nyes ",
        "a < b",
        "</think>",
        "<thinking>x</thinking>y",
        "<|im_end|>",
        "日本",
        "  ",
        "detailed thinking off",
    ]
    for _ in range(4 * n):
        messages = [{"role": "system", "content": rng.choice(["Be brief.", " Be\n"])}] if rng.random() < 0.3 else []
        for _ in range(rng.randint(1, 3)):
            answer = {"role": "assistant", "content": "".join(rng.choices(words[:3] if rng.random() < 0.6 else words, k=2))}
            if rng.random() < 0.3:
                answer["reasoning_content"] = rng.choice(["why", "hm\n", "a</think>b"])
            messages += [
                {"role": "user", "content": "".join(rng.choices(words[:3] if rng.random() < 0.8 else words, k=2))},
                answer,
            ]
        records.append({"messages": messages, "tools": None})
    parts = [{"type": "text", "text": "It is "}, {"type": "text", "text": "4.", "train": False}]
    records.append({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": parts}], "tools": None})
    thought = {"role": "assistant", "content": "two", "reasoning_content": "why"}
    answers = [{"role": "assistant", "content": "one"}, thought, {"role": "assistant", "content": "three"}]
    records.append({"messages": [{"role": "user", "content": "a"}, *answers], "tools": None})
    blank: list[dict[str, Any]] = [{"role": "user", "content": "Go."}]
    for k in range(8):
        call = {"type": "function", "function": {"name": "run", "arguments": {"x": str(k)}}}
        turn = {"role": "assistant", "content": "I look.", "tool_calls": [call]}
        blank += [turn if k == 3 else {**turn, "reasoning_content": " "}, {"role": "tool", "content": f"found {k}"}]
    blank.append({"role": "assistant", "content": "Done.", "reasoning_content": "so"})
    records += [{"messages": [m for i, m in enumerate(blank) if i not in (7, 8)], "tools": [_TOOL]}] * 4
    records.append({"messages": blank, "tools": [_TOOL]})
    for steps in (1, 6, 12):
        messages = [{"role": "user", "content": "Mend it."}]
        for k in range(steps):
            call = {"type": "function", "function": {"name": "run", "arguments": {"x": str(k)}}}
            turn = {"role": "assistant", "content": rng.choice(["", "I look."]), "tool_calls": [call]}
            if rng.random() < 0.5:
                turn["reasoning_content"] = "because"
            messages += [turn, {"role": "tool", "content": f"found {k}", **({"is_error": True} if rng.random() < 0.3 else {})}]
            if rng.random() < 0.2:
                messages += [{"role": "assistant", "content": "so far"}, {"role": "user", "content": "go on"}]
        records.append({"messages": [*messages, {"role": "assistant", "content": "Done."}], "tools": [_TOOL]})
    return records


_TOOL = {
    "type": "function",
    "function": {"name": "run", "description": "Run it.", "parameters": {"type": "object", "properties": {}}},
}


def _rows(parser: Parser, record: dict[str, Any], policy: Any) -> Any:
    """What a record gives, as far as a build writes and counts it."""
    try:
        draft = begin(normalise(record, parser.spec.roles), policy, parser, "k")
        made = complete(draft, encode([draft])[0])
    except chatmask.RejectedRow as error:
        return (error.reason, error.message), []
    kinds = [type(one).__name__ for one in draft.layouts]
    rows = [
        (s.index, s.variant, e.input_ids, e.loss_mask, e.spans, dict(e.notes), dict(e.rewritten), e.straddles, e.content_dropped)
        for s, e in made.rows
    ]
    return (rows, made.dropped), kinds


def both_ways(parser: Parser, record: dict[str, Any], policy: Any) -> tuple[Any, Any, list[str]]:
    """What a record gives by the short ways and by the long ones, and which ways were taken."""
    short, kinds = _rows(parser, record, policy)
    parser.short_ways, tokenizer = False, parser.encoder.fast
    parser.encoder.fast = None
    try:
        long, _ = _rows(parser, record, policy)
    finally:
        parser.short_ways, parser.encoder.fast = True, tokenizer
    return short, long, kinds


def check_rows(spec: str, options: list[str], size: int = 8) -> set[str]:
    """Compare the rows of records by short ways and by long ones; which ways were taken."""
    parser, policy, taken = fast(spec), load_policy(None, options), set[str]()
    for record in _records(3, size, spec):
        record = fitting(record, spec)
        short, long, kinds = both_ways(parser, record, policy)
        taken.update(kinds)
        assert short == long, record
    return taken


def agent(steps: int, texts: dict[int, str] | None = None, calls: dict[int, int] | None = None) -> dict[str, Any]:
    """An agent's run of so many steps, where some say something else or make several calls at once."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Mend it."}]
    for k in range(steps):
        call = {"type": "function", "function": {"name": "run", "arguments": {"x": str(k)}}}
        n = (calls or {}).get(k, 1)
        messages.append({"role": "assistant", "content": (texts or {}).get(k, "I look."), "tool_calls": [call] * n})
        messages += [{"role": "tool", "content": f"found {k}"}] * n
    return {"messages": [*messages, {"role": "assistant", "content": "Done."}], "tools": [_TOOL]}


def check_what_shapes_see() -> None:
    """A template that measures, slices, compares or indexes a content has no shapes; one that trims or searches has."""
    body = "{%% for m in messages %%}<|im_start|>{{ m.role }}\n{{ %s }}<|im_end|>\n{%% endfor %%}{%% if add_generation_prompt %%}<|im_start|>assistant\n{%% endif %%}"
    chat = {"messages": [{"role": "user", "content": "How much?"}, {"role": "assistant", "content": "It is 4."}]}
    for expression, seen in {
        "m.content": True,
        "m.content | trim": True,
        "m.content.split('<x>')[-1].lstrip('\\n')": True,
        "('A' if 'yes' in m.content else '') ~ m.content": True,
        "m.content ~ ('!' if m.content | length > 40 else '')": False,
        "m.content[:1] ~ m.content[1:]": False,
        "m.content ~ ('' if m.content < 'a' else '')": False,
        "m.content ~ ('!' if m.content == messages[0].content and not loop.first else '')": False,
        "m.content ~ ('' if m.content in 'abc' else '')": False,
        "m.content ~ ('' if m.content is lower else '')": False,
        "(m.content | tojson)[1:-1]": False,
        "m.content | replace('It', 'It')": False,
        "[m.content] | join('')": True,
        "('' ~ m.content).strip()": True,
        "('(' ~ m.content) ~ ')'": True,
        "('(' + m.content) + ('!' if ('(' + m.content).startswith('(It') else '')": False,
        "(m.content ~ ' ') | trim": False,
        "m.content ~ ('!' if messages[0].content in m.content else '')": False,
        "m.content ~ ('!' if loop.changed(m.content) and loop.index > 2 else '')": False,
        "', '.join([m.content, ''])": False,
        "{'It is 4.': 'x'}.get(m.content, m.content)": False,
        "m.content ~ {'a': 'x'}.get('b', '')": True,
        "m.content ~ ('!' if m.content in m.role else '')": False,
        "m.content ~ ('!' if m.content not in ('a' ~ 'b') else '')": False,
        "m.content ~ ('!' if messages[0].content in loop.previtem.content | default('') else '')": False,
        "m.content ~ ('!' if 'yes' in [m.content] else '')": True,
        "m.content ~ ('!' if m.role in ['tool', 'user'] else '')": True,
        "m.content ~ ('!' if 'yes' in ('' ~ m) else '')": False,
        "[m.content]": False,
        "m": False,
        "'' ~ [m.content]": False,
        "[m.content] | string": False,
        "m.content ~ ('!' if (m | items | list | string) | length > 60 else '')": False,
        "'%s' % [m.content]": False,
        "'%(content)s!' % m": False,
        "'a%s' % m.content": False,
        "'{!r}'.format(m.content)": False,
        "[[m.content]] | join('')": False,
        "[m] | join(' ', attribute='content')": False,
        "[m] | map(attribute='content') | join": False,
        "m.content ~ ('!' if 'yes'['startswith'](m.content) else '')": False,
        "m.content ~ ('!' if ('yes'.count if true else 0)(m.content) else '')": False,
        "m.content ~ ('!' if namespace(get='yes'.count).get(m.content) else '')": False,
        "m.content ~ ('!' if 'yes' | trim(m.content) == '' else '')": False,
        "m.content ~ 'yes'.rjust(m.content | length)": False,
        "namespace(x=m.content).x": True,
        "m.content ~ loop.cycle('', m.content)": False,
        "m.content ~ ('' if m.content is sameas m.content else '!')": False,
        "m.content ~ ('!' if [m.content] == ['yes'] else '')": True,
        "m.content ~ ('!' if (m.content, 1) in [('yes', 1)] else '')": True,
        "m.content ~ range(m.content | int) | list | length": False,
    }.items():
        parser = made_up(body % expression)
        assert parser.encoder.speed_up() == ""
        found = parser.shape(normalise(chat))
        assert (found is not None) == seen, expression
        if isinstance(found, Filled):
            assert found.text == parser.parse(chat).text
        # what was asked of the shape's strings is asked of the others
        for question, content in itertools.product(("How much?", "yes"), ("yes", "yes, 4.", 'it\'s "so"', "a", "A b", "user")):
            other = {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": content}]}
            if isinstance(filled := parser.shape(normalise(other)), Filled):
                assert filled.text == parser.parse(other).text, (expression, content)
    searching = made_up(body % "('A' if 'yes' in m.content else '') ~ m.content")
    assert searching.encoder.speed_up() == "" and searching.shape(normalise(chat)) is not None
    assert searching.shape(normalise({"messages": [chat["messages"][0], {"role": "assistant", "content": "yes, 4."}]})) is None


def check_short_ways() -> None:
    """Shapes, cuts and edges without offsets give the rows of the long ways."""
    for spec in ("qwen3-thinking", "ling-3.0-thinking"):
        check_rows(spec, [], 3)
        check_rows(spec, ["split=per_turn"], 3)
    check_what_shapes_see()

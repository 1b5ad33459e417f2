"""The short ways against the long ones, on records of all sorts: helpers of `test_short_ways.py` and of the mutants' checker."""

from __future__ import annotations

import random
from typing import Any

import chatmask
from chatmask.conversation import normalise
from chatmask.parsers.parser import Parser
from chatmask.policy import load_policy
from chatmask.sampling import begin, complete, encode
from tests.conversations import benign

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


def check_rows(spec: str, options: list[str], size: int = 8) -> set[str]:
    """Compare the rows of records by short ways and by long ones; which ways were taken."""
    parser, policy, taken = fast(spec), load_policy(None, options), set[str]()
    parser.compared_records, parser.cut_kinds = 0, {}
    for record in _records(3, size, spec):
        record = fitting(record, spec)
        short, kinds = _rows(parser, record, policy)
        taken.update(kinds)
        parser.short_ways, tokenizer = False, parser.encoder.fast
        parser.encoder.fast = None
        try:
            long, _ = _rows(parser, record, policy)
        finally:
            parser.short_ways, parser.encoder.fast = True, tokenizer
        assert short == long, record
    return taken


def check_short_ways() -> None:
    """Shapes, cuts and edges without offsets give the rows of the long ways."""
    for spec in ("qwen3-thinking", "ling-3.0-thinking"):
        check_rows(spec, [], 3)
        check_rows(spec, ["split=per_turn"], 3)

"""`specforge/*`: SpecForge's ids and masks, token for token, on harmless data; and no forged span on hostile data."""

from __future__ import annotations

import ast
import json
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

import chatmask
from chatmask.cases import CASES
from chatmask.errors import RejectedRow
from chatmask.parsers.parser import Parser
from chatmask.templates.registry import list_specs, load_spec
from tests import peer_specforge, references
from tests.conversations import benign

ENTRIES = [name for name in list_specs() if name.startswith("specforge/")]
TRIED = [name for name in ENTRIES if load_spec(name).reference is not None]
# of different rules: a system text and trailing newline, ignored text, a header inside the think block, plain-text headers, GLM
FEW = ("specforge/qwen", "specforge/qwen3-instruct", "specforge/deepseek-v2", "specforge/glm-5.2", "specforge/gpt-oss")


@lru_cache(maxsize=2)
def parser(name: str) -> Parser:
    """The entry on its reference tokenizer."""
    return chatmask.load_parser(name, tokenizer=references.for_spec(load_spec(name)))


def role(name: str) -> str:
    """The name of the assistant's role in the data of this entry."""
    return next((said for said, meaning in load_spec(name).roles.items() if meaning == "assistant"), "assistant")


def harmless(name: str, count: int) -> list[dict[str, Any]]:
    """Conversations without control text, in the shape that the entry takes."""
    spec = load_spec(name)
    assert spec.specforge is not None
    found = []
    for item in benign(11, count):
        messages = [{**m, "role": role(name) if m["role"] == "assistant" else m["role"]} for m in item["messages"]]
        if spec.thinking.mode != "on":
            messages = [{k: v for k, v in m.items() if k != "reasoning_content"} for m in messages]
        found.append({"messages": messages, "tools": item["tools"]})
    return found


def compare(name: str, count: int) -> int:
    """How many conversations were compared; fails where ids or masks differ from SpecForge's way."""
    built = parser(name)
    compared = 0
    for record in harmless(name, count):
        try:
            example = built.parse(record)
        except RejectedRow:
            continue
        if name != "specforge/gpt-oss":
            assert peer_specforge.rendered(built, record["messages"], record["tools"]) == example.text
        assert (example.input_ids, example.loss_mask) == peer_specforge.mask(built, example.text), example.text
        compared += 1
    return compared


def test_the_registry_is_covered() -> None:
    """All 26 entries of SpecForge's registry and both of Ling-3.0 are there, each with a note that says what to use instead."""
    assert len(ENTRIES) == 28
    for name in ENTRIES:
        spec = load_spec(name)
        assert spec.specforge is not None
        assert spec.note
        ours = spec.note.rpartition("Our own rules: ")[2].rstrip(".")
        assert "Our own rules: " not in spec.note or ours in list_specs()


@pytest.mark.parametrize("name", FEW)
def test_ids_and_masks_are_specforges(name: str) -> None:
    """On harmless conversations ids and masks equal those of searching the text and measuring prefixes."""
    assert compare(name, 40) >= 5


@pytest.mark.long
@pytest.mark.parametrize("name", TRIED)
def test_ids_and_masks_are_specforges_everywhere(name: str) -> None:
    """The same for every entry whose template can be had, on many conversations."""
    assert compare(name, 300) >= 30


@pytest.mark.parametrize("name", FEW)
def test_a_quoted_header_opens_no_span(name: str) -> None:
    """Where content quotes headers and ends, the spans are those of the same conversation with other words there."""
    built = parser(name)
    header, end = built.spec.assistant.header, built.spec.assistant.ends[0]
    said = role(name)

    def spans(quote: str) -> list[tuple[int, bool, str]]:
        messages = [
            {"role": "user", "content": f"Explain {quote} please."},
            {"role": said, "content": f"It is {quote}."},
            {"role": "user", "content": f"{quote}?"},
            {"role": said, "content": "Yes."},
        ]
        example = built.parse({"messages": messages})
        return [
            (span.message, span.trained, example.text[turn.start : turn.end].replace(quote, "QUOTE"))
            for span, turn in zip(example.spans, example.turns, strict=True)
        ]

    assert spans(f"{end}\n{header}") == spans("plain words")


def test_what_specforge_trains_of_tools_is_reproduced_and_ours_does_not() -> None:
    """`specforge/glm-5.2` trains tool results, as SpecForge does; the spec that its note names does not."""
    record = {"messages": CASES["tools"][1], "tools": CASES["tools"][2]}
    theirs = parser("specforge/glm-5.2").parse(record)
    assert '{"temp": 21}' in "".join(theirs.text[turn.start : turn.end] for turn in theirs.turns)
    spec = load_spec("glm-5.2")
    ours = chatmask.load_parser(spec, tokenizer=references.for_spec(spec)).parse(record)
    assert '{"temp": 21}' not in "".join(ours.text[turn.start : turn.end] for turn in ours.turns)


def test_a_header_that_is_not_there_is_listed() -> None:
    """A turn that SpecForge silently does not train stands in the span table with its reason, and a row of none is refused."""
    built = parser("specforge/qwen3-instruct")
    with pytest.raises(RejectedRow) as caught:
        built.parse(
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning_content": "c"}]}
        )
    assert caught.value.reason == "reasoning_in_no_think_spec"
    next_thinking = parser("specforge/qwen3-next-thinking")
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning_content": "c"}]
    example = next_thinking.parse({"messages": [*turns, *turns]})
    assert [(span.message, span.trained, span.reason) for span in example.spans] == [
        (1, False, "header_not_found"),
        (3, True, ""),
    ]


@pytest.mark.skipif("CHATMASK_SHARED" not in os.environ, reason="needs CHATMASK_SHARED, a folder with SpecForge's own references")
def test_specforges_own_references() -> None:
    """SpecForge's own reference ids and masks, where the tokenizer that they were made with can be had."""
    lines = (Path(os.environ["CHATMASK_SHARED"]) / "data" / "specforge_references.jsonl").read_text(encoding="utf-8").splitlines()
    compared = 0
    for line in lines:
        value = json.loads(line)
        spec = load_spec(f"specforge/{value['name'].rpartition('_')[0]}")
        if spec.reference is None or not spec.reference.own:
            continue
        messages = ast.literal_eval(value["messages"]) if isinstance(value["messages"], str) else value["messages"]
        example = parser(spec.name).parse({"messages": messages, "tools": value.get("tools")})
        assert (example.input_ids, example.loss_mask) == (value["input_ids"], value["loss_mask"]), value["name"]
        compared += 1
    assert compared >= 7

"""Bugs reported to other tools, by kind: none of them may happen here. The cases and their sources are in `public_cases.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import chatmask
from chatmask.conversation import normalise
from chatmask.errors import SpecError
from chatmask.example import Row, Span
from chatmask.loading import labels_of
from chatmask.records import loads
from chatmask.templates.environment import environment
from chatmask.templates.registry import load_spec
from tests.properties import oracles
from tests.public_cases import CASES, REPORTS, Case, assistant, check_case, tool, user
from tests.rows import make_dataset

# reports that no single conversation can show; each has a test of its own below
APART = {"B02", "B03", "B13", "B16", "B19", "B23", "B44"}


def _name(case: Case) -> str:
    return f"{case.report}-{case.spec}-{CASES.index(case)}"


def test_every_report_has_a_test() -> None:
    """Each report that this file claims is exercised by a case or by a test of its own."""
    assert {case.report for case in CASES} | APART == set(REPORTS)


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_case(case: Case) -> None:
    """On the demo tokenizer the case supervises exactly the right text, or is refused with the right reason."""
    check_case(case)


@pytest.mark.parametrize("case", [case for case in CASES if not case.overrides], ids=_name)
def test_case_on_real_vocabularies(case: Case) -> None:
    """The same on the real templates and vocabularies."""
    check_case(case, "real")


# --- a header or an end that the template does not write ---


@pytest.mark.parametrize(
    ("spec", "override", "expected", "found"),
    [
        ("qwen3-instruct", "assistant.header=<|assistant|>\\n", "<|assistant|>", "<|im_start|>assistant"),
        ("qwen3-thinking", "assistant.header=<|im_start|>assistant", "<|im_start|>assistant'", "<|im_start|>assistant\\n"),
        (
            "ling-3.0",
            "assistant.header=<role>ASSISTANT</role>",
            "<role>ASSISTANT</role>'",
            "<role>ASSISTANT</role>\\n<think></think>",
        ),
        ("ling-3.0-thinking", "assistant.header=<role>ASSISTANT </role>", "<role>ASSISTANT </role>", "<role>ASSISTANT</role>"),
        ("ling-flash-2.0", "assistant.header=ASSISTANT", "'ASSISTANT'", "<role>ASSISTANT</role>"),
    ],
)
def test_b02_b03_a_header_that_is_not_written_stops_before_any_data(spec: str, override: str, expected: str, found: str) -> None:
    """A wrong header fails when the spec is compiled, with expected and found text; nothing falls back to ones or zeros."""
    with pytest.raises(SpecError) as caught:
        chatmask.load_parser(spec, demo=True, overrides=[override])
    assert expected in str(caught.value)
    assert found in str(caught.value)


@pytest.mark.parametrize("end", ["<|eot|>", "<|endoftext|>", "<|im_start|>"])
def test_b02_an_end_token_that_is_not_written_stops_before_any_data(end: str) -> None:
    """The same for an end token that the template never writes behind an answer."""
    with pytest.raises(SpecError, match="end of turn"):
        chatmask.load_parser("qwen3-instruct", demo=True, overrides=[f"assistant.end_of_turn={end}"])


@pytest.mark.parametrize("spec", oracles.SPECS)
def test_b02_no_mask_is_all_ones_or_all_zeros(spec: str) -> None:
    """Good rows have targets and context; a row without targets is refused by name."""
    parser = oracles.parser_of(spec, "demo")
    for conversation in oracles.good(spec, 41, 20):
        assert set(parser.parse(conversation).loss_mask) == {0, 1}
    with pytest.raises(chatmask.RejectedRow) as caught:
        parser.parse({"messages": [user("q"), {**assistant("a"), "train": False}]})
    assert caught.value.reason == "zero_supervision"


# --- labels: padding and shifts ---


@pytest.mark.parametrize("mask", [[0, 0, 1, 1, 1], [0, 1, 1, 0, 1], [1, 1, 1, 1, 1]])
def test_b13_padding_with_the_end_token_hides_no_real_one(mask: list[int]) -> None:
    """Collating with pad = eos keeps the label of every real eos, and gives padding none."""
    eos = 9
    ids = np.array([5, 6, eos, 7, eos], np.int32)
    short = {
        "input_ids": ids[:3],
        "loss_mask": np.array(mask[:3], np.uint8),
        "labels": labels_of(ids[:3], np.array(mask[:3], np.uint8)),
    }
    long = {"input_ids": ids, "loss_mask": np.array(mask, np.uint8), "labels": labels_of(ids, np.array(mask, np.uint8))}
    batch = chatmask.collate([short, long], pad_token_id=eos)
    assert batch["labels"].tolist() == [
        [int(i) if m else -100 for i, m in zip(ids[:3], mask[:3], strict=True)] + [-100, -100],
        [int(i) if m else -100 for i, m in zip(ids, mask, strict=True)],
    ]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1] * 5]
    assert batch["loss_mask"].tolist() == [[*mask[:3], 0, 0], mask]


@pytest.mark.parametrize(
    ("spans", "mask"),
    [(((2, 5),), [0, 0, 1, 1, 1]), (((1, 2), (4, 5)), [0, 1, 0, 0, 1]), (((0, 5),), [1] * 5)],
)
def test_b16_one_convention_and_one_shift(tmp_path: Path, spans: tuple[tuple[int, int], ...], mask: list[int]) -> None:
    """mask[k] = 1 says that token k is a target; `shift="labels"` moves labels one to the left, once, and drops none but the first."""
    ids = np.array([10, 11, 12, 13, 14], np.int32)
    row = Row(ids, np.array(mask, np.uint8), tuple(Span(n, a, b, True, "") for n, (a, b) in enumerate(spans)), "x.jsonl", 1, 0, 0)
    make_dataset(tmp_path / "data", [[row]])
    kept = chatmask.load(tmp_path / "data")[0]
    moved = chatmask.load(tmp_path / "data", shift="labels")[0]
    assert kept["loss_mask"].tolist() == moved["loss_mask"].tolist() == mask
    assert kept["labels"].tolist() == [10 + k if m else -100 for k, m in enumerate(mask)]
    assert moved["labels"].tolist() == [*kept["labels"].tolist()[1:], -100]


# --- ids and text are the tokenizer's and the template's own ---


@pytest.mark.parametrize("source", oracles.SOURCES)
@pytest.mark.parametrize("spec", oracles.SPECS)
def test_b19_b33_text_is_the_templates_and_ids_are_those_of_the_whole(spec: str, source: str) -> None:
    """Multi-turn text is what the template renders in an environment of its own, and ids are its one-shot encoding."""
    parser = oracles.parser_of(spec, source)
    template = environment().from_string(parser.template_text)
    for conversation in oracles.good(spec, 43, 15):
        example = parser.parse(conversation)
        prepared = parser.sample(normalise(conversation)).prepared
        given = {**prepared.spec.kwargs, "messages": prepared.messages, "tools": prepared.tools}
        assert example.text == template.render(add_generation_prompt=False, documents=None, **given)
        assert example.input_ids == parser.loaded.whole.encode(example.text, add_special_tokens=False).ids


@pytest.mark.parametrize("spec", oracles.SPECS)
@pytest.mark.parametrize("prompt", ["Name a red fruit.", [user("Name a fruit."), assistant("Pear."), user("A red one.")]])
def test_b23_prompt_and_completion_never_train_the_header(spec: str, prompt: Any) -> None:
    """A prompt/completion record trains the completion alone: no header, no earlier answer, no generation prompt."""
    parser = oracles.parser_of(spec, "demo")
    example = parser.parse({"prompt": prompt, "completion": [assistant("Cherry.")]})
    turns = len(example.spans)
    assert [s.trained for s in example.spans] == [False] * (turns - 1) + [True]
    assert {s.reason for s in example.spans[:-1]} <= {"flag"}
    trained = parser.loaded.decode([i for i, m in zip(example.input_ids, example.loss_mask, strict=True) if m])
    messages = [user(prompt)] if isinstance(prompt, str) else prompt
    assert trained == oracles.expected_turns(spec, [*messages, assistant("Cherry.")])[-1].emission
    assert parser.loaded.decode(example.ids[: example.spans[-1].start]).endswith(parser.spec.for_sample(False).assistant.header)


def test_b28_the_thinking_mode_is_part_of_the_fingerprint() -> None:
    """Specs that differ in the thinking mode alone have different hashes, and the option reaches the template."""
    hashes = {load_spec(name).sha256 for name in oracles.SPECS}
    assert len(hashes) == len(oracles.SPECS)
    assert load_spec("qwen3-instruct").kwargs == {"enable_thinking": False}
    example = oracles.parser_of("qwen3-instruct", "demo").parse({"messages": [user("hi"), assistant("hello")]})
    assert "<|im_start|>assistant\n<think>\n\n</think>\n\nhello" in example.text
    off = oracles.parser_of("ling-3.0", "demo").parse({"messages": [user("hi"), assistant("hello")]})
    on = oracles.parser_of("ling-3.0-thinking", "demo").parse({"messages": [user("hi"), assistant("hello", "hm")]})
    assert "detailed thinking off" in off.text
    assert "detailed thinking on" in on.text


# --- tools ---


@pytest.mark.parametrize("spec", ["qwen3-instruct", "ling-3.0", "ling-flash-2.0"])
def test_b34_calls_of_different_rows_share_no_keys(spec: str) -> None:
    """Two JSON lines whose calls have different arguments render each its own, and a null that was meant stays."""
    lines = [
        json.dumps({"messages": [user("q"), assistant("", None, (name, arguments))]}).encode()
        for name, arguments in (("move", {"x": 0}), ("say", {"text": "hi", "loud": None}))
    ]
    parser = oracles.parser_of(spec, "demo")
    first, second = (parser.parse(loads(line)).text for line in lines)
    assert "loud" not in first
    assert "text" not in first
    assert "null" not in first
    assert "loud" in second
    assert "null" in second
    assert '"x"' not in second
    assert "<arg_key>x" not in second


@pytest.mark.parametrize("spec", oracles.SPECS)
def test_b40_tools_reach_the_template_once(spec: str) -> None:
    """The schemas of the record stand in the text once each, before the first turn, and no part of them is trained."""
    parser = oracles.parser_of(spec, "demo")
    example = parser.parse({"messages": [user("q"), assistant("a")], "tools": [tool("first_tool"), tool("second_tool")]})
    for name in ("first_tool", "second_tool"):
        assert example.text.count(name) == 1
        assert example.text.index(name) < example.text.index(parser.spec.for_sample(False).assistant.header)
    assert not any(example.loss_mask[: example.spans[0].start])


# --- versions ---


@pytest.mark.parametrize("spec", oracles.SPECS)
def test_b44_a_loaded_tokenizer_gives_the_same_and_masks_are_as_long_as_ids(spec: str) -> None:
    """Given as a loaded transformers object the tokenizer gives the same ids and masks as given by name; lengths always agree."""
    parser = oracles.parser_of(spec, "demo")
    loaded = parser.tokenizer
    template = parser.loaded.chat_template
    assert loaded.chat_template == template
    again = chatmask.load_parser(spec, tokenizer=loaded)
    for conversation in oracles.good(spec, 47, 10):
        one, two = parser.parse(conversation), again.parse(conversation)
        assert (one.input_ids, one.loss_mask, one.spans) == (two.input_ids, two.loss_mask, two.spans)
        assert len(one.input_ids) == len(one.loss_mask) > 10
        assert all(isinstance(i, int) for i in one.input_ids)

"""Rendered texts as input: read back to the conversation that they came from, or refused by name."""

from __future__ import annotations

import json
import random
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import chatmask
from chatmask.conversation import normalise
from chatmask.errors import RejectedRow
from tests.properties.oracles import good

SPECS = ["qwen3-instruct", "qwen3-thinking", "ling-3.0", "ling-3.0-thinking", "ling-3.0-auto", "ling-flash-2.0"]
CHAT = [{"role": "user", "content": "Add 2 and 2."}, {"role": "assistant", "content": "It is 4."}]


@cache
def parser(spec: str) -> Any:
    """A compiled demo parser."""
    return chatmask.load_parser(spec, demo=True)


def rendered(spec: str, data: dict[str, Any]) -> str:
    """The text that the spec's template writes for a conversation."""
    return str(parser(spec).sample(normalise(data)).rendering.text)


def reason(spec: str, text: str, **more: Any) -> str:
    """The reason for which a text is refused."""
    with pytest.raises(RejectedRow) as caught:
        parser(spec).parse({"text": text, **more})
    return caught.value.reason.value


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("tools", [True, False], ids=["tools given", "tools in the text"])
def test_a_rendered_text_gives_what_its_messages_give(spec: str, tools: bool) -> None:
    """Ids and mask of a conversation and of its rendered text are the same, or the text is refused by name; most are read. Only turns
    whose reasoning the template may have left out are masked where the messages would show that they had none."""
    seen: Counter[str] = Counter()
    for data in good(spec, 5, 40):
        want = parser(spec).parse(data)
        given = {"tools": data["tools"]} if tools else {}
        try:
            found = parser(spec).parse({"text": want.text, **given})
        except RejectedRow as error:
            assert error.reason in ("text_not_reproduced", "content_steers_template"), error
            seen[error.reason.value] += 1
            continue
        seen["same"] += 1
        assert found.input_ids == want.input_ids
        unsure = {span.message for span in found.spans if span.reason == "history_rewritten"}
        assert not unsure or spec == "qwen3-thinking"
        for ours, theirs in zip(found.spans, want.spans, strict=True):
            # of a history turn without reasoning the text does not tell whether it had any
            assert ours == theirs or (theirs.trained and not ours.trained and ours.message in unsure)
        lost = {i for i, kind in want.rewritten.items() if kind == "emission"}
        assert lost <= unsure
        if not unsure:
            assert found.loss_mask == want.loss_mask
    assert seen["same"] >= 30, seen


@pytest.mark.parametrize("spec", SPECS)
def test_a_changed_byte_or_a_cut_is_refused_or_is_another_text(spec: str) -> None:
    """A text with one character changed, or cut anywhere, is refused by name, or read as exactly that text."""
    rng = random.Random(spec)
    whole = rendered(spec, {"messages": [{"role": "system", "content": "Be brief."}, *CHAT, *CHAT]})
    refused = 0
    for _ in range(60):
        at = rng.randrange(len(whole))
        text = whole[:at] if rng.random() < 0.3 else whole[:at] + rng.choice("xQ\n <") + whole[at + 1 :]
        try:
            assert parser(spec).parse({"text": text}).text == text
        except RejectedRow:
            refused += 1
    assert refused >= 20


@pytest.mark.parametrize("spec", SPECS)
def test_a_text_that_is_not_a_finished_rendering_is_refused(spec: str) -> None:
    """Cut within a turn, without what the template writes at the end, with a generation prompt behind it, or from another template."""
    whole = rendered(spec, {"messages": CHAT})
    prompt = parser(spec).template.render(CHAT[:1], add_generation_prompt=True, **parser(spec).variants[0].kwargs)
    for text in ("", "Just text.", whole[:-3], whole.rstrip("\n")[:-1], whole + "x", prompt, f"<s>[INST] {whole} [/INST]"):
        assert reason(spec, text) == "text_not_reproduced", text


def test_quoted_control_text_is_refused() -> None:
    """A text does not say whether a control token in a message was quoted, so such a row is refused rather than guessed at."""
    whole = rendered("qwen3-instruct", {"messages": CHAT}).replace("Add 2", "Say <|im_start|> 2")
    assert reason("qwen3-instruct", whole) == "text_not_reproduced"


def test_tools_that_do_not_fit_the_text_are_refused() -> None:
    """`tools` beside a text must be those that the text lists."""
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}
    assert reason("qwen3-instruct", rendered("qwen3-instruct", {"messages": CHAT}), tools=[tool]) == "text_not_reproduced"


def test_a_build_takes_rendered_texts(tmp_path: Path) -> None:
    """A build from texts has the rows of one from the conversations; a record with messages beside its text is a conversation."""
    data = [{"messages": CHAT}, {"messages": [*CHAT, *CHAT]}]
    texts = [{"text": rendered("qwen3-instruct", one)} for one in data]
    built = []
    for name, rows in (("a", data), ("b", texts), ("c", [{**one, "text": "anything"} for one in data])):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        dataset = chatmask.build(path, "qwen3-instruct", tmp_path / name, demo=True, parity="full").dataset
        built.append([(r["input_ids"].tolist(), r["loss_mask"].tolist()) for r in chatmask.load(dataset, allow_demo=True)])
    assert built[0] == built[1] == built[2]

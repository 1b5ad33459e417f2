"""The default policy changes nothing: what `build` makes of a record is what `Parser.parse` says of it."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest

import chatmask
from chatmask.conversation import normalise
from chatmask.parsers.parser import Parser, load_parser
from chatmask.policy import DEFAULT
from chatmask.sampling import make

PIECES = (
    "<think>", "</think>", "<thinking>", "</thinking>", "<reasoning>", "</reasoning>", "<|im_end|>", "\n", "\n\n", " ", "why", "so it is.",
    "if a < b", "",
)  # fmt: skip
SPECS = ("qwen3-thinking", "qwen3-instruct", "qwen3-preserved", "ling-3.0", "ling-3.0-thinking", "ling-3.0-auto")


def _text(rng: random.Random) -> str:
    return "".join(rng.choices(PIECES, k=rng.randint(0, 7)))


def _record(rng: random.Random) -> dict[str, Any]:
    """A conversation whose answers begin with all kinds of blocks, whole and broken."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}] if rng.random() < 0.3 else []
    for _ in range(rng.randint(1, 3)):
        answer: dict[str, Any] = {"role": "assistant", "content": rng.choice([_text(rng), "Yes.", _block(rng), None])}
        if rng.random() < 0.4:
            answer["reasoning_content"] = rng.choice(["why", "Because.", _text(rng)])
        if rng.random() < 0.3 or answer["content"] is None:
            answer["tool_calls"] = [{"type": "function", "function": {"name": "f", "arguments": {"x": "é"}}}]
        messages += [{"role": "user", "content": rng.choice(["q", _text(rng)])}, answer]
    return {"messages": messages}


def _block(rng: random.Random) -> str:
    opening, closing = rng.choice(PIECES[0:6:2]), rng.choice(PIECES[1:6:2])
    return f"{opening}{rng.choice(['why', _text(rng)])}{closing}{rng.choice(['so it is.', _text(rng)])}"


def _outcome(make_it: Any) -> Any:
    try:
        example = make_it()
    except chatmask.RejectedRow as error:
        return (error.reason, error.detail, error.message)
    return (example.text, example.input_ids, example.loss_mask, example.spans, dict(example.notes), dict(example.rewritten))


@pytest.mark.parametrize("name", SPECS)
def test_build_and_parse_agree(name: str) -> None:
    """Without a policy a build gives each record the row, or the reject, that `Parser.parse` gives it."""
    parser, rng, kept = load_parser(name, demo=True), random.Random(f"agree-{name}"), 0

    def built(record: dict[str, Any]) -> Any:
        ((_, example),) = make(normalise(record, parser.spec.roles), DEFAULT, parser, "k").rows
        return example

    for _ in range(150):
        record = _record(rng)
        ours = _outcome(partial(parser.parse, record))
        assert ours == _outcome(partial(built, record)), record
        kept += len(ours) > 3
    assert kept > 25


@pytest.mark.parametrize("name", ["qwen3-instruct", "ling-3.0"])
@pytest.mark.parametrize("content", ["<thinking>why</thinking>so", "<reasoning>a", "<thinking>a</think>b</thinking>"])
def test_content_in_other_tags_is_text_where_nothing_thinks(name: str, content: str) -> None:
    """Under a spec with thinking off, content that begins with a tag which is not the spec's own stays as it is, or is judged by the
    spec's own tag alone."""
    parser = load_parser(name, demo=True)
    record = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": content}]}
    raw = _outcome(lambda: parser.example(normalise(record)))
    assert _outcome(lambda: parser.parse(record)) == raw
    if "</think>" not in content:
        assert content in raw[0]


@pytest.mark.parametrize("name", ["qwen3-thinking", "ling-3.0-thinking", "ling-3.0-auto"])
@pytest.mark.parametrize(
    "content", ["<thinking>why</thinking>\nso", "<thinking>\nwhy\n</think>so", "<reasoning>why</reasoning>so"]
)
def test_other_tags_are_reasoning_where_the_spec_thinks(name: str, content: str) -> None:
    """Under a thinking spec a leading block in other or mixed tags is what the spec's own block is, without any policy."""
    parser: Parser = load_parser(name, demo=True)
    for said in (content, {"reasoning_content": "why", "content": "so"}):
        fields = {"content": said} if isinstance(said, str) else said
        example = parser.parse({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", **fields}]})
        if isinstance(said, str):
            first = example.text
    assert example.text == first


def test_a_close_tag_quoted_in_reasoning_is_text() -> None:
    """A block ends at the close tag that fits its open tag; one that quotes the spec's own is refused, since it could not be read back."""
    parser = load_parser("qwen3-thinking", demo=True)

    def parse(content: str) -> str:
        return parser.parse({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": content}]}).text

    assert "<think>\nsay </thinking> twice\n</think>\n\nso" in parse("<think>say </thinking> twice</think>so")
    with pytest.raises(chatmask.RejectedRow, match="holds the spec's own think tags") as caught:
        parse("<thinking>say </think> twice</thinking>so")
    assert (caught.value.reason, caught.value.message) == ("inline_thinking_unclear", 1)

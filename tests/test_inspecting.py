"""Inspecting: what is shown is what is trained, nothing is lost on the way, and nothing in the data can harm the reader."""

from __future__ import annotations

import json
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers as hf
from conversations import benign, hostile
from hypothesis import given, settings
from hypothesis import strategies as st

import chatmask
from chatmask.errors import CheckFailed, DamagedDataset, InputError, OptionError
from chatmask.example import Span
from chatmask.inspecting import Inspected, InspectedSpan, Segment, inspect_rows, render_html, render_text, to_json
from chatmask.inspecting_text import in_words, visible_lines, wrap
from chatmask.inspecting_view import View
from chatmask.templates.registry import load_spec, packaged_template
from chatmask.tokenizers import Tokenizer, demo_tokenizer, load_tokenizer

FIXTURE = Path(__file__).parent.parent / "fixtures" / "swe_raw.jsonl"
SPECS = ("ling-3.0-auto", "qwen3-thinking", "qwen3-instruct")
LITERALS = ("<role>", "</role>", "<|role_end|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>")
NASTY = "\x00\x07\x1b[2J\x1b]0;t\x07\x7f\x9b31m\r\u202e\u2066\u200b\u2028\ufeff\u00ad\u2800\U000e0041 <b>&\"'"

Row = dict[str, Any]


def write(path: Path, rows: list[Row]) -> Path:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def chat(*texts: str, **last: Any) -> Row:
    """A chat of user and assistant turns in turn; `last` adds to the last message."""
    messages: list[Row] = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    messages[-1].update(last)
    return {"messages": messages}


def plain(generated: list[Row]) -> list[Row]:
    """Generated conversations as records that every demo template takes (they refuse reasoning where they know none)."""
    records = []
    for item in generated:
        messages = [{k: v for k, v in m.items() if k != "reasoning_content"} for m in item["messages"]]
        records.append({"messages": messages, **({"tools": item["tools"]} if item.get("tools") else {})})
    return records


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Raw input and dataset for each spec: benign, hostile, flagged and rewritten conversations."""
    folder = tmp_path_factory.mktemp("inspect")
    rows = plain(benign(1, 4) + hostile(1, 14, LITERALS))
    rows += [chat("a", "first " + NASTY, NASTY, "second"), chat("a", "é👩‍👩‍👧 日本", "b", "no", train=False)]
    rows.append(chat("q", "\n\nleading breaks", "r", " leading space"))
    found = {}
    for spec in SPECS:
        raw = write(folder / f"{spec}.jsonl", rows)
        result = chatmask.build(raw, spec, folder / spec, demo=True, bad_rows="skip", parity="off")
        assert result.ledger.kept > 10
        found[spec] = (raw, result.dataset)
    return found


@cache
def demo(spec: str = "ling-3.0") -> Tokenizer:
    """The demo tokenizer with a spec's demo template."""
    return demo_tokenizer(packaged_template(str(load_spec(spec).demo_template)))


def check_item(item: Inspected) -> None:
    """What holds for every shown row."""
    assert "".join(segment.text for segment in item.segments) == item.text
    assert all(segment.text for segment in item.segments)
    trained = [segment.text for segment in item.segments if segment.kind == "supervised"]
    assert trained == [span.text for span in item.spans if span.trained and span.text]
    assert item.supervised_tokens == sum(span.end - span.start for span in item.spans if span.trained)


# --- properties ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS)
def test_dataset_and_raw_input_look_the_same(datasets: dict[str, tuple[Path, Path]], spec: str) -> None:
    """A row shows the same text, spans and segments whether it comes from the dataset or from its raw line."""
    raw, dataset = datasets[spec]
    from_raw = [item for item in inspect_rows(raw, spec=spec, demo=True) if item.reject is None]
    from_dataset = list(inspect_rows(dataset))

    assert len(from_dataset) == len(from_raw)
    for a, b in zip(from_dataset, from_raw, strict=True):
        check_item(a)
        check_item(b)
        assert a.segments == b.segments
        assert {**to_json(a), "row": 0} == {**to_json(b), "row": 0}


@pytest.mark.parametrize("spec", SPECS)
def test_shown_spans_are_the_parsers(datasets: dict[str, tuple[Path, Path]], spec: str) -> None:
    """Text, headers and span texts are those that the parser found by character offsets, on text that is already NFC."""
    raw, _ = datasets[spec]
    parser = chatmask.load_parser(spec, demo=True)
    lines = raw.read_text(encoding="utf-8").splitlines()
    for item in inspect_rows(raw, spec=spec, demo=True):
        if item.reject is None:
            example = parser.parse(json.loads(lines[item.row]))
            assert item.text == example.text
            headers = [segment.text for segment in item.segments if segment.kind == "header"]
            assert headers == [example.text[turn.header : turn.start] for turn in example.turns]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("width", [None, 17])
def test_no_control_character_reaches_the_terminal(datasets: dict[str, tuple[Path, Path]], spec: str, width: int | None) -> None:
    """Without colour, output holds no control or format character but the line break; with colour, only our own sequences."""
    for item in inspect_rows(datasets[spec][0], spec=spec, demo=True):
        text = render_text(item, False, width)
        assert all(line.isprintable() for line in text.split("\n"))
        colored = render_text(item, True, width)
        for code in ("36", "1;32", "33", "1", "2", "1;31", "0"):
            colored = colored.replace(f"\x1b[{code}m", "")
        assert colored == text


@given(st.text(max_size=60), st.integers(2, 20))
def test_lines_and_wrapping_lose_nothing(text: str, room: int) -> None:
    """Shown lines are printable, there are as many as the text has, and wrapped pieces make up the line."""
    lines = visible_lines(text)

    assert all(line.isprintable() for line in lines)
    assert len(lines) == max(1, text.count("\n") + (not text.endswith("\n")))
    for line in lines:
        assert "".join(wrap(line, room)) == line


@settings(deadline=None, max_examples=80)
@given(st.text(max_size=30), st.data())
def test_segments_hold_for_any_token_borders(text: str, data: st.DataObject) -> None:
    """Wherever spans begin and end, also inside a character, the segments make up the decoded text."""
    tokenizer = demo()
    ids = np.array(tokenizer.whole.encode(text).ids, dtype=np.int32)
    borders = sorted(data.draw(st.lists(st.integers(0, len(ids)), min_size=2, max_size=6).filter(lambda x: len(x) % 2 == 0)))
    kinds = data.draw(st.lists(st.booleans(), min_size=3, max_size=3))
    spans = [
        Span(n, a, b, kinds[n], "" if kinds[n] else "flag")
        for n, (a, b) in enumerate(zip(borders[::2], borders[1::2], strict=True))
    ]

    item = View(tokenizer, load_spec("ling-3.0"), ids, spans, None, "here").inspected(0, "f", 1, 0, 0)

    assert item.text == tokenizer.decode(ids)
    check_item(item)
    for span in item.spans:
        piece = tokenizer.decode(ids[span.start : span.end])
        assert piece == span.text or "\ufffd" in piece


def test_segments_hold_where_pieces_do_not_add_up() -> None:
    """A decoder that drops the first blank of whatever it is given (Metaspace) still loses nothing at the borders."""
    model = hf.models.WordLevel({"▁a": 0, "▁b": 1, "c": 2, "?": 3}, unk_token="?")
    built = hf.Tokenizer(model)
    built.decoder = hf.decoders.Metaspace()
    tokenizer = Tokenizer(json.loads(built.to_str()), None, {}, "metaspace")
    ids = np.array([0, 1, 2, 1, 0], dtype=np.int32)

    view = View(tokenizer, load_spec("ling-3.0"), ids, [Span(0, 1, 3, True, ""), Span(1, 3, 4, False, "flag")], None, "here")
    item = view.inspected(0, "f", 1, 0, 0)

    assert item.text == "a bc b a"
    assert [segment.text for segment in item.segments] == ["a", " bc", " b", " a"]
    check_item(item)


class _Page(HTMLParser):
    """Collects the tags, the balance of open elements and the text of every <pre>."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.pres: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag == "pre":
            self.pres.append("")
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "pre":
            self.pres[-1] += data


@pytest.mark.parametrize("spec", SPECS)
def test_html_is_whole_and_holds_only_our_markup(datasets: dict[str, tuple[Path, Path]], spec: str) -> None:
    """The page is balanced, has no element or attribute of the data's making, and its text is the segments' text."""
    items = list(inspect_rows(datasets[spec][0], spec=spec, demo=True))
    page = _Page(render_html(items, f'<script>"{NASTY}'))

    assert page.open == []
    ours = {"html", "head", "meta", "title", "style", "body", "h1", "p", "div", "span", "b", "pre", "details", "summary"}
    assert page.tags <= ours | {"table", "thead", "tr", "th", "td"}
    assert page.attributes <= {"lang", "charset", "http-equiv", "content", "name", "class", "open"}
    shown = "\n".join(text.removeprefix("\n") if text.startswith("\n\n") else text for text in page.pres[4:])
    expected = "\n".join(line for item in items for segment in item.segments for line in visible_lines(segment.text))
    assert shown == expected


# --- examples: kinds, reasons, rejects ----------------------------------------------------------------------------------------


def one(tmp_path: Path, record: Row, spec: str, **options: Any) -> Inspected:
    """The one row of a raw input with one record."""
    (item,) = inspect_rows(write(tmp_path / "one.jsonl", [record]), spec=spec, demo=True, **options)
    return item


def test_the_four_kinds(tmp_path: Path) -> None:
    """Context, header, trained and masked text of one small chat, exactly."""
    record = chat("hi", "It is 4.", "and", "Five.")
    record["messages"][1]["train"] = False
    item = one(tmp_path, record, "ling-flash-2.0")

    assert [(segment.kind, segment.text) for segment in item.segments] == [
        ("context", "<role>SYSTEM</role>detailed thinking off<|role_end|><role>HUMAN</role>hi<|role_end|>"),
        ("header", "<role>ASSISTANT</role>"),
        ("untrained", "It is 4.<|role_end|>"),
        ("context", "<role>HUMAN</role>and<|role_end|>"),
        ("header", "<role>ASSISTANT</role>"),
        ("supervised", "Five.<|role_end|>"),
    ]
    lines = render_text(item, False, None).splitlines()
    assert [line[:10] for line in lines[1:7]] == [
        "context  │",
        "header   │",
        "masked   │",
        "context  │",
        "header   │",
        "TRAINED  ┃",
    ]
    assert "not trained: flag" in lines[7]
    assert "demo tokenizer" in lines[0]
    assert "spec ling-flash-2.0" in lines[0]


def test_json_has_the_promised_keys(tmp_path: Path) -> None:
    """The JSON object has exactly the keys of the contract; token indices are half open."""
    value = to_json(one(tmp_path, chat("hi", "Five."), "ling-3.0"))

    assert list(value) == ["row", "source", "text", "tokens", "supervised_tokens", "spans"]
    assert value["source"] == {"file": str(tmp_path / "one.jsonl"), "line": 1}
    (span,) = value["spans"]
    assert list(span) == ["message", "start", "end", "text", "trained", "reason"]
    assert span["text"] == "Five.<|role_end|>"
    assert span["end"] == value["tokens"]
    assert span["end"] - span["start"] == value["supervised_tokens"]
    json.dumps(value)


def test_rewritten_turns_are_named(tmp_path: Path) -> None:
    """A turn whose reasoning history drops is masked with the reason; a turn with a history header is said to be rewritten."""
    record = chat("a", "b", "c", "d", reasoning_content="so")
    record["messages"][1]["reasoning_content"] = "hm"
    masked = one(tmp_path, record, "qwen3-thinking")
    assert [(span.reason, span.rewritten) for span in masked.spans] == [("history_rewritten", "emission"), ("", "")]
    assert in_words("history_rewritten") in render_text(masked, False, None)

    history = one(tmp_path, chat("a", "b", "c", "d"), "qwen3-instruct")
    assert [span.rewritten for span in history.spans] == ["context", ""]
    assert "context" in render_text(history, False, None).splitlines()[-3]


def test_context_rewritten_can_be_masked(tmp_path: Path) -> None:
    """With `rewritten.context: mask` the turn is masked, and the reason says what that means."""
    item = one(tmp_path, chat("a", "b", "c", "d"), "qwen3-instruct", overrides=["rewritten.context=mask"])

    assert [(span.trained, span.reason) for span in item.spans] == [(False, "context_rewritten"), (True, "")]
    assert item.segments[2] == Segment("untrained", "b<|im_end|>", in_words("context_rewritten"))


@pytest.mark.parametrize("straddle", ["exclude", "include"])
def test_a_straddling_token_is_shown(straddle: str) -> None:
    """A token across the border of header and turn is set apart as masked, or counted to the trained text under `include`."""
    spec = load_spec("ling-flash-2.0", [f"straddle={straddle}"])
    spec = load_spec(spec, ['assistant.header="<role>ASSISTANT</role> th"'])
    tokenizer = demo("ling-flash-2.0")
    ids = np.array(tokenizer.whole.encode("<role>ASSISTANT</role> the end<|role_end|>").ids, dtype=np.int32)
    (at,) = [i for i, token in enumerate(ids.tolist()) if tokenizer.decode([token]) == " the"]
    start = at + (straddle == "exclude")

    item = View(tokenizer, spec, ids, [Span(1, start, len(ids), True, "")], None, "here").inspected(0, "f", 1, 0, 0)

    check_item(item)
    assert item.spans[0].straddles
    if straddle == "exclude":
        expected = [("header", "<role>ASSISTANT</role> th"), ("untrained", "e"), ("supervised", " end<|role_end|>")]
    else:
        expected = [("header", "<role>ASSISTANT</role>"), ("supervised", " the end<|role_end|>")]
    assert [(segment.kind, segment.text) for segment in item.segments] == expected
    assert "straddles" in render_text(item, False, None)


def test_rejected_lines_are_items_too(tmp_path: Path) -> None:
    """A line that gives no row is shown with reason, detail and advice; blank lines do not count as rows."""
    path = tmp_path / "bad.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "\x7f<b>"}]}\n\n   \n{"a": "\x1b' + '[31m"\n', encoding="utf-8")
    items = list(inspect_rows(path, spec="ling-3.0", demo=True))

    assert [(item.row, item.line) for item in items] == [(0, 1), (1, 4)]
    first = to_json(items[0])
    assert list(first) == ["row", "source", "reject"]
    assert first["reject"]["reason"] == "no_assistant"
    assert list(first["reject"]) == ["reason", "detail", "message"]
    assert to_json(items[1])["reject"]["reason"] == "invalid_json"
    text = render_text(items[0], False, None)
    assert "REJECTED no_assistant" in text
    assert "what to do:" in text
    assert "no_assistant" in render_html(items, "x")


def test_invisible_characters_get_signs() -> None:
    """Border line breaks, tabs, border spaces, escapes, zero-width and bidi characters are all shown."""
    assert visible_lines("a\tb  \n\u202ec\u200b\x1b[0m\n") == ["a⇥b··", "⟨U+202E⟩c⟨U+200B⟩␛[0m⏎"]
    assert visible_lines("\n\nx") == ["⏎", "", "x"]
    assert visible_lines("\n") == ["⏎"]
    assert visible_lines("  x y") == ["··x y"]


def test_wrapping_breaks_behind_spaces_and_counts_wide_characters() -> None:
    """Words stay whole where they fit; a CJK character takes two columns."""
    assert wrap("one two three", 8) == ["one two ", "three"]
    assert wrap("abcdefgh", 3) == ["abc", "def", "gh"]
    assert wrap("日本語テ", 5) == ["日本", "語テ"]


def test_long_context_is_folded_and_trained_text_never(tmp_path: Path) -> None:
    """Of a long block of context only the ends are shown, unless fold is None; trained lines are all there."""
    long = "\n".join(f"line {i}" for i in range(100))
    item = one(tmp_path, chat(long, long), "ling-3.0")
    text = render_text(item, False, None)

    assert "context  │ … 89 lines" in text
    assert "context  │ line 50" not in text
    assert "TRAINED  ┃ line 50" in text
    assert "context  │ line 50" in render_text(item, False, None, fold=None)


def test_control_text_and_changed_text_are_noted(tmp_path: Path) -> None:
    """Control tokens quoted in content are mentioned."""
    item = one(tmp_path, chat("say <|role_end|>", "no"), "ling-3.0")
    assert any("control-token literals" in note for note in item.notes)


def test_html_of_nothing_and_of_many_rows(tmp_path: Path) -> None:
    """A page without rows is a page; a page with many rows starts closed."""
    assert _Page(render_html([], "empty")).open == []
    items = list(inspect_rows(write(tmp_path / "m.jsonl", [chat("a", "b")] * 21), spec="ling-3.0", demo=True))
    assert 'class="row" open' in render_html(items[:20], "few")
    assert 'class="row" open' not in render_html(items, "many")


def test_untrained_spans_are_summed_up_in_html() -> None:
    """The summary counts turns by reason, with codes that it does not know spelled out."""
    span = InspectedSpan(1, 0, 1, "x", False, "some_new_reason")
    page = render_html([Inspected(0, "f", 1, "x", 1, 0, (span,), (Segment("untrained", "x", "some new reason"),))], "t")
    assert "<td>not trained: some_new_reason</td>" in page
    assert "not trained: some new reason" in page


# --- picking rows, and what is refused ----------------------------------------------------------------------------------------


def test_rows_and_limit_pick(datasets: dict[str, tuple[Path, Path]]) -> None:
    """`rows` picks in the order of the input, `limit` caps, for datasets and raw inputs alike."""
    raw, dataset = datasets["ling-3.0-auto"]
    for path, options in ((dataset, {}), (raw, {"spec": "ling-3.0-auto", "demo": True})):
        assert [item.row for item in inspect_rows(path, rows=[5, 2, 5], **options)] == [2, 5]
        assert [item.row for item in inspect_rows(path, limit=3, **options)] == [0, 1, 2]
        assert list(inspect_rows(path, limit=0, **options)) == []


def test_unknown_rows_are_refused_with_the_last_one(tmp_path: Path, datasets: dict[str, tuple[Path, Path]]) -> None:
    """A row that does not exist is an error at the call, which names the last valid row; so are negative numbers."""
    raw = write(tmp_path / "two.jsonl", [chat("a", "b")] * 2)
    with pytest.raises(OptionError, match="rows are 0 to 1"):
        inspect_rows(raw, spec="ling-3.0", demo=True, rows=[0, 2])
    dataset = datasets["ling-3.0-auto"][1]
    with pytest.raises(OptionError, match=f"rows are 0 to {len(chatmask.load(dataset, allow_demo=True)) - 1}"):
        inspect_rows(dataset, rows=[10_000])
    with pytest.raises(OptionError, match="from 0"):
        inspect_rows(dataset, rows=[-1])
    with pytest.raises(OptionError, match="limit is -1"):
        inspect_rows(dataset, limit=-1)


def test_another_tokenizer_is_refused(tmp_path: Path, datasets: dict[str, tuple[Path, Path]]) -> None:
    """Ids are decoded by the tokenizer that made them and by no other, and the error says what to give."""
    dataset = datasets["ling-3.0-auto"][1]
    data = json.loads(json.dumps(demo().data))
    data["added_tokens"][0]["content"] = "<|other|>"
    (tmp_path / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")

    with pytest.raises(CheckFailed, match="leave --tokenizer out"):
        inspect_rows(dataset, tokenizer=tmp_path)
    assert list(inspect_rows(dataset, tokenizer=demo("ling-3.0-auto"), limit=1))


def test_a_dataset_of_a_real_tokenizer_takes_it_again(tmp_path: Path) -> None:
    """A dataset that was not built with --demo wants its own tokenizer, refuses --demo, and shows what the raw input shows."""
    folder = tmp_path / "tok"
    folder.mkdir()
    source = demo()
    (folder / "tokenizer.json").write_text(json.dumps(source.data), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(str(source.chat_template), encoding="utf-8")
    raw = write(tmp_path / "one.jsonl", [chat("a", "b")])
    dataset = chatmask.build(raw, "ling-3.0", tmp_path / "out", tokenizer=folder).dataset

    (item,) = inspect_rows(dataset, tokenizer=load_tokenizer(folder))
    (line,) = inspect_rows(raw, spec="ling-3.0", tokenizer=folder)
    assert item.segments == line.segments
    assert item.tokenizer == str(folder)
    with pytest.raises(OptionError, match="leave --demo out"):
        inspect_rows(dataset, demo=True)


def test_another_spec_is_refused_and_the_own_is_welcome(datasets: dict[str, tuple[Path, Path]]) -> None:
    """A dataset shows what its own spec supervises; naming that spec is fine, naming another is an error."""
    dataset = datasets["qwen3-thinking"][1]
    assert len(list(inspect_rows(dataset, spec="qwen3-thinking", limit=1))) == 1
    with pytest.raises(OptionError, match="built with the spec qwen3-thinking"):
        inspect_rows(dataset, spec="qwen3-instruct")


def test_inputs_that_cannot_be_shown(tmp_path: Path) -> None:
    """A raw input without a spec, a missing path and a directory that is no dataset are errors by name."""
    with pytest.raises(InputError, match="--spec"):
        inspect_rows(FIXTURE)
    with pytest.raises(InputError):
        inspect_rows(tmp_path / "missing.jsonl", spec="ling-3.0", demo=True)
    with pytest.raises(DamagedDataset):
        inspect_rows(tmp_path)


def test_ids_that_the_tokenizer_does_not_know() -> None:
    """An id beyond the vocabulary is damage, not an empty piece of text."""
    with pytest.raises(DamagedDataset, match="4000000"):
        View(demo(), load_spec("ling-3.0"), np.array([5, 4_000_000], dtype=np.int32), (), None, "here")


def test_fixture_rows_are_shown() -> None:
    """The packaged trajectories show every assistant turn with its header."""
    for item in inspect_rows(FIXTURE, spec="ling-3.0-auto", demo=True):
        check_item(item)
        assert sum(segment.kind == "header" for segment in item.segments) == len(item.spans)
        assert item.notes == () or all("header" not in note for note in item.notes)

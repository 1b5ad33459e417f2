"""The short ways (fast tokenizer, pieces, shapes, cuts, look-ups in line) give what the long ways give, or are not taken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

import chatmask
from chatmask import backends
from chatmask.conversation import normalise
from chatmask.encoding import Encoder, Request
from chatmask.errors import RejectedRow
from chatmask.example import Example
from chatmask.parsers.parser import Choice
from chatmask.parsers.shapes import Filled
from chatmask.policy import load_policy
from chatmask.sampling import begin, encode
from chatmask.templates import environment as sandbox
from tests.properties.made_up import made_up
from tests.properties.oracles import parser_of
from tests.properties.short import SPECS, agent, both_ways, check_rows, check_what_shapes_see, fast

pytest.importorskip("fastokens", reason="the extra `fast` is part of `dev`")

PIECES = st.sampled_from(
    [
        "<role>",
        "<think>",
        "</think>",
        "<|role_end|>",
        " a",
        "a",
        "\n",
        "\n\n",
        " ",
        "é",
        "e\u0301",
        "\u0301",
        "日",
        "½",
        "12",
        "<|",
        "|>",
        "🙂",
    ]
)


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return fast("ling-3.0").encoder


@given(parts=st.lists(PIECES, max_size=20), quoted=st.booleans(), data=st.data())
def test_ids_and_edges_are_those_of_the_long_way(encoder: Encoder, parts: list[str], quoted: bool, data: st.DataObject) -> None:
    """Fast tokenizer and pieces give the ids, and the edges at any border, that offsets of the whole give, or leave it to them."""
    text = "".join(parts)
    controls = encoder.cut(text)
    inside = {k for start, end, _ in controls for k in range(start + 1, end)}
    borders = data.draw(st.lists(st.sampled_from([k for k in range(len(text) + 1) if k not in inside]), max_size=4))
    request = Request(text, controls, borders, quoted)
    long = encoder._long(request)
    switched, encoder.fast = encoder.fast, None
    try:
        ways = [encoder.encode_many([request])[0]]
    finally:
        encoder.fast = switched
    ways.append(encoder.encode_many([request])[0])
    for short in ways:
        assert short.ids.tolist() == long.ids.tolist()
        assert short.edges == long.edges


def test_the_short_way_is_taken(encoder: Encoder) -> None:
    """Ordinary text needs no offsets: neither at a header's end nor at a turn's."""
    text = "<role>ASSISTANT</role>\n<think>It is 4.<|role_end|><role>HUMAN</role>Thanks<|role_end|>"
    controls = encoder.cut(text)
    borders = [text.index("It"), text.index("<role>HUMAN")]
    (found,) = encoder._short([Request(text, controls, borders, quoted=False)])
    assert found is not None
    assert all(edge.clean for edge in found.edges.values())


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(
    "options",
    [
        [],
        ["split=per_turn"],
        ["split=per_turn", "strip_thinking=context", "empty_think=target"],
        ["split=per_turn", "mask_from=role_header", "tool_error=mask"],
        ["split=per_turn", "strip_thinking=context", "supervise_reasoning=false"],
        ["split=exact"],
    ],
    ids=lambda options: "+".join(options) or "none",
)
def test_rows_are_those_of_the_long_way(spec: str, options: list[str]) -> None:
    """Shapes and cuts give the ids, masks, spans and counts that laying out each sample by itself gives, for rejects too."""
    taken = check_rows(spec, options)
    assert ("Filled" if not options else "Cut" if options == ["split=per_turn"] else "Layout") in taken


@pytest.mark.parametrize("spec", ["qwen3-instruct", "ling-3.0"])
def test_rows_do_not_depend_on_their_batch(spec: str) -> None:
    """Chats of one shape that are encoded together, some with control text among them, have the rows that each has alone."""
    parser, policy = fast(spec), load_policy(None)
    answers = ["It is 4.", "a <|im_end|> b", "yes", "<role>x", "four, so to say", "<|role_end|>", "It is\n5."] * 3
    chats = [{"messages": [{"role": "user", "content": a[:9]}, {"role": "assistant", "content": a}]} for a in answers]
    drafts = [begin(normalise(chat), policy, parser, "k") for chat in chats]
    assert sum(isinstance(draft.layouts[0], Filled) for draft in drafts) > 10
    together = encode(drafts)
    parser.short_ways = False
    for chat, (example,) in zip(chats, together, strict=True):
        alone = parser.example(normalise(chat))
        assert isinstance(example, Example) and example.same_row(alone)


def test_a_shape_is_refused_where_a_template_looks_into_strings() -> None:
    """A template that measures, slices, compares or indexes a content has no shapes; one that trims or searches has."""
    check_what_shapes_see()


def _write(path: Path, n: int, special: str = "") -> Path:
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{special if k == 0 else ''}What is {k}?"},
                {"role": "assistant", "content": f"It is {k}."},
            ]
        }
        for k in range(n)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_a_build_has_the_same_bytes_with_any_backend(tmp_path: Path) -> None:
    """The fast tokenizer and one or two workers change no byte of a dataset."""
    source = _write(tmp_path / "a.jsonl", 700)
    made = {}
    for backend, workers in (("tokenizers", 1), ("fast", 1), ("fast", 2)):
        out = tmp_path / f"{backend}{workers}"
        built = chatmask.build(source, "ling-3.0", out, demo=True, backend=backend, workers=workers)
        assert built.summary["backend"].startswith("fastokens" if backend == "fast" else "tokenizers")
        made[backend, workers] = _contents(out)
    assert made["tokenizers", 1] == made["fast", 1] == made["fast", 2]


def test_a_fast_tokenizer_that_differs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A difference seen while building gives the rows of the `tokenizers` library, and the ledger says that there was one."""
    source = _write(tmp_path / "a.jsonl", 40, "zebra ")
    flat = backends.Fast.flat

    def wrong(self: backends.Fast, texts: Any) -> Any:
        ids, offsets = flat(self, texts)
        ids = ids.copy()
        for text, start in zip(texts, offsets.tolist(), strict=False):
            if "zebra" in text:
                ids[start + 12] += 1
        return ids, offsets

    right = chatmask.build(source, "ling-3.0", tmp_path / "right", demo=True, backend="tokenizers")
    monkeypatch.setattr(backends.Fast, "flat", wrong)
    built = chatmask.build(source, "ling-3.0", tmp_path / "built", demo=True, backend="fast")
    assert built.summary["notes"] == {**right.summary["notes"], "fast_tokenizer_refused": 1}
    shards = [name for name in _contents(tmp_path / "right") if name.endswith(".arrow")]
    assert all(_contents(tmp_path / "right")[name] == _contents(tmp_path / "built")[name] for name in shards)


def test_a_fast_tokenizer_that_fails_its_proof_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ids on the proof texts: `auto` does without and says why, `fast` is an error."""
    source = _write(tmp_path / "a.jsonl", 40)
    parser_of("ling-3.0", "demo").encoder.fast = None
    monkeypatch.setattr(backends.Fast, "flat", lambda self, texts: (np.zeros(len(texts), np.int32), np.arange(len(texts) + 1)))
    monkeypatch.setattr("chatmask.pipeline.FAST_FROM", 0)
    built = chatmask.build(source, "ling-3.0", tmp_path / "auto", demo=True)
    assert "other ids" in built.summary["backend"]
    with pytest.raises(chatmask.ChatmaskError, match="other ids"):
        chatmask.build(source, "ling-3.0", tmp_path / "fast", demo=True, backend="fast")


def test_cuts_that_would_be_wrong_are_not_made(tmp_path: Path) -> None:
    """A template whose text depends on the number of messages gives, cut or not, the rows that each sample has by itself."""
    from chatmask.templates.registry import load_spec
    from chatmask.tokenizers import demo_tokenizer

    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% if messages | length > 7 and loop.first %} (long){% endif %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    spec = tmp_path / "counting.yaml"
    spec.write_text('name: counting\nassistant: {header: "<|im_start|>assistant\\n", end_of_turn: "<|im_end|>"}\n')
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Go."}]
    for k in range(6):
        messages += [{"role": "assistant", "content": f"step {k}"}, {"role": "tool", "content": f"did {k}"}]
    record = {"messages": [*messages, {"role": "assistant", "content": "Done."}]}
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n")
    tokenizer = demo_tokenizer(template)
    load_spec(spec)
    built = chatmask.build(
        tmp_path / "a.jsonl", spec, tmp_path / "d", tokenizer=tokenizer, policy_overrides=["split=per_turn"], parity="off"
    )
    assert built.summary["samples"] == 7
    rows = chatmask.load(tmp_path / "d", allow_demo=True)
    texts = [tokenizer.decode(row["input_ids"]) for row in rows]
    assert ["(long)" in text for text in texts] == [False] * 3 + [True] * 4


# what is written in front of a message's text, for the text, and behind it; first or last message, counts and neighbours are asked for
LAST_TURN_DIFFERS = {
    "text": ("", "{{ m.content }}{{ '!' if loop.last and 'yes' in m.content }}"),
    "a question in it": ("", "{{ m.content }}{{ '!' if loop.last and '?' in m.content }}"),
    "one text": ("", "{{ m.content }}{{ '?' if loop.last and m.content == 'x' }}"),
    "its length": ("", "{{ m.content }}{{ '?' if loop.last and m.content | length > 30 }}"),
    "blanks at its end": ("", "{{ m.content | trim if loop.last else m.content }}"),
    "blanks in front": ("", "{{ m.content.lstrip('\\n') if loop.last else m.content }}"),
    "calls at once": ("", "{{ m.content }}{{ '!' if loop.last and m.tool_calls and m.tool_calls | length > 1 }}"),
    "place": ("", "{{ m.content }}{{ '!' if loop.last and loop.index > 14 }}"),
    "messages": ("", "{{ m.content }}{{ '?' if loop.last and messages | length == 8 }}"),
    "messages, in front": ("{{ '#' if loop.first and messages | length > 6 }}", "{{ m.content }}"),
    "even or odd, in front": ("{{ '#' if loop.first and messages | length % 4 == 0 }}", "{{ m.content }}"),
    "the count itself": ("{{ messages | length if loop.first }}", "{{ m.content }}"),
    "tool messages, in front": (
        "{{ '#' if loop.first and messages | selectattr('role', 'equalto', 'tool') | list | length > 4 }}",
        "{{ m.content }}",
    ),
    "the last text, in front": ("{{ '#' if loop.first and 'yes' in messages[-1].content }}", "{{ m.content }}"),
    "the message before": ("{{ '!' if loop.last and loop.previtem and 'found 4' in loop.previtem.content }}", "{{ m.content }}"),
    "the message behind": ("", "{{ m.content }}{{ '?' if loop.nextitem is defined and 'found 4' in loop.nextitem.content }}"),
    "the role behind": ("", "{{ m.content }}{{ '>' if loop.nextitem is defined and loop.nextitem.role == 'tool' }}"),
}
RUNS = [
    *[agent(3)] * 4,
    agent(8, {3: "so yes it is", 5: "x", 6: "so it is \n"}),
    agent(12, {2: "\nwhy?", 5: "a long text that is more than thirty", 7: "is it?"}, {5: 2, 9: 3}),
    agent(20, {13: "part? yes"}),
]


@pytest.mark.parametrize("options", [[], ["strip_thinking=context", "mask_from=role_header"]], ids="+".join)
@pytest.mark.parametrize("asked", LAST_TURN_DIFFERS)
def test_a_last_turn_written_otherwise_is_not_cut_as_history_has_it(asked: str, options: list[str]) -> None:
    """Whatever a template asks about the last turn, `per_turn` gives the rows that each sample has when it is laid out by itself."""
    front, text = LAST_TURN_DIFFERS[asked]
    calls = "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
    parser = made_up(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n" + front + text + calls + "<|im_end|>\n{% endfor %}",
        rewritten={"context": "train", "emission": "train"},
    )
    assert parser.encoder.speed_up() == ""
    taken = set[str]()
    for record in RUNS:
        short, long, kinds = both_ways(parser, record, load_policy(None, ["split=per_turn", *options]))
        assert short == long
        taken.update(kinds)
    # these two change every sample's text, so that none is ever cut
    assert ("Cut" in taken) == (asked not in ("the count itself", "the role behind"))


def test_a_refused_sample_takes_no_other_with_it() -> None:
    """Where the longest sample of a run is refused, those that are cut from it are laid out by themselves, and stay."""
    parser = made_up(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{{ '\n' if m.role == 'assistant' }}{% endfor %}",
        assistant={"header": "<|im_start|>assistant\n", "end_of_turn": "\n"},
    )
    assert parser.encoder.speed_up() == ""
    # an empty answer: its end and its header's end are one token, so that nothing of it is a target
    texts = ["Go.", "one", "did it", "two", "did more", ""]
    roles = ["user", *["assistant", "tool"] * 2, "assistant"]
    record = {"messages": [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]}
    draft = begin(normalise(record), load_policy(None, ["split=per_turn", "mask_from=role_header"]), parser, "k")
    assert [type(one).__name__ for one in draft.layouts] == ["Cut", "Cut", "Layout"]
    *shorter, longest = encode([draft])[0]
    assert isinstance(longest, RejectedRow)
    assert longest.reason.value == "zero_supervision"
    for sample, example in zip(draft.samples, shorter, strict=False):
        assert not isinstance(example, RejectedRow), example
        choice = Choice("role_header")
        alone = parser.example(sample.conversation, untrained=sample.untrained, choice=choice)
        assert example.same_row(alone)


class TestSandbox:
    """Look-ups in line are those of jinja2's own sandbox."""

    CASES = (
        "{{ m.role }} {{ m['role'] }} {{ m.none }} {{ m.items() | list }} {{ m.get('x', 'y') }} {{ m.keys() | list }}",
        "{{ m.content.strip() }} {{ m.content.split('b')[-1] }} {{ m.content.upper() }} {{ m.content.startswith('a') }}",
        "{% for x in l %}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{{ x.role }}{% endfor %}",
        "{% set ns = namespace(a=1, b='t') %}{% set ns.a = 2 %}{{ ns.a }}{{ ns.b.strip() }}{{ ns.c }}",
        "{{ '%s' % m.content }} {{ '{0}'.format(m.content) }} {{ m.content.format(1) }}",
        "{{ l[0].role }} {{ l[-1]['content'] }} {{ l[5] }} {{ l[0:1] }}",
        "{% macro f(x, y='d') %}{{ x.role }}{{ y }}{% endmacro %}{{ f(m) }}{{ f(m, y=m.content) }}",
        "{% set loop = m %}{{ loop.first }}{{ loop.role }}",
    )
    UNSAFE = (
        "{{ m.__class__ }}", "{{ m['__class__'] }}", "{{ ''.__class__.__mro__ }}", "{{ m.content.format.__globals__ }}",
        "{{ '{0.__class__}'.format(m) }}", "{{ l.append(1) }}", "{{ m.update({'a': 1}) }}", "{{ m.clear() }}", "{{ f.__globals__ }}",
        "{{ ns.__init__ }}", "{{ m.pop('role') }}", "{{ l.__len__() }}",
    )  # fmt: skip

    def _outcome(self, env: jinja2.Environment, source: str) -> tuple[str, str]:
        given = {"m": {"role": "user", "content": "ab a", "first": "dict"}, "l": [{"role": "r", "content": "c"}], "f": len}
        try:
            return "text", env.from_string(source).render(given)
        except Exception as error:
            return type(error).__name__, str(error)

    @pytest.mark.parametrize("source", [*CASES, *UNSAFE])
    def test_answers_are_those_of_the_sandbox(self, source: str) -> None:
        """Any expression gives the text, or the error, that jinja2's immutable sandbox gives."""
        plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        plain.globals["namespace"] = sandbox.environment().globals["namespace"]
        assert self._outcome(sandbox.environment(), source) == self._outcome(plain, source)

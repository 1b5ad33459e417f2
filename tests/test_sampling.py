"""Policies carried out by the build: split modes, lengths, what of a turn is trained, and that nothing is lost on the way."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import chatmask
from chatmask import pipeline
from chatmask.cli import main
from chatmask.conversation import normalise
from chatmask.parsers.parser import Parser, load_parser
from chatmask.policy import Policy, load_policy
from chatmask.sampling import _least, explain, make
from chatmask.trajectories import cut, expand, tags_of

RAW = Path(__file__).resolve().parent.parent / "fixtures" / "swe_raw.jsonl"
RECORDS = [json.loads(line) for line in RAW.read_text(encoding="utf-8").splitlines()]


def policy(**fields: Any) -> Policy:
    """The default policy with some fields."""
    return Policy.model_validate({"name": "test", **fields})


def rows(parser: Parser, record: dict[str, Any], oracle: bool = False, **fields: Any) -> list[Any]:
    """(sample, example) of one record."""
    return list(make(normalise(record, parser.spec.roles), policy(**fields), parser, "k", oracle).rows)


def trained_texts(made: list[Any]) -> Counter[str]:
    """Text of every trained span over all samples."""
    return Counter(
        example.text[turn.start : turn.end]
        for _, example in made
        for span, turn in zip(example.spans, example.turns, strict=True)
        if span.trained
    )


@pytest.mark.parametrize("split", ["per_turn", "exact"])
def test_a_split_trains_the_same_turns(split: str) -> None:
    """Where the template rewrites nothing, per_turn and exact train exactly the spans that trajectory trains, each once."""
    parser = load_parser("ling-3.0-thinking", demo=True)
    for record in RECORDS:
        assert trained_texts(rows(parser, record, split=split)) == trained_texts(rows(parser, record))


@pytest.mark.parametrize("spec", ["qwen3-thinking", "ling-3.0-thinking"])
def test_exact_has_every_turn_behind_its_served_prompt(spec: str) -> None:
    """Split exact trains every turn that per_turn trains, whole, and each stands behind what the server had sent, to the id."""
    parser = load_parser(spec, demo=True)
    for record in RECORDS:
        exact, single = rows(parser, record, oracle=True, split="exact"), rows(parser, record, split="per_turn")
        assert trained_texts(exact) == trained_texts(single)
        assert len(exact) <= len(single)
        for _, example in exact:
            broken = {found.message for found in example.parity if found.kind == "text"}
            assert not broken & {span.message for span in example.spans if span.trained}
            assert not set(example.rewritten) & {span.message for span in example.spans if span.trained}


@pytest.mark.parametrize("overlength", ["drop", "last_turns", "first_turns", "explode"])
@pytest.mark.parametrize("limit", [700, 1200])
def test_no_sample_is_longer_than_the_limit(overlength: str, limit: int) -> None:
    """Every length policy keeps to the limit, parts no end token from its span, and says what it left out."""
    parser = load_parser("ling-3.0-thinking", demo=True)
    for record in RECORDS:
        whole = trained_texts(rows(parser, record))
        made = make(normalise(record), policy(max_length=limit, overlength=overlength), parser, "k")
        texts = trained_texts(list(made.rows))
        assert all(len(example.ids) <= limit for _, example in made.rows)
        assert texts <= whole
        if overlength == "explode" and texts != whole:
            # what is missing does not fit behind the task by itself
            with pytest.raises(chatmask.RejectedRow):
                for text in whole - texts:
                    rows(parser, record, split="per_turn", max_length=limit)
                    raise AssertionError(text)
        assert made.rows or made.dropped == {"overlength": 1}
        for sample, example in made.rows:
            assert example.mask.any()
            whole_row = len(sample.conversation.messages) == len(normalise(record).messages)
            assert whole_row or overlength == "explode" or example.notes["turns_cut"]
        if overlength == "explode" and made.rows:
            assert made.dropped["overlength_turns"] == sum((whole - texts).values())


def _agent(question: str, steps: int, *more: str) -> dict[str, Any]:
    """An agent's run of so many steps for a question, and as many again for each further one."""
    messages: list[dict[str, Any]] = []
    for asked in (question, *more):
        messages.append({"role": "user", "content": asked})
        for k in range(steps):
            call = {"type": "function", "function": {"name": "run", "arguments": {"x": str(k)}}}
            messages.append(
                {"role": "assistant", "content": "I look.", "reasoning_content": f"because {k}", "tool_calls": [call]}
            )
            messages.append({"role": "tool", "content": f"found it {k} " * 9})
    return {"messages": [*messages, {"role": "assistant", "content": "Done."}], "tools": None}


@pytest.mark.parametrize("spec", ["qwen3-thinking", "qwen3-preserved", "ling-3.0-auto"])
def test_no_part_is_shorter_than_the_least_that_it_is_held_to_have(spec: str) -> None:
    """Parts that are left unrendered as too long are: the count never exceeds the tokens of any part, and comes close to it."""
    parser = load_parser(spec, demo=True)
    found = []
    for record in (*RECORDS[:2], _agent("Mend it.", 3, "And now?")):
        (sample,), _, _ = expand(normalise(record), policy(), "k")
        try:
            least = _least(sample, parser.layout(sample.conversation), parser)
        except chatmask.RejectedRow:
            continue
        n = len(sample.conversation.messages)
        for start, stop in itertools.combinations(range(n + 1), 2):
            try:
                length = len(parser.example(cut(sample, start, stop).conversation).ids)
            except chatmask.RejectedRow:
                continue
            assert least(start, stop) <= length, (start, stop)
            found.append(least(start, stop) / length)
    assert sum(found) > 0.7 * len(found) > 20


def test_the_windows_of_a_long_run_do_not_render_every_part() -> None:
    """`explode` renders a few parts a window, not one for each beginning and end, of which a run of 60 steps has 1,800."""
    parser, rendered = load_parser("ling-3.0-thinking", demo=True), 0
    layout = parser.layout

    def counting(*given: Any, **named: Any) -> Any:
        nonlocal rendered
        rendered += 1
        return layout(*given, **named)

    parser.layout = counting  # type: ignore[method-assign]
    made = make(normalise(_agent("Mend it.", 60)), policy(max_length=1000, overlength="explode"), parser, "k")
    assert sum(len(sample.targets) for sample, _ in made.rows) == 61
    assert rendered < 6 * len(made.rows)


def test_last_turns_keeps_the_longest_end_that_fits() -> None:
    """A part that begins with a step takes the first question with it, so that one which begins earlier may be the shorter one."""
    parser = load_parser("ling-3.0-thinking", demo=True)
    first = _agent("Mend it, please. " * 30, 1)["messages"][:-1]
    for steps in range(5, 9):
        later = _agent("And now?", steps)["messages"]
        alone = len(rows(parser, {"messages": later})[0][1].ids)
        made = make(normalise({"messages": [*first, *later]}), policy(max_length=alone, overlength="last_turns"), parser, "k")
        ((sample, example),) = made.rows
        assert (sample.conversation.messages[0]["content"], len(example.ids)) == ("And now?", alone)


def test_over_length_is_an_error_unless_declared() -> None:
    """Without a word on it, a sample over the limit rejects its record by name; nothing is cut in silence."""
    parser = load_parser("ling-3.0-thinking", demo=True)
    with pytest.raises(chatmask.RejectedRow) as caught:
        rows(parser, RECORDS[0], max_length=100)
    assert caught.value.reason == "overlength"


def test_reasoning_may_be_context_only() -> None:
    """`supervise_reasoning: false` takes reasoning and its closing tag out of the mask and nothing else."""
    parser = load_parser("ling-3.0-thinking", demo=True)
    record = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "A.", "reasoning_content": "R."}]}
    (_, whole), (_, part) = rows(parser, record)[0], rows(parser, record, supervise_reasoning=False)[0]
    assert whole.input_ids == part.input_ids
    decode = parser.loaded.decode
    assert decode([i for i, bit in zip(whole.input_ids, whole.loss_mask, strict=True) if bit]) == "R.</think>A.<|role_end|>"
    assert decode([i for i, bit in zip(part.input_ids, part.loss_mask, strict=True) if bit]) == "A.<|role_end|>"


@pytest.mark.parametrize("spec", ["ling-3.0-thinking", "qwen3-preserved", "qwen3-instruct"])
def test_where_reasoning_is_context_so_is_an_empty_block(spec: str) -> None:
    """Under `supervise_reasoning: false` a turn without reasoning trains its answer and end token alone, whatever block stands there."""
    parser = load_parser(spec, demo=True)
    record = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "A."}]}
    _, part = rows(parser, record, supervise_reasoning=False)[0]
    trained = parser.loaded.decode([i for i, bit in zip(part.input_ids, part.loss_mask, strict=True) if bit])
    assert trained.strip() == f"A.{parser.spec.assistant.ends[0]}"


def test_a_mask_from_the_role_header_holds_the_think_block() -> None:
    """`mask_from: role_header` also trains the block that the server writes itself."""
    parser = load_parser("qwen3-instruct", demo=True)
    record = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "A."}]}
    made = rows(parser, record, mask_from="role_header")[0][1]
    text = parser.loaded.decode([i for i, bit in zip(made.input_ids, made.loss_mask, strict=True) if bit])
    assert text == "<think>\n\n</think>\n\nA.<|im_end|>"


def test_areal_pair_renders_as_areal_does() -> None:
    """areal-pair: context without reasoning, an empty block where the target has none, the mask right behind the role header."""
    parser = load_parser("qwen3-preserved", demo=True, overrides=["tool_arguments=json"])
    talk = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "A.", "reasoning_content": "R."},
        {"role": "user", "content": "r"},
        {"role": "assistant", "content": "B."},
    ]
    made = make(normalise({"messages": talk}), load_policy("areal-pair"), parser, "k").rows
    assert [example.text.partition("assistant\n")[2] for _, example in made] == [
        "<think>\nR.\n</think>\n\nA.<|im_end|>\n",
        "A.<|im_end|>\n<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nB.<|im_end|>\n",
    ]
    texts = [
        parser.loaded.decode([i for i, bit in zip(example.input_ids, example.loss_mask, strict=True) if bit])
        for _, example in made
    ]
    assert texts == ["<think>\nR.\n</think>\n\nA.<|im_end|>", "<think>\n\n</think>\n\nB.<|im_end|>"]


def test_failed_steps_are_masked_or_dropped_and_counted(tmp_path: Path) -> None:
    """A step whose result says `is_error` is masked in a trajectory and its own sample dropped in per_turn; the ledger says so."""
    talk = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "Try.", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
        {"role": "tool", "content": "boom", "is_error": True},
        {"role": "assistant", "content": "Again.", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
        {"role": "tool", "content": "fine"},
        {"role": "assistant", "content": "Done."},
    ]
    path = tmp_path / "raw.jsonl"
    path.write_text(json.dumps({"messages": talk}) + "\n")
    masked = chatmask.build(path, "ling-3.0-thinking", tmp_path / "a", demo=True, policy_overrides=["tool_error=mask"])
    assert masked.summary["untrained"] == {"tool_error": 1}
    assert masked.summary["trained_turns"] == 2
    dropped = chatmask.build(
        path, "ling-3.0-thinking", tmp_path / "b", demo=True, policy_overrides=["split=per_turn", "tool_error=drop"]
    )
    assert (dropped.summary["samples"], dropped.summary["trained_turns"]) == (2, 2)
    assert dropped.summary["notes"]["dropped_tool_error"] == 1


@pytest.mark.parametrize("split", ["per_turn", "exact"])
def test_bytes_do_not_depend_on_workers(tmp_path: Path, split: str) -> None:
    """The same input and policy give the same files with one worker and with two, and the dataset verifies."""
    made = {}
    again = tmp_path / "again.jsonl"
    again.write_bytes(RAW.read_bytes())
    for workers in (1, 2):
        out = tmp_path / str(workers)
        chatmask.build(
            [RAW, again], "ling-3.0-thinking", out, demo=True, workers=workers,
            policy_overrides=[f"split={split}", "strip_probability=0.5", "variants=2"] if split == "per_turn" else [f"split={split}"],
        )  # fmt: skip
        made[workers] = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
        chatmask.verify(out)
    assert made[1] == made[2]


def test_the_policy_is_part_of_what_was_built(tmp_path: Path) -> None:
    """Building again with another policy into the same directory says that the policy differs."""
    chatmask.build(RAW, "ling-3.0-thinking", tmp_path / "d", demo=True)
    with pytest.raises(chatmask.SpecError, match="policy"):
        chatmask.build(RAW, "ling-3.0-thinking", tmp_path / "d", demo=True, policy_overrides=["split=per_turn"])


def test_all_text_trains_everything_but_what_is_flagged(tmp_path: Path) -> None:
    """`train_on: all_text` makes every token a target, once; a flagged message and a failed step keep out with their whole text."""
    rows = [
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "reasoning_content": "r"}] * 2},
        {
            "messages": [
                {"role": "user", "content": "secret", "train": False},
                {"role": "assistant", "content": "a", "reasoning_content": "r"},
            ]
        },
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    built = chatmask.build(
        tmp_path / "a.jsonl", "ling-3.0-thinking", tmp_path / "d", demo=True, policy_overrides=["train_on=all_text"]
    )
    whole, flagged = chatmask.load(tmp_path / "d", allow_demo=True)
    assert set(whole["loss_mask"]) == {1}
    assert [span.message for span in whole["spans"]] == [0, 1, 2, 3]
    assert 0 < sum(flagged["loss_mask"]) < len(flagged["loss_mask"])
    assert [(span.message, span.reason) for span in flagged["spans"]] == [(0, "flag"), (1, "")]
    assert built.summary["turns"] == built.summary["trained_turns"] == 3


@pytest.mark.parametrize("option", ["split=per_turn", "overlength=explode", "supervise_reasoning=false"])
def test_all_text_goes_with_whole_records_only(tmp_path: Path, option: str) -> None:
    """What would train a text several times, or only in part, is refused together with `train_on: all_text`."""
    with pytest.raises(chatmask.ChatmaskError, match="all_text"):
        chatmask.build(RAW, "ling-3.0-thinking", tmp_path / "d", demo=True, policy_overrides=["train_on=all_text", option])


@pytest.mark.parametrize("option", ["supervise_reasoning=false", "mask_from=role_header"])
def test_parity_is_of_the_prompt_whatever_is_trained(tmp_path: Path, option: str) -> None:
    """What part of a turn is trained does not change what stands before it: full parity holds."""
    built = chatmask.build(RAW, "ling-3.0-thinking", tmp_path / "d", demo=True, parity="full", policy_overrides=[option])
    assert built.summary["parity"] == {"turns": 54, "text": 0, "tokens": 0}


def test_words_of_a_policy_do_not_rebuild(tmp_path: Path) -> None:
    """Another name or description of a policy is the same build."""
    chatmask.build(RAW, "ling-3.0-thinking", tmp_path / "d", demo=True, policy=policy())
    again = chatmask.build(RAW, "ling-3.0-thinking", tmp_path / "d", demo=True, policy=policy(description="other words"))
    assert again.already_built


@pytest.mark.parametrize("workers", [1, 2])
def test_equal_samples_are_kept_once(tmp_path: Path, workers: int) -> None:
    """`dedup` keeps the first of equal samples over all files and counts the others; the ledger still adds up."""
    again = tmp_path / "again.jsonl"
    again.write_bytes(RAW.read_bytes())
    one = chatmask.build(RAW, "ling-3.0-thinking", tmp_path / "one", demo=True)
    two = chatmask.build(
        [RAW, again], "ling-3.0-thinking", tmp_path / "two", demo=True, workers=workers, policy_overrides=["dedup=true"]
    )
    assert two.summary["samples"] == one.summary["samples"]
    assert two.summary["dropped"] == {"duplicate": len(RECORDS)}
    assert two.summary["lines"] == two.summary["kept"] + two.ledger.dropped.total() == 2 * len(RECORDS)


def test_balance_leaves_the_declared_share(tmp_path: Path) -> None:
    """`max_no_thinking_ratio` keeps int(thinking * ratio) samples with calls and without reasoning, and all others."""
    call = [{"function": {"name": "f", "arguments": {}}}]
    path = tmp_path / "raw.jsonl"
    lines = []
    for n in range(12):
        reasoning = {"reasoning_content": "Why."} if n < 4 else {}
        lines.append(
            {
                "messages": [
                    {"role": "user", "content": f"q{n}"},
                    {"role": "assistant", "content": "", "tool_calls": call, **reasoning},
                ]
            }
        )
    lines.append({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "Final."}]})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = chatmask.build(
        path, "ling-3.0-thinking", tmp_path / "d", demo=True, policy_overrides=["split=per_turn", "max_no_thinking_ratio=0.5"]
    )
    assert made.summary["samples"] == 4 + 2 + 1
    assert made.summary["dropped"] == {"balance": 6}


def test_validation_parts_records_and_loses_none(tmp_path: Path) -> None:
    """The train and the validation part of a build are disjoint, hold whole records, and together hold all."""
    seen = []
    for part in ("train", "validation"):
        out = tmp_path / part
        options = ["split=per_turn", "validation=0.4", f"part={part}", "seed=3"]
        built = chatmask.build(RAW, "ling-3.0-thinking", out, demo=True, policy_overrides=options)
        rows = chatmask.load(out, allow_demo=True)
        seen.append({rows[i]["source"]["line"] for i in range(len(rows))})
        assert built.ledger.dropped.total() == len(RECORDS) - len(seen[-1])
    assert not seen[0] & seen[1]
    assert len(seen[0] | seen[1]) == len(RECORDS)


def test_explain_tells_what_each_step_did() -> None:
    """`build --explain LINE` prints the steps and samples of one record and writes nothing."""
    runner = CliRunner()
    with runner.isolated_filesystem():
        result = runner.invoke(
            main, ["build", "--spec", "ling-3.0-thinking", "--demo", str(RAW), "--split", "per_turn", "--explain", "3"]
        )
        assert result.exit_code == 0
        assert "per_turn, 5 samples" in result.stdout
        assert result.stdout.count("sample ") >= 5
        assert not list(Path().iterdir())
        missing = runner.invoke(main, ["build", "--spec", "ling-3.0-thinking", "--demo", str(RAW), "--explain", "99"])
        assert missing.exit_code == 2


def test_tags_come_from_the_spec() -> None:
    """Other think tags in data become the spec's own before anything is split."""
    parser = load_parser("ling-3.0-thinking", demo=True)
    assert tags_of(parser.spec) is not None
    record = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "<thinking>R.</think>A."}]}
    assert rows(parser, record)[0][1].text.endswith("<think>R.</think>A.<|role_end|>")


# --- windows: what is counted and numbered within one --------------------------------------------------------------------------


def long_talk(turns: int, **last: Any) -> dict[str, Any]:
    """A conversation that needs several windows of 60 tokens; `last` changes its last answer."""
    messages = [{"role": "system", "content": "Be brief."}]
    for i in range(turns):
        answer = {"role": "assistant", "content": f"<thinking>r{i}</thinking>Answer {i}."}
        messages += [{"role": "user", "content": f"Question {i}?"}, answer]
    messages[-1] |= last
    return {"messages": messages}


def test_windows_count_the_record_once() -> None:
    """What was changed in a record is counted with its first window only; what a window shows of itself, with each."""
    parser = load_parser("ling-3.0-thinking", demo=True)
    fields: dict[str, Any] = {"max_length": 60, "overlength": "explode", "strip_thinking": "all", "empty_think": "all"}
    made = rows(parser, long_talk(8), **fields)
    assert len(made) > 3
    sums = sum((Counter(example.notes) for _, example in made), Counter[str]())
    assert (sums["think_tags_rewritten"], sums["reasoning_stripped"], sums["empty_blocks"]) == (8, 8, 8)
    assert [example.notes["turns_without_reasoning"] for _, example in made] == [len(example.spans) for _, example in made]


def test_a_reject_in_a_window_names_the_message_of_the_record() -> None:
    """A sample that was cut is refused with the message's number in the record, not in the window."""
    parser = load_parser("ling-3.0", demo=True, overrides=["rewritten.emission=reject"])
    record = long_talk(8)
    for message in record["messages"]:
        message["content"] = message["content"].rpartition(">")[2]
    record["messages"][-1]["tool_calls"] = [{"type": "function", "function": {"name": "f", "arguments": "[1]"}}]
    with pytest.raises(chatmask.RejectedRow) as whole:
        rows(parser, record)
    assert whole.value.message == 16

    def refuse(part: Any, *_: Any, **__: Any) -> Any:
        if len(part.messages) < 17:
            raise chatmask.RejectedRow(chatmask.RejectReason.HEADER_NOT_FOUND, "made up", len(part.messages) - 1)
        return real(part)

    record["messages"][-1].pop("tool_calls")
    real = parser.layout
    parser.layout = refuse  # type: ignore[method-assign]
    with pytest.raises(chatmask.RejectedRow, match=r"message 16: made up") as cut:
        rows(parser, record, max_length=60, overlength="last_turns")
    assert cut.value.message == 16


def test_explain_names_messages_as_the_record_does(tmp_path: Path) -> None:
    """`--explain` of a record in windows names every trained message once, by its place in the record; spans count within the sample."""
    path = tmp_path / "raw.jsonl"
    path.write_text(json.dumps(long_talk(6)) + "\n")
    options = ["max_length=60", "overlength=explode"]
    lines = list(explain(path, 1, "ling-3.0-thinking", demo=True, policy_overrides=options))
    named = [line.partition("trains messages ")[2].partition(";")[0] for line in lines if "trains messages" in line]
    assert len(named) > 2
    assert [int(i) for text in named for i in text.split(", ")] == [2, 4, 6, 8, 10, 12]
    built = chatmask.build(path, "ling-3.0-thinking", tmp_path / "d", demo=True, policy_overrides=options)
    for row in chatmask.load(built.dataset, allow_demo=True):
        assert row["spans"][0].message == 2


SYSTEM_POLICIES: list[dict[str, Any]] = [
    {"tool_error": "mask", "bare_text_tool_call": "mask"},
    {"split": "per_turn", "strip_thinking": "context", "empty_think": "target", "mask_from": "role_header"},
    {"split": "exact", "tool_error": "drop"},
    {"max_length": 900, "overlength": "explode", "supervise_reasoning": False},
]


@pytest.mark.parametrize("fields", SYSTEM_POLICIES)
@pytest.mark.parametrize("spec", ["qwen3-thinking", "ling-3.0-thinking"])
def test_a_system_text_of_the_spec_changes_no_choice(spec: str, fields: dict[str, Any]) -> None:
    """With a system text added by the spec a policy makes the rows that it makes where the data has that text itself; spans, turns,
    rewritten turns, parity and reasons count messages as the data does, one less."""
    added, plain = load_parser(spec, demo=True, overrides=["system=You mend code."]), load_parser(spec, demo=True)
    for record in RECORDS[::4]:
        whole = normalise(record)
        bare = {"messages": [m for m in whole.messages if m["role"] != "system"], "tools": whole.tools}
        given = {**bare, "messages": [{"role": "system", "content": "You mend code."}, *bare["messages"]]}
        ours, theirs = rows(added, bare, oracle=True, **fields), rows(plain, given, oracle=True, **fields)
        assert len(ours) == len(theirs)
        for (a_sample, a), (b_sample, b) in zip(ours, theirs, strict=True):
            assert (a.input_ids, a.loss_mask) == (b.input_ids, b.loss_mask)
            shown = [(s.message, s.start, s.end, s.trained, s.reason) for s in a.spans]
            assert shown == [(s.message - 1, s.start, s.end, s.trained, s.reason) for s in b.spans]
            assert [turn.message for turn in a.turns] == [turn.message - 1 for turn in b.turns] == [s.message for s in a.spans]
            assert dict(a.rewritten) == {i - 1: kind for i, kind in b.rewritten.items()}
            assert [(p.message, p.kind) for p in a.parity] == [(p.message - 1, p.kind) for p in b.parity]
            assert a_sample.untrained == {i - 1: reason for i, reason in b_sample.untrained.items()}


@pytest.mark.parametrize(
    "options",
    [
        ["max_length=900", "overlength=explode", "variants=2", "strip_probability=0.5"],
        ["split=exact", "validation=0.3", "shuffle=true"],
        ["split=per_turn", "variants=2", "strip_probability=0.5", "dedup=true", "max_no_thinking_ratio=0.5", "shuffle=true"],
    ],
)
def test_every_mode_writes_the_same_bytes_with_any_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    """One, two and three workers write equal files, whatever the policy asks of one record or of the whole build."""
    monkeypatch.setattr(pipeline, "MIN_CHUNK", 16_000)
    again = tmp_path / "again.jsonl"
    again.write_bytes(RAW.read_bytes()[: RAW.read_bytes().index(b"\n") + 1])
    made = []
    for workers in (1, 2, 3):
        out = tmp_path / str(workers)
        built = chatmask.build(
            [RAW, again], "ling-3.0-auto", out, demo=True, workers=workers, parity="off", policy_overrides=options
        )
        assert len(built.manifest["shards"]) > 2
        made.append({path.name: path.read_bytes() for path in out.iterdir()})
    assert made[0] == made[1] == made[2]


# --- records that train nothing --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["trajectory", "per_turn", "exact", "pre_split"])
def test_flags_alone_that_leave_nothing_are_a_reject(split: str) -> None:
    """A record all of whose turns are flagged off in the data is refused in every split mode, in the words of `Parser.parse`; one
    without an assistant turn as well."""
    parser = load_parser("ling-3.0", demo=True)
    flagged = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "train": False}]
    for messages, reason in ((flagged, "zero_supervision"), (flagged[:1], "no_assistant_turn")):
        found = []
        for refuse in (
            lambda m=messages: parser.parse({"messages": m}),
            lambda m=messages: rows(parser, {"messages": m}, split=split),
        ):
            with pytest.raises(chatmask.RejectedRow) as caught:
                refuse()
            found.append(str(caught.value))
            assert reason.split("_", maxsplit=1)[0] in caught.value.reason
        assert found[0] == found[1]


@pytest.mark.parametrize("split", ["trajectory", "per_turn", "exact", "pre_split"])
@pytest.mark.parametrize("rule", ["mask", "drop"])
def test_a_rule_that_leaves_nothing_drops_the_record(split: str, rule: str) -> None:
    """Where a rule takes the last turn that could be trained, flags or the template having taken the others, the record is `dropped`
    with the rule's name; where only the template did, it is a reject."""
    call = {"content": "", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}
    failed = [{"role": "assistant", **call, "reasoning_content": "Try."}, {"role": "tool", "content": "no", "is_error": True}]
    question, parser = {"role": "user", "content": "q"}, load_parser("qwen3-thinking", demo=True)
    flagged = {"role": "assistant", "content": "a", "train": False}
    thought = {"role": "assistant", "content": "a", "reasoning_content": "r"}
    for before in ([], [flagged, question], *([[thought, question]] if split == "trajectory" else [])):
        made = make(normalise({"messages": [question, *before, *failed]}), policy(split=split, tool_error=rule), parser, "k")
        assert not made.rows
        assert max(made.dropped, key=lambda reason: made.dropped[reason]) in ("tool_error", "context", "flag")
        assert made.dropped["tool_error"] >= 1
    if split == "trajectory":
        last = {"role": "assistant", "content": "b", "train": False}
        with pytest.raises(chatmask.RejectedRow, match="history_rewritten"):
            rows(parser, {"messages": [question, thought, question, last]}, tool_error=rule)


def test_windows_are_found_without_laying_out_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trajectory that is cut into windows is laid out a few times a window, and never much beyond the limit."""
    parser = load_parser("qwen3-instruct", demo=True)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Mend it."}]
    for k in range(60):
        call = {"type": "function", "function": {"name": "run", "arguments": {"step": k}}}
        messages.append({"role": "assistant", "content": f"I look {k}.", "tool_calls": [call]})
        messages.append({"role": "tool", "content": f"found {k} " * 6})
    lengths: list[int] = []
    layout = parser.layout

    def counted(conversation: Any, *args: Any, **kwargs: Any) -> Any:
        lengths.append(len(conversation.messages))
        return layout(conversation, *args, **kwargs)

    monkeypatch.setattr(parser, "layout", counted)
    tool = {"type": "function", "function": {"name": "run", "parameters": {"type": "object", "properties": {}}}}
    made = make(normalise({"messages": messages, "tools": [tool]}), policy(max_length=1500, overlength="explode"), parser, "k")
    assert sum(len(sample.targets) for sample, _ in made.rows) == 60
    assert len(lengths) <= 8 * len(made.rows)
    longest = max(len(sample.conversation.messages) for sample, _ in made.rows)
    assert sorted(lengths)[-2] <= 3 * longest  # but for the whole record, which was too long

"""Records of every shape become the same conversation, or a rejection that names message and field."""

from __future__ import annotations

import copy
import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmask.conversation import ROLES, Conversation, normalise
from chatmask.errors import RejectedRow
from chatmask.records import parse, plan, read

Json = dict[str, Any]
USER: Json = {"role": "user", "content": "Add 2 and 2."}
ANSWER: Json = {"role": "assistant", "content": "It is 4."}
CALL: Json = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"x": 2, "y": None}}}
TOOL: Json = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def messages_of(data: Json, **options: Any) -> list[Json]:
    """The normalised messages of a record."""
    return normalise(data, **options).messages


def assistant(**fields: Any) -> Json:
    """A record whose last message is the assistant's, with these fields."""
    return {"messages": [USER, {"role": "assistant", **fields}]}


def rejected(data: Json, **options: Any) -> RejectedRow:
    """The rejection of a record."""
    with pytest.raises(RejectedRow) as caught:
        normalise(data, **options)
    return caught.value


# --- properties -------------------------------------------------------------------------------------------------------

texts = st.text(max_size=8)
contents = texts | st.lists(texts | st.fixed_dictionaries({"type": st.just("text"), "text": texts}), max_size=3)
arguments = st.dictionaries(texts, st.none() | st.integers() | texts, max_size=2)
functions = st.fixed_dictionaries({"name": st.sampled_from(["add", "say"]), "arguments": arguments | arguments.map(json.dumps)})
calls = functions | st.fixed_dictionaries({"id": st.none() | texts, "type": st.just("function"), "function": functions})
extras = {
    "name": st.none() | texts,
    "custom": st.none() | arguments,
    "train": st.none() | st.booleans(),
    "agent": st.just("main"),
}
others = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "human", "tool"]), "content": contents}, optional=extras
)
assistants = st.fixed_dictionaries(
    {"role": st.sampled_from(["assistant", "gpt"]), "content": contents},
    optional={"reasoning": st.none() | texts, "tool_calls": st.none() | st.lists(calls, max_size=2), **extras},
)
records = st.fixed_dictionaries(
    {"messages": st.tuples(st.lists(others, max_size=4), assistants).map(lambda pair: [*pair[0], pair[1]])},
    optional={"tools": st.none() | st.just([TOOL]) | st.just(json.dumps([TOOL["function"]])), "system": st.none() | st.just("S")},
)


@given(records)
@settings(max_examples=200, deadline=None)
def test_normalising_is_idempotent_and_leaves_its_input_alone(data: Json) -> None:
    """A conversation put in again comes out the same, and no record is changed on the way."""
    before = copy.deepcopy(data)
    try:
        once = normalise(data)
    except RejectedRow as error:
        assert error.reason.value == "ambiguous_record" and "system" in data
        return
    finally:
        assert data == before
    again = normalise({"messages": once.messages, "tools": once.tools})
    assert (again.messages, again.tools) == (once.messages, once.tools)
    assert len(once.flags) == len(once.messages) == len(data["messages"]) + once.notes.get("system_from_record", 0)
    for message in once.messages:
        assert set(message) <= {"role", "content", "reasoning_content", "tool_calls", "name", "custom"}
        assert all(value is not None for key, value in message.items() if key != "content")


@given(records)
@settings(max_examples=100, deadline=None)
def test_the_shape_makes_no_difference(data: Json) -> None:
    """The same turns give the same conversation under each of the keys that may hold them."""
    turns, rest = data["messages"], {"tools": data.get("tools")}
    shapes: list[Json] = [
        {"conversations": turns},
        {"conversations": [{"messages": [USER]}, {"messages": turns, **rest}]},
        {"history": turns, "trajectory": [{"action": "ls"}], "info": {}},
        {"trajectory": {"messages": turns, "info": {}}},
        {"trajectory": {"history": turns}},
        {"trajectory": turns},
        {"messages": turns, "info": {}, "trajectory_format": "mini-swe-agent-1"},
        {"messages": turns, "conversations": [], "history": [USER], "trajectory": [{"action": "ls"}]},
        {"prompt": turns[:-1], "completion": turns[-1:]},
    ]
    expected = normalise({"messages": turns, **rest})
    for shape in shapes:
        found = normalise({**rest, **shape})
        assert (found.messages, found.tools) == (expected.messages, expected.tools), shape


junk = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 2) | st.sampled_from(["user", "assistant", "text", "", "{}"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    *(
                        "messages",
                        "conversations",
                        "role",
                        "from",
                        "value",
                        "content",
                        "tool_calls",
                        "function",
                        "name",
                        "arguments",
                    ),
                    *("type", "text", "tools", "history", "trajectory", "prompt", "completion", "weight", "is_demo", "thinking"),
                    *("function_call", "tool_call_ids", "system", "functions"),
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@given(
    st.dictionaries(st.sampled_from(["messages", "conversations", "history", "trajectory", "prompt", "completion"]), junk), junk
)
@settings(max_examples=250, deadline=None)
def test_any_json_object_is_a_conversation_or_a_rejection(data: Json, message: Any) -> None:
    """No JSON object makes anything but a conversation or a RejectedRow."""
    for record in (
        data,
        {"messages": [USER, message, ANSWER], "tools": message},
        assistant(**{"content": "x", "tool_calls": [message]}),
    ):
        try:
            assert isinstance(normalise(record), Conversation)
        except RejectedRow as error:
            assert error.detail


@pytest.mark.skipif("CHATMASK_SHARED" not in os.environ, reason="CHATMASK_SHARED is not set")
def test_real_trajectories_are_unchanged() -> None:
    """Real SWE-agent conversations all pass, and stay as they are."""
    _, chunks = plan([Path(os.environ["CHATMASK_SHARED"]) / "data" / "swe_agent_real.jsonl"])
    rows = [parse(record) for chunk in chunks for record in read(chunk)]
    assert len(rows) == 22
    assert [messages_of(row) for row in rows] == [row["messages"] for row in rows]


# --- shapes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", [role for role in ROLES if role != "function_call"])
def test_sharegpt_roles(role: str) -> None:
    """Each known role name is understood under `from`."""
    data = {"conversations": [{"from": role, "value": "a"}, {"from": "gpt", "value": "b"}]}
    assert messages_of(data)[0] == {"role": ROLES[role], "content": "a"}


def test_sharegpt_function_call() -> None:
    """A function_call turn becomes an assistant message with one or more calls, and its result a tool message."""
    for text in ('{"name": "add", "arguments": {"x": 1}}', '[{"name": "add", "arguments": {"x": 1}}]'):
        turns = [{"from": "human", "value": "q"}, {"from": "function_call", "value": text}, {"from": "observation", "value": "3"}]
        called = [{"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}]
        assert messages_of({"conversations": turns})[1:] == [
            {"role": "assistant", "content": None, "tool_calls": called},
            {"role": "tool", "content": "3"},
        ]
    for text in ("add(1)", "[]", '{"arguments": {}}', '{"name": "a", "name": "b", "arguments": {}}'):
        error = rejected({"conversations": [{"from": "human", "value": "q"}, {"from": "function_call", "value": text}]})
        assert (error.reason.value, error.message) == ("bad_tool_call", 1)


def test_nested_conversations_use_the_last_and_count_the_others() -> None:
    """Of a log of requests the last is used with its own tools; the record's tools stand in where it has none."""
    last: Json = {"messages": [USER, ANSWER], "tools": [TOOL]}
    found = normalise({"conversations": [{"messages": [USER]}, {"messages": [USER]}, last], "tools": []})
    assert (found.messages, found.tools, found.notes) == ([USER, ANSWER], [TOOL], {"conversations_ignored": 2})
    assert normalise({"conversations": [{"messages": [USER, ANSWER], "tools": None}], "tools": [TOOL]}).tools == [TOOL]
    assert rejected({"conversations": [{"messages": [USER]}, USER]}).reason.value == "bad_message"


def test_swe_agent_history() -> None:
    """Bookkeeping goes, text parts are joined, a demonstration is context, a result keeps its call's id."""
    history: list[Json] = [
        {"role": "system", "content": "S", "agent": "main", "message_type": "system_prompt"},
        {"role": "assistant", "content": "demo", "is_demo": True, "agent": "main", "thought": "t", "action": "ls"},
        {"role": "user", "content": [{"type": "text", "text": "T", "cache_control": {"type": "ephemeral"}}], "tags": []},
        {"role": "assistant", "content": "look", "thought": "look", "action": "ls", "tool_calls": [CALL], "is_demo": False},
        {"role": "tool", "content": "out", "tool_call_ids": ["c1"], "message_type": "observation"},
    ]
    found = normalise({"history": history, "trajectory": [{"action": "ls"}], "info": {}, "environment": "e"})
    assert found.messages == [
        {"role": "system", "content": "S"},
        {"role": "assistant", "content": "demo"},
        {"role": "user", "content": "T"},
        {"role": "assistant", "content": "look", "tool_calls": [CALL]},
        {"role": "tool", "content": "out", "tool_call_id": "c1"},
    ]
    assert found.flags == (None, False, None, None, None)


def test_mini_swe_agent_exit_entry_is_counted_and_gone() -> None:
    """The log's closing `exit` entries are no messages; elsewhere that role is unknown."""
    end = {"role": "exit", "content": "Submitted", "extra": {}}
    turns = [USER, {**ANSWER, "extra": {"cost": 0.1}, "timestamp": 1.5, "provider_specific_fields": {}}]
    kind = {"trajectory_format": "mini-swe-agent-1.1", "info": {}}
    for count in (1, 2):
        found = normalise({"messages": turns + [end] * count, **kind})
        assert (found.messages, found.notes) == ([USER, ANSWER], {"exit_messages": count})
    assert normalise({"messages": turns, **kind}).notes == {}
    assert rejected({"messages": [*turns, end]}).reason.value == "unknown_role"
    error = rejected({"messages": [*turns, end, USER], **kind})
    assert (error.reason.value, error.message) == ("unknown_role", 2)
    assert rejected({"messages": [end], **kind}).reason.value == "empty_messages"


@pytest.mark.parametrize("version", ["mini-swe-agent-1", "mini-swe-agent-1.1"])
def test_a_mini_swe_agent_file_is_one_conversation(tmp_path: Path, version: str) -> None:
    """A trajectory file, indented over many lines, is one record with the messages that the model saw."""
    seen: list[Json] = [{"role": "system", "content": "S"}, USER, {**ANSWER, "content": "```bash\nls\n```"}]
    if version == "mini-swe-agent-1":
        written = [*seen, {"role": "user", "content": "", "timestamp": 2.0}]
        expected, notes = [*seen, {"role": "user", "content": ""}], {}
    else:
        # a call as litellm dumps it, with its nulls, and its result
        seen.append({"role": "assistant", "content": None, "tool_calls": [CALL]})
        seen.append({"role": "tool", "content": "<returncode>1</returncode>", "tool_call_id": "c1"})
        dumped = {**seen[3], "function_call": None, "provider_specific_fields": None, "extra": {"response": {"id": "r"}}}
        written = [*seen[:3], dumped, {**seen[4], "extra": {}}, {"role": "exit", "content": "d", "extra": {"submission": "d"}}]
        expected, notes = seen, {"exit_messages": 1}
    document = {"info": {"exit_status": "Submitted"}, "messages": written, "trajectory_format": version, "instance_id": "a"}
    path = tmp_path / "a.traj.json"
    path.write_text(json.dumps(document, indent=2))
    (chunk,) = plan([path])[1]
    (row,) = read(chunk)
    found = normalise(parse(row))
    assert (found.messages, found.notes, found.tools) == (expected, notes, None)


def test_prompt_and_completion() -> None:
    """The completion is trained and the prompt's answers are not, unless a message says so itself."""
    assert normalise({"prompt": "q", "completion": "a"}).flags == (None, True)
    found = normalise({"prompt": [USER, ANSWER, USER], "completion": [{**ANSWER, "weight": 0}, ANSWER]})
    assert found.flags == (None, False, None, False, True)


@pytest.mark.parametrize("key", ["messages", "conversations", "history"])
def test_turns_as_json_text(key: str) -> None:
    """JSON text of a list of messages is that list, with its nulls; text that is none, or of something else, has its reason."""
    turns = [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    assert messages_of({key: json.dumps(turns), "tools": json.dumps([TOOL])}) == turns
    for text in ("hi", "", "{}", '"[]"', "[NaN]", '[{"role": "user", "role": "user"}]', "[" * 100 + "]" * 100):
        assert rejected({key: text}).reason.value == "no_messages"
    assert rejected({key: "[]"}).reason.value == "empty_messages"
    assert messages_of({"prompt": "[]", "completion": "[]"})[0]["content"] == "[]"


def test_two_conversations_in_one_record() -> None:
    """Two that agree are one, and two that differ are rejected; a lone prompt is metadata."""
    turns = [{"from": "human", "value": USER["content"]}, {"from": "gpt", "value": ANSWER["content"]}]
    assert messages_of({"messages": [USER, ANSWER], "conversations": turns}) == [USER, ANSWER]
    assert messages_of({"messages": [USER, ANSWER], "prompt": "other"}) == [USER, ANSWER]
    assert rejected({"messages": [USER, ANSWER], "conversations": turns[:1] + turns}).reason.value == "ambiguous_record"
    assert rejected({"messages": [USER, ANSWER], "prompt": "a", "completion": "b"}).reason.value == "ambiguous_record"
    both = {"prompt": [USER], "completion": [ANSWER], "messages": [USER, ANSWER]}
    assert normalise(both).flags == (None, True)
    assert rejected({**both, "messages": [USER, {**ANSWER, "train": False}]}).reason.value == "flag_conflict"


def test_a_system_text_beside_the_turns_is_not_lost() -> None:
    """`system` becomes the first message, once; a different system message beside it is ambiguous."""
    found = normalise({"system": "S", "messages": [USER, ANSWER]})
    assert (found.messages[0], found.flags, found.notes) == (
        {"role": "system", "content": "S"},
        (None,) * 3,
        {"system_from_record": 1},
    )
    assert messages_of({"system": "S", "messages": found.messages}) == found.messages
    assert rejected({"system": "T", "messages": found.messages}).reason.value == "ambiguous_record"


# --- fields -----------------------------------------------------------------------------------------------------------


def test_roles_can_be_extended_and_overridden() -> None:
    """The `roles` argument adds names and changes known ones."""
    turns = [{"role": "critic", "content": "a"}, {"role": "developer", "content": "b"}, ANSWER]
    found = messages_of({"messages": turns}, roles={"critic": "user", "developer": "developer"})
    assert [message["role"] for message in found] == ["user", "developer", "assistant"]


def test_reasoning_under_any_name() -> None:
    """One reasoning text, or several equal ones, become `reasoning_content`; null content is then allowed."""
    for fields in ({"reasoning": "r"}, {"thinking": "r", "reasoning_content": "r"}, {"reasoning_content": "r", "reasoning": ""}):
        assert messages_of(assistant(content="a", **fields))[1] == {"role": "assistant", "content": "a", "reasoning_content": "r"}
    assert messages_of(assistant(content=None, reasoning="r"))[1]["content"] is None


def test_calls_keep_their_arguments() -> None:
    """Arguments stay a dict or text, a meant null survives, and older forms become `tool_calls`."""
    assert messages_of(assistant(tool_calls=[CALL]))[1] == {"role": "assistant", "content": None, "tool_calls": [CALL]}
    old = {"name": "add", "arguments": '{"x": null}'}
    expected = [{"type": "function", "function": old}]
    for fields in ({"function_call": old}, {"tool_calls": [old]}, {"tool_calls": [{"function": old}], "function_call": old}):
        assert messages_of(assistant(content="", **fields))[1]["tool_calls"] == expected


def test_tools_in_every_form() -> None:
    """A list, its JSON text, bare functions and the older `functions` are one thing; an empty list is none."""
    bare = TOOL["function"]
    forms: list[Json] = [{"tools": [TOOL]}, {"tools": json.dumps([TOOL])}, {"tools": [bare]}, {"functions": [bare]}]
    forms += [{"tools": [{"type": "function", **bare}]}, {"tools": [TOOL], "functions": [bare]}]
    for form in forms:
        assert normalise({"messages": [USER, ANSWER], **form}).tools == [TOOL]
    nothing: list[Json] = [{"tools": None}, {"tools": []}, {"tools": ""}, {"tools": "[]"}]
    for empty in nothing:
        assert normalise({"messages": [USER, ANSWER], **empty}).tools is None


@pytest.mark.parametrize("key", ["train", "training", "trainable", "loss", "loss_mask", "weight"])
def test_flags_are_read_and_removed(key: str) -> None:
    """Each flag name is understood, as a boolean or as 0 and 1, and does not stay in the message."""
    for value in (True, False, 0, 1):
        found = normalise(assistant(content="a", **{key: value}))
        assert (found.flags, found.messages[1]) == ((None, bool(value)), {"role": "assistant", "content": "a"})


def part(text: str, **fields: Any) -> Json:
    """A text part with these further fields."""
    return {"type": "text", "text": text, **fields}


@pytest.mark.parametrize("key", ["train", "training", "trainable", "loss", "loss_mask", "weight"])
def test_part_flags_are_ranges_of_the_joined_content(key: str) -> None:
    """Each flagged part is a range of characters; equal neighbours are one, empty parts none, and a silent part is left open."""
    parts = [
        "ab",
        part(""),
        part("é\U0001f600", **{key: 1}),
        part("x", **{key: True}),
        part("", **{key: 0}),
        part("yz", **{key: 0}),
    ]
    found = normalise(assistant(content=[*parts, part("open"), part("end", **{key: False})]))
    assert found.messages[1] == {"role": "assistant", "content": "abé\U0001f600xyzopenend"}
    assert (found.flags, found.part_flags) == ((None, None), ((), ((2, 5, True), (5, 7, False), (11, 14, False))))
    assert normalise(assistant(content=["ab", part("c"), part("d", **{key: None})])).part_flags == ()
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": [part("c", **{key: 0})]}]
    assert normalise({"conversations": turns, "system": [part("S", **{key: 0})]}).part_flags == (
        ((0, 1, False),),
        (),
        ((0, 1, False),),
    )


flagged = st.builds(lambda text, flag: part(text, **({} if flag is None else {"train": flag})), texts, st.none() | st.booleans())


@given(st.lists(flagged, max_size=6))
@settings(max_examples=150, deadline=None)
def test_part_flags_say_of_each_character_what_its_part_says(parts: list[Json]) -> None:
    """Spread over the characters, the ranges give back the parts' flags; they are in order, not empty, and as few as can be."""
    found = normalise(assistant(content=parts))
    ranges = found.part_flags[1] if found.part_flags else ()
    said: list[bool | None] = [None] * len(found.messages[1]["content"])
    for start, end, flag in ranges:
        assert start < end and said[start:end] == [None] * (end - start)
        said[start:end] = [flag] * (end - start)
    assert said == [one.get("train") for one in parts for _ in one["text"]]
    assert all(a[1] < b[0] or a[2] != b[2] for a, b in pairwise(ranges)) and list(ranges) == sorted(ranges)


def test_a_part_is_nearer_than_its_place_but_never_contradicts_its_message() -> None:
    """A part may differ from what `prompt` and `completion` say, not from its message's flag, nor from a second telling."""
    no, yes = (
        {"role": "assistant", "content": [part("a", train=False)]},
        {"role": "assistant", "content": [part("a", train=True)]},
    )
    found = normalise({"prompt": [USER, yes, USER], "completion": [no]})
    assert (found.flags, found.part_flags) == ((None, False, None, True), ((), ((0, 1, True),), (), ((0, 1, False),)))
    plain = {"role": "assistant", "content": "a"}
    for both in ([no, plain], [plain, no], [no, {**no, "weight": 0}], [no, {**plain, "weight": 0}]):
        data = {"messages": [USER, both[0]], "conversations": [USER, both[1]]}
        assert normalise(data).part_flags == ((), ((0, 1, False),))
    for first, second in ((no, yes), (yes, {**plain, "train": False}), ({**plain, "train": False}, yes)):
        error = rejected({"messages": [USER, first], "conversations": [USER, second]})
        assert (error.reason.value, error.message) == ("flag_conflict", 1)


def test_is_error_is_a_boolean_of_a_tool_message() -> None:
    """`is_error` stays with its tool message as true or false; null says nothing, and of other roles it is an unknown key."""
    for value, expected in ((True, True), (False, False), (1, True), (0, False), (1.0, True)):
        result = messages_of({"messages": [USER, {"role": "tool", "content": "x", "is_error": value}, ANSWER]})[1]
        assert result["is_error"] is expected
    assert "is_error" not in messages_of({"messages": [USER, {"role": "tool", "content": "x", "is_error": None}, ANSWER]})[1]
    assert messages_of({"messages": [{**USER, "is_error": "?"}, ANSWER]})[0]["is_error"] == "?"
    by_name = {"messages": [USER, {"role": "observation", "content": "x", "is_error": 1}, ANSWER]}
    assert messages_of(by_name)[1]["is_error"] is True


# --- rejections -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "expected", "message"),
    [
        ({}, "no_messages", None),
        ({"text": "<|im_start|>"}, "no_messages", None),
        ({"messages": "hi"}, "no_messages", None),
        ({"messages": []}, "empty_messages", None),
        ({"messages": None, "conversations": []}, "empty_messages", None),
        ({"messages": [USER]}, "no_assistant", None),
        ({"messages": [USER, "hi"]}, "bad_message", 1),
        ({"messages": [{"content": "hi"}]}, "bad_message", 0),
        ({"messages": [{"role": 1, "content": "hi"}]}, "bad_message", 0),
        ({"messages": [USER, {"role": "critic", "content": "hi"}]}, "unknown_role", 1),
        ({"messages": [{"role": "user", "content": None}]}, "null_content", 0),
        ({"messages": [{"role": "tool"}]}, "null_content", 0),
        (assistant(content=None), "null_content", 1),
        (assistant(content=None, reasoning="", tool_calls=[]), "null_content", 1),
        (assistant(content=5), "bad_content", 1),
        (assistant(content={"text": "a"}), "bad_content", 1),
        (assistant(content=[{"type": "text"}]), "bad_content", 1),
        (assistant(content=[{"type": "image_url"}]), "unsupported_part", 1),
        (assistant(content=[{"type": "text", "text": "a"}, {"type": "tool_use", "name": "f"}]), "unsupported_part", 1),
        (assistant(content="a", reasoning="r", thinking="s"), "reasoning_conflict", 1),
        (assistant(content="a", reasoning={"effort": "low"}), "bad_message", 1),
        ({"messages": [{**USER, "tool_calls": [CALL]}]}, "bad_message", 0),
        (assistant(content="a", tool_calls={}), "bad_tool_call", 1),
        (assistant(content="a", tool_calls=[{"function": {"arguments": {}}}]), "bad_tool_call", 1),
        (assistant(content="a", tool_calls=[{"name": "f", "parameters": {"x": 1}}]), "bad_tool_call", 1),
        (assistant(content="a", tool_calls=[{"type": "custom", "name": "f"}]), "bad_tool_call", 1),
        (assistant(content="a", tool_calls=[CALL], function_call={"name": "g"}), "bad_tool_call", 1),
        (assistant(content="a", tool_calls=[{"name": "f", "arguments": [1]}]), "bad_tool_arguments", 1),
        (assistant(content="a", train=True, weight=0), "flag_conflict", 1),
        (assistant(content="a", train=True, is_demo=True), "flag_conflict", 1),
        (assistant(content=[{"type": "text", "text": "a", "train": True}], train=False), "flag_conflict", 1),
        (assistant(content=["b", {"type": "text", "text": "a", "loss": 0}], weight=1), "flag_conflict", 1),
        (assistant(content=[{"type": "text", "text": "a", "train": True}], is_demo=True), "flag_conflict", 1),
        (assistant(content=[{"type": "text", "text": "a", "train": True, "weight": 0}]), "flag_conflict", 1),
        (assistant(content=[{"type": "text", "text": "a", "weight": 0.5}]), "bad_flag", 1),
        (assistant(content=[{"type": "text", "text": "a", "train": "no"}]), "bad_flag", 1),
        (assistant(content="a", weight=0.5), "bad_flag", 1),
        (assistant(content="a", loss_mask=[0, 1]), "bad_flag", 1),
        (assistant(content="a", train="yes"), "bad_flag", 1),
        (assistant(content="a", train_detail=[{"begin_offset": 0, "end_offset": 0, "train": False}]), "bad_flag", 1),
        (assistant(content=[{"type": "text", "text": "a", "training_detail": [{"train": False}]}]), "bad_flag", 1),
        *((assistant(content="a", tool_calls=[{**CALL, key: 0}]), "bad_flag", 1) for key in ("train", "weight", "loss_mask")),
        (assistant(content="a", tool_calls=[{"function": {"name": "f", "arguments": {}, "train": False}}]), "bad_flag", 1),
        (assistant(content="a", function_call={"name": "f", "arguments": "{}", "train": False}), "bad_flag", 1),
        (assistant(content="a", tool_call_ids=["a", "b"]), "bad_message", 1),
        *(
            ({"messages": [USER, {"role": "tool", "content": "x", "is_error": value}, ANSWER]}, "bad_message", 1)
            for value in ("true", "false", "", 2, 0.5, {}, [True])
        ),
        ({"messages": [USER, ANSWER], "tools": "{bad"}, "bad_tools", None),
        ({"messages": [USER, ANSWER], "tools": {"name": "f"}}, "bad_tools", None),
        ({"messages": [USER, ANSWER], "tools": ["f"]}, "bad_tools", None),
        ({"messages": [USER, ANSWER], "tools": [{"type": "function"}]}, "bad_tools", None),
        ({"messages": [USER, ANSWER], "tools": [{"name": "f", "input_schema": {}}]}, "bad_tools", None),
        ({"messages": [USER, ANSWER], "tools": [TOOL], "functions": [{"name": "g"}]}, "bad_tools", None),
    ],
)
def test_each_kind_of_bad_conversation_has_its_reason(data: Json, expected: str, message: int | None) -> None:
    """The rejection carries the right reason and the index of the message at fault."""
    error = rejected(data)
    assert (error.reason.value, error.message) == (expected, message)


def test_too_many_messages() -> None:
    """The limit is on the number of messages, and is inclusive."""
    data = {"messages": [USER, ANSWER]}
    assert len(messages_of(data, max_messages=2)) == 2
    assert rejected(data, max_messages=1).reason.value == "too_many_messages"


def test_a_null_under_one_of_two_names_of_content_says_nothing() -> None:
    """A table with both columns has nulls in one of them: `value: null` beside a filled `content` is no contradiction."""
    turns = [{"from": "human", "value": "q", "content": None}, {"from": "gpt", "value": None, "content": "a"}]
    assert [message["content"] for message in normalise({"conversations": turns}).messages] == ["q", "a"]


@pytest.mark.parametrize("flag", [{"train": False}, {"weight": 0}, {"loss_mask": [0, 1]}])
@pytest.mark.parametrize("nested", [False, True])
def test_a_flag_beside_the_messages_is_not_overlooked(flag: Json, nested: bool) -> None:
    """A record that says of itself that it is not trained, or which tokens are, is refused; a measured loss or a weight is no such word."""
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]

    def record(**fields: Any) -> Json:
        inner = {"messages": turns, **fields}
        return {"conversations": [inner]} if nested else inner

    assert rejected(record(**flag)).reason == "bad_flag"
    assert normalise(record(loss=1.25, weight=0.5, train=True)).messages == turns


@pytest.mark.parametrize("key", ["reasoning_details", "thinking_blocks"])
def test_reasoning_in_another_form_is_not_lost(key: str) -> None:
    """Reasoning as a list of blocks is refused where no text of it stands beside it."""
    turn = {"role": "assistant", "content": "a", key: [{"type": "thinking", "thinking": "because"}]}
    assert rejected({"messages": [{"role": "user", "content": "q"}, turn]}).reason == "bad_message"
    given = normalise({"messages": [{"role": "user", "content": "q"}, {**turn, "reasoning_content": "because"}]})
    assert given.messages[1]["reasoning_content"] == "because"


def test_both_names_of_a_role_may_stand_in_one_message() -> None:
    """`role` beside `from` and `value` says the same thing twice."""
    turns = [{"role": "user", "from": "human", "value": "q"}, {"role": "assistant", "from": "gpt", "value": "a"}]
    assert [m["content"] for m in normalise({"messages": turns}).messages] == ["q", "a"]

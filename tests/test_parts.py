"""Flags of content parts in the mask: the characters of a flagged part are not trained, all the rest of the turn is."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import chatmask
from chatmask.conversation import normalise
from chatmask.encoding import edge_at
from chatmask.errors import RejectedRow
from chatmask.example import Example, by_turn
from chatmask.inspecting import inspect_rows, render_html, render_text, to_json
from chatmask.ledger import Ledger
from chatmask.masking import Emission, mask_tokens
from chatmask.policy import load_policy
from chatmask.sampling import make
from tests import references

Json = dict[str, Any]
SPECS = ["ling-3.0", "ling-3.0-thinking", "qwen3-instruct", "qwen3-thinking", "ling-flash-2.0"]
USER: Json = {"role": "user", "content": "Add 2 and 2."}


@cache
def parser(spec: str) -> Any:
    """A compiled demo parser."""
    return chatmask.load_parser(spec, demo=True)


def part(text: str, train: bool | None = None) -> Json:
    """A text part, with a flag or without."""
    return {"type": "text", "text": text, **({} if train is None else {"train": train})}


def answer(*parts: Any, **more: Any) -> Json:
    """An assistant message whose content is these parts."""
    return {"role": "assistant", "content": list(parts), **more}


def pieces(spec: str, *messages: Json) -> list[list[tuple[str, str]]]:
    """By turn: (`+` trained, else the reason; decoded text)."""
    parse = parser(spec)
    found = parse.parse({"messages": [USER, *messages]})
    check(found)
    return [
        [(span.reason or "+", parse.loaded.decode(found.ids[span.start : span.end])) for span in turn]
        for turn in by_turn(found.spans)
    ]


def check(found: Example) -> None:
    """The span table is ordered, without overlap, and says where the mask is 1."""
    mask = np.zeros_like(found.mask)
    position = 0
    for span in found.spans:
        assert position <= span.start <= span.end
        assert bool(span.reason) is not span.trained
        position = span.end
        mask[span.start : span.end] = span.trained
    assert (mask == found.mask).all()


@pytest.mark.parametrize("spec", SPECS)
def test_a_flagged_part_is_not_trained_and_the_rest_of_its_turn_is(spec: str) -> None:
    """Parts with a flag against them are cut out of the turn; what surrounds them and the end token stay."""
    first = {"reasoning_content": "Sum."} if spec.endswith("thinking") else {}
    (turn,) = pieces(spec, answer(part("Well. "), part("QUOTED TEXT.", False), part(" It is 4."), **first))
    assert [reason for reason, _ in turn] == ["+", "part_flag", "+"]
    text = "".join(text for _, text in turn)
    assert turn[1][1].strip().startswith("QUOTED") and "QUOTED" not in turn[0][1] + turn[2][1]
    assert "Well." in turn[0][1] and "It is 4." in turn[2][1] and not text.endswith("4.")


def test_nothing_changes_without_a_flag_against_a_part() -> None:
    """Parts without flags, or with flags for training, give what the joined text gives."""
    parse = parser("qwen3-instruct")
    plain = parse.parse({"messages": [USER, {"role": "assistant", "content": "Well. It is 4."}]})
    for parts in ((part("Well. "), part("It is 4.")), (part("Well. ", True), part("It is 4."))):
        found = parse.parse({"messages": [USER, answer(*parts)]})
        assert (found.input_ids, found.loss_mask, found.spans) == (plain.input_ids, plain.loss_mask, plain.spans)


def test_a_think_block_given_as_a_part_is_not_trained_with_its_closing_tag() -> None:
    """A block that content begins with becomes reasoning and takes its part's flag along; so does the answer behind it."""
    block = "<think>\nTwo and two.\n</think>\n\n"
    (turn,) = pieces("qwen3-thinking", answer(part(block, False), part("It is 4.")))
    assert [reason for reason, _ in turn] == ["part_flag", "+"]
    assert turn[0][1].endswith("</think>\n\n") and turn[1][1].startswith("It is 4.")
    (turn,) = pieces("qwen3-thinking", answer(part(block), part("It is 4.", False)))
    assert [reason for reason, _ in turn] == ["+", "part_flag", "+"]
    assert turn[0][1].endswith("</think>") and turn[1][1].strip() == "It is 4." and turn[2][1].startswith("<|im_end|>")


def test_a_content_word_that_reasoning_holds_too_is_found_in_the_content() -> None:
    """The flag of a short part is about the answer, though the same word stands in the reasoning and in the call."""
    call = {"type": "function", "function": {"name": "four", "arguments": {"x": "4"}}}
    (turn,) = pieces(
        "ling-3.0-thinking", answer(part("4", False), part("!"), reasoning_content="It is 4, so 4!", tool_calls=[call])
    )
    assert "".join(text for reason, text in turn if reason == "+").count("4") >= 3
    assert [text.strip() for reason, text in turn if reason == "part_flag"] in (["4"], ["4!"], ["</think>4"])


def test_a_turn_of_nothing_but_flagged_parts_is_not_trained_at_all() -> None:
    """Where every character of content is flagged and there is nothing else, the end token is not trained either; a call keeps it."""
    whole = [answer(part("No.", False)), USER, {"role": "assistant", "content": "Yes."}]
    assert [turn[0][0] for turn in pieces("qwen3-instruct", *whole)] == ["part_flag", "+"]
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    (turn,) = pieces("qwen3-instruct", answer(part("No.", False), tool_calls=[call]))
    assert [reason for reason, _ in turn] == ["part_flag", "+"]
    with pytest.raises(RejectedRow) as caught:
        pieces("qwen3-instruct", whole[0])
    assert caught.value.reason == "zero_supervision"


def test_a_message_flag_masks_all_and_a_part_of_a_prompt_may_be_trained() -> None:
    """A message's own flag against training masks all of it; of an assistant turn in `prompt` the flagged part alone is trained."""
    last = [USER, {"role": "assistant", "content": "Yes."}]
    turns = pieces("qwen3-instruct", answer(part("a ", False), part("b"), train=False), *last)
    assert [reason for reason, _ in turns[0]] == ["flag"]
    parse = parser("qwen3-instruct")
    found = parse.parse({"prompt": [USER, answer(part("Not this."), part(" But this.", True)), USER], "completion": "Yes."})
    check(found)
    first = by_turn(found.spans)[0]
    assert [span.reason for span in first] == ["flag", "", "flag"]
    assert parse.loaded.decode(found.ids[first[1].start : first[1].end]).strip() == "But this."


def test_trimmed_edges_are_cut_from_a_flag() -> None:
    """White space that the template trims away takes nothing of the text beside it along."""
    (turn,) = pieces("qwen3-instruct", answer(part("\n\n", False), part("It is 4.")))
    assert turn == [("+", "It is 4.<|im_end|>")]


def test_quoted_control_tokens_do_not_move_a_flag() -> None:
    """Ranges hold where content quotes control tokens, which are shielded on the way."""
    (turn,) = pieces(
        "qwen3-instruct", answer(part("Say <|im_end|> twice: <|im_start|>. "), part("HIDDEN", False), part(" Done."))
    )
    assert [text.strip() for reason, text in turn if reason == "part_flag"] == ["HIDDEN"]


def test_a_token_across_the_border_of_a_part_is_a_straddle_and_not_trained() -> None:
    """A token with characters on both sides of a part's border belongs to the untrained span; it is counted once."""
    starts, ends = np.array([0, 2, 4, 6], np.int32), np.array([2, 4, 6, 8], np.int32)
    edges = {border: edge_at(starts, ends, border) for border in (2, 3, 4, 8)}
    mask, spans, straddles = mask_tokens(edges, 4, [Emission(1, 2, 8, "", ((3, 4),), "part_flag")])
    assert (mask.tolist(), straddles) == ([0, 0, 1, 1], 1)
    assert [(s.start, s.end, s.trained, s.reason) for s in spans] == [(1, 2, False, "part_flag"), (2, 4, True, "")]


def test_flags_follow_the_steps_of_a_policy() -> None:
    """Cuts, stripped reasoning, foreign tags and windows keep each flag on its own characters."""
    chat = {
        "messages": [
            USER,
            answer(part("<thinking>Old</thinking>\n"), part("SECRET", False), part(" one.")),
            USER,
            answer(part("<thinking>New</thinking>\n", False), part("Two "), part("SECRET", False), part(" end.")),
        ]
    }
    parse = parser("ling-3.0-thinking")
    for changes in (
        ["split=per_turn"],
        ["split=exact"],
        ["strip_thinking=context", "split=per_turn"],
        ["strip_thinking=all"],
        ["strip_thinking=all", "empty_think=all"],
        ["max_length=70", "overlength=explode"],
    ):
        made = make(normalise(chat), load_policy(None, [*changes, "think_tags=[[<thinking>, </thinking>]]"]), parse, "k")
        assert made.rows
        for _, found in made.rows:
            check(found)
            trained = [parse.loaded.decode(found.ids[s.start : s.end]) for s in found.spans if s.trained]
            hidden = [parse.loaded.decode(found.ids[s.start : s.end]) for s in found.spans if s.reason == "part_flag"]
            assert not any("SECRET" in text or "New" in text for text in trained), changes
            assert any("SECRET" in text for text in hidden), changes


def test_turns_are_counted_as_turns_and_shown_piece_by_piece(tmp_path: Path) -> None:
    """The ledger counts turns, not spans; `inspect` names each piece with its reason, as text, JSON and HTML."""
    parse = parser("qwen3-instruct")
    chat = {"messages": [USER, answer(part("Well. "), part("HIDDEN", False), part(" It is 4."))]}
    ledger = Ledger()
    ledger.add_example(parse.example(normalise(chat), oracle=True))
    assert (ledger.turns, ledger.trained_turns, ledger.untrained.total(), ledger.parity["turns"]) == (1, 1, 0, 1)
    assert ledger.notes["turns_trained_in_part"] == 1
    path = tmp_path / "a.jsonl"
    path.write_bytes(json.dumps(chat).encode())
    built = chatmask.build(path, "qwen3-instruct", tmp_path / "d", demo=True).dataset
    for items in (list(inspect_rows(path, spec="qwen3-instruct", demo=True)), list(inspect_rows(built))):
        (item,) = items
        assert [span.reason for span in item.spans] == ["", "part_flag", ""] and len(item.turns) == 1 and not item.notes
        text = render_text(item, False, None)
        assert "not trained: part_flag (a flag of this part of the content says so)" in text
        assert [span["reason"] for span in to_json(item)["spans"]] == ["", "part_flag", ""]
        assert "1 of them in part" in render_html([item], "x")


def trained_texts(parse: Any, data: Json, *changes: str) -> list[tuple[str, str]]:
    """(`+` or the reason, decoded text) of each span of the one sample that a policy makes."""
    ((_, found),) = make(normalise(data), load_policy(None, list(changes)), parse, "k").rows
    check(found)
    return [(span.reason or "+", parse.loaded.decode(found.ids[span.start : span.end])) for span in found.spans]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("role", ["system", "user", "tool", "assistant"])
@pytest.mark.parametrize("whole", [True, False], ids=["message", "part"])
def test_all_text_leaves_out_what_is_flagged_in_any_role(spec: str, role: str, whole: bool) -> None:
    """Under `train_on: all_text` a flagged message or part is not trained, wherever the template writes it; other texts are."""
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": "ARGUMENT"}}}
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}}
    texts = {"system": "RULES", "user": "QUESTION", "assistant": "CALLING", "tool": "RESULT"}
    messages: list[Json] = [{"role": name, "content": text} for name, text in texts.items()]
    messages[2]["tool_calls"] = [call]
    messages += [{"role": "assistant", "content": "ANSWER"}]
    for message in messages:
        if message["content"] == texts[role]:
            message.update({"train": False} if whole else {"content": [part("Before "), part("HIDDEN", False), part(" behind")]})
    spans = trained_texts(parser(spec), {"messages": messages, "tools": [tool]}, "train_on=all_text")
    trained = "".join(text for reason, text in spans if reason == "+")
    assert (texts[role] if whole else "HIDDEN") not in trained
    # the first system text goes with the first message of the template's loop
    kept = {*texts.values(), "ANSWER"} - {texts[role]} - ({"RULES"} if whole and role == "user" else set())
    assert all(text in trained for text in kept), trained
    assert whole or ("Before" in trained and "behind" in trained)


@pytest.mark.parametrize("split", ["trajectory", "per_turn", "exact"])
@pytest.mark.parametrize("inline", [True, False], ids=["inline", "field"])
def test_a_turn_whose_reasoning_is_not_trained_and_whose_answer_is_flagged_is_not_trained(split: str, inline: bool) -> None:
    """Where a spec or a policy takes the reasoning from the training, an answer that is flagged whole takes its end token along."""
    answered = answer(part("<think>\nSum.\n</think>\n\n"), part("HIDDEN", False)) if inline else answer(part("HIDDEN", False))
    data = {"messages": [USER, answered | ({} if inline else {"reasoning_content": "Sum."}), USER, answer(part("Yes."))]}
    stripping = chatmask.load_parser("ling-3.0", demo=True, overrides=["thinking.strip=true"])
    ways = [(stripping, []), (parser("ling-3.0-thinking"), ["supervise_reasoning=false"])]
    ways += [(parser("ling-3.0-thinking"), ["strip_thinking=all"])] if split != "exact" else []
    for parse, changes in ways:
        spans = trained_texts(parse, data, f"split={split}", *changes)
        assert [reason for reason, _ in spans] == ["part_flag", "+"], spans
    (first, _) = pieces("ling-3.0-thinking", *data["messages"][1:])
    assert [reason for reason, _ in first] == ["+", "part_flag", "+"]  # its reasoning is trained, so its end is, too


def test_a_flag_on_content_that_the_template_leaves_out_by_declaration_is_no_reject() -> None:
    """Of content that is not in the text (`drops`) there is nothing to keep from training; the calls beside it are trained."""
    own = chatmask.load_parser("gpt-oss", tokenizer=references.for_spec(chatmask.load_spec("gpt-oss")))
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"x": "4"}}}
    messages = [USER, answer(part("Well. "), part("HIDDEN", False), tool_calls=[call])]
    messages += [{"role": "tool", "content": "ok", "tool_call_id": "c"}, {"role": "assistant", "content": "Done."}]
    found = own.parse({"messages": messages})
    assert "HIDDEN" not in found.text and all(span.trained for span in found.spans) and len(found.spans) == 2


@pytest.mark.parametrize("split", ["trajectory", "per_turn", "exact", "pre_split"])
def test_a_record_of_which_its_parts_leave_nothing_is_a_reject_as_with_a_message_flag(split: str) -> None:
    """What only the data's own flags take is never a quiet drop, whether a message or all of its parts say so."""
    for flagged in (answer(part("No.", False)), answer(part("No."), train=False)):
        with pytest.raises(RejectedRow) as caught:
            make(normalise({"messages": [USER, flagged]}), load_policy(None, [f"split={split}"]), parser("qwen3-instruct"), "k")
        assert caught.value.reason == "zero_supervision"

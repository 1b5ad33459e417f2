"""Trajectories: what a policy makes of one record, as properties of made-up ones and as single cases."""

from __future__ import annotations

import copy
import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmask.conversation import Conversation, normalise
from chatmask.errors import CheckFailed, OptionError, RejectedRow, RejectReason
from chatmask.parsers.parser import load_parser
from chatmask.parsers.thinking import reasoning_of, split_inline
from chatmask.policy import DEFAULT, Policy, list_policies, load_policy
from chatmask.templates.registry import load_spec
from chatmask.templates.spec import Thinking
from chatmask.trajectories import (
    EMPTY_BLOCK,
    THINK,
    Diversity,
    Sample,
    Tags,
    balance_class,
    balance_rank,
    chance,
    cut,
    diversity,
    expand,
    fewest,
    in_validation,
    keep_by_rank,
    rank,
    shuffle_rank,
    tags_of,
)

FIXTURE = Path(__file__).parent.parent / "fixtures" / "swe_raw.jsonl"
CALL = [{"id": "c", "type": "function", "function": {"name": "run", "arguments": {"x": "ü"}}}]
RULES = ("tool_error", "empty_tool_call", "bare_text_tool_call")
SPLITS = ("trajectory", "per_turn", "exact", "pre_split")


def user(text: str = "go") -> dict[str, Any]:
    return {"role": "user", "content": text}


def turn(content: str | None = "done", reasoning: str | None = None, calls: bool = False, **more: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": CALL if calls else None}
    return {**{key: value for key, value in message.items() if value is not None or key == "content"}, **more}


def result(is_error: Any = None) -> dict[str, Any]:
    return {"role": "tool", "content": "out", "tool_call_id": "c", **({} if is_error is None else {"is_error": is_error})}


def record(*messages: dict[str, Any], **more: Any) -> Conversation:
    return normalise({"messages": copy.deepcopy(list(messages)), **more})


def policy_of(**fields: Any) -> Policy:
    return Policy.model_validate({"name": "test", **fields})


def samples_of(conversation: Conversation, **fields: Any) -> list[Sample]:
    return expand(conversation, policy_of(**fields), "a.jsonl:1", shared=lambda _, i, j: True)[0]


def same_parity(_: Conversation, i: int, j: int) -> bool:
    """A relation that a template could have: a prefix order with two branches."""
    return i % 2 == j % 2


# --- made-up records ----------------------------------------------------------------------------------------------------------

TEXTS = st.sampled_from(["", "done", "  look\n", "a < b", "<task-notification>x</task-notification>"])
REASONINGS = st.sampled_from([None, None, "", "\n", "why not", "  so\n\nthen "])
BLOCKS = st.sampled_from(
    ["", "", "<think>\nwhy\n</think>\n\n", "<thinking>why</think>", "\n<reasoning>so</reasoning> ", "<think>\n</think>"]
)


@st.composite
def steps_of_agents(draw: st.DrawFn) -> list[dict[str, Any]]:
    """A question, an assistant turn, the results of its calls."""
    messages = [user(draw(TEXTS))] if draw(st.booleans()) else []
    block, reasoning, calls = draw(BLOCKS), draw(REASONINGS), draw(st.booleans())
    content: str | None = block + draw(TEXTS)
    if block and reasoning is not None:
        reasoning = None
    if not content and calls and draw(st.booleans()):
        content = None
    messages.append(turn(content, reasoning, calls, **({"train": False} if draw(st.integers(0, 5)) == 0 else {})))
    if calls:
        messages += [result(draw(st.sampled_from([None, False, True]))) for _ in range(draw(st.integers(0, 2)))]
    return messages


@st.composite
def records(draw: st.DrawFn) -> Conversation:
    """A conversation of an agent."""
    head = [{"role": "system", "content": "be brief"}] if draw(st.booleans()) else []
    steps = draw(st.lists(steps_of_agents(), min_size=1, max_size=6))
    return record(*head, user("start"), *itertools.chain.from_iterable(steps), tools=[{"name": "run"}])


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    """Any policy."""
    train_on = draw(st.sampled_from(["all", "last", "last_n"]))
    variants = draw(st.integers(1, 3))
    split = draw(st.sampled_from(SPLITS))
    return policy_of(
        split=split,
        train_on=train_on,
        last_n=draw(st.integers(1, 3)) if train_on == "last_n" else None,
        variants=variants,
        strip_probability=draw(st.sampled_from([0.3, 0.7] if variants > 1 else [0.0, 0.5])),
        strip_thinking=draw(st.sampled_from(["none", "all"] if split == "exact" else ["none", "context", "all"])),
        **{rule: draw(st.sampled_from(["train", "mask", "drop"])) for rule in RULES},
        truncate_at_notification=draw(st.booleans()),
        tools=draw(st.sampled_from(["record", "drop"])),
        empty_think=draw(st.sampled_from(["none", "target", "all"])),
        dict_arguments=draw(st.sampled_from(["given", "ascii_json"])),
        strip_blanks=draw(st.booleans()),
        seed=draw(st.integers(0, 3)),
    )


def turns_in(conversation: Conversation) -> set[int]:
    return {i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"}


def trained(samples: Sequence[Sample], variant: int = 0) -> list[int]:
    """Indices in the record of the turns that a variant trains."""
    return [sample.origin[i] for sample in samples if sample.variant == variant for i in sample.targets]


# --- properties ---------------------------------------------------------------------------------------------------------------


@given(records(), policies())
def test_every_turn_is_trained_or_untrained_or_dropped(whole: Conversation, policy: Policy) -> None:
    """In every mode each assistant turn of the record is trained in one sample of a variant, or dropped, or untrained, with a reason."""
    samples, dropped, steps = expand(whole, policy, "k", shared=same_parity)
    gone: dict[int, str] = {}
    for step in steps:
        assert not gone.keys() & step.dropped.keys()
        gone.update(step.dropped)
    assert dropped == Counter(gone.values())
    for variant in range(policy.variants) if samples else [0]:
        once = trained(samples, variant)
        assert len(once) == len(set(once))
        assert not set(once) & gone.keys()
        seen = {sample.origin[i] for sample in samples if sample.variant == variant for i in sample.untrained}
        assert set(once) | gone.keys() | seen == turns_in(whole)
    for sample in samples:
        assert set(sample.targets) | sample.untrained.keys() == turns_in(sample.conversation)
        assert not set(sample.targets) & sample.untrained.keys()
        assert all(sample.untrained.values())
        assert all(gone.values())


@given(records(), policies())
def test_samples_are_prefixes_of_the_record(whole: Conversation, policy: Policy) -> None:
    """A sample shows the record's messages from the first on, unchanged but for the assistant's reasoning and arguments."""
    for sample in expand(whole, policy, "k", shared=same_parity)[0]:
        messages = sample.conversation.messages
        assert sample.origin == tuple(range(len(messages)))
        assert len(sample.conversation.flags) == len(messages)
        assert sample.conversation.flags == whole.flags[: len(messages)]
        for mine, theirs in zip(messages, whole.messages, strict=False):
            if mine["role"] != "assistant":
                assert mine == theirs
            else:
                assert [c["id"] for c in mine.get("tool_calls", [])] == [c["id"] for c in theirs.get("tool_calls", [])]
        if policy.split in ("per_turn", "exact") and sample.targets:
            assert messages[-1]["role"] == "assistant"
            assert len(messages) - 1 in sample.targets
        if policy.split == "per_turn" and sample.targets:
            assert len(sample.targets) == 1


@given(records(), policies(), st.sampled_from(RULES), st.sampled_from(["mask", "drop"]))
def test_a_rule_only_takes_away(whole: Conversation, policy: Policy, rule: str, treatment: str) -> None:
    """Adding a rule trains no turn that was not trained before, in any mode."""
    before = policy.model_copy(update={rule: "train"})
    after = policy.model_copy(update={rule: treatment})
    less, more = (trained(expand(whole, one, "k", shared=same_parity)[0]) for one in (after, before))
    assert set(less) <= set(more)


@given(records(), policies())
def test_the_same_key_gives_the_same_samples(whole: Conversation, policy: Policy) -> None:
    """Samples depend on record, policy and key only, and the record is not changed."""
    untouched = copy.deepcopy(whole)
    first = expand(whole, policy, "k", shared=same_parity)
    expand(whole, policy, "another", shared=same_parity)
    assert expand(whole, policy, "k", shared=same_parity) == first
    assert whole == untouched


@given(records(), policies())
def test_variant_zero_is_untouched(whole: Conversation, policy: Policy) -> None:
    """Variant 0 of several is what a policy without random stripping gives."""
    if policy.variants == 1:
        return
    plain = policy.model_copy(update={"variants": 1, "strip_probability": 0.0})
    zero = [s for s in expand(whole, policy, "k", shared=same_parity)[0] if s.variant == 0]
    assert zero == expand(whole, plain, "k", shared=same_parity)[0]


@given(records())
def test_the_defaults_keep_every_record_as_it_is(whole: Conversation) -> None:
    """Without a policy a record whose blocks stand in the spec's own tags goes on as the very same messages."""
    own = all("<thinking>" not in (m["content"] or "") and "<reasoning>" not in (m["content"] or "") for m in whole.messages)
    (sample,), dropped, _ = expand(whole, DEFAULT, "k")
    assert (sample.conversation == whole) == own
    assert not dropped


@given(records(), policies())
def test_thinking_is_what_the_parser_reads(whole: Conversation, policy: Policy) -> None:
    """A sample's `thinking` names the turns in which the parser finds reasoning; where blocks were added it finds none."""
    thinking = Thinking(mode="on", open="<think>", close="</think>")
    for sample in expand(whole, policy, "k", shared=same_parity)[0]:
        read = [split_inline(m, i, thinking, "A:") for i, m in enumerate(sample.conversation.messages)]
        assert sample.thinking == {i for i, m in enumerate(read) if m["role"] == "assistant" and reasoning_of(m)}
        if policy.strip_thinking == "all":
            assert not sample.thinks
        if policy.strip_thinking == "context":
            assert sample.thinking <= sample.targets


@given(records(), policies())
def test_strip_touches_reasoning_only(whole: Conversation, policy: Policy) -> None:
    """What the parser reads as a turn's answer is the same with and without stripping, white space at its ends apart."""
    thinking = Thinking(mode="on", open="<think>", close="</think>")
    plain = policy.model_copy(update={"strip_thinking": "none", "strip_probability": 0.0, "variants": 1})
    kept = {s.index: s for s in expand(whole, plain, "k", shared=same_parity)[0]}

    def answers(sample: Sample) -> Iterator[str]:
        for i, message in enumerate(sample.conversation.messages):
            text = split_inline(message, i, thinking, "A:")["content"] or ""
            yield text.strip() if policy.strip_blanks else text

    for sample in expand(whole, policy, "k", shared=same_parity)[0]:
        assert list(answers(sample)) == list(answers(kept[sample.index]))


@given(st.lists(st.sampled_from(["thinking", "no_thinking_call", "final"]), max_size=60), st.floats(0, 3), st.integers(0, 9))
def test_balance_keeps_exactly_the_declared_share(kinds: list[str], ratio: float, seed: int) -> None:
    """Of the calls without reasoning exactly `int(thinking * ratio)` stay, or all where there are no more, in any order given."""
    thinking = kinds.count("thinking")
    calls = [rank(seed, i) for i, kind in enumerate(kinds) if kind == "no_thinking_call"]
    if calls and not thinking:
        with pytest.raises(CheckFailed, match="no sample has reasoning"):
            keep_by_rank(calls, thinking, ratio)
        return
    kept = keep_by_rank(calls, thinking, ratio)
    assert kept <= set(calls)
    assert len(kept) == min(len(calls), int(thinking * ratio))
    assert keep_by_rank(calls[::-1], thinking, ratio) == kept


@given(records(), st.floats(0, 0.99), st.integers(0, 9))
@settings(max_examples=30)
def test_validation_depends_on_what_a_record_says(whole: Conversation, share: float, seed: int) -> None:
    """A record is on one side of the parting by seed and content alone: a copy of it is on the same side, wherever it stands."""
    policy = policy_of(validation=share, seed=seed)
    side = in_validation(policy, whole)
    copied = [dict(reversed(message.items())) for message in whole.messages]
    assert in_validation(policy, replace(whole, messages=copied, notes={"n": 1})) == side
    assert in_validation(policy_of(validation=0.0, seed=seed), whole) is False


def test_validation_takes_its_share() -> None:
    """Of many records about the declared share is set apart."""
    policy = policy_of(validation=0.2)
    apart = sum(in_validation(policy, record(user(f"q{i}"), turn("a"))) for i in range(1000))
    assert 160 < apart < 240


# --- exact --------------------------------------------------------------------------------------------------------------------


def _minimum(turns: Sequence[int], shared: Callable[[int, int], bool]) -> int:
    """The least number of ends such that every turn is one or shares with one, by trying all sets."""
    for size in range(len(turns) + 1):
        for ends in itertools.combinations(turns, size):
            if all(any(i == end or (i < end and shared(i, end)) for end in ends) for i in turns):
                return size
    raise AssertionError("unreachable: every turn may be an end")


def _forest(rng: random.Random, n: int) -> set[tuple[int, int]]:
    """Every turn continues one earlier turn's text or starts anew: what prefixes of texts look like."""
    parent = [rng.choice([None, *range(j)]) if j else None for j in range(n)]
    pairs = set()
    for j in range(n):
        i = parent[j]
        while i is not None:
            pairs.add((i, j))
            i = parent[i]
    return pairs


def _transitive(rng: random.Random, n: int) -> set[tuple[int, int]]:
    """Any transitive relation that goes forward."""
    pairs = {(i, j) for i, j in itertools.combinations(range(n), 2) if rng.random() < 0.3}
    for k, i, j in itertools.product(range(n), repeat=3):
        if (i, k) in pairs and (k, j) in pairs:
            pairs.add((i, j))
    return pairs


@pytest.mark.parametrize("make", [_forest, _transitive])
@given(seed=st.integers(0, 10**6), n=st.integers(0, 7))
def test_exact_makes_the_fewest_samples(make: Callable[[random.Random, int], set[tuple[int, int]]], seed: int, n: int) -> None:
    """For every relation that texts can have, no smaller set of samples trains every turn after its served prompt."""
    rng = random.Random(seed)
    pairs = make(rng, n)
    turns = sorted(rng.sample(range(n), rng.randint(0, n)))
    groups = fewest(turns, lambda i, j: (i, j) in pairs)
    assert sorted(itertools.chain.from_iterable(groups)) == turns
    assert all((i, max(group)) in pairs for group in groups for i in group if i != max(group))
    assert len(groups) == _minimum(turns, lambda i, j: (i, j) in pairs)


@given(seed=st.integers(0, 10**6), n=st.integers(0, 7))
def test_exact_is_right_for_any_relation(seed: int, n: int) -> None:
    """Whatever the relation, each turn stands in one sample that it may share; at most n questions a sample are asked."""
    rng = random.Random(seed)
    pairs = {(i, j) for i, j in itertools.combinations(range(n), 2) if rng.random() < 0.5}
    asked: list[tuple[int, int]] = []

    def shared(i: int, j: int) -> bool:
        asked.append((i, j))
        return (i, j) in pairs

    groups = fewest(range(n), shared)
    assert sorted(itertools.chain.from_iterable(groups)) == list(range(n))
    assert all((i, max(group)) in pairs for group in groups for i in group if i != max(group))
    assert len(asked) == len(set(asked)) <= n * len(groups)


def test_exact_on_texts_that_are_rewritten_at_every_question() -> None:
    """Where a template rewrites history at each user message, the turns between two questions share one sample."""
    whole = record(
        user(), turn("a", "r", calls=True), result(), turn("b", "r"), user(), turn("c", "r", calls=True), result(), turn("d")
    )

    def shared(conversation: Conversation, i: int, j: int) -> bool:
        return not any(m["role"] == "user" for m in conversation.messages[i:j])

    samples, dropped, _ = expand(whole, policy_of(split="exact"), "k", shared=shared)
    assert [sorted(s.targets) for s in samples] == [[1, 3], [5, 7]]
    assert [len(s.conversation.messages) for s in samples] == [4, 8]
    assert samples[1].untrained == {1: "context", 3: "context"}
    assert not dropped


@pytest.mark.parametrize("spec", ["qwen3-thinking", "qwen3-instruct", "ling-3.0-thinking"])
def test_exact_keeps_what_a_real_template_serves(spec: str) -> None:
    """With a parser's own answers, every trained turn of a sample stands behind the very prompt that the server had sent, whole."""
    parser = load_parser(spec, demo=True, overrides=["thinking.strip=true"] if spec == "qwen3-instruct" else [])
    whole = record(
        user(), turn("a", "r", calls=True), result(), turn("b", "q"), user(), turn("c", "r", calls=True), result(), turn("d")
    )

    def stands(conversation: Conversation, end: int) -> dict[int, str]:
        """For each turn of the sample that ends with `end`: its prompt, if it is the served one, and its own text."""
        sample = parser.sample(Conversation(conversation.messages[: end + 1], conversation.tools, conversation.flags[: end + 1]))
        breaks, text = parser.served_text_breaks(sample), sample.rendering.text
        return {t.message: text[: t.end] for t in sample.turns if t.message not in breaks}

    def shared(conversation: Conversation, i: int, j: int) -> bool:
        alone, within = stands(conversation, i), stands(conversation, j)
        return i in within and within[i] == alone.get(i)

    samples, _, _ = expand(whole, policy_of(split="exact"), "k", tags=tags_of(parser.spec), shared=shared)
    assert sorted(trained(samples)) == [1, 3, 5, 7]
    assert len(samples) == _minimum([1, 3, 5, 7], lambda i, j: shared(whole, i, j))
    for sample in samples:
        assert sample.targets <= stands(sample.conversation, len(sample.conversation.messages) - 1).keys()


def test_exact_asks_about_the_conversation_that_is_rendered() -> None:
    """The question about shared prompts is asked of the messages as they will stand in the samples, empty blocks included."""
    seen: list[Conversation] = []

    def shared(conversation: Conversation, i: int, j: int) -> bool:
        seen.append(conversation)
        return False

    samples, _, _ = expand(
        record(user(), turn("a"), user(), turn("b")), policy_of(split="exact", empty_think="target"), "k", shared=shared
    )
    assert [m.get("reasoning_content") for m in seen[0].messages] == [None, EMPTY_BLOCK, None, EMPTY_BLOCK]
    assert samples[1].conversation.messages == seen[0].messages
    with pytest.raises(OptionError, match="exact"):
        expand(record(user(), turn()), policy_of(split="exact"), "k")


# --- rules --------------------------------------------------------------------------------------------------------------------

AGENT = record(
    user(),
    turn(None, "look", calls=True),
    result(),
    turn(None, calls=True),
    result(),
    result(True),
    turn("try", calls=True),
    result(False),
    turn(" \n", calls=True),
    turn("done"),
)


@pytest.mark.parametrize(
    ("rules", "reasons"),
    [
        ({}, {}),
        ({"tool_error": "mask"}, {3: "tool_error"}),
        ({"empty_tool_call": "mask"}, {3: "empty_tool_call", 8: "empty_tool_call"}),
        ({"bare_text_tool_call": "mask"}, {6: "bare_text_tool_call"}),
        (dict.fromkeys(RULES, "mask"), {3: "tool_error", 6: "bare_text_tool_call", 8: "empty_tool_call"}),
        ({"train_on": "last"}, dict.fromkeys([1, 3, 6, 8], "not_last")),
        (
            {"train_on": "last_n", "last_n": 2, "empty_tool_call": "mask"},
            {1: "not_last", 3: "empty_tool_call", 6: "not_last", 8: "empty_tool_call"},
        ),
    ],
)
def test_rules_name_the_turns_they_take(rules: dict[str, Any], reasons: Mapping[int, str]) -> None:
    """A step counts as failed, empty or bare text by what the issue of each rule says, first rule first, and positions come last."""
    (sample,) = samples_of(AGENT, **rules)
    assert sample.untrained == reasons
    assert sample.targets == {1, 3, 6, 8, 9} - set(reasons)
    apart, dropped, _ = expand(AGENT, policy_of(split="per_turn", **rules), "k")
    assert sorted(trained(apart)) == sorted(sample.targets)
    assert dropped == Counter(reasons.values())


def test_drop_takes_the_record_of_a_trajectory_and_the_sample_of_a_turn() -> None:
    """`drop` leaves out the turn's own sample in per_turn, and the whole record in trajectory, unless the turn is not trained anyway."""
    assert [len(s.conversation.messages) for s in samples_of(AGENT, split="per_turn", tool_error="drop")] == [2, 7, 9, 10]
    samples, dropped, steps = expand(AGENT, policy_of(tool_error="drop"), "k")
    assert (samples, dropped) == ([], Counter(tool_error=5))
    assert "message 3 (tool_error)" in steps[-1].did
    assert len(samples_of(AGENT, tool_error="drop", train_on="last")) == 1


@pytest.mark.parametrize("n", range(5, 12))
def test_more_last_turns_than_there_are_mean_all(n: int) -> None:
    """`last_n` of as many turns as the record has, or more, makes and drops what `train_on: all` does."""
    for split in ("trajectory", "per_turn"):
        for rule in ("mask", "drop"):
            wanted = expand(AGENT, policy_of(split=split, tool_error=rule), "k")[:2]
            assert expand(AGENT, policy_of(split=split, tool_error=rule, train_on="last_n", last_n=n), "k")[:2] == wanted


def test_a_rule_that_masks_shields_from_none_that_drops() -> None:
    """Where a turn falls under two rules, the one that drops counts."""
    whole = record(user(), turn("try", calls=True), result(True), turn())
    assert expand(whole, policy_of(tool_error="mask", bare_text_tool_call="drop"), "k")[1] == Counter(bare_text_tool_call=2)


def test_inline_blocks_count_as_reasoning_for_the_rules() -> None:
    """A call with reasoning inside its content is neither bare text nor empty; an empty block is no reasoning."""
    whole = record(
        user(),
        turn("<think>a</think>", calls=True),
        turn("<thinking>\n</think>b", calls=True),
        turn("<think></think>", calls=True),
        turn(),
    )
    (sample,) = samples_of(whole, bare_text_tool_call="mask", empty_tool_call="mask")
    assert sample.untrained == {2: "bare_text_tool_call", 3: "empty_tool_call"}


@pytest.mark.parametrize("said", ["true", "false", 1, 0, {}])
def test_is_error_must_be_a_boolean(said: Any) -> None:
    """Where the rule is in force, `is_error` that is neither true nor false is refused with its message; else it is not looked at."""
    whole = record(user(), turn(calls=True), result(True), turn())
    whole.messages[2]["is_error"] = said  # as a caller may build it; read from a record it is a boolean or a reject already
    with pytest.raises(RejectedRow, match="message 2: `is_error`") as caught:
        expand(whole, policy_of(tool_error="mask"), "k")
    assert caught.value.reason == RejectReason.BAD_MESSAGE
    assert len(expand(whole, DEFAULT, "k")[0]) == 1


def test_flags_go_before_rules_and_alone_leave_the_verdict_to_the_parser() -> None:
    """A turn that the data excludes has the reason `flag`; a record of only such turns goes on, to be refused by name."""
    whole = record(user(), turn(calls=True, train=False), result(True), turn(train=True))
    (sample,) = samples_of(whole, tool_error="drop")
    assert (sample.targets, sample.untrained) == ({3}, {1: "flag"})
    none = record(user(), turn(train=False))
    for split in ("trajectory", "per_turn", "pre_split"):
        ((sample,), dropped, _) = expand(none, policy_of(split=split), "k")
        assert (sample.targets, sample.untrained, dropped) == (frozenset(), {1: "flag"}, Counter())


def test_a_record_whose_every_turn_falls_under_a_rule_is_dropped() -> None:
    """Where rules leave nothing to train, no sample is made and the turns are counted under their reasons."""
    samples, dropped, _ = expand(record(user(), turn(calls=True), result(True)), policy_of(tool_error="mask"), "k")
    assert (samples, dropped) == ([], Counter(tool_error=1))


def test_pre_split_trains_the_last_turn() -> None:
    """A record that is a sample already is taken whole, with its last assistant turn as the target and rules applied to that turn."""
    whole = record(user(), turn("a", "r"), user(), turn("b"), user())
    (sample,) = samples_of(whole, split="pre_split", strip_thinking="context")
    assert (sample.targets, sample.untrained, len(sample.conversation.messages)) == ({3}, {1: "context"}, 5)
    assert "reasoning_content" not in sample.conversation.messages[1]
    assert samples_of(AGENT, split="pre_split", tool_error="drop")[0].targets == {9}
    failed = record(user(), turn("a"), user(), turn(calls=True), result(True))
    assert expand(failed, policy_of(split="pre_split", tool_error="drop"), "k")[1] == Counter(context=1, tool_error=1)


def test_truncation_needs_an_answer_before_the_notification() -> None:
    """A conversation is cut before a notification behind a text-only turn, and behind no other."""
    note = user("x <task-notification>job</task-notification>")
    whole = record(
        user(), turn("wait", calls=True), result(), note, turn("ok"), user("thanks"), note, turn("noise"), turn("more")
    )
    samples, dropped, _ = expand(whole, policy_of(truncate_at_notification=True), "k")
    assert len(samples[0].conversation.messages) == len(samples[0].conversation.flags) == 6
    assert samples[0].conversation.notes == {"truncated_at_notification": 1}
    assert dropped == Counter(task_notification=2)
    silent = record(user(), turn("<think>so</think>", None), note, turn())
    assert len(samples_of(silent, truncate_at_notification=True)[0].conversation.messages) == 4


# --- reasoning ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        "<thinking>why</thinking>ok",
        "<thinking>\nwhy\n</think>\n\nok",
        " <think>why</thinking>ok",
        "<reasoning>why</reasoning>\nok",
    ],
)
def test_other_tags_become_the_specs(content: str) -> None:
    """A leading block in other or mixed tags is rewritten to the spec's tags, and counted; the text is otherwise the same."""
    for tags in (THINK, Tags("[THINK]", "[/THINK]")):
        (sample,), _, steps = expand(record(user(), turn(content)), DEFAULT, "k", tags=tags)
        assert sample.conversation.messages[1]["content"] == f"{tags.open}\nwhy\n{tags.close}\n\nok"
        assert sample.conversation.notes == {"think_tags_rewritten": 1}
        assert any(step.name == "think_tags_rewritten" for step in steps)


def test_tags_stay_text_for_a_spec_without_any() -> None:
    """For a spec that reads no tags, content stays as it is, but what a policy strips is still found."""
    whole = record(user(), turn("<thinking>why</thinking>\nok"), user(), turn("<think>open"))
    (sample,), _, _ = expand(whole, DEFAULT, "k", tags=None)
    assert sample.conversation == whole
    (sample,), _, _ = expand(whole, policy_of(strip_thinking="all"), "k", tags=None)
    assert [m["content"] for m in sample.conversation.messages[1::2]] == ["ok", "<think>open"]


def test_tags_further_on_are_text() -> None:
    """A tag that content does not begin with is no reasoning."""
    whole = record(user(), turn("use <thinking> here </thinking>"))
    assert samples_of(whole)[0].conversation == whole


def test_a_block_that_is_not_closed_is_refused() -> None:
    """An open tag at the start of content without any close tag is refused, with the message and the tag."""
    with pytest.raises(RejectedRow, match=r"message 1: content: '<thinking>' is never closed"):
        samples_of(record(user(), turn("<thinking>why")))


def test_prompt_opened_blocks_are_read() -> None:
    """Where the prompt opens the block, content may begin inside it."""
    whole = record(user(), turn("why</think>ok", calls=True), user(), turn("why</think>ok"))
    samples = expand(whole, policy_of(split="per_turn", strip_thinking="context"), "k", tags=Tags("<think>", "</think>", True))[0]
    assert samples[1].conversation.messages[1]["content"] == "ok"
    assert samples[1].conversation.messages[3]["content"] == "why</think>ok"


def test_inline_wins_only_if_the_policy_says_so() -> None:
    """A field and a block that differ are refused, or the block goes first and is counted; equal ones are no conflict."""
    whole = record(user(), turn("<thinking>a</thinking>ok", "b"))
    with pytest.raises(RejectedRow) as caught:
        samples_of(whole)
    assert caught.value.reason == RejectReason.REASONING_CONFLICT
    (sample,) = samples_of(whole, inline_conflict="inline")
    assert sample.conversation.messages[1] == turn("<think>\na\n</think>\n\nok")
    assert sample.conversation.notes == {"inline_over_field": 1, "think_tags_rewritten": 1}
    assert samples_of(record(user(), turn("<think>a</think>ok", " a\n")))[0].thinking == {1}


def test_stripping_never_makes_reasoning_of_an_answer() -> None:
    """A turn whose answer quotes a think tag is refused rather than stripped: the rest would be read as reasoning again."""
    whole = record(user(), turn("quote </think> it", "why"), user(), turn())
    assert len(samples_of(whole)) == 1
    with pytest.raises(RejectedRow) as caught:
        samples_of(whole, strip_thinking="all")
    assert (caught.value.reason, caught.value.message) == (RejectReason.INLINE_THINKING_UNCLEAR, 1)


def test_context_loses_its_reasoning_and_the_target_keeps_it() -> None:
    """`strip_thinking: context` removes reasoning from fields and content of untrained turns only, and counts it."""
    whole = record(user(), turn("<think>a</think>one "), user(), turn(None, "b", calls=True), result(), turn("three", "c"))
    first, second, third = samples_of(whole, split="per_turn", strip_thinking="context", strip_blanks=True)
    assert first.conversation.messages[1]["content"] == "<think>a</think>one "
    assert [m["content"] for m in third.conversation.messages[1::2]] == ["one", None, "three"]
    assert [m.get("reasoning_content") for m in second.conversation.messages] == [None, None, None, "b"]
    assert [m.get("reasoning_content") for m in third.conversation.messages] == [None, None, None, None, None, "c"]
    assert [s.notes["reasoning_stripped"] for s in (first, second, third)] == [0, 1, 2]
    assert [s.thinking for s in (first, second, third)] == [{1}, {3}, {5}]


@pytest.mark.parametrize(("which", "blocks"), [("none", set()), ("target", {1}), ("all", {1, 3})])
def test_empty_blocks_go_where_the_policy_says(which: str, blocks: set[int]) -> None:
    """An empty block is given to turns without reasoning: to none, to those that are trained, or to all."""
    (sample,) = samples_of(
        record(user(), turn("<think>\n</think>\n\na"), user(), turn(train=False), user(), turn("x", "y")), empty_think=which
    )
    messages = sample.conversation.messages
    assert {i for i, m in enumerate(messages) if m.get("reasoning_content") == EMPTY_BLOCK} == blocks
    assert not sample.thinking & blocks
    assert sample.notes["empty_blocks"] == len(blocks)
    assert messages[1]["content"] == ("a" if blocks else "<think>\n</think>\n\na")


def test_randomly_stripped_samples_get_no_empty_blocks() -> None:
    """Under random stripping the lack of a block is kept; variant 0 has the blocks."""
    whole = record(user(), turn("a", "r"), user(), turn("b"))
    zero, one = samples_of(whole, empty_think="all", variants=2, strip_probability=1.0)
    assert [m.get("reasoning_content") for m in zero.conversation.messages[1::2]] == ["r", EMPTY_BLOCK]
    assert [m.get("reasoning_content") for m in one.conversation.messages[1::2]] == [None, None]
    assert one.notes == {"reasoning_stripped": 1}


def test_an_empty_block_is_rendered_as_one() -> None:
    """The empty block reaches the text through a real parser, and is no reasoning for its rules."""
    parser = load_parser("qwen3-thinking", demo=True)
    (sample,), _, _ = expand(record(user(), turn("ok")), load_policy("areal-pair"), "k", tags=tags_of(parser.spec))
    text = parser.example(sample.conversation).text
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\nok<|im_end|>\n")


def test_tags_are_the_specs_own() -> None:
    """Tags come from a spec that splits them, with what its prompt opens."""
    assert tags_of(load_spec("qwen3-thinking")) == Tags("<think>", "</think>", False)
    assert tags_of(load_spec("ling-3.0-thinking")) == Tags("<think>", "</think>", True)
    assert tags_of(load_spec("ling-3.0-thinking", ["thinking.inline=keep"])) is None
    assert tags_of(load_spec("qwen2.5")) is None


# --- variants -----------------------------------------------------------------------------------------------------------------


def test_variants_share_one_drawing_in_every_split() -> None:
    """Which turns of a variant lose their reasoning does not depend on how the record is split."""
    whole = record(*itertools.chain.from_iterable((user(), turn("a", "r")) for _ in range(12)))
    patterns = {}
    for split in ("trajectory", "per_turn", "exact"):
        samples = samples_of(whole, split=split, variants=4, strip_probability=0.5, seed=3)
        patterns[split] = {s.variant: s.pattern for s in samples}
    assert patterns["trajectory"] == patterns["per_turn"] == patterns["exact"]
    assert len(set(patterns["trajectory"].values())) == 4


def test_diversity_counts_patterns_and_stripped_turns() -> None:
    """Diversity tells distinct patterns, the most possible, and the share of stripped turns, and adds up."""
    whole = record(*itertools.chain.from_iterable((user(), turn("a", "r")) for _ in range(40)))
    samples = samples_of(whole, variants=5, strip_probability=0.5)
    found = diversity(samples)
    assert (found.records, found.distinct, found.possible, found.thinking) == (1, 5, 5, 160)
    assert found.stripped == sum(40 - len(s.thinking) for s in samples)
    assert 0.3 < found.stripped_share < 0.7
    assert (found + found).mean_distinct == 5.0
    all_gone = diversity(samples_of(record(user(), turn("a", "r")), variants=5, strip_probability=1.0))
    assert (all_gone.distinct, all_gone.possible, all_gone.stripped_share) == (2, 2, 1.0)
    assert diversity(samples_of(record(user(), turn("a")), variants=3, strip_probability=0.5)) == Diversity()
    assert diversity(samples_of(whole)) == Diversity() == Diversity() + Diversity()
    assert Diversity().mean_distinct == Diversity().stripped_share == 0.0


# --- the rest -----------------------------------------------------------------------------------------------------------------


def test_areal_pair_by_hand() -> None:
    """`areal-pair` gives one sample a turn, failed ones left out, context without reasoning, JSON text with ASCII escapes."""
    whole = record(
        user(),
        turn("<thinking>a</thinking> one", calls=True),
        result(True),
        turn("two", "b", calls=True),
        result(),
        turn("three"),
    )
    samples, dropped, _ = expand(whole, load_policy("areal-pair"), "k")
    assert dropped == Counter(tool_error=1)
    assert [sorted(s.targets) for s in samples] == [[3], [5]]
    last = samples[1].conversation.messages
    assert [m["content"] for m in last[1::2]] == ["one", "two", "three"]
    assert [m.get("reasoning_content") for m in last[1::2]] == [None, None, EMPTY_BLOCK]
    assert samples[0].conversation.messages[3]["reasoning_content"] == "b"
    assert last[1]["tool_calls"][0]["function"]["arguments"] == r'{"x": "\u00fc"}'
    assert whole.messages[1]["tool_calls"] == CALL


def test_areal_trajectory_by_hand() -> None:
    """`areal-trajectory` gives one sample a record, failed turns masked, all reasoning kept and empty blocks for the rest."""
    whole = record(
        user(), turn("one", calls=True), result(True), turn("<think>b</think>two", "other", calls=True), result(), turn("three")
    )
    (sample,), dropped, _ = expand(whole, load_policy("areal-trajectory"), "k")
    assert (sample.targets, sample.untrained, dropped) == ({3, 5}, {1: "tool_error"}, Counter())
    assert [m.get("reasoning_content") for m in sample.conversation.messages[1::2]] == [EMPTY_BLOCK, None, EMPTY_BLOCK]
    assert sample.conversation.messages[3]["content"] == "<think>b</think>two"


def test_balance_class_looks_at_trained_turns() -> None:
    """A sample is of the class of what it trains: reasoning, a call without any, or a final answer; empty blocks are none."""
    whole = record(user(), turn("a", "r", calls=True), result(), turn("b", calls=True), result(), turn("c"))
    samples = samples_of(whole, split="per_turn", empty_think="target")
    assert [balance_class(s) for s in samples] == ["thinking", "no_thinking_call", "final"]
    assert [balance_class(s) for s in samples_of(whole)] == ["thinking"]


def test_ranks_are_stable_and_apart() -> None:
    """Ranks and chances are the same numbers in every process and version, and differ by purpose, sample and seed."""
    assert rank(0, "strip", "a.jsonl:1", 1, 2)[:16] == "b70d17537e1f6750"
    assert chance(0, "a") == 0.2896953134586566
    samples = samples_of(AGENT, split="per_turn", variants=2, strip_probability=0.5)
    names = [balance_rank(policy_of(seed=seed), "k", s) for seed in (0, 1) for s in samples]
    names += [shuffle_rank(seed, "k", s.variant, s.index) for seed in (0, 1) for s in samples]
    assert len(set(names)) == len(names)
    numbers = [chance(0, "n", i) for i in range(2000)]
    assert 0.47 < sum(numbers) / 2000 < 0.53
    assert all(0 <= number < 1 for number in numbers)


def test_cut_keeps_the_system_and_moves_every_index() -> None:
    """Cutting a sample keeps leading system messages, and every index follows its message."""
    whole = record(
        {"role": "system", "content": "s"},
        user("1"),
        turn("a", "r"),
        user("2"),
        turn("b", "r", train=False),
        user("3"),
        turn("c"),
    )
    (sample,) = samples_of(whole)
    tail = cut(sample, 3, 7)
    assert [m["content"] for m in tail.conversation.messages] == ["s", "2", "b", "3", "c"]
    assert (tail.origin, tail.targets, tail.untrained, tail.thinking) == ((0, 3, 4, 5, 6), {4}, {2: "flag"}, {2})
    assert tail.conversation.flags == (None, None, False, None, None)
    assert cut(sample, 0, 99) == sample


def test_the_records_counts_stand_once() -> None:
    """Counts that normalisation made of a record are in one of its samples only."""
    whole = normalise({"conversations": [{"messages": [user()]}, {"messages": [user(), turn(), user(), turn()]}]})
    samples = samples_of(whole, split="per_turn")
    assert [s.conversation.notes for s in samples] == [{"conversations_ignored": 1}, {}]


def test_steps_say_what_happened() -> None:
    """Each step that a policy asks for says in words what it did to the record."""
    steps = expand(AGENT, load_policy("areal-pair"), "k")[2]
    said = {step.name: step.did for step in steps}
    assert said["tool_error"] == "drop: message 3"
    assert said["arguments_as_json"] == "messages 1, 3, 6, 8"
    assert said["split"].startswith("per_turn, 4 samples: messages 0 to 1, trained message 1; ")
    assert said["changed"] == "empty_blocks 3, reasoning_stripped 3"


@pytest.mark.parametrize("name", [None, *list_policies()])
@pytest.mark.parametrize("split", SPLITS)
def test_the_demo_trajectories_expand_in_every_mode(name: str | None, split: str) -> None:
    """The demonstration's trajectories give samples in every mode, and each turn is accounted for."""
    policy = load_policy(name, [f"split={split}", "strip_thinking=none"])
    for number, line in enumerate(FIXTURE.read_text().splitlines()):
        whole = normalise(json.loads(line))
        samples, dropped, _ = expand(whole, policy, f"f:{number}", shared=same_parity)
        context = 0 if split in ("per_turn", "exact") else sum(len(s.untrained) for s in samples)
        assert len(trained(samples)) + dropped.total() + context == len(turns_in(whole))

"""Conversation -> samples, by a policy: what is cut off, which turns are trained, whose reasoning goes, and how it is split.

`expand` takes one record; all chance comes from a hash of seed and record, so that neither order nor workers matter. What concerns
a whole build (balance, shuffle, validation) stands at the end of the page. No tokenizer is needed here, except that `exact` asks
one question of it.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

from .conversation import REASONING_UNKNOWN, Conversation, PartFlags, flags_within
from .errors import CheckFailed, OptionError, RejectedRow, RejectReason
from .parsers.thinking import reasoning_of
from .policy import DEFAULT, Policy
from .templates.spec import TemplateSpec

NOTIFICATION = "<task-notification>"
KNOWN_TAGS = (("<thinking>", "</thinking>"), ("<think>", "</think>"), ("<reasoning>", "</reasoning>"))
EMPTY_BLOCK = "\n"  # reasoning that is there and says nothing: templates write an empty think block, `reasoning_of` sees none

Message = dict[str, Any]
Shared = Callable[[Conversation, int, int], bool]
BalanceClass = Literal["thinking", "no_thinking_call", "final"]


@dataclass(frozen=True)
class Tags:
    """The think tags of a spec.

    Attributes:
        open, close: the literals.
        prompt_opens: the generation prompt ends with the open tag, so that content may begin inside the block.
        thinks: the spec has thinking on or auto, so that a block in other well-known tags is reasoning too.
    """

    open: str
    close: str
    prompt_opens: bool = False
    thinks: bool = True


THINK = Tags("<think>", "</think>")

# Why the data itself keeps a turn from training (`Conversation.excluded`), as against a policy.
OF_THE_DATA = frozenset({"flag", "part_flag", "history_rewritten"})


def tags_of(spec: TemplateSpec) -> Tags | None:
    """The tags of a spec; None for one that leaves tags in content alone, so that other tags are no reasoning for it either."""
    thinking = spec.thinking
    if not thinking.open or not thinking.close or thinking.inline != "split":
        return None
    opens = spec.assistant.header.rstrip().endswith(thinking.open)
    return Tags(thinking.open, thinking.close, opens, thinking.mode in ("on", "auto"))


def in_spec_tags(conversation: Conversation, tags: Tags | None) -> Conversation:
    """The conversation with reasoning in the spec's own tags, as every build has it that names no tags of its own.

    Raises:
        RejectedRow: as `expand`.
    """
    thoughts = {i: _read(m, i, tags, DEFAULT) for i, m in enumerate(conversation.messages) if m["role"] == "assistant"}
    return _normalised(conversation, thoughts, tags, DEFAULT, [])[0]


@dataclass(frozen=True)
class Sample:
    """One sample of a record, before it is rendered.

    Attributes:
        conversation: what is rendered; all indices below are into its messages, but for `origin`'s values and `pattern`.
        origin: for each message its index in the record's conversation.
        targets: the assistant messages that are trained.
        untrained: every other assistant message and why: `flag`, `part_flag`, `history_rewritten`, `tool_error`, `empty_tool_call`, `bare_text_tool_call`, `not_last`,
            or `context` (trained in another sample, if at all).
        index: which sample of the record this is, within its variant.
        variant: which variant; 0 is not randomly stripped where there are several.
        thinking: the assistant messages with reasoning.
        pattern: indices in the record's conversation of all turns that think in this variant.
        notes: counts of what was changed (`reasoning_stripped`, `empty_blocks`, ...).
    """

    conversation: Conversation
    origin: tuple[int, ...]
    targets: frozenset[int]
    untrained: Mapping[int, str]
    index: int = 0
    variant: int = 0
    thinking: frozenset[int] = frozenset()
    pattern: frozenset[int] = frozenset()
    notes: Counter[str] = field(default_factory=Counter)

    @property
    def thinks(self) -> bool:
        """The adaptive thinking option of this sample: on if any assistant turn of it thinks."""
        return bool(self.thinking)


@dataclass(frozen=True)
class Step:
    """What one step did to a record, in words, and the turns (indices in the record) that it dropped, with the reason."""

    name: str
    did: str
    dropped: Mapping[int, str] = field(default_factory=dict)


def expand(
    conversation: Conversation,
    policy: Policy,
    key: str,
    *,
    tags: Tags | None = THINK,
    shared: Shared | None = None,
    strips: bool = False,
    explained: bool = True,
) -> tuple[list[Sample], Counter[str], list[Step]]:
    """Make the samples of one record.

    Args:
        conversation: as `conversation.normalise` gives it; not changed.
        policy: what to do.
        key: the record's identity (file and line); with the seed it decides everything random.
        tags: the spec's think tags (`tags_of`).
        shared: for split `exact`: whether turn i, in the sample that ends with turn j, keeps the prompt that the server sent before i
            and its own text, to the character (i < j, indices of messages).
        strips: the spec takes reasoning away (`thinking.strip`).
        explained: say what each step did; without it a record of which everything is trained as it is takes a short way.

    Returns:
        The samples, the number of turns that can no longer be trained by reason, and what each step did. An assistant turn of the
        record is trained in exactly one sample of each variant, or dropped with a reason, or untrained with a reason.

    Raises:
        RejectedRow: reasoning that is given twice and differs, a think block that is not closed, `is_error` that is no boolean.
    """
    if policy.plain and not explained and (sample := _untouched(conversation, tags, policy)) is not None:
        return [sample], Counter(), []
    steps: list[Step] = []
    whole = conversation
    if policy.tools == "drop":
        steps.append(Step("tools", f"{len(whole.tools or ())} tool definitions left out"))
        whole = replace(whole, tools=None)
    if policy.truncate_at_notification:
        whole = _truncate(whole, policy, tags, steps)
    thoughts = {i: _read(m, i, tags, policy) for i, m in enumerate(whole.messages) if m["role"] == "assistant"}
    choice = _choose(whole, thoughts, policy, steps, strips)
    samples: list[Sample] = []
    if choice.targets or choice.passes:
        whole, thoughts = _normalised(whole, thoughts, tags, policy, steps)
        for variant in range(policy.variants):
            draft = _vary(whole, thoughts, policy, key, variant, tags, steps)
            samples += _split(draft, choice, policy, variant, shared, steps)
    dropped = Counter(reason for step in steps for reason in step.dropped.values())
    return samples, dropped, steps


def as_it_is(conversation: Conversation, turns: Collection[int], thinking: Collection[int]) -> Sample:
    """The one sample of a record of which every turn is trained and nothing is changed; `thinking` are the turns with reasoning."""
    thinks = frozenset(thinking)
    return Sample(conversation, tuple(range(len(conversation.messages))), frozenset(turns), {}, thinking=thinks, pattern=thinks)


def _untouched(conversation: Conversation, tags: Tags | None, policy: Policy) -> Sample | None:
    """The sample of a record that says nothing about training and has no think blocks in content, under a policy that asks for
    nothing; None for any other."""
    if conversation.part_flags or any(flag is False for flag in conversation.flags):
        return None
    turns, thinking = [], []
    for i, message in enumerate(conversation.messages):
        if message["role"] == "assistant":
            thought = _read(message, i, tags, policy)
            if thought.block or thought.wins or REASONING_UNKNOWN in message:
                return None
            turns.append(i)
            if thought.reasoning:
                thinking.append(i)
    return as_it_is(conversation, turns, thinking)


# --- what is read -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Thought:
    """An assistant message taken apart: reasoning ('' for none), content without its block, and where the block stood.

    `block`: `own` or `foreign` tags inside content, else ''. `wins`: the block goes before a field that says something else.
    `inner`, `close`: where in content the text of the block begins, and where its closing tag stands (start, end).
    """

    reasoning: str
    answer: str | None
    block: Literal["", "own", "foreign"] = ""
    wins: bool = False
    inner: int = 0
    close: tuple[int, int] = (0, 0)

    @property
    def text(self) -> bool:
        """There is an answer, not only reasoning and calls."""
        return bool((self.answer or "").strip())


def _read(message: Message, index: int, tags: Tags | None, policy: Policy) -> _Thought:
    """Find the reasoning: in its field, or in a block that content begins with. A spec without tags refuses nothing."""
    content, given = message.get("content"), reasoning_of(message)
    if not isinstance(content, str):
        return _Thought(given, content)
    pairs, openings = _pairs(tags, policy.tag_pairs)
    body = content.lstrip()
    if body.startswith(openings):
        opening = next(opening for opening in openings if body.startswith(opening))
        body = body.removeprefix(opening)
        # its own close tag if there is one, so that another one inside is text
        fitting = {closing for start, closing in pairs if start == opening}
        closings = [closing for _, closing in pairs if closing in body]
        found = [(body.find(closing), closing) for closing in closings if closing in fitting or not fitting & set(closings)]
        if not found:
            if tags is None:
                return _Thought(given, content)
            raise RejectedRow(RejectReason.INLINE_THINKING_UNCLEAR, f"content: {opening!r} is never closed", index)
        at, closing = min(found, key=lambda one: (one[0], -len(one[1])))
    elif tags and tags.prompt_opens and not given and (at := body.find(tags.close)) >= 0 and tags.open not in body[:at]:
        opening, closing = tags.open, tags.close
    else:
        return _Thought(given, content)
    reasoning, answer = body[:at].strip("\n"), body[at + len(closing) :].lstrip("\n")
    own = tags is not None and (opening, closing) == (tags.open, tags.close)
    if tags is not None and not own and (tags.open in reasoning or tags.close in reasoning):
        raise RejectedRow(
            RejectReason.INLINE_THINKING_UNCLEAR,
            f"content: the block that {opening!r} opens holds the spec's own think tags",
            index,
        )
    differs = bool(given) and given.strip() != reasoning.strip()
    if differs and policy.inline_conflict == "reject" and tags is not None:
        raise RejectedRow(
            RejectReason.REASONING_CONFLICT,
            f"reasoning_content is {given[:60]!r}, the inline block in content {reasoning[:60]!r}",
            index,
        )
    begin = len(content) - len(body)
    inner = begin + at - len(body[:at].lstrip("\n"))
    close = (begin + at, begin + at + len(closing))
    return _Thought(reasoning if reasoning.strip() else "", answer, "own" if own else "foreign", differs, inner, close)


@lru_cache(maxsize=64)
def _pairs(tags: Tags | None, others: tuple[tuple[str, str], ...] | None) -> tuple[list[tuple[str, str]], tuple[str, ...]]:
    """The pairs of tags that are read as reasoning, the spec's own first; and their opening ones."""
    if others is None:
        others = KNOWN_TAGS if tags is None or tags.thinks else ()
    pairs = [*([(tags.open, tags.close)] if tags else ()), *others]
    return pairs, tuple(opening for opening, _ in pairs)


def _truncate(conversation: Conversation, policy: Policy, tags: Tags | None, steps: list[Step]) -> Conversation:
    """Cut before the first notification behind a turn that had already answered: what follows is answers to noise."""
    messages = conversation.messages
    before: int | None = None
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            before = i
        if message["role"] != "user" or before is None or NOTIFICATION not in (message["content"] or ""):
            continue
        if not messages[before].get("tool_calls") and _read(messages[before], before, tags, policy).text:
            gone = {k: "task_notification" for k in range(i, len(messages)) if messages[k]["role"] == "assistant"}
            did = f"cut before message {i}, a task notification behind the answer in message {before}; {len(messages) - i} messages gone"
            steps.append(Step("truncate_at_notification", did, gone))
            notes = {**conversation.notes, "truncated_at_notification": 1}
            return replace(conversation.first(i), notes=notes)
    steps.append(Step("truncate_at_notification", "no notification behind an answer"))
    return conversation


# --- which turns ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Choice:
    """The turns that are trained; why the others are not; and whether the record goes on although it has none to train.

    The last is so where only the data's own flags say no: then the parser's refusal (`zero_supervision`) is the right answer.
    """

    targets: frozenset[int]
    reasons: Mapping[int, str]
    passes: bool = False


def _choose(whole: Conversation, thoughts: Mapping[int, _Thought], policy: Policy, steps: list[Step], strips: bool) -> _Choice:
    """Flags, then rules, then `train_on`: each only takes away. Turns are counted from the end before anything is taken away."""
    turns = list(thoughts)
    cut_off = any(step.dropped for step in steps)
    window = {"last": 1, "last_n": policy.last_n or 0}.get(policy.train_on, len(turns))
    if policy.split == "pre_split":
        window = 1
    first = max(0, len(turns) - window)
    beyond = "context" if policy.split == "pre_split" else "not_last"
    rules = {i: rule for i in turns if (rule := _rule(whole.messages, i, thoughts[i], policy))}
    for name in ("tool_error", "empty_tool_call", "bare_text_tool_call"):
        if getattr(policy, name) != "train":
            steps.append(Step(name, f"{getattr(policy, name)}: {_listed([i for i, rule in rules.items() if rule == name])}"))
    reasons: dict[int, str] = {}
    unseen = strips or not policy.supervise_reasoning or policy.strip_thinking == "all"  # no reasoning is trained
    for place, i in enumerate(turns):
        if excluded := whole.excluded(i, thoughts[i].close[1] if unseen else None):
            reasons[i] = excluded
        elif i in rules:
            reasons[i] = rules[i]
        if place < first and (i not in reasons or policy.split == "pre_split"):
            reasons[i] = beyond
    targets = frozenset(turns) - frozenset(reasons)
    apart = policy.split in ("per_turn", "exact")
    spoiled = [i for i in turns[first:] if i in rules and reasons[i] == rules[i] and getattr(policy, rules[i]) == "drop"]
    # what the data itself says is no declared option: such a record goes on to the parser's refusal, in every mode
    passes = not targets and not cut_off and all(reason in OF_THE_DATA for reason in reasons.values())
    if apart and not passes:
        steps.append(Step("targets", f"trained: {_listed(sorted(targets))}", reasons))
        return _Choice(targets, reasons)
    if spoiled:
        why = reasons[spoiled[0]]
        steps.append(Step("targets", f"the record is dropped, by message {spoiled[0]} ({why})", _all(turns, reasons, why)))
        return _Choice(frozenset(), reasons)
    if not targets and not passes:
        steps.append(Step("targets", "nothing is left to train, the record is dropped", reasons))
        return _Choice(frozenset(), reasons)
    steps.append(Step("targets", f"trained: {_listed(sorted(targets))}; not: {_listed(sorted(reasons))}"))
    return _Choice(targets, reasons, passes=True)


def _all(turns: Iterable[int], reasons: Mapping[int, str], otherwise: str) -> dict[int, str]:
    return {i: reasons.get(i, otherwise) for i in turns}


def _rule(messages: Sequence[Message], turn: int, thought: _Thought, policy: Policy) -> str:
    """The rule that takes the turn, or ''. One that drops goes before those that mask, so that no rule shields from another."""
    silent = bool(messages[turn].get("tool_calls")) and not thought.reasoning
    hit = {
        "tool_error": policy.tool_error != "train" and _failed(messages, turn),
        "empty_tool_call": policy.empty_tool_call != "train" and silent and not thought.text,
        "bare_text_tool_call": policy.bare_text_tool_call != "train" and silent and thought.text,
    }
    rules = sorted((name for name in hit if hit[name]), key=lambda name: getattr(policy, name) != "drop")
    return next(iter(rules), "")


def _failed(messages: Sequence[Message], turn: int) -> bool:
    """A tool result of the turn says `is_error: true`; raises where it says neither true nor false."""
    failed = False
    for index in range(turn + 1, len(messages)):
        if messages[index]["role"] != "tool":
            break
        said = messages[index].get("is_error", False)
        if not isinstance(said, bool):
            raise RejectedRow(RejectReason.BAD_MESSAGE, f"`is_error` is {said!r:.40}, not true or false", index)
        failed = failed or said
    return failed


# --- what is changed --------------------------------------------------------------------------------------------------------


def _normalised(
    whole: Conversation, thoughts: Mapping[int, _Thought], tags: Tags | None, policy: Policy, steps: list[Step]
) -> tuple[Conversation, dict[int, _Thought]]:
    """Blocks in other tags into the spec's own, conflicts settled, arguments as the policy wants them; all counted."""
    messages, parts = list(whole.messages), list(whole.part_flags)
    done: dict[str, list[int]] = {"think_tags_rewritten": [], "inline_over_field": [], "arguments_as_json": []}
    for i, thought in thoughts.items():
        message = dict(messages[i])
        if thought.wins and tags is not None:
            del message["reasoning_content"]
            done["inline_over_field"].append(i)
        if thought.block == "foreign" and tags is not None:
            message["content"] = f"{tags.open}\n{thought.reasoning}\n{tags.close}\n\n{thought.answer}"
            if parts:
                parts[i] = _in_own_tags(parts[i], messages[i]["content"], thought, tags)
            done["think_tags_rewritten"].append(i)
        if policy.dict_arguments == "ascii_json" and (calls := message.get("tool_calls")):
            message["tool_calls"] = [_with_json_arguments(call) for call in calls]
            if message["tool_calls"] != calls:
                done["arguments_as_json"].append(i)
        messages[i] = message
    for name, turns in done.items():
        if turns:
            steps.append(Step(name, _listed(turns)))
    if not any(done.values()):
        return whole, dict(thoughts)
    notes = {**whole.notes, **{name: len(turns) for name, turns in done.items() if turns}}
    return replace(whole, messages=messages, notes=notes, part_flags=tuple(parts)), dict(thoughts)


def _in_own_tags(flags: PartFlags, content: str, thought: _Thought, tags: Tags) -> PartFlags:
    """Flags of parts of a content whose block has other tags, for the content with the spec's own."""
    start, end = thought.close
    edge = len(tags.open) + 1 + len(thought.reasoning) + 1
    behind = edge + len(tags.close) + 2
    closing = flags_within(flags, start, end)
    # a tag of another length takes the one flag that all of it has; one of which a part is not trained is not trained
    tag = {train for _, _, train in closing}
    opening = flags_within(flags, 0, thought.inner)
    pieces = [
        *((0, len(tags.open) + 1, False) for _, _, train in opening if not train),
        *(
            (a + len(tags.open) + 1, b + len(tags.open) + 1, train)
            for a, b, train in flags_within(flags, thought.inner, thought.inner + len(thought.reasoning))
        ),
        *((edge - 1, edge + len(tags.close), train) for train in (False, True) if train in tag and (not train or tag == {True})),
        *(
            (a + behind, b + behind, train)
            for a, b, train in flags_within(flags, len(content) - len(thought.answer or ""), len(content))
        ),
    ]
    return tuple(dict.fromkeys(pieces))


def _with_json_arguments(call: Message) -> Message:
    arguments = call["function"]["arguments"]
    if not isinstance(arguments, Mapping):
        return call
    return {**call, "function": {**call["function"], "arguments": json.dumps(arguments)}}


@dataclass(frozen=True)
class _Draft:
    """The whole conversation of one variant, before it is split.

    Attributes:
        thinking: turns with reasoning.
        gone: turns that lost theirs for the whole variant.
        adds_blocks: turns without reasoning get empty blocks, as far as the policy says.
        bare: turns without their reasoning, made when first asked for: each is context of many samples.
    """

    conversation: Conversation
    thoughts: Mapping[int, _Thought]
    thinking: frozenset[int]
    gone: frozenset[int]
    adds_blocks: bool
    tags: Tags | None
    bare: dict[int, Message] = field(default_factory=dict)


def _vary(
    whole: Conversation,
    thoughts: Mapping[int, _Thought],
    policy: Policy,
    key: str,
    variant: int,
    tags: Tags | None,
    steps: list[Step],
) -> _Draft:
    """Strip reasoning from every turn, or at random; one drawing per turn and variant, however the record is split."""
    thinking = frozenset(i for i, thought in thoughts.items() if thought.reasoning)
    random = policy.strip_probability > 0.0 and (variant > 0 or policy.variants == 1)
    gone = frozenset[int]()
    if policy.strip_thinking == "all":
        gone = thinking
        if variant == 0:
            steps.append(Step("strip_thinking", f"from {_listed(sorted(gone))}"))
    elif random:
        gone = frozenset(i for i in thinking if chance(policy.seed, "strip", key, variant, i) < policy.strip_probability)
    if policy.variants > 1 or random:
        steps.append(Step("variant", f"{variant}: reasoning removed at random from {_listed(sorted(gone if random else ()))}"))
    messages, parts = list(whole.messages), list(whole.part_flags)
    for i, thought in thoughts.items():
        if i in gone or (policy.strip_thinking == "all" and thought.block):  # an empty block in content goes too
            messages[i] = _stripped(messages[i], i, thought, tags, policy)
            _move_flags(parts, i, whole.messages[i], messages[i])
    return _Draft(replace(whole, messages=messages, part_flags=tuple(parts)), thoughts, thinking - gone, gone, not random, tags)


def _stripped(message: Message, index: int, thought: _Thought, tags: Tags | None, policy: Policy) -> Message:
    result = {key: value for key, value in message.items() if key != "reasoning_content"}
    return {**result, "content": _answer(message, index, thought, tags, policy.strip_blanks)}


def _move_flags(parts: list[PartFlags], index: int, before: Message, after: Message) -> None:
    """Bring flags of content parts along where a block that content begins with, and blanks at its edges, are taken away or put back."""
    content, answer = before["content"] or "", after["content"] or ""
    if not parts or content == answer:
        return
    if answer.strip() == content:
        lead = len(answer) - len(answer.lstrip())
        parts[index] = tuple((a + lead, b + lead, train) for a, b, train in parts[index])
        return
    end = len(content) if content.endswith(answer) else len(content.rstrip())
    parts[index] = flags_within(parts[index], end - len(answer), end)


def _answer(message: Message, index: int, thought: _Thought, tags: Tags | None, blanks: bool) -> str | None:
    """Content without its block. Nothing may be left in it that would be read as reasoning again."""
    answer = thought.answer
    if answer is None:
        return None if message.get("tool_calls") else ""
    if tags is not None and (tags.open in answer or tags.close in answer):
        raise RejectedRow(
            RejectReason.INLINE_THINKING_UNCLEAR,
            "content: without its reasoning, think tags in the answer would be read as some",
            index,
        )
    return answer.strip() if blanks and thought.block else answer


# --- samples ----------------------------------------------------------------------------------------------------------------


def _split(
    draft: _Draft, choice: _Choice, policy: Policy, variant: int, shared: Shared | None, steps: list[Step]
) -> list[Sample]:
    everything = len(draft.conversation.messages)
    if policy.split in ("trajectory", "pre_split") or not choice.targets:
        cuts = {everything: choice.targets}
    elif policy.split == "per_turn":
        cuts = {turn + 1: frozenset({turn}) for turn in sorted(choice.targets)}
    else:
        if shared is None:
            raise OptionError("split `exact` must know which turns keep their prompt; give `shared`")
        asked = draft.conversation
        if draft.adds_blocks:
            # a turn in the context was served with the block that it is trained with elsewhere
            blocked = _blocked(draft, policy, choice.targets) - draft.thinking
            messages, parts = list(asked.messages), list(asked.part_flags)
            for i in sorted(blocked):
                messages[i] = _with_block(messages[i], i, draft.thoughts[i], draft.tags)
                _move_flags(parts, i, asked.messages[i], messages[i])
            asked = replace(asked, messages=messages, part_flags=tuple(parts))
            draft = replace(draft, conversation=asked)
        groups = fewest(sorted(choice.targets), lambda i, j: shared(asked, i, j))
        cuts = {max(group) + 1: frozenset(group) for group in groups}
    if variant == 0:
        shape = "; ".join(f"messages 0 to {end - 1}, trained {_listed(sorted(targets))}" for end, targets in cuts.items())
        steps.append(Step("split", f"{policy.split}, {len(cuts)} samples: {shape}"))
    samples: list[Sample] = []
    for index, (end, targets) in enumerate(cuts.items()):
        sample = _sample(draft, end, targets, choice.reasons, policy)
        if index or variant:  # counts of the record stand once, however many samples it gives
            sample = replace(sample, conversation=replace(sample.conversation, notes={}))
        samples.append(replace(sample, index=index, variant=variant))
    if variant == 0 and (sums := sum((sample.notes for sample in samples), Counter[str]())):
        steps.append(Step("changed", ", ".join(f"{name} {count}" for name, count in sorted(sums.items()))))
    return samples


def _sample(draft: _Draft, end: int, targets: frozenset[int], reasons: Mapping[int, str], policy: Policy) -> Sample:
    """The variant's conversation up to `end`, context without its reasoning and empty blocks added where the policy says so."""
    turns = frozenset(i for i in draft.thoughts if i < end)
    whole = draft.conversation
    messages, thinking = whole.messages[:end], draft.thinking & turns
    parts = list(whole.part_flags[:end])
    notes: Counter[str] = Counter(reasoning_stripped=len(draft.gone & turns))
    if policy.strip_thinking == "context":
        for i in turns - targets:
            if i in thinking or draft.thoughts[i].block:  # an empty block in content goes too
                if i not in draft.bare:
                    draft.bare[i] = _stripped(messages[i], i, draft.thoughts[i], draft.tags, policy)
                _move_flags(parts, i, messages[i], draft.bare[i])
                messages[i] = draft.bare[i]
        notes["reasoning_stripped"] += len(thinking - targets)
        thinking &= targets
    if policy.empty_think != "none" and draft.adds_blocks:
        bare = (_blocked(draft, policy, targets) & turns) - thinking
        for i in bare:
            before, messages[i] = messages[i], _with_block(messages[i], i, draft.thoughts[i], draft.tags)
            _move_flags(parts, i, before, messages[i])
        notes["empty_blocks"] = len(bare)
    return Sample(
        Conversation(messages, whole.tools, whole.flags[:end], whole.notes, tuple(parts)),
        tuple(range(end)),
        targets,
        {i: reasons.get(i, "context") for i in sorted(turns - targets)},
        thinking=thinking,
        pattern=draft.thinking,
        notes=+notes,
    )


def _blocked(draft: _Draft, policy: Policy, targets: frozenset[int]) -> frozenset[int]:
    """Turns that get an empty block if they have no reasoning."""
    return {"none": frozenset[int](), "target": targets, "all": frozenset(draft.thoughts)}[policy.empty_think]


def _with_block(message: Message, index: int, thought: _Thought, tags: Tags | None) -> Message:
    """The message with an empty block in place of the one that its content may begin with."""
    standing = thought.block and not thought.reasoning
    content = _answer(message, index, thought, tags, blanks=False) if standing else message["content"]
    return {**message, "content": content, "reasoning_content": EMPTY_BLOCK}


def fewest(turns: Sequence[int], shared: Callable[[int, int], bool]) -> list[list[int]]:
    """Group turns into the fewest samples; a sample ends with its last turn j and may hold each i < j with `shared(i, j)`.

    `shared(i, j)` says that a text, prompt and emission of i, is a prefix of another, that of j. Being a prefix is transitive, so a
    turn that shares with any later one shares with one that shares with no later one. Those last need a sample each, and are
    enough: going from the last turn to the first and opening a sample only for a turn that fits into none is the minimum. Two of
    them never need comparing with what lies between, so n turns in k samples take at most n * k questions. (Where `shared` is
    not transitive, each turn still stands in a sample that it may share, but there may be too many of these.)
    """
    groups: list[list[int]] = []
    for turn in sorted(turns, reverse=True):
        # nearest end first: the shortest context that holds the turn
        home = next((group for group in reversed(groups) if shared(turn, group[0])), None)
        if home is None:
            groups.append([turn])
        else:
            home.append(turn)
    return [sorted(group) for group in reversed(groups)]


def leading_system(messages: Sequence[Message]) -> int:
    """How many system messages a conversation begins with."""
    return next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))


def kept_by(messages: Sequence[Message], start: int, stop: int) -> list[int]:
    """Which messages a cut keeps: `start` to `stop`, the leading system messages, and the first question where the cut begins with an
    agent's step, so that the steps still stand behind the task."""
    system = leading_system(messages)
    step = system < start < len(messages) and messages[start]["role"] != "user" and messages[system]["role"] == "user"
    return [*range(min(system + step, start)), *range(start, min(stop, len(messages)))]


def cut(sample: Sample, start: int, stop: int) -> Sample:
    """The sample with the messages of `kept_by` only; for length policies, which cut between messages.

    A cut that leaves nothing to train, or begins with a tool's result whose call is gone, is for the caller to refuse.
    """
    messages = sample.conversation.messages
    kept = kept_by(messages, start, stop)
    place = {old: new for new, old in enumerate(kept)}
    return replace(
        sample,
        conversation=replace(
            sample.conversation,
            messages=[messages[i] for i in kept],
            flags=tuple(sample.conversation.flags[i] for i in kept),
            part_flags=tuple(sample.conversation.parts_of(i) for i in kept) if sample.conversation.part_flags else (),
        ),
        origin=tuple(sample.origin[i] for i in kept),
        targets=frozenset(place[i] for i in sample.targets if i in place),
        untrained={place[i]: reason for i, reason in sample.untrained.items() if i in place},
        thinking=frozenset(place[i] for i in sample.thinking if i in place),
    )


# --- the whole build --------------------------------------------------------------------------------------------------------


def rank(seed: int, *what: str | int) -> str:
    """A stable place in a random order: hex digits that depend on the seed and on what is named, and on nothing else."""
    return hashlib.sha256(json.dumps([seed, *what]).encode("utf-8", "surrogatepass")).hexdigest()


def chance(seed: int, *what: str | int) -> float:
    """A number from 0 to below 1, as stable as `rank`."""
    return int(rank(seed, *what)[:13], 16) / 16**13  # 52 bits, which a float holds exactly


def in_validation(policy: Policy, conversation: Conversation) -> bool:
    """Whether a record, with all of its samples, is set apart for validation.

    Told from what the record says, not from where it stands: equal records are never on both sides, and a file keeps its parting
    under another name.
    """
    said = json.dumps([conversation.messages, conversation.tools], sort_keys=True)
    return chance(policy.seed, "validation", said) < policy.validation


def shuffle_rank(seed: int, key: str, variant: int, index: int) -> str:
    """Where a row stands in the build's order under `shuffle`."""
    return rank(seed, "shuffle", key, variant, index)


def balance_rank(policy: Policy, key: str, sample: Sample) -> str:
    """The name and place of a sample for `keep_by_rank`."""
    return rank(policy.seed, "balance", key, sample.variant, sample.index)


def balance_class(sample: Sample) -> BalanceClass:
    """`thinking` if a trained turn thinks, `no_thinking_call` if one calls tools, else `final`."""
    if sample.targets & sample.thinking:
        return "thinking"
    calls = any(sample.conversation.messages[i].get("tool_calls") for i in sample.targets)
    return "no_thinking_call" if calls else "final"


def keep_by_rank(ranks: Collection[str], thinking: int, ratio: float) -> frozenset[str]:
    """Which of the `no_thinking_call` samples stay: the first `int(thinking * ratio)` by rank, all if there are no more.

    Raises:
        CheckFailed: calls without reasoning, but no sample with any; there is nothing to balance against.
    """
    if ranks and not thinking:
        raise CheckFailed(
            f"max_no_thinking_ratio is {ratio}, but no sample has reasoning: all {len(ranks):,} samples with calls would go; leave it out"
        )
    return frozenset(sorted(ranks)[: int(thinking * ratio)])


@dataclass(frozen=True)
class Diversity:
    """How different the variants of a build are. Adds up over records.

    Attributes:
        records: records with a turn that thinks.
        distinct: thinking patterns among their variants, summed.
        possible: the most there could be of them: variants, or 2 to the number of thinking turns where that is less.
        thinking, stripped: turns of variants 1 and on that could think, and those of them that no longer do.
    """

    records: int = 0
    distinct: int = 0
    possible: int = 0
    thinking: int = 0
    stripped: int = 0

    def __add__(self, other: Diversity) -> Diversity:
        return Diversity(
            self.records + other.records,
            self.distinct + other.distinct,
            self.possible + other.possible,
            self.thinking + other.thinking,
            self.stripped + other.stripped,
        )

    @property
    def mean_distinct(self) -> float:
        """Distinct patterns per record."""
        return self.distinct / self.records if self.records else 0.0

    @property
    def stripped_share(self) -> float:
        """Share of thinking turns that the variants lost."""
        return self.stripped / self.thinking if self.thinking else 0.0


def diversity(samples: Iterable[Sample]) -> Diversity:
    """The diversity of one record's samples; nothing where it has no turn that thinks, or one variant only."""
    patterns = {sample.variant: sample.pattern for sample in samples}
    all_turns = patterns.get(0, frozenset[int]())
    if len(patterns) < 2 or not all_turns:
        return Diversity()
    others = [pattern for variant, pattern in patterns.items() if variant]
    return Diversity(
        records=1,
        distinct=len(set(patterns.values())),
        possible=min(len(patterns), 2 ** len(all_turns)),
        thinking=len(all_turns) * len(others),
        stripped=sum(len(all_turns) - len(pattern) for pattern in others),
    )


def _listed(turns: Sequence[int]) -> str:
    """`no turn`, or `messages 2, 4, 6`, the middle left out where there are many."""
    if not turns:
        return "no turn"
    shown = [str(i) for i in turns] if len(turns) <= 12 else [*(str(i) for i in turns[:6]), "...", *(str(i) for i in turns[-3:])]
    return f"message{'s' if len(turns) > 1 else ''} {', '.join(shown)}"

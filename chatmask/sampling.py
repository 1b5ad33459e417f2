"""One conversation -> rows: the policy's samples, rendered and masked, each within its length.

`conversation -> expand (trajectories.py) -> example (parser) -> fit -> made`
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .conversation import Conversation
from .encoding import Request
from .errors import InputError, OptionError, RejectedRow, RejectReason, SpecError, TemplateError
from .example import Example, Span, by_turn
from .parsers.parser import ALL_CHECKS, NO_CHECKS, Checks, Choice, Layout, Parser, choose
from .parsers.parser import Sample as Rendered
from .parsers.prefixes import Cut, Unsound, cuts_of, run_of
from .parsers.shapes import Filled
from .policy import Policy, PolicyLike, load_policy
from .records import parse, plan, read
from .templates.registry import SpecLike, load_spec
from .templates.spec import TemplateSpec
from .templates.strict_yaml import override_pairs
from .trajectories import (
    OF_THE_DATA,
    Diversity,
    Sample,
    Shared,
    Step,
    as_it_is,
    balance_class,
    balance_rank,
    cut,
    diversity,
    expand,
    in_validation,
    keep_by_rank,
    kept_by,
    leading_system,
    tags_of,
)


@dataclass(frozen=True)
class Made:
    """What one record gave.

    Attributes:
        rows: each sample with its example.
        dropped: samples and turns that a declared option set aside, by reason.
        steps: what each step did, in words (`--explain`).
    """

    rows: tuple[tuple[Sample, Example], ...]
    dropped: Counter[str] = field(default_factory=Counter)
    steps: tuple[Step, ...] = ()


def parser_for(
    policy: Policy, spec: SpecLike, tokenizer: Any, demo: bool, overrides: Mapping[str, str] | Sequence[str]
) -> Parser:
    """The parser for a spec under a policy: arguments that the policy makes JSON text stay text (`tool_arguments: json`), unless the
    overrides say otherwise or the template takes dictionaries only.

    Raises:
        SpecError, TokenizerError: as `load_parser`.
    """
    resolved, loaded = choose(spec, tokenizer, demo, overrides)
    given = override_pairs(overrides, "--set", "--set thinking.strip=true")
    if policy.dict_arguments == "ascii_json" and "tool_arguments" not in given:
        with suppress(SpecError):
            return Parser(load_spec(resolved, {"tool_arguments": "json"}), loaded)
    return Parser(resolved, loaded)


def refuse_unknown(policy: Policy, spec: TemplateSpec) -> None:
    """Refuse what `build` does not carry out yet; raises OptionError that names it."""
    if not policy.supervise_reasoning and spec.thinking.inline == "keep":
        raise OptionError(
            f"policy {policy.name}: supervise_reasoning: false needs a spec that tells reasoning from content (inline: keep)"
        )


@dataclass
class Draft:
    """A record on its way: its samples laid out, but not encoded.

    Attributes:
        samples, layouts: of the record, and for each its layout, or what it is refused for.
        dropped, steps: as in `Made`.
        shape: a plain chat that is checked goes both ways.
    """

    policy: Policy
    parser: Parser
    checks: Checks
    samples: list[Sample]
    layouts: list[Layout | Filled | Cut | RejectedRow]
    dropped: Counter[str] = field(default_factory=Counter)
    steps: tuple[Step, ...] = ()
    shape: Filled | None = None

    @property
    def characters(self) -> int:
        """How much text the samples hold."""
        return sum(one.characters for one in self.layouts if not isinstance(one, RejectedRow))


def make(conversation: Conversation, policy: Policy, parser: Parser, key: str, oracle: bool = False) -> Made:
    """Make the rows of one record.

    Args:
        conversation: as `normalise` gives it.
        policy: the samples, the turns that are trained, and lengths.
        parser: the compiled spec.
        key: the record's identity (file and line).
        oracle: compare every turn with what the server would have sent.

    Raises:
        RejectedRow: as `Parser.example`, and `overlength` under `overlength: error`. One bad sample makes the record bad.
    """
    draft = begin(conversation, policy, parser, key, ALL_CHECKS if oracle else NO_CHECKS, explained=True)
    return complete(draft, encode([draft])[0])


def begin(
    conversation: Conversation,
    policy: Policy,
    parser: Parser,
    key: str,
    checks: Checks = NO_CHECKS,
    explained: bool = False,
) -> Draft:
    """The first half of `make`: samples, laid out. Arguments and errors as there; `checks` as `Parser.layout`, `explained` as `expand`."""
    if policy.validation and in_validation(policy, conversation) != (policy.part == "validation"):
        return Draft(policy, parser, checks, [], [], Counter({"validation" if policy.part == "train" else "train": 1}))
    filled = parser.shape(conversation) if policy.plain else None
    if filled is not None and checks == NO_CHECKS:
        sample = as_it_is(conversation, filled.shape.turns, filled.shape.thinking)
        return Draft(policy, parser, checks, [sample], [filled])
    shared = _sharing(parser) if policy.split == "exact" else None
    samples, dropped, steps = expand(
        conversation,
        policy,
        key,
        tags=tags_of(parser.spec),
        shared=shared,
        strips=parser.spec.thinking.strip,
        explained=explained,
    )
    layouts = _cut(samples, policy, parser, checks) or [_layout(sample, policy, parser, checks) for sample in samples]
    return Draft(policy, parser, checks, samples, layouts, dropped, tuple(steps), filled)


def _layout(sample: Sample, policy: Policy, parser: Parser, checks: Checks) -> Layout | RejectedRow:
    choice = Choice(policy.mask_from, policy.supervise_reasoning, policy.train_on == "all_text")
    try:
        return parser.layout(sample.conversation, checks, untrained=sample.untrained, choice=choice)
    except RejectedRow as error:
        return error


def _cut(
    samples: Sequence[Sample], policy: Policy, parser: Parser, checks: Checks
) -> list[Layout | Filled | Cut | RejectedRow] | None:
    """Samples that train their last turn only (`per_turn`) as cuts of the longest ones (`parsers/prefixes.py`); None where each must be laid out by itself."""
    if (
        not parser.short_ways
        or policy.split not in ("per_turn", "exact")
        or len(samples) < 2
        or samples[0].conversation.part_flags
    ):
        return None
    if checks == ALL_CHECKS or any(sample.targets != {len(sample.conversation.messages) - 1} for sample in samples):
        return None  # every turn is compared with what the server sent, context too; or a sample trains several
    layouts: list[Layout | Filled | Cut | RejectedRow] = []
    for _, group in itertools.groupby(samples, lambda sample: (sample.variant, run_of(sample.conversation))):
        *others, longest = group
        base = _layout(longest, policy, parser, checks)
        found = _cuts(others, longest, base, policy, parser, checks) if others and isinstance(base, Layout) else None
        layouts += [
            cut or _layout(sample, policy, parser, checks)
            for sample, cut in zip(others, found or [None] * len(others), strict=True)
        ]
        layouts.append(base)
    return layouts


def _cuts(
    others: Sequence[Sample], longest: Sample, base: Layout, policy: Policy, parser: Parser, checks: Checks
) -> list[Cut | None] | None:
    context = longest.conversation.messages
    if any(
        one is not other and one != other
        for sample in others
        for one, other in zip(sample.conversation.messages[:-1], context[: len(sample.conversation.messages) - 1], strict=True)
    ):
        return None
    own = {len(sample.conversation.messages) - 1: sample.conversation.messages[-1] for sample in others}
    whole: Layout | RejectedRow = base
    if any(context[i] is not message and context[i] != message for i, message in own.items()):
        messages = [own.get(i, message) for i, message in enumerate(context)]
        whole = _layout(
            replace(longest, conversation=replace(longest.conversation, messages=messages)), policy, parser, NO_CHECKS
        )
    if not isinstance(whole, Layout):
        return None
    moved = policy.mask_from != "prompt" or not policy.supervise_reasoning
    return cuts_of(parser, base, whole, [sample.conversation for sample in others], checks.turns, moved)


def encode(drafts: Sequence[Draft]) -> list[list[Example | RejectedRow]]:
    """Encode the samples of several records in one go; for each record the examples of its samples, or what they are refused for.

    Raises:
        Unsound: as `Parser.finish`.
    """
    if not drafts:
        return []
    parser = drafts[0].parser
    made = iter(parser.finish([one for draft in drafts for one in draft.layouts if not isinstance(one, RejectedRow)]))
    examples = [[one if isinstance(one, RejectedRow) else next(made) for one in draft.layouts] for draft in drafts]
    checked = [
        (draft.shape, own[0]) for draft, own in zip(drafts, examples, strict=True) if draft.shape and draft.checks != NO_CHECKS
    ]
    for (_, long), short in zip(checked, parser.finish([shape for shape, _ in checked]), strict=True):
        if not isinstance(long, Example) or not isinstance(short, Example) or not long.same_row(short):
            raise Unsound("shapes", "a plain chat has another row by its shape than by the template")
    return examples


def complete(draft: Draft, examples: Sequence[Example | RejectedRow]) -> Made:
    """The second half of `make`: lengths, and what is dropped. Raises RejectedRow as there."""
    policy, parser, dropped = draft.policy, draft.parser, draft.dropped
    usual = len(examples) == 1 and policy.plain and policy.max_length is None and not draft.samples[0].notes
    if usual and type(one := examples[0]) is Example:
        return Made(((draft.samples[0], one),), dropped, draft.steps)

    def noted(sample: Sample, made: Example | RejectedRow) -> Example:
        if isinstance(made, Example):
            return replace(made, notes=Counter(made.notes) + sample.notes) if sample.notes else made
        if made.message is None:
            raise made
        raise RejectedRow(made.reason, made.detail, sample.origin[made.message]) from None  # as the record counts

    bounds: dict[int, Callable[[int, int], int]] = {}

    def least(sample: Sample) -> Callable[[int, int], int]:
        longest = max((one for one in draft.samples if one.variant == sample.variant), key=lambda one: len(one.origin))
        if longest.origin[: len(sample.origin)] != sample.origin:
            longest = sample
        if id(longest) not in bounds:
            bounds[id(longest)] = _least(longest, _layout(longest, policy, parser, NO_CHECKS), parser)
        return bounds[id(longest)]

    def example(sample: Sample) -> Example:
        layout = _layout(sample, policy, parser, draft.checks)
        return noted(sample, layout if isinstance(layout, RejectedRow) else parser.finish([layout])[0])

    rows: list[tuple[Sample, Example]] = []
    for sample, one in zip(draft.samples, examples, strict=True):
        try:
            first = noted(sample, one)
        except RejectedRow as error:
            if policy.require_spans and error.reason in (RejectReason.HEADER_NOT_FOUND, RejectReason.NO_ASSISTANT_SPAN):
                dropped["span_count"] += 1
                continue
            took = Counter(reason for reason in sample.untrained.values() if reason not in OF_THE_DATA | {"context"})
            if error.reason is RejectReason.ZERO_SUPERVISION and took:
                # what the policy took was all that the template had left to train
                dropped[max(sorted(took), key=lambda reason: took[reason])] += 1
                continue
            raise
        if policy.max_length is None or len(first.ids) <= policy.max_length:
            rows.append((sample, first))
            continue
        fitted = list(_fit(sample, len(first.ids), policy, example, least))
        if not fitted:
            dropped["overlength"] += 1
        elif policy.overlength == "explode":
            # turns that fit behind nothing, not even by themselves
            lost = len(sample.targets) - sum(len(part.targets) for part, _ in fitted)
            dropped.update({"overlength_turns": lost} if lost else {})
        rows += fitted
    numbered = [(sample if sample.index == i else replace(sample, index=i), made) for i, (sample, made) in enumerate(rows)]
    variety = diversity(sample for sample, _ in numbered) if policy.variants > 1 else Diversity()
    if variety.records:
        sample, made = numbered[0]
        counts = {"variant_patterns": variety.distinct, "variant_patterns_possible": variety.possible}
        numbered[0] = (sample, replace(made, notes={**made.notes, **counts}))
    return Made(tuple(numbered), dropped, draft.steps)


# --- the whole build: equal samples, and the balance of calls with and without reasoning ---------------------------------------

Place = tuple[str, int, int]  # file, line, index of the sample in its record


@dataclass(frozen=True)
class Entry:
    """One sample, as far as the choice over a whole build needs it: where it is, what it is equal to, its class and rank."""

    place: Place
    digest: bytes
    kind: str
    rank: str


def entries_of(made: Made, policy: Policy, path: str, line: int) -> list[Entry]:
    """What the choice over a whole build must know of a record's samples."""
    key = f"{path}:{line}"
    return [
        Entry(
            (path, line, sample.index),
            hashlib.sha256(example.ids.tobytes() + example.mask.tobytes()).digest(),
            balance_class(sample),
            balance_rank(policy, key, sample),
        )
        for sample, example in made.rows
    ]


def left_out(entries: Iterable[Entry], policy: Policy) -> dict[Place, str]:
    """Which samples of a build go, and why: `duplicate` of an earlier one, then `balance` (calls without reasoning beyond the ratio).

    Raises:
        CheckFailed: a balance is asked for and no sample has reasoning.
    """
    gone: dict[Place, str] = {}
    seen: set[bytes] = set()
    calls: dict[str, Place] = {}
    thinking = 0
    for entry in entries:
        if policy.dedup and entry.digest in seen:
            gone[entry.place] = "duplicate"
            continue
        seen.add(entry.digest)
        thinking += entry.kind == "thinking"
        if entry.kind == "no_thinking_call":
            calls[entry.rank] = entry.place
    if policy.max_no_thinking_ratio is not None:
        kept = keep_by_rank(calls.keys(), thinking, policy.max_no_thinking_ratio)
        gone.update({place: "balance" for rank, place in calls.items() if rank not in kept})
    return gone


def explain(
    path: str | Path,
    line: int,
    spec: SpecLike,
    *,
    tokenizer: Any = None,
    demo: bool = False,
    overrides: Mapping[str, str] | Sequence[str] = (),
    policy: PolicyLike | None = None,
    policy_overrides: Mapping[str, str] | Sequence[str] = (),
) -> Iterator[str]:
    """What each step makes of one record, in words.

    Args:
        path, line: the record.
        spec, tokenizer, demo, overrides, policy, policy_overrides: as `build`.

    Yields:
        One line of text a step, then one for each sample with its tokens and turns.

    Raises:
        InputError: the file has no such line.
        SpecError, TokenizerError: as `build`.
    """
    chosen = load_policy(policy, policy_overrides)
    parser = parser_for(chosen, spec, tokenizer, demo, overrides)
    _, chunks = plan([path])
    record = next((record for chunk in chunks for record in read(chunk) if record.line == line), None)
    if record is None:
        raise InputError(f"{path}: has no line {line}")
    yield f"{path}:{line}, spec {parser.spec.name}, policy {chosen.name} (split {chosen.split})"
    try:
        conversation = parser.read(parse(record))
        turns = sum(message["role"] == "assistant" for message in conversation.messages)
        yield f"  read        {len(conversation.messages)} messages, {turns} assistant turns, {len(conversation.tools or ())} tools"
        made = make(conversation, chosen, parser, f"{path}:{line}", oracle=True)
    except RejectedRow as error:
        yield f"  rejected    {error}"
        return
    for step in made.steps:
        dropped = f"; dropped {', '.join(f'turn {i} ({why})' for i, why in sorted(step.dropped.items()))}" if step.dropped else ""
        yield f"  {step.name:<12}{step.did}{dropped}"
    for reason, count in sorted(made.dropped.items()):
        yield f"  dropped     {count} {reason}"
    for sample, example in made.rows:
        turns = by_turn(example.spans)
        trained = [
            f"{sample.origin[turn[0].message]}{' (in part)' if len(turn) > 1 else ''}"
            for turn in turns
            if any(span.trained for span in turn)
        ]
        others = Counter(turn[0].reason for turn in turns if not any(span.trained for span in turn))
        why = f"; not trained: {', '.join(f'{n} {reason}' for reason, n in sorted(others.items()))}" if others else ""
        yield (
            f"  sample {sample.index}{f' variant {sample.variant}' if chosen.variants > 1 else ''}: {len(sample.conversation.messages)} "
            f"messages, {len(example.ids):,} tokens, {int(example.mask.sum()):,} supervised; trains messages {', '.join(trained)}{why}"
        )


# --- lengths ------------------------------------------------------------------------------------------------------------------


def _least(sample: Sample, layout: Layout | RejectedRow, parser: Parser) -> Callable[[int, int], int]:
    """How many tokens the part of a sample from `start` to `stop` has at least, told from the whole one; arguments as `kept_by`.

    Templates write a message at least as long in a part as in the whole: what they leave out, they leave out of history, and where more
    follows, there is more of it. So a part that is too long by this count need not be rendered, of which there are very many.
    """
    if isinstance(layout, RejectedRow):
        return lambda start, stop: 0
    messages, rendering, shift = sample.conversation.messages, layout.sample.rendering, int(layout.sample.prepared.added_system)
    ranges = [rendering.ranges.get(i + shift, []) for i in range(len(messages))]
    system = leading_system(messages)
    pieces = [rendering.text[a:b] for found in ranges for a, b in found]
    # what stands in front of all is in every part, unless messages may stand there that are not
    head = rendering.text[: min(a for found in ranges for a, _ in found)] if pieces and all(ranges[system:]) else ""
    encoded = parser.encoder.encode_many([Request(piece, tuple(parser.encoder.cut(piece))) for piece in [head, *pieces]])
    # a token may reach over each border
    first, *counts = [max(0, len(one.ids) - 1) for one in encoded]
    own, sizes = iter(counts), [first]
    sizes += [sum(next(own) for _ in found) for found in ranges]
    total = list(itertools.accumulate(sizes))

    def least(start: int, stop: int) -> int:
        front = next((n for n, i in enumerate(kept_by(messages, start, start + 1)) if i == start), 0)
        return total[front] + total[min(stop, len(messages))] - total[start]

    return least


def _fit(
    sample: Sample,
    tokens: int,
    policy: Policy,
    example: Callable[[Sample], Example],
    lengths: Callable[[Sample], Callable[[int, int], int]],
) -> Iterator[tuple[Sample, Example]]:
    """What the length policy makes of an over-long sample. Cuts fall between messages, an end token never parts from its span."""
    limit = policy.max_length
    assert limit is not None
    if policy.overlength == "error":
        raise RejectedRow(RejectReason.OVERLENGTH, f"{tokens:,} tokens; the limit is {limit:,}")
    if policy.overlength == "drop":
        return
    messages = sample.conversation.messages
    system = leading_system(messages)
    # a window begins with a question, or with an agent's step behind the first one
    starts = [
        i
        for i in range(system, len(messages))
        if messages[i]["role"] == "user"
        or (messages[i]["role"] == "assistant" and i > system and messages[i - 1]["role"] == "tool")
    ]
    starts = sorted({system, *starts})
    stops = [i + 1 for i, m in enumerate(messages) if m["role"] == "assistant" and i in sample.targets]

    least = lengths(sample)

    def fits(start: int, stop: int) -> tuple[Sample, Example] | None:
        if least(start, stop) > limit:
            return None
        part = cut(sample, start, stop)
        before = ["", *(m["role"] for m in part.conversation.messages)]
        orphan = any(
            m["role"] == "tool" and before[i] not in ("assistant", "tool") for i, m in enumerate(part.conversation.messages)
        )
        if not part.targets or orphan:
            return None
        made = example(part)
        if policy.overlength != "explode":
            turns, left = ([m["role"] for m in some].count("assistant") for some in (messages, part.conversation.messages))
            made = replace(made, notes={**made.notes, "turns_cut": turns - left})
        return (part, made) if len(made.ids) <= limit else None

    if policy.overlength == "first_turns":
        found = _largest([stop for stop in stops if stop > starts[0]], lambda stop: fits(system, stop))
        if found is not None:
            yield found
    elif policy.overlength == "last_turns":
        # one by one: a later start may give a longer part, since an agent's step takes the first question with it
        stop = max(stops, default=0)
        found = next((part for start in starts if start < stop and (part := fits(start, stop)) is not None), None)
        if found is not None:
            yield found
    else:
        yield from _windows(sample, starts, stops, fits)


def _largest(candidates: list[int], fits: Callable[[int], Any]) -> Any:
    """What the last of the candidates that fits gives; candidates grow in length, so those behind one that does not fit are longer."""
    low, high, best = 0, len(candidates) - 1, None
    while low <= high:
        middle = (low + high) // 2
        made = fits(candidates[middle])
        if made is not None:
            best, low = made, middle + 1
        else:
            high = middle - 1
    # lengths need not only grow (history may be rewritten): where the search found nothing, the short ones are tried one by one
    return best if best is not None else next((made for c in candidates if (made := fits(c)) is not None), None)


def _windows(
    sample: Sample, starts: list[int], stops: list[int], fits: Callable[[int, int], tuple[Sample, Example] | None]
) -> Iterator[tuple[Sample, Example]]:
    """Windows that overlap by whole turns; each trained turn is trained in one, behind as much context as fits."""
    done, counted = 0, False
    while any(stop > done for stop in stops):
        rest = [stop for stop in stops if stop > done]
        # the most context with which the next turn fits, then as many turns as fit behind it
        start = next((start for start in starts if start < rest[0] and fits(start, rest[0]) is not None), None)
        if start is None:
            done = rest[0]  # this turn does not fit by itself
            continue
        starts = [one for one in starts if one >= start]  # what was too long for this turn is too long for the next ones
        stop, (part, made) = _furthest(start, rest, fits)
        kept = kept_by(sample.conversation.messages, start, stop)
        again = {i for i, old in enumerate(kept) if old < done and i in part.targets}
        if counted:  # counts of the record stand once, with its first window
            made = replace(made, notes=Counter(made.notes) - (Counter(sample.conversation.notes) + sample.notes))
        counted = True
        yield _without(part, made, again)
        done = stop


def _furthest(
    start: int, stops: list[int], fits: Callable[[int, int], tuple[Sample, Example] | None]
) -> tuple[int, tuple[Sample, Example]]:
    """The last of the stops up to which a window from `start` fits, and what it gives; up to the first one it does.

    The search goes by doubling steps, so that no window is laid out that is much longer than the limit.
    """

    def window(stop: int) -> tuple[int, tuple[Sample, Example]] | None:
        made = fits(start, stop)
        return None if made is None else (stop, made)

    low, step = 0, 1
    while low + step < len(stops) and window(stops[low + step]) is not None:
        low, step = low + step, 2 * step
    found: tuple[int, tuple[Sample, Example]] = _largest(stops[low : low + step], window)
    return found


def _without(part: Sample, made: Example, again: set[int]) -> tuple[Sample, Example]:
    """The row with turns that an earlier window trained as context."""
    if not again:
        return part, made
    mask = made.mask.copy()
    spans: list[Span] = []
    for turn in by_turn(made.spans):
        if turn[0].message in again and any(span.trained for span in turn):
            mask[turn[0].start : turn[-1].end] = 0
            turn = (Span(turn[0].message, turn[0].start, turn[-1].end, False, "context"),)
        spans += turn
    untrained = {**part.untrained, **dict.fromkeys(again, "context")}
    return replace(part, targets=part.targets - again, untrained=untrained), replace(made, mask=mask, spans=tuple(spans))


# --- exact ----------------------------------------------------------------------------------------------------------------------


def _sharing(parser: Parser) -> Shared:
    """May turn i stand in the sample that ends with turn j? Its prompt and text must be what they are where it is the last.

    Two renderings a turn: what the server sent, and the sample that ends with it. Where the one begins the other, the turn is what
    stands between them, up to the end token; elsewhere it is located, which takes several times as long.
    """
    known: dict[tuple[int, int], tuple[str, str | None]] = {}
    held: dict[int, tuple[Conversation, Rendered | None]] = {}  # the conversation, so that its id is not given to another one

    def ending(conversation: Conversation, end: int) -> tuple[str, str | None]:
        """The text of the sample that ends with turn `end`, up to the turn's end; and that again if its prompt is the served one."""
        place = (id(conversation), end)
        if place not in known:
            if id(conversation) not in held:
                held[id(conversation)] = conversation, _readable(parser, conversation)
            whole = held[id(conversation)][1]
            found = None if whole is None else _between_prompt_and_end(parser, whole, end)
            if found is not None:
                known[place] = found, found
                return found, found
            sample = parser.sample(conversation.first(end + 1))
            turn = sample.turns[-1]
            text = sample.rendering.text[: turn.end]
            served = parser.served(sample, turn.message)
            known[place] = (text, text if served is not None and served[0] == text[: turn.start] else None)
        return known[place]

    def shared(conversation: Conversation, i: int, j: int) -> bool:
        own = ending(conversation, i)[1]
        return own is not None and ending(conversation, j)[0].startswith(own)

    return shared


def _readable(parser: Parser, conversation: Conversation) -> Rendered | None:
    """The conversation, rendered, if turns of its beginnings may be read off their texts: no control text in content, ends that are
    tokens; else None."""
    if not parser.short_ways:
        return None
    try:
        whole = parser.sample(conversation)
    except RejectedRow:
        return None  # for what stands behind the last trained turn, perhaps
    assistant = whole.prepared.spec.assistant
    readable = (
        whole.shield is None
        and not whole.rendering.quoted
        and not parser.template.tagged
        and parser.spec.thinking.mode != "auto"
        and whole.prepared.spec.specforge is None
        and assistant.end_owner == "self"
        and assistant.history_end is None
        and assistant.final_stop == "none"
        and all(end in parser.control for end in assistant.ends)
    )
    return whole if readable else None


def _between_prompt_and_end(parser: Parser, whole: Rendered, end: int) -> str | None:
    """The text of the sample that ends with turn `end`, up to its end token, where it begins with the served prompt; else None."""
    message, spec = end + int(whole.prepared.added_system), whole.prepared.spec
    served = parser.served(whole, message)
    try:
        text = parser.template.render(whole.shown[: message + 1], whole.tools, **spec.kwargs)
    except TemplateError:
        return None
    after_tool = whole.prepared.messages[max(0, message - 1)]["role"] == "tool"
    if served is None or not text.startswith(served[0]) or not served[0].endswith(spec.assistant.served_header(after_tool)):
        return None
    stop = max(text.rfind(literal, len(served[0])) + len(literal) for literal in spec.assistant.ends)
    return text[:stop] if stop > len(served[0]) and not text[stop:].strip() else None

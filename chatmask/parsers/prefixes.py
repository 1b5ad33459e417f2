"""Samples that share their beginning: rendered and encoded once, and cut.

Split `per_turn` makes a sample of each turn, with all that came before it as context. Where no user message lies between two of
them, templates write the shorter context as the beginning of the longer one (one that rewrites history does so at user messages,
or at the last turn, whose header then differs). So of each such run only the longest sample is laid out. Any other is its text up
to the turn's header, and the turn as it is written when it is the last: with the served header, and with what the policy leaves
it (its reasoning, where context has none).

That a template does so is not believed: each sample is rendered by itself, untraced, and compared with what was cut. What is saved is
to trace, check and encode the shared beginning again. Where the template writes a turn otherwise when it is the last (Qwen3 adds an
empty think block), the beginning is shared all the same; where that differs, too, the sample is laid out by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from ..canonical import first_difference
from ..conversation import Conversation
from ..encoding import Control, Encoded, Request
from ..errors import TemplateError
from ..example import Example, ParityBreak, Span
from ..masking import Emission, bounds
from .turns import Turn, irregular

if TYPE_CHECKING:
    from .parser import Layout, Parser


class Unsound(Exception):
    """A short way gave something else than the long way; `what` says which. The rows must be made again without it."""

    def __init__(self, what: str, detail: str) -> None:
        super().__init__(f"{what}: {detail}")
        self.what = what


@dataclass(frozen=True)
class Cut:
    """A sample that shares its beginning with another.

    Attributes:
        base: the longest sample of the run.
        conversation: this one.
        place: which of the base's turns is its last, the one that is trained.
        head: characters of the base's text in front of that turn's header.
        tail: the turn's own text, header and what the template writes behind it included.
        controls: the control tokens in it.
        lead: where the turn's header ends in it.
        emission: the turn's trained characters in it.
        message: the turn's message, as the template gets it where it is the last.
        context: the turn stands behind one that history has rewritten.
        asked: compare the turn's prompt with what the server would have sent.
        text: the whole sample's text, as the template renders it.
    """

    base: Layout
    conversation: Conversation
    place: int
    head: int
    tail: str
    controls: tuple[Control, ...]
    lead: int
    emission: Emission
    message: dict[str, Any]
    context: bool
    asked: bool = False
    text: str = ""

    @property
    def characters(self) -> int:
        """Length of the sample's text."""
        return self.head + len(self.tail)

    @property
    def request(self) -> Request:
        """What is to be encoded of it."""
        return Request(self.tail, self.controls, (self.emission.start, self.emission.end), quoted=False)


def run_of(conversation: Conversation) -> int:
    """The last user message of a sample; those that end behind the same one are a run."""
    return next((i for i in range(len(conversation.messages) - 1, -1, -1) if conversation.messages[i]["role"] == "user"), -1)


def cuts_of(
    parser: Parser, base: Layout, whole: Layout, conversations: Sequence[Conversation], asked: int, moved: bool
) -> list[Cut | None] | None:
    """Cut samples out of the longest of them; None for each, or all, that must be laid out by itself.

    Args:
        parser: of the spec.
        base: the longest sample, laid out, all turns but its last untrained.
        whole: the same with every turn as it is where it is the last one; the base itself where policies leave context alone.
        conversations: the others, each ending with an assistant message, in ascending length.
        asked: at how many of them the prompt is compared with what the server would have sent.
        moved: the trained part of a turn does not begin right behind its header.
    """
    spec = base.sample.prepared.spec
    if (
        irregular(base.sample.prepared.messages)
        or parser.encoder.whole_only
        or spec.specforge
        or spec.tool_call_ids is not None
        or not parser.predicts
    ):
        return None
    if any(
        layout.sample.rendering.quoted
        or layout.sample.rendering.gaps
        or layout.sample.prepared.added_system
        or layout.sample.prepared.notes
        or layout.sample.prepared.spec != spec
        for layout in (base, whole)
    ):
        return None
    if parser.spec.thinking.mode == "auto" and any(parser.thinks(one) != (spec.thinking.mode == "on") for one in conversations):
        return None
    before = {turn.message: (n, turn) for n, turn in enumerate(base.sample.turns)}
    last = {turn.message: (turn, emission) for turn, emission in zip(whole.sample.turns, whole.emissions, strict=True)}
    messages, rendering = base.sample.prepared.messages, whole.sample.rendering
    cuts: list[Cut] = []
    chosen = (
        set(np.linspace(0, len(conversations) - 1, min(asked, len(conversations))).round().astype(int).tolist())
        if asked
        else set()
    )
    for n, conversation in enumerate(conversations):
        target = len(conversation.messages) - 1
        following = rendering.ranges.get(target + 1)
        if target not in before or target not in last or not following:
            return None
        (place, head), (turn, emission) = before[target], last[target]
        end, context = min(start for start, _ in following), base.changed.get(target, False)
        usual = turn.stopped and not turn.end_rewritten and turn.end <= end and whole.rewritten.get(target) != "emission"
        if not usual or (context and spec.rewritten.context != "train"):
            return None
        if not (_at_control(base, head.header) and _at_control(whole, turn.header)):
            return None  # text may only be cut where a control token begins
        tail, start = rendering.text[turn.header : end], emission.start - turn.header
        if turn.form == "history":
            if moved:
                return None
            header = spec.assistant.served_header(target > 0 and messages[target - 1]["role"] == "tool")
            tail, start = header + rendering.text[turn.start : end], len(header)
        stop = start + turn.end - emission.start
        lead = start if turn.form == "history" else turn.start - turn.header
        message = whole.sample.prepared.messages[target]
        cut = Cut(
            base, conversation, place, head.header, tail, (), lead, Emission(target, start, stop), message, context, n in chosen
        )
        cuts.append(cut)
    with parser.template.remembering():
        settled = [_settled(parser, cut, whole, moved) for cut in cuts]
    return [cut and replace(cut, controls=tuple(parser.encoder.cut(cut.tail))) for cut in settled]


def _at_control(layout: Layout, position: int) -> bool:
    return next(layout.sample.rendering.controls_from(position), (-1, -1, -1))[0] == position


def _settled(parser: Parser, cut: Cut, whole: Layout, moved: bool) -> Cut | None:
    """The cut as the template writes it when it is rendered itself; None where it cannot be cut."""
    sample, target = cut.base.sample, cut.emission.message
    shown = [*sample.shown[:target], whole.sample.shown[target]]
    try:
        text = parser.template.render(shown, sample.tools, **sample.prepared.spec.kwargs)
    except TemplateError:
        return None
    shared = sample.rendering.text.startswith(text[: cut.head])
    if shared and len(text) == cut.characters and text.endswith(cut.tail):
        return replace(cut, text=text)
    start, tail = cut.emission.start, text[cut.head :]
    body = cut.tail[start:]
    if moved or not shared or not tail.startswith(cut.tail[:start]) or not tail.endswith(body):
        return None
    if len(tail) < start + len(body):
        return None
    # what the template adds in front of the last turn's text is its own emission; where it ends is counted from behind
    stop = len(tail) - (len(cut.tail) - cut.emission.end)
    return replace(cut, tail=tail, emission=Emission(target, start, stop), text=text)


def cut_examples(
    parser: Parser, cuts: Sequence[Cut], encoded: Encoded, longest: Example, tails: Sequence[Encoded]
) -> list[Example | None]:
    """The examples of the cuts of one base; None where no token of the turn is trained.

    Args:
        parser: of the spec.
        cuts: in ascending length.
        encoded, longest: the base's ids and edges, and its example.
        tails: of each cut, encoded.
    """
    if not cuts:
        return []
    base = cuts[0].base
    sample, spec = base.sample, base.sample.prepared.spec
    across = [0, *accumulate(bounds(encoded.edges, emission, spec.straddle)[2] for emission in base.emissions)]
    made: list[Example | None] = []
    for cut, tail in zip(cuts, tails, strict=True):
        shift, target = encoded.edges[cut.head].token, cut.emission.message
        first, last, straddles = bounds(tail.edges, cut.emission, spec.straddle)
        if last <= first:
            made.append(None)
            continue
        ids = np.concatenate((encoded.ids[:shift], tail.ids))
        mask = np.zeros(len(ids), np.uint8)
        mask[shift + first : shift + last] = 1
        span = Span(target, shift + first, shift + last, True, "")
        messages = [*sample.prepared.messages[:target], cut.message]
        end = cut.head + cut.emission.end
        turns = (*sample.turns[: cut.place], Turn(target, cut.head, cut.head + cut.lead, end, "served"))
        rewritten = {i: kind for i, kind in base.rewritten.items() if i < target}
        if cut.context:
            rewritten[target] = "context"
        example = Example(
            text=cut.text,
            ids=ids,
            mask=mask,
            spans=(*longest.spans[: cut.place], span),
            rewritten=rewritten,
            straddles=across[cut.place] + straddles,
            notes={**cut.conversation.notes, **parser.counts(spec, messages, turns)},
            turns=turns,
        )
        made.append(_asked(parser, cut, example, span) if cut.asked else example)
    return made


def _asked(parser: Parser, cut: Cut, example: Example, span: Span) -> Example:
    """The example with its turn's prompt compared with what the server would have sent."""
    sample, turn = cut.base.sample, example.turns[-1]
    served = parser.served(sample, turn.message)
    prefix = sample.rendering.text[: cut.head] + cut.tail[: cut.lead]
    breaks: tuple[ParityBreak, ...]
    if served is not None and served[0] != prefix:
        breaks = (ParityBreak(turn.message, "text", not parser.stable(sample), first_difference(served[0], prefix)),)
    else:
        breaks = parser.parity(sample, {}, [turn], example.ids, {span.message: span}) if cut.lead == cut.emission.start else ()
    return replace(example, parity=breaks, compared=1)

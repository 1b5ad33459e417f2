"""Samples that are prefixes of one another: rendered and encoded once, cut at the turns' ends.

Split `per_turn` makes a sample of each turn, with all that came before it. Where no user message lies between two of them, templates write the
shorter one as the beginning of the longer one (a template that rewrites history does so at user messages, or the probe has said
otherwise). So of each such run only the longest is laid out, and the others are cut from it; some of them, in each record, are
rendered themselves and compared, and a difference ends the use of cuts (`Unsound`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from ..conversation import Conversation
from ..encoding import Encoded
from ..errors import TemplateError
from ..example import Example, Span
from ..masking import bounds
from .turns import Turn

if TYPE_CHECKING:
    from .parser import Layout, Parser

COMPARED = 2  # cuts of one run that are rendered themselves, besides those of the first records
ALL_COMPARED = 3  # records of which every cut is


class Unsound(Exception):
    """A short way gave something else than the long way; `what` says which. The rows must be made again without it."""

    def __init__(self, what: str, detail: str) -> None:
        super().__init__(f"{what}: {detail}")
        self.what = what


@dataclass(frozen=True)
class Cut:
    """A sample that is the beginning of another.

    Attributes:
        base: the longest sample of the run.
        conversation: this one.
        end: characters of the base's text that are this sample's.
        turns: how many of the base's turns it has; the last of them is trained.
        asked: compare that turn's prompt with what the server would have sent.
    """

    base: Layout
    conversation: Conversation
    end: int
    turns: int
    asked: bool


def run_end(conversation: Conversation, end: int) -> int:
    """The last user message before `end`: samples that end behind the same one are a run."""
    return next((i for i in range(end - 1, -1, -1) if conversation.messages[i]["role"] == "user"), -1)


def cuts_of(parser: Parser, base: Layout, conversations: Sequence[Conversation], asked: int) -> list[Cut] | None:
    """Cut samples out of the longest of them, or None where they must be laid out one by one.

    Args:
        parser: of the spec.
        base: the longest sample, laid out, all other turns untrained.
        conversations: the others, each ending with an assistant message, in ascending length.
        asked: at how many of them the prompt is compared with what the server would have sent.

    Raises:
        Unsound: a sample is not the beginning of the base.
    """
    sample, spec = base.sample, base.sample.prepared.spec
    rendering = sample.rendering
    thinks = spec.thinking.mode
    usual = not (
        rendering.quoted or rendering.gaps or parser.encoder.whole_only or spec.specforge or sample.prepared.added_system
    )
    if not usual or sample.prepared.notes or spec.tool_call_ids is not None or not parser.predicts:
        return None
    if parser.spec.thinking.mode == "auto" and any(
        parser.thinks(conversation) != (thinks == "on") for conversation in conversations
    ):
        return None
    places = {turn.message: n for n, turn in enumerate(sample.turns)}
    cuts = []
    for conversation in conversations:
        target = len(conversation.messages) - 1
        following = rendering.ranges.get(target + 1)
        turn: Turn | None = sample.turns[places[target]] if target in places else None
        if turn is None or not following or not turn.stopped or base.rewritten.get(target):
            return None
        end = min(start for start, _ in following)
        if turn.end > end:
            return None
        cuts.append(Cut(base, conversation, end, places[target] + 1, False))
    _compare(parser, cuts)
    chosen = set(np.linspace(0, len(cuts) - 1, min(asked, len(cuts))).round().astype(int).tolist()) if asked else set()
    return [Cut(c.base, c.conversation, c.end, c.turns, n in chosen) for n, c in enumerate(cuts)]


def _compare(parser: Parser, cuts: Sequence[Cut]) -> None:
    """Render some of the cuts themselves."""
    everything = parser.compared_records < ALL_COMPARED
    parser.compared_records += 1
    # the shortest, and one that differs from record to record
    chosen = cuts if everything else {0: cuts[0], **({n: cuts[n]} if (n := len(cuts) * 7 // 11) else {})}.values()
    for cut in chosen:
        sample = cut.base.sample
        shown = sample.shown[: len(cut.conversation.messages)]
        try:
            text = parser.template.render(shown, sample.tools, **sample.prepared.spec.kwargs)
        except TemplateError as error:
            raise Unsound("prefix_cuts", str(error)) from None
        if text != sample.rendering.text[: cut.end]:
            raise Unsound("prefix_cuts", f"{len(text)} characters of a sample that was cut at {cut.end}")


def cut_examples(parser: Parser, cuts: Sequence[Cut], encoded: Encoded, whole: Example) -> list[Example | None]:
    """The examples of the cuts of one base, from its ids, edges and spans (one a turn); None where no token of the turn is trained."""
    if not cuts:
        return []
    base = cuts[0].base
    sample = base.sample
    spec = sample.prepared.spec
    across = list(accumulate(bounds(encoded.edges, emission, spec.straddle)[2] for emission in base.emissions))
    texts = base.sample.rendering.text
    made: list[Example | None] = []
    for cut in cuts:
        end, span = encoded.edges[cut.end], whole.spans[cut.turns - 1]
        if span.end <= span.start or end.over:
            made.append(None)
            continue
        mask = np.zeros(end.token, np.uint8)
        mask[span.start : span.end] = 1
        messages, turns = sample.prepared.messages[: len(cut.conversation.messages)], tuple(sample.turns[: cut.turns])
        ids, turn = encoded.ids[: end.token], turns[-1]
        breaks = parser.served_text_breaks(sample, [turn]) if cut.asked else {}
        made.append(
            Example(
                text=texts[: cut.end],
                ids=ids,
                mask=mask,
                spans=(*whole.spans[: cut.turns - 1], Span(span.message, span.start, span.end, True, "")),
                rewritten={i: kind for i, kind in base.rewritten.items() if i < len(messages)},
                straddles=across[cut.turns - 1],
                notes={**cut.conversation.notes, **parser.counts(spec, messages, turns)},
                parity=parser.parity(sample, breaks, [turn], ids, {span.message: span}) if cut.asked else (),
                turns=turns,
                compared=int(cut.asked),
            )
        )
    return made

"""Parser: a compiled spec. One conversation in, one Example out.

`conversation -> prepare -> render (shielded, traced) -> turns -> policy -> encode -> mask`
"""

from __future__ import annotations

import bisect
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from ..canonical import first_difference
from ..conversation import MAX_MESSAGES, Conversation, normalise
from ..encoding import Encoded, EncodedShape, Filling, Ids, Request, control_tokens
from ..errors import RejectedRow, RejectReason, SpecError, TemplateError, TokenizerError
from ..example import Example, ParityBreak, Span
from ..masking import Emission, mask_tokens
from ..templates.environment import constants
from ..templates.preserve import Gate, preserved
from ..templates.probe import AGENT, CHAT, SYSTEM, TOOLS, Report, compile_probe
from ..templates.registry import SpecLike, load_spec, packaged_template
from ..templates.spec import TemplateSpec
from ..templates.tracing import ChatTemplate, Gap, Traced
from ..tokenizers import Tokenizer, demo_tokenizer, load_tokenizer
from ..trajectories import in_spec_tags, tags_of
from . import specforge
from .dropped import check_dropped, check_foreign, strings_of_message
from .messages import Prepared, joined, joins, prepare
from .parts import Marked, Piece, merged, untrained_ranges
from .prefixes import Cut, Unsound, cut_examples
from .prerendered import Learned, is_prerendered, learn, read_prerendered
from .shapes import Filled, Shapes
from .shielding import Control, Fragments, Shield, find_quoted, joined_strings
from .thinking import reasoning_of
from .turns import Rendering, Stops, Turn, irregular, keeps_reasoning, locate

Mask = np.ndarray[Any, np.dtype[np.uint8]]  # one flag a token

# of prompts that a sampled row has compared besides its first and last: a long one is not all compared
ASKED_CHARACTERS = 1 << 18


@dataclass(frozen=True)
class Choice:
    """Which part of a trained turn is a target, where a policy chooses otherwise than docs/rules.md.

    Attributes:
        mask_from: `prompt`, or `role_header`: a think block that the server writes itself is trained too (AReaL).
        reasoning: False leaves reasoning and its closing tag out.
        all_text: everything is a target, prompts and template text too, but for messages that are flagged or ruled out.
    """

    mask_from: str = "prompt"
    reasoning: bool = True
    all_text: bool = False


@dataclass(frozen=True)
class Checks:
    """How much of a conversation is checked besides what is always checked.

    Attributes:
        turns: at how many turns the training prefix is compared with what the server would have sent.
        reference: of how many characters the ids are compared with those that the `tokenizers` library gives the text as a whole; where
            it is not 0, the rendering is compared with the untraced one, too.
    """

    turns: int = 0
    reference: int = 0


NO_CHECKS, ALL_CHECKS = Checks(), Checks(sys.maxsize, sys.maxsize)


@dataclass
class Layout:
    """A conversation before it is encoded.

    Attributes:
        sample: text and turns.
        rewritten: message -> `context` or `emission`.
        breaks: message -> first difference to the served prompt, as text.
        asked: the turns that are compared with the served prompt.
        emissions: one for each turn.
        changed: assistant message -> a turn before it, behind the same user message, is rewritten.
    """

    sample: Sample
    rewritten: dict[int, str]
    breaks: dict[int, str]
    asked: list[Turn]
    emissions: list[Emission]
    choice: Choice
    checks: Checks
    changed: Mapping[int, bool]

    @property
    def characters(self) -> int:
        """Length of the text."""
        return len(self.sample.rendering.text)


@dataclass
class Sample:
    """One conversation on its way: what the template was given, what it wrote, and where the turns are."""

    prepared: Prepared
    shield: Shield | None
    shown: list[dict[str, Any]]  # messages as the template gets them
    tools: Any
    rendering: Rendering
    turns: list[Turn]
    tagged: Traced | None = None


class Parser:
    """A spec compiled for one tokenizer.

    Args:
        spec: a resolved spec.
        tokenizer: as `load_tokenizer` gives it.
        check: run the probe (raises SpecError when the template does not bear the spec out).
    """

    def __init__(self, spec: TemplateSpec, tokenizer: Tokenizer, check: bool = True) -> None:
        self.spec = spec
        self.loaded = tokenizer
        self.variants = [spec.for_sample(True), spec.for_sample(False)] if spec.thinking.mode == "auto" else [spec]
        self.stock_text = _template_text(spec, tokenizer)
        self.gates: tuple[Gate, ...] = ()
        self.template_text = self._preserved() if spec.preserve_thinking else self.stock_text
        self.template = ChatTemplate(self.template_text, dict(tokenizer.special_tokens), spec.date)
        named = [text for variant in self.variants for text in (*variant.assistant.headers, *variant.assistant.ends)]
        named += [variant.assistant.history_end for variant in self.variants if variant.assistant.history_end]
        named += [tag for tag in (spec.thinking.open, spec.thinking.close) if tag]
        self.template.calibrate([(CHAT, None), (AGENT, TOOLS)], **self.variants[0].kwargs)
        self.control = control_tokens(tokenizer, self.template_text, named)
        self.control.update(self._put_together())
        self.encoder = tokenizer.encoder(self.control)
        self.markers = frozenset(tag for tag in (spec.thinking.open, spec.thinking.close) if tag in self.control)
        self.untouched = self.markers if spec.thinking.inline == "keep" else frozenset()
        written = [*constants(self.template_text), *(v for v in tokenizer.special_tokens.values() if isinstance(v, str))]
        self.fragments = Fragments(self.control, written)
        self.shapes = Shapes(self)
        self.short_ways = True  # cuts and shapes; the same rows come out without them
        self.null_content: str | None = ""
        self.renders_tools = True
        self.predicts = True
        self.trigger: dict[tuple[str, bool], str] = {}
        if check:
            for variant in self.variants:
                compile_probe(self, variant).raise_if_failed()

    def _preserved(self) -> str:
        """The template without its history gate; keeps what was changed. Raises SpecError where there is nothing to preserve."""
        spec = self.variants[0]
        if spec.thinking.mode != "on":
            raise SpecError(
                f"the spec {self.spec.name}: preserve_thinking: thinking is {spec.thinking.mode}, so there is no reasoning to preserve; "
                "take the spec of this model with thinking on"
            )
        special = dict(self.loaded.special_tokens)
        try:
            found = preserved(self.stock_text, special, spec.kwargs, spec.date, spec.thinking.join, spec.tool_arguments)
        except SpecError as error:
            raise SpecError(f"the spec {self.spec.name} on the template of {self.loaded.name}: {error}") from None
        self.gates = found.gates
        return str(found.source)

    @cached_property
    def stock(self) -> ChatTemplate:
        """The template before `preserve_thinking`, traced the same way."""
        template = ChatTemplate(self.stock_text, dict(self.loaded.special_tokens), self.spec.date)
        template.tagged = self.template.tagged
        return template

    def _put_together(self) -> dict[str, int]:
        """Added tokens that the template writes in pieces (`'<|' + role + '|>'`): they stand in no constant, but in its renderings."""
        texts = []
        for messages, tools in ((CHAT, None), ([SYSTEM, *CHAT], None), (AGENT, TOOLS)):
            for prompt in (False, True):
                with suppress(TemplateError):
                    kwargs = self.variants[0].kwargs
                    texts.append(self.template.render(messages, tools, add_generation_prompt=prompt, **kwargs))
        return {
            token.content: token.id
            for token in self.loaded.added.values()
            if _looks_like_a_tag(token.content) and any(token.content in text for text in texts)
        }

    def thinks(self, conversation: Conversation) -> bool:
        """Does any assistant turn of a conversation have reasoning, once its blocks are read."""
        tags = tags_of(self.spec)
        return any(reasoning_of(m) for m in in_spec_tags(conversation, tags).messages if m["role"] == "assistant")

    @cached_property
    def tokenizer(self) -> Any:
        """The transformers tokenizer."""
        return self.loaded.transformers

    def parse(self, record: Mapping[str, Any] | Conversation) -> Example:
        """Turn one conversation into an Example.

        Args:
            record: any record shape that `build` reads (`{"messages": [...], "tools": [...]}`), or a Conversation.

        Raises:
            RejectedRow: with `.reason`, when the conversation cannot be trained on as the spec demands.
        """
        return self.example(self.conversation(record))

    def conversation(self, record: Mapping[str, Any] | Conversation) -> Conversation:
        """Read a record as `build` does without a policy: normalised, reasoning in the spec's own tags. Arguments, errors as `parse`."""
        if not isinstance(record, (Conversation, Mapping)):
            raise RejectedRow(RejectReason.NOT_AN_OBJECT, f"found a {type(record).__name__}")
        read = record if isinstance(record, Conversation) else self.read(record)
        return in_spec_tags(read, tags_of(self.spec))

    def read(self, data: Mapping[str, Any], max_messages: int = MAX_MESSAGES) -> Conversation:
        """A record of any shape as a conversation, before any policy; of a rendered text (`{"text": ...}`) the one that it was
        rendered from.

        Raises:
            RejectedRow: as `conversation.normalise`; `text_not_reproduced` for a text that the spec does not render.
        """
        if is_prerendered(data):
            return read_prerendered(data, self, max_messages)
        return normalise(data, self.spec.roles, max_messages)

    @cached_property
    def learned(self) -> Learned:
        """What the template writes around contents; found out when the first rendered text is read."""
        return learn(self)

    def example(
        self,
        conversation: Conversation,
        oracle: bool = False,
        *,
        untrained: Mapping[int, str] | None = None,
        choice: Choice = Choice(),
    ) -> Example:
        """As `parse`, for a Conversation.

        Args:
            conversation: as `conversation.normalise` gives it.
            oracle: also compare every turn with what the server would have sent, and text and ids with the plain ways to them.
            untrained: message index -> why this assistant message is not trained (a policy's word on it).
            choice: which part of a trained turn is a target.
        """
        checks = ALL_CHECKS if oracle else NO_CHECKS
        made = self.finish([self.layout(conversation, checks, untrained=untrained, choice=choice)])[0]
        if isinstance(made, RejectedRow):
            raise made
        return made

    def layout(
        self,
        conversation: Conversation,
        checks: Checks = NO_CHECKS,
        *,
        untrained: Mapping[int, str] | None = None,
        choice: Choice = Choice(),
    ) -> Layout:
        """The first half of `example`: all but tokens, so that many can be encoded in one go (`finish`)."""
        sample = self.sample(conversation)
        spec, rendering = sample.prepared.spec, sample.rendering
        rewritten, changed = ({}, {}) if spec.specforge else self.rewriting(sample)
        # where roles come in another order than question and answer, or the template goes its own ways, `rewriting` may be wrong: ask
        unsure = not spec.specforge and (irregular(sample.prepared.messages) or (not spec.prefix_stable and not self.predicts))
        every = unsure or (spec.rewritten.context != "train" and not (spec.prefix_stable or spec.specforge))
        asked = _some(sample.turns, checks.turns)
        if checks.turns < len(sample.turns):
            asked = _affordable(asked)
        compared = sample.turns if every else asked
        breaks = self.served_text_breaks(sample, compared)
        if not spec.specforge:
            told = {turn.message for turn in compared}
            emissions_rewritten = {i: kind for i, kind in rewritten.items() if kind == "emission"}
            predicted = {i: kind for i, kind in rewritten.items() if i not in told}
            rewritten = {**predicted, **dict.fromkeys(breaks, "context"), **emissions_rewritten}
        if rendering.quoted and self.encoder.unquotable:
            raise RejectedRow(
                RejectReason.CONTROL_TEXT,
                f"content quotes a control token, and {self.loaded.name} cannot encode it as text: {self.encoder.unquotable}",
            )
        emissions = self._emissions(sample, rewritten, untrained or {}, choice)
        if choice.all_text:
            emissions = self._all_text(sample, emissions, conversation)
        if checks.reference and not rendering.quoted and rendering.text != self._plain_text(sample):
            raise TemplateError("the traced rendering differs from the plain one; this is a defect of chatmask, please report it")
        return Layout(sample, rewritten, breaks, asked, emissions, choice, checks, changed)

    def shape(self, conversation: Conversation) -> Filled | None:
        """A plain chat's text without the template (`shapes.py`); None where `layout` must do it. For the fast tokenizer only."""
        return self.shapes.fill(conversation) if self.short_ways and self.encoder.fast is not None else None

    def finish(self, drafts: Sequence[Layout | Filled | Cut]) -> list[Example | RejectedRow]:
        """The second half of `example`, for many: encode and mask. What a row is refused for stands in its place.

        Raises:
            Unsound: a short way gave something else than the long way.
        """
        made: dict[int, Example | RejectedRow] = {}
        filled = [(i, one) for i, one in enumerate(drafts) if isinstance(one, Filled)]
        cuts: dict[int, list[tuple[int, Cut]]] = {}
        for i, one in enumerate(drafts):
            if isinstance(one, Cut):
                cuts.setdefault(id(one.base), []).append((i, one))
        laid = [(i, one) for i, one in enumerate(drafts) if isinstance(one, Layout)]
        requests = [self._request(one, [cut.head for _, cut in cuts.get(id(one), ())]) for _, one in laid]
        tails = [cut.request for _, one in laid for _, cut in cuts.get(id(one), ())]
        encoded = self.encoder.encode_many([*requests, *tails])
        ends = iter(encoded[len(requests) :])
        for (i, layout), request, own in zip(laid, requests, encoded, strict=False):
            below = [(n, cut, next(ends)) for n, cut in cuts.get(id(layout), ())]
            try:
                made[i] = longest = self._finished(layout, request, own)
            except RejectedRow as error:
                made[i] = error
                made.update({n: self._cut_laid_out(cut) for n, cut, _ in below})  # one bad sample takes no other with it
                continue
            examples = cut_examples(self, [cut for _, cut, _ in below], own, longest, [tail for _, _, tail in below])
            for (n, cut, _), example in zip(below, examples, strict=True):
                made[n] = example or self._cut_laid_out(cut)
        for (i, one), example in zip(filled, self._finish_filled([one for _, one in filled]), strict=True):
            made[i] = example or self._laid_out(one.conversation)
        return [made[i] for i in range(len(drafts))]

    def _finish_filled(self, filled: Sequence[Filled]) -> Iterable[Example | None]:
        """In the order of `filled`; None where the shape does not do."""
        groups: dict[int, list[int]] = {}
        for i, one in enumerate(filled):
            groups.setdefault(id(one.shape), []).append(i)
        if not groups:
            return []
        shapes = [filled[own[0]].shape for own in groups.values()]
        fillings = [
            Filling([filled[i].text for i in own], shape.controls, shape.anchors)
            for own, shape in zip(groups.values(), shapes, strict=True)
        ]
        made: list[Example | None] = [None] * len(filled)
        for own, found in zip(groups.values(), self.encoder.encode_filled(fillings), strict=True):
            shape = filled[own[0]].shape
            masks = _masks(found, [k for k, (message, _, _) in enumerate(shape.spans) if message not in shape.reasons])
            for i, ids, certain, tokens, mask in zip(own, found.ids, found.certain, found.tokens.tolist(), masks, strict=True):
                made[i] = _filled(filled[i], ids, tokens, mask) if certain else None
        return made

    def _cut_laid_out(self, cut: Cut) -> Example | RejectedRow:
        untrained = {emission.message: emission.reason or "context" for emission in cut.base.emissions[: cut.place]}
        return self._laid_out(cut.conversation, untrained, cut.base.choice)

    def _laid_out(
        self, conversation: Conversation, untrained: Mapping[int, str] | None = None, choice: Choice = Choice()
    ) -> Example | RejectedRow:
        try:
            return self.example(conversation, untrained=untrained, choice=choice)
        except RejectedRow as error:
            return error

    def _request(self, layout: Layout, more: Sequence[int] = ()) -> Request:
        rendering = layout.sample.rendering
        borders = [border for one in layout.emissions for pair in ((one.start, one.end), *one.parts) for border in pair]
        if layout.asked:
            borders += [border for turn in layout.sample.turns for border in (turn.start, turn.end)]
        return Request(rendering.text, rendering.controls, [*borders, *more], bool(rendering.quoted))

    def _finished(self, layout: Layout, request: Request, encoded: Encoded) -> Example:
        sample, ids, emissions = layout.sample, encoded.ids, layout.emissions
        spec, rendering = sample.prepared.spec, sample.rendering
        shift = int(sample.prepared.added_system)
        different, most = "", layout.checks.reference
        if most and not rendering.quoted:
            different = self.encoder.differs_from_whole(request, ids, most)
        if self.encoder.fast is not None and (different or (most and rendering.quoted)):
            # which of the two ways is to blame
            blamed = self.encoder.agrees(request, ids)
            if blamed:
                raise Unsound("fast_tokenizer", blamed)
        if different:
            raise TokenizerError(
                f"{self.loaded.name}: text cut at control tokens has other ids than the whole text ({different}), which the check at load "
                "did not show; please report this tokenizer"
            )
        if rendering.quoted and spec.special_in_content != "allow" and self.encoder.foreign_control_ids(ids, rendering.controls):
            raise RejectedRow(
                RejectReason.CONTROL_ID_FROM_CONTENT, f"{self.loaded.name} encodes quoted control text as a control id"
            )
        whole_end = spec.specforge is not None
        mask, spans, straddles = mask_tokens(encoded.edges, len(ids), emissions, spec.straddle, whole_end)
        if not mask.any():
            why = Counter(emission.reason or "no whole token inside the span" for emission in emissions)
            raise RejectedRow(
                RejectReason.ZERO_SUPERVISION,
                f"none of {len(emissions)} assistant turns is trained: {', '.join(f'{n} {r}' for r, n in why.items())}",
            )
        parity: tuple[ParityBreak, ...] = ()
        if layout.asked:
            served_spans = spans
            if layout.choice != Choice() or any(emission.parts for emission in emissions):
                # the prefix ends where the turn begins, whatever part of it is trained
                plain = [Emission(turn.message, turn.start, turn.end, turn.reason) for turn in sample.turns]
                served_spans = mask_tokens(encoded.edges, len(ids), plain, spec.straddle, whole_end)[1]
            parity = self.parity(sample, layout.breaks, layout.asked, ids, {span.message: span for span in served_spans})
        notes = self.notes_of(sample)
        if layout.asked and spec.preserve_thinking:
            notes["preserved_turns"] = self._preserved_turns(sample)
        return Example(
            text=rendering.text,
            ids=ids,
            mask=mask,
            spans=tuple(Span(s.message - shift, s.start, s.end, s.trained, s.reason) for s in spans) if shift else spans,
            rewritten={i - shift: kind for i, kind in layout.rewritten.items()},
            control_text=rendering.quoted,
            straddles=straddles,
            content_dropped=sample.prepared.notes.get("content_dropped", 0),
            notes={k: v for k, v in notes.items() if k != "content_dropped"},
            parity=parity,
            turns=tuple(turn._replace(message=turn.message - shift) for turn in sample.turns) if shift else tuple(sample.turns),
            compared=len(layout.asked),
        )

    def notes_of(self, sample: Sample) -> dict[str, int]:
        """Counts of the normalisation and of the turns' ends."""
        return {**sample.prepared.notes, **self.counts(sample.prepared.spec, sample.prepared.messages, sample.turns)}

    def counts(self, spec: TemplateSpec, messages: Sequence[dict[str, Any]], turns: Sequence[Turn]) -> dict[str, int]:
        """Counts of what the turns of a sample are like."""
        counts = {
            "end_rewritten": sum(turn.end_rewritten for turn in turns),
            "untrained_stops": sum(not turn.stopped for turn in turns),
        }
        if spec.thinking.mode == "on" and not spec.thinking.strip:
            counts["turns_without_reasoning"] = sum(not reasoning_of(messages[turn.message]) for turn in turns)
        counts["empty_answers"] = sum(
            not (reasoning_of(m) or m.get("tool_calls") or (m.get("content") or "").strip())
            for m in messages
            if m["role"] == "assistant"
        )
        return {name: n for name, n in counts.items() if n}

    def _preserved_turns(self, sample: Sample) -> int:
        """How many turns the stock template would have written otherwise (asked on the rows that the oracle sees)."""
        spec = sample.prepared.spec
        both = [template.trace(sample.shown, sample.tools, **spec.kwargs) for template in (self.template, self.stock)]
        return sum(_pieces(both[0], turn.message) != _pieces(both[1], turn.message) for turn in sample.turns)

    # --- rendering --------------------------------------------------------------------------------------------------------

    def sample(self, conversation: Conversation) -> Sample:
        """Prepare, render and locate the turns of one conversation; raises RejectedRow (message indices as in the data)."""
        prepared = prepare(conversation, self.spec, self.null_content)
        try:
            return self._sample(prepared)
        except RejectedRow as error:
            if prepared.added_system and error.message:
                raise RejectedRow(error.reason, error.detail, error.message - 1) from None
            raise
        except RecursionError:
            raise RejectedRow(RejectReason.TOO_DEEP, "a value is nested too deeply to be rendered") from None

    def _sample(self, prepared: Prepared) -> Sample:
        spec = prepared.spec
        shield, composable = None, False
        if spec.special_in_content != "allow":
            strings = joined_strings(prepared.messages, prepared.tools)
            shield = find_quoted(strings, self.encoder.pattern, self.markers, self.untouched)
            composable = self.fragments.in_any(strings)
        # shielded first: the tags that joining adds are meant for the template, those in content are not
        shown = prepared.messages
        if shield or spec.thinking.join is not None:
            shown = [dict(joined(shield.message(m) if shield else m, spec.thinking)) for m in prepared.messages]
        tools = shield.value(prepared.tools) if shield else prepared.tools
        if shield and spec.special_in_content == "reject" and any(not kept for _, kept in shield.quoted):
            literal = next(text for text, kept in shield.quoted if not kept)
            raise RejectedRow(RejectReason.CONTROL_TEXT, f"content holds {literal!r}")
        try:
            tagged = self.template.trace(shown, tools, tagged=True, **spec.kwargs) if composable or self.template.tagged else None
            traced = tagged if tagged and self.template.tagged else self.template.trace(shown, tools, **spec.kwargs)
            rendering = self._render(prepared, shield, traced, tagged.strings if tagged and composable else ())
        except TemplateError as error:
            raise RejectedRow(RejectReason.TEMPLATE_REFUSED, str(error)) from None
        if not _encodable(rendering.text):
            raise RejectedRow(RejectReason.LONE_SURROGATE, "the rendered text holds an unpaired surrogate")
        assistants = [i for i, m in enumerate(prepared.messages) if m["role"] == "assistant"]
        self._refuse_reasoning(prepared, rendering)
        stops = self._stops(spec)
        if spec.specforge is not None:
            turns = specforge.turns_of(rendering, assistants, spec, stops, self.encoder)
        else:
            roles = [m["role"] for m in prepared.messages]
            turns = [
                locate(rendering, i, spec, stops, roles[max(0, i - 1)] == "tool", roles[i + 1 : i + 2] == ["tool"])
                for i in assistants
            ]
            turns = [_with_own_blanks(rendering, turn, prepared.messages[turn.message]) for turn in turns]
        if turns and not turns[-1].stopped and spec.assistant.final_stop == "add" and turns[-1].end == len(rendering.text):
            rendering, turns[-1] = self._with_stop(rendering, turns[-1], spec)
        sample = Sample(prepared, shield, shown, tools, rendering, turns, tagged)
        check_dropped(self, sample)
        if spec.specforge is None:
            check_foreign(self, sample)
        return sample

    def _render(
        self, prepared: Prepared, shield: Shield | None, traced: Traced, strings: Sequence[tuple[int, int, int]]
    ) -> Rendering:
        """The final text and its control tokens; `strings` are the input strings in it, where one could complete a control token."""
        if shield is None:
            found = self.encoder.cut(traced.text)
            controls = _not_composed(found, strings, self._joined_tags(prepared))
            composed = len(found) - len(controls)
            return Rendering(traced.text, tuple(controls), traced.ranges(), traced.gaps(), composed, json=traced.json)
        text, controls, at = shield.restore(traced.text, self.control)
        own = [control for control in controls if control[0] not in shield.kept]
        whole = set(_not_composed(own, [(owner, at(a), at(b)) for owner, a, b in strings], self._joined_tags(prepared)))
        composed = len(own) - len(whole)
        controls = [control for control in controls if control in whole or control[0] in shield.kept]
        if text != self.template.render(prepared.given, prepared.tools, **prepared.spec.kwargs):
            raise RejectedRow(
                RejectReason.CONTENT_STEERS_TEMPLATE,
                f"the template acts on control text in content ({', '.join(sorted({repr(t) for t, _ in shield.quoted}))})",
            )
        ranges = {i: [(at(a), at(b)) for a, b in found] for i, found in traced.ranges().items()}
        gaps = {
            i: [Gap(at(gap.before), at(gap.first), at(gap.last), at(gap.after)) for gap in found]
            for i, found in traced.gaps().items()
        }
        return Rendering(text, tuple(controls), ranges, gaps, len(shield.quoted) + composed, frozenset(shield.kept))

    def _joined_tags(self, prepared: Prepared) -> dict[int, list[int]]:
        """By message, the ids of the think tags that `thinking.join` put into its content, once each."""
        if prepared.spec.thinking.join is None:
            return {}
        tags = [self.control[match.group()] for match in self.encoder.pattern.finditer(prepared.spec.thinking.join)]
        return {i: list(tags) for i, m in enumerate(prepared.messages) if joins(m, prepared.spec.thinking)}

    def _stops(self, spec: TemplateSpec) -> Stops:
        ids = {end: self.control[end] for end in spec.assistant.ends if end in self.control}
        headers = {header: len(self.encoder.cut(header)) for header in spec.assistant.headers}
        return Stops(ids, self.control.get(spec.assistant.history_end or ""), headers)

    def _with_stop(self, rendering: Rendering, turn: Turn, spec: TemplateSpec) -> tuple[Rendering, Turn]:
        """The text with the end-of-turn token that the template leaves out behind a last turn (`final_stop: add`)."""
        literal = spec.assistant.ends[0]
        start, end = len(rendering.text), len(rendering.text) + len(literal)
        controls = (*rendering.controls, (start, end, self.control[literal])) if literal in self.control else rendering.controls
        return replace(rendering, text=rendering.text + literal, controls=controls), turn._replace(end=end, stopped=True)

    def _refuse_reasoning(self, prepared: Prepared, rendering: Rendering) -> None:
        """A spec without thinking on data with reasoning: never a silent zero."""
        if prepared.spec.thinking.mode not in ("off", "none"):
            return
        for i, message in enumerate(prepared.messages):
            if message["role"] == "assistant" and reasoning_of(message):
                header = prepared.spec.assistant.header
                start = next((a for a, _ in rendering.ranges.get(i, [])), None)
                found = "nothing" if start is None else repr(rendering.text[start : start + len(header) + 40])
                raise RejectedRow(
                    RejectReason.REASONING_IN_NO_THINK_SPEC,
                    f"spec {prepared.spec.name} has thinking {prepared.spec.thinking.mode} but the message has reasoning; "
                    f"expected header {header!r}, found {found}",
                    i,
                )

    # --- policy -----------------------------------------------------------------------------------------------------------

    def rewriting(self, sample: Sample) -> tuple[dict[int, str], dict[int, bool]]:
        """Which turns are rendered otherwise than served, from the final rendering alone, and before which ones that was so already.

        A turn's own emission and header are looked at; that an *earlier* turn's rewriting changed the context is told from when
        the template rewrites (`trigger`, found by the probe for turns with and without reasoning): where it does so at a later user
        message, turns that no user message parts from the rewritten one saw its served form.
        """
        spec, messages = sample.prepared.spec, sample.prepared.messages
        close_id = self.control.get(spec.thinking.close or "")
        found: dict[int, str] = {}
        before: dict[int, bool] = {}
        changed = False  # a turn of this user segment is rewritten
        segment = -1
        for turn in sample.turns:
            users = [i for i in range(segment + 1, turn.message) if messages[i]["role"] == "user"]
            if users:
                changed = False
            segment = turn.message
            before[turn.message] = changed
            if not keeps_reasoning(sample.rendering, turn, messages[turn.message], spec, close_id):
                found[turn.message] = "emission"
            elif turn.form == "history" or changed:
                found[turn.message] = "context"
            own = found.get(turn.message) == "emission" or turn.form == "history"
            changed = changed or (
                own and self.trigger.get((spec.thinking.mode, bool(reasoning_of(messages[turn.message])))) == "user"
            )
        return found, before

    def _emissions(
        self, sample: Sample, rewritten: Mapping[int, str], untrained: Mapping[int, str], choice: Choice
    ) -> list[Emission]:
        spec = sample.prepared.spec
        emissions = []
        for turn in sample.turns:
            reason = ""
            kind = rewritten.get(turn.message)
            treatment = getattr(spec.rewritten, kind) if kind else "train"
            if treatment == "reject":
                raise RejectedRow(
                    RejectReason.HISTORY_REWRITTEN,
                    f"{kind} rewritten",
                    turn.message - sample.prepared.added_system,
                )
            message = turn.message - sample.prepared.added_system  # as the data counts
            if message in untrained:
                reason = untrained[message]
            elif turn.message in sample.prepared.excluded:
                reason = sample.prepared.excluded[turn.message]
            elif turn.reason:
                reason = turn.reason
            elif treatment == "mask":
                reason = "history_rewritten" if kind == "emission" else "context_rewritten"
            start = turn.start
            if choice.mask_from == "role_header":
                start = turn.header + len(self._role_header(sample, turn))
            if not choice.reasoning and (behind := self._behind_reasoning(sample, turn)) > turn.start:
                start = behind
            parts: tuple[tuple[int, int], ...] = ()
            found = sample.prepared.parts.get(turn.message)
            if found is not None and not reason:
                own = [one for one in sample.turns if one.message == turn.message]
                strings = partial(strings_of_message, self, sample, turn.message)
                called = bool(sample.prepared.messages[turn.message].get("tool_calls"))
                lacks = "content" in spec.drops or (called and "content_with_tool_calls" in spec.drops)
                parts = untrained_ranges(sample.rendering.text, own, found, strings, kind != "emission", message, lacks)
                parts = tuple((max(a, start), min(b, turn.end)) for a, b in parts if a < turn.end and b > start)
            emissions.append(Emission(turn.message, start, turn.end, reason, parts, found.reason if found and parts else ""))
        return emissions

    def _all_text(self, sample: Sample, turns: Sequence[Emission], conversation: Conversation) -> list[Emission]:
        """The whole text, parted where messages begin; what stands before the first one's range goes with it.

        Of a message that is flagged in part, or that the template writes among another's text (system texts, mostly), what is
        untrained are its own strings; raises RejectedRow (`part_not_found`) where these cannot be told.
        """
        text, ranges = sample.rendering.text, sample.rendering.ranges
        found = sorted((min(start for start, _ in own), message) for message, own in ranges.items())
        starts = [(0, found[0][1] if found else 0), *found[1:]]
        ends = [*(start for start, _ in starts[1:]), len(text)]
        reasons = {emission.message: emission.reason for emission in turns}
        shift = int(sample.prepared.added_system)
        for message in range(shift, len(sample.prepared.messages)):
            if message not in reasons and conversation.flags[message - shift] is False:
                says = any(train for _, _, train in conversation.parts_of(message - shift))
                reasons[message] = "" if says else "flag"
        untrained = [(a, b, emission.part_reason) for emission in turns for a, b in emission.parts]
        for message in range(shift, len(sample.prepared.messages)):
            untrained += self._untrained_strings(sample, message, reasons.get(message, ""), conversation)
        emissions = []
        for (message, start), end in zip(((message, start) for start, message in starts), ends, strict=True):
            inside = [(max(a, start), min(b, end), why) for a, b, why in untrained if a < end and b > start]
            parts = merged((a, b) for a, b, _ in inside)
            emissions.append(Emission(message, start, end, reasons.get(message, ""), parts, inside[0][2] if inside else ""))
        return emissions

    def _untrained_strings(
        self, sample: Sample, message: int, reason: str, conversation: Conversation
    ) -> list[tuple[int, int, str]]:
        """What data or policy keep from training of a message, where the range of the message alone does not tell it; and why."""
        index = message - int(sample.prepared.added_system)
        given, flags = sample.prepared.messages[message], conversation.parts_of(index)
        assistant = given["role"] == "assistant"
        if not reason and (assistant or all(train for _, _, train in flags)) and conversation.flags[index] is not False:
            return []  # an assistant's parts are in its emission
        strings = partial(strings_of_message, self, sample, message)
        if reason:
            places = strings()
            content = given.get("content")
            if not places and message not in sample.rendering.ranges and isinstance(content, str) and content.strip():
                raise RejectedRow(
                    RejectReason.PART_NOT_FOUND,
                    f"is kept from training ({reason}), and where its text stands in the rendering cannot be told",
                    index,
                )
            return [(a, b, reason) for a, b in places]
        if assistant:
            return []
        places = [*strings(), *sample.rendering.ranges.get(message, [])]
        start, end = min((a for a, _ in places), default=0), max((b for _, b in places), default=len(sample.rendering.text))
        marks = Marked((Piece(given.get("content") or "", flags),), conversation.flags[index] is not False)
        turn = Turn(message, start, start, end, "history")
        return [(a, b, marks.reason) for a, b in untrained_ranges(sample.rendering.text, [turn], marks, strings, True, index)]

    def _role_header(self, sample: Sample, turn: Turn) -> str:
        """The turn's header without the think tag or block that it ends with."""
        header = sample.rendering.text[turn.header : turn.start]
        opening = sample.prepared.spec.thinking.open
        return header.partition(opening)[0] if opening else header

    def _behind_reasoning(self, sample: Sample, turn: Turn) -> int:
        """Where the answer of a turn begins, its reasoning and closing tag left out; so is an empty block."""
        text, thinking = sample.rendering.text, sample.prepared.spec.thinking
        opening, close = thinking.open or "", thinking.close or ""
        reasoning = reasoning_of(sample.prepared.messages[turn.message]).strip()
        if not reasoning:
            emission = text[turn.start : turn.end].lstrip().removeprefix(opening).lstrip()
            return turn.end - len(emission) + len(close) if close and emission.startswith(close) else turn.start
        at = text.find(reasoning, turn.start, turn.end)
        closed = text.find(close, at + len(reasoning), turn.end) if at >= 0 and close else -1
        return turn.start if closed < 0 else closed + len(close)

    def _plain_text(self, sample: Sample) -> str:
        text = self.template.render(sample.prepared.given, sample.prepared.tools, **sample.prepared.spec.kwargs)
        return text + sample.rendering.text[len(text) :] if sample.prepared.spec.assistant.final_stop == "add" else text

    # --- the oracle -------------------------------------------------------------------------------------------------------

    def served(self, sample: Sample, message: int) -> tuple[str, list[Any]] | None:
        """What a server sends before it samples `message` (text and control tokens), or None where it could not (no messages
        yet, or the template refuses)."""
        if message == 0:
            return None
        try:
            text = self.template.render(
                sample.shown[:message], sample.tools, add_generation_prompt=True, **sample.prepared.spec.kwargs
            )
        except TemplateError:
            return None
        if sample.shield:
            restored, controls, _ = sample.shield.restore(text, self.control)
            return restored, controls
        return text, self.encoder.cut(text)

    def served_text_breaks(self, sample: Sample, turns: Iterable[Turn] | None = None) -> dict[int, str]:
        """Message index -> first difference, for each turn (of those given) whose prefix in the training text is not the served prompt."""
        breaks = {}
        for turn in sample.turns if turns is None else turns:
            served = self.served(sample, turn.message)
            prefix = sample.rendering.text[: turn.start]
            if served is not None and served[0] != prefix:
                breaks[turn.message] = first_difference(served[0], prefix)
        return breaks

    def stable(self, sample: Sample) -> bool:
        """Does the spec say that what stands before a turn is what the server sent."""
        return sample.prepared.spec.prefix_stable and not sample.prepared.spec.specforge

    def parity(
        self, sample: Sample, breaks: Mapping[int, str], asked: Sequence[Turn], ids: Ids, spans: Mapping[int, Span]
    ) -> tuple[ParityBreak, ...]:
        """Compare what stands before turns with what the server would have sent.

        Args:
            sample: of the turns.
            breaks: turns whose text differs, with the difference.
            asked: the turns whose ids are compared, too.
            ids, spans: of the sample; a span for each turn.
        """
        stable, shift = self.stable(sample), sample.prepared.added_system
        found = [ParityBreak(i - shift, "text", not stable, detail) for i, detail in breaks.items()]
        # a broken text has been said; the others' ids may still differ
        prompts = {turn.message: self.served(sample, turn.message) for turn in asked if turn.message not in breaks}
        requests = {i: Request(text, controls) for i, served in prompts.items() if served for text, controls in [served]}
        if not sample.rendering.quoted:
            requests = {i: replace(request, quoted=False) for i, request in requests.items()}
        for i, encoded in zip(requests, self.encoder.encode_many(list(requests.values())), strict=True):
            prompt, trained = encoded.ids, ids[: spans[i].start]
            if len(prompt) != len(trained) or (prompt != trained).any():
                # only the last token may differ: one that grew over the border is a straddle, which is declared and counted
                straddled = len(prompt) >= len(trained) >= len(prompt) - 4
                same = (prompt[: len(trained) - 1] == trained[:-1]).all() if straddled and len(trained) else straddled
                detail = f"served ids end {prompt[-4:].tolist()}, trained prefix ends {trained[-4:].tolist()}"
                found.append(ParityBreak(i - shift, "tokens", bool(same), detail))
        return tuple(found)


def _masks(found: EncodedShape, trained: Sequence[int]) -> list[Mask]:
    """The loss mask of each text of a shape; no token's for those that are not certain.

    Args:
        found: the texts, encoded.
        trained: which of the turns are trained.
    """
    sizes = np.array([len(ids) for ids in found.ids])
    ends = np.cumsum(sizes)
    borders = (found.tokens + (ends - sizes)[:, None])[np.array(found.certain)]
    steps = np.zeros(int(ends[-1]) + 1, np.int8)
    for k in trained:
        np.add.at(steps, borders[:, 2 * k], 1)
        np.add.at(steps, borders[:, 2 * k + 1], -1)
    return np.split(np.cumsum(steps[:-1], dtype=np.int8).view(np.uint8), ends[:-1])


def _filled(filled: Filled, ids: Ids, tokens: Sequence[int], mask: Mask) -> Example | None:
    """The example of a filled shape; None where no token is trained."""
    shape = filled.shape
    turns = zip(shape.spans, tokens[::2], tokens[1::2], strict=True)
    spans = [Span(i, a, b, i not in shape.reasons, shape.reasons.get(i, "")) for (i, _, _), a, b in turns]
    if not any(span.trained and span.end > span.start for span in spans):
        return None
    notes = {**filled.conversation.notes, **shape.notes}
    return Example(filled.text, ids, mask, tuple(spans), shape.rewritten, notes=notes)


def _some(turns: Sequence[Turn], count: int) -> list[Turn]:
    """At most `count` of the turns: the first and the last, and others evenly between them."""
    if len(turns) <= count:
        return list(turns)
    if count < 2:
        return list(turns[len(turns) - count :])
    return [turns[round(k * (len(turns) - 1) / (count - 1))] for k in range(count)]


def _affordable(turns: Sequence[Turn]) -> list[Turn]:
    """Of the turns to be compared, the last and the first, and the others as long as their prompts are not too long together."""
    inner, left = [], ASKED_CHARACTERS
    for turn in turns[1:-1]:
        left -= turn.start
        if left < 0:
            break
        inner.append(turn)
    return [*turns[:1], *inner, *turns[1:][-1:]]


def _with_own_blanks(rendering: Rendering, turn: Turn, message: Mapping[str, Any]) -> Turn:
    """A turn without an end token, with the white space that the message itself ends with (the template's is not the model's)."""
    content = message.get("content")
    if turn.stopped or turn.end_rewritten or not isinstance(content, str) or message.get("tool_calls"):
        return turn
    blanks = content[len(content.rstrip()) :]
    return turn._replace(end=turn.end + len(blanks)) if rendering.text.startswith(blanks, turn.end) else turn


def _pieces(traced: Traced, message: int) -> list[str]:
    """What a template wrote while it worked on a message, or, where structure does not show that, between its neighbours' texts."""
    ranges = traced.ranges().get(message) or [(gap.before, gap.after) for gap in traced.gaps().get(message, [])]
    return [traced.text[start:end] for start, end in ranges]


def _encodable(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _looks_like_a_tag(literal: str) -> bool:
    return len(literal) > 2 and not literal[0].isalnum() and not literal[-1].isalnum() and literal.strip() == literal


def _not_composed(
    controls: list[Control], strings: Sequence[tuple[int, int, int]], joined_tags: Mapping[int, list[int]]
) -> list[Control]:
    """The control tokens of which the template wrote every character: those that overlap no input string, and the think tags that
    `thinking.join` put into a message's content (`joined_tags`)."""
    if not strings:
        return controls
    starts = sorted(start for _, start, end in strings if end > start)
    ends = sorted(end for _, start, end in strings if end > start)

    def tag(control: Control) -> bool:
        for owner, start, end in strings if joined_tags else ():
            if start <= control[0] and control[1] <= end and control[2] in joined_tags.get(owner, ()):
                joined_tags[owner].remove(control[2])
                return True
        return False

    # a string overlaps [a, b) unless it ends by a or begins at b: count those that began before b and have not ended by a
    return [c for c in controls if bisect.bisect_left(starts, c[1]) == bisect.bisect_right(ends, c[0]) or tag(c)]


def _template_text(spec: TemplateSpec, tokenizer: Tokenizer) -> str:
    if spec.template != "tokenizer":
        path = Path(spec.template)
        return path.read_text(encoding="utf-8") if path.is_file() else packaged_template(spec.template)
    if tokenizer.chat_template is None:
        raise SpecError(
            f"the tokenizer {tokenizer.name} has no chat template; put chat_template.jinja beside its tokenizer.json, or name one "
            f"with `template:` in the spec {spec.name}"
        )
    return tokenizer.chat_template


def load_parser(
    spec: SpecLike,
    tokenizer: Any = None,
    demo: bool = False,
    overrides: Mapping[str, str] | Sequence[str] = (),
) -> Parser:
    """Compile a spec for a tokenizer.

    Args:
        spec: packaged name, YAML file or spec object.
        tokenizer: hub id, directory, loaded transformers tokenizer; None takes the spec's own hub id.
        demo: take the embedded demo tokenizer with the spec's demo template instead.
        overrides: `KEY=VALUE` changes to the spec, as `--set`.

    Raises:
        SpecError: the spec cannot be read, or the tokenizer's template does not bear it out.
        TokenizerError: the tokenizer cannot be had.
    """
    return Parser(*choose(spec, tokenizer, demo, overrides))


def probe(
    spec: SpecLike,
    tokenizer: Any = None,
    demo: bool = False,
    overrides: Mapping[str, str] | Sequence[str] = (),
) -> list[Report]:
    """Probe a spec without failing: one report, or two (on, off) for an `auto` spec. Arguments and errors as `load_parser`."""
    parser = Parser(*choose(spec, tokenizer, demo, overrides), check=False)
    return [compile_probe(parser, variant) for variant in parser.variants]


def choose(
    spec: SpecLike, tokenizer: Any, demo: bool, overrides: Mapping[str, str] | Sequence[str]
) -> tuple[TemplateSpec, Tokenizer]:
    """The spec and the tokenizer that a parser is made of. Arguments and errors as `load_parser`."""
    resolved = load_spec(spec, overrides)
    if demo:
        if tokenizer is not None:
            raise SpecError("--demo takes the embedded demo tokenizer; leave --tokenizer out")
        if resolved.demo_template is None:
            raise SpecError(f"the spec {resolved.name} has no demo template; give a tokenizer with --tokenizer DIR")
        return resolved, demo_tokenizer(packaged_template(resolved.demo_template))
    if tokenizer is None:
        if resolved.tokenizer.id is None:
            raise SpecError(f"the spec {resolved.name} names no tokenizer; give one with --tokenizer DIR|ID")
        return resolved, load_tokenizer(resolved.tokenizer.id, resolved.tokenizer.revision)
    return resolved, load_tokenizer(tokenizer)

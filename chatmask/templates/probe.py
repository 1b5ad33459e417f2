"""The probe: a spec's claims, tried on the tokenizer's own template before any data is read.

Each claim becomes a finding with what was expected and what was found. Compiling a spec fails on the first set of findings that
do not hold; `chatmask specs probe` prints them all.
"""

from __future__ import annotations

import difflib
import itertools
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..canonical import first_unequal
from ..conversation import Conversation
from ..encoding import control_tokens, matcher
from ..errors import RejectedRow, RejectReason, SpecError, TemplateError, TokenizerError
from ..masking import Emission, mask_tokens
from .environment import variables
from .spec import TemplateSpec
from .tracing import ChatTemplate

if TYPE_CHECKING:
    from ..parsers.parser import Parser
    from ..tokenizers import Tokenizer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "probe_tool",
            "description": "A tool of the probe",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}, "depth": {"type": "integer"}}},
        },
    }
]


@dataclass(frozen=True)
class Finding:
    """One claim: what the spec (or good sense) expects, what the template does, and whether they agree."""

    claim: str
    expected: str
    found: str
    ok: bool


@dataclass(frozen=True)
class Report:
    """All findings on one spec and tokenizer."""

    spec: str
    tokenizer: str
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """True when every claim holds."""
        return all(finding.ok for finding in self.findings)

    def raise_if_failed(self) -> None:
        """Raise SpecError that shows each failed claim, expected and found side by side."""
        failed = [finding for finding in self.findings if not finding.ok]
        if failed:
            shown = "\n".join(f"  {f.claim}\n    expected  {f.expected}\n    found     {f.found}" for f in failed)
            raise SpecError(f"the spec {self.spec} does not fit the tokenizer {self.tokenizer}:\n{shown}")


# what templates may read reasoning from, and nothing of it
_FIELDS: tuple[dict[str, Any], ...] = (
    {"reasoning_content": None},
    {"reasoning_content": "Probe beta."},
    {"reasoning_content": None, "thinking": "Probe beta."},
    {"reasoning_content": None, "reasoning": "Probe beta."},
)


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _assistant(text: str | None, reasoning: str | None = None, call: bool = False) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if call:
        function = {"name": "probe_tool", "arguments": {"path": "probe/argument.txt", "depth": 7}}
        message["tool_calls"] = [{"id": "call00001", "type": "function", "function": function}]
    return message


# two conversations that show whether structure alone tells the template's messages apart
CHAT = [
    _user("Probe question one?"),
    _assistant("Probe answer one."),
    _user("Probe question two?"),
    _assistant("Probe answer two."),
]
AGENT = [
    _user("Probe question one?"),
    _assistant("Probe step one.", "Probe reasoning.", call=True),
    {"role": "tool", "content": "Probe result.", "tool_call_id": "call00001", "name": "probe_tool"},
    _assistant("Probe answer two."),
]


SYSTEM = {"role": "system", "content": "Probe system."}


def _chat(*messages: dict[str, Any], tools: bool = False) -> Conversation:
    return Conversation(list(messages), TOOLS if tools else None, (None,) * len(messages), {})


def compile_probe(parser: Parser, spec: TemplateSpec) -> Report:
    """Probe one concrete spec; also fills in what the parser needs to know and a spec does not say.

    Sets on the parser: `null_content` (how a null content is passed), `markers` (emission markers) and `trigger` (when the
    template rewrites earlier turns: `none`, `user` for a later user message, `any` for any later message).
    """
    findings: list[Finding] = []
    name = f"{spec.name}" + (f" (thinking {spec.thinking.mode})" if parser.spec.thinking.mode == "auto" else "")

    def report() -> Report:
        return Report(name, parser.loaded.name, tuple(findings))

    # stripping is what is done to the data; the claims are about the template
    spec = spec.model_copy(update={"thinking": spec.thinking.model_copy(update={"strip": False})})
    thinks = spec.thinking.mode == "on"
    why = "Probe reasoning alpha." if thinks else None
    plain = _chat(_user("Probe question one?"), _assistant("Probe answer one.", why))
    if spec.specforge is not None:
        _specforge(parser, spec, findings, plain)
        return report()
    if not _prompt(parser, spec, findings):
        return report()
    sample = _try(findings, parser, spec, "a one-turn chat", plain)
    if sample is None:
        return report()
    _end_token(parser, spec, findings)
    _bos(parser, findings, sample)
    _emission(parser, findings, sample, "Probe answer one.", why)
    _last_id(parser, spec, findings, sample)
    if findings and not all(finding.ok for finding in findings):
        return report()

    two = _chat(_user("Probe question one?"), _assistant("Probe answer one.", why), _user("Probe question two?"), _assistant("Probe answer two.", why))  # fmt: skip
    sample = _try(findings, parser, spec, "a two-turn chat", two)
    if sample is None:
        return report()
    _history(parser, spec, findings, sample, two)
    _edges(parser, spec, findings, _thoughtless(two))
    if spec.thinking.join is not None:
        texts = {
            parser.template.render([*plain.messages[:-1], {**plain.messages[-1], **more}], None, **spec.kwargs)
            for more in _FIELDS
        }
        claim, found = "the template reads no field of reasoning (thinking.join)", "not read" if len(texts) == 1 else "read"
        findings.append(Finding(claim, "not read", found, found == "not read"))
    unknown = sorted(set(spec.kwargs) - variables(parser.template.source))
    found = f"{', '.join(unknown)} {'are' if len(unknown) > 1 else 'is'} read nowhere" if unknown else "read"
    findings.append(Finding("the template reads every kwarg", "read", found, not unknown))
    _try(
        findings,
        parser,
        spec,
        "a system message",
        _chat({"role": "system", "content": "Probe system."}, *plain.messages),
        refusable=True,
    )
    parser.renders_tools = _renders_tools(parser, spec, plain)
    called = _chat(
        _user("Probe question one?"), _assistant("", why, call=True), {"role": "tool", "content": "Probe result.", "tool_call_id": "call00001", "name": "probe_tool"},
        _assistant("Probe answer two.", why), tools=parser.renders_tools,
    )  # fmt: skip
    parser.null_content = _null_content(parser, spec, called)
    tools = _try(findings, parser, spec, "a tool call and its result", called, optional=True)
    if spec.assistant.after_tool is not None:
        _after_tool(parser, spec, findings, tools)
    if tools is not None:
        _results_untrained(findings, tools)
        _markers(parser, spec, called)
        _never_none(parser, spec, findings, _with_null(called))
    else:
        _other_form(parser, spec, findings, called)
    _triggers(parser, spec, called, two)
    chats = [plain, two]
    if tools is not None:
        # agent steps, then another question: the point at which templates forget what the steps thought
        more = [*called.messages, _user("Probe question two?"), _assistant("Probe answer three.", why)]
        chats += [called, _chat(*more, tools=parser.renders_tools)]
    _stability(parser, spec, findings, chats)
    return report()


def _specforge(parser: Parser, spec: TemplateSpec, findings: list[Finding], plain: Conversation) -> None:
    """SpecForge's entries claim less: a header that need not be the generation prompt, and an end. Both must be found."""
    role = next((name for name, meaning in spec.roles.items() if meaning == "assistant"), None)
    if role is not None:
        plain = _chat(*({**m, "role_in_data": role} if m["role"] == "assistant" else m for m in plain.messages))
    sample = _try(findings, parser, spec, "a one-turn chat", plain)
    if sample is None:
        return
    turn, text = sample.turns[-1], sample.rendering.text
    header = repr(spec.assistant.header)
    found = f"not found; the text is {text[:200]!r}" + _nearest(spec.assistant.header, text) if turn.reason else header
    findings.append(Finding("assistant.header stands where the turn begins", header, found, not turn.reason))
    _bos(parser, findings, sample)
    parser.renders_tools = _renders_tools(parser, spec, plain)


def _sample(parser: Parser, spec: TemplateSpec, conversation: Conversation) -> Any:
    """The parser's sample with this variant of the spec, whatever the conversation's reasoning says."""
    whole, parser.spec = parser.spec, spec
    try:
        return parser.sample(conversation)
    finally:
        parser.spec = whole


def _try(
    findings: list[Finding],
    parser: Parser,
    spec: TemplateSpec,
    what: str,
    conversation: Conversation,
    optional: bool = False,
    refusable: bool = False,
) -> Any:
    try:
        sample = _sample(parser, spec, conversation)
    except RejectedRow as error:
        if optional or (refusable and error.reason is RejectReason.TEMPLATE_REFUSED):
            findings.append(
                Finding(what, "rendered", f"not supported by the template ({error.reason.value}: {error.detail})", True)
            )
        else:
            findings.append(Finding(what, _expectation(spec, error), _shown(error), False))
        return None
    findings.append(Finding(what, "header, content and end token in each assistant turn", "as expected", True))
    return sample


def _expectation(spec: TemplateSpec, error: RejectedRow) -> str:
    if error.reason.value == "header_not_found":
        return f"header {' or '.join(repr(h) for h in spec.assistant.headers)}"
    if error.reason.value == "end_not_found":
        return f"end of turn {list(spec.assistant.ends)}, then {spec.assistant.trailing!r}"
    return "the conversation rendered as the spec says"


def _shown(error: RejectedRow) -> str:
    return f"{error.reason.value}: {error.detail}"


def generation_prompt(template: ChatTemplate, tokenizer: Tokenizer, question: dict[str, Any], **kwargs: Any) -> str:
    """What `add_generation_prompt` adds behind a question; where it adds nothing, the template's text behind the question.

    A template may close the conversation when no prompt is asked for (Phi writes the EOS then); what the closed and the prompted
    text share behind the question is not part of the header.

    Raises:
        TemplateError: the template does not render a question.
    """
    before = template.render([question], None, **kwargs)
    served = template.render([question], None, add_generation_prompt=True, **kwargs)
    if served.startswith(before) and len(served) > len(before):
        return served[len(before) :]
    behind, closed = (text.rpartition(question["content"])[2] for text in (served, before))
    if behind == closed:
        return behind
    shared = first_unequal(behind, closed)
    pattern = matcher(control_tokens(tokenizer, template.source))
    inside = next((match.start() for match in pattern.finditer(behind) if match.start() < shared < match.end()), shared)
    return behind[inside:]


def _prompt(parser: Parser, spec: TemplateSpec, findings: list[Finding]) -> bool:
    """The header must be the generation prompt: what the template adds, not one tag less and not one more."""
    question = _user("Probe question one?")
    try:
        served = parser.template.render([question], None, add_generation_prompt=True, **spec.kwargs)
        found = generation_prompt(parser.template, parser.loaded, question, **spec.kwargs)
    except TemplateError as error:
        findings.append(Finding("the template renders a user message", "text", str(error), False))
        return False
    header = spec.assistant.header
    before = parser.template.render([question], None, **spec.kwargs)
    # where the template writes the header behind every question (Yi), the prompt adds nothing and the header is a part of that text
    # an empty header says as much: there is no prompt, whatever closes the question (Mistral)
    behind = served == before and (not header or (found.endswith(header) if header.strip() else not found.strip()))
    ok = found == header or behind
    near = "" if ok else _nearest(header, served)
    findings.append(Finding("assistant.header is the generation prompt", repr(header), repr(found) + near, ok))
    return ok


def _nearest(wanted: str, text: str) -> str:
    match = difflib.SequenceMatcher(None, wanted, text, autojunk=False).find_longest_match()
    if match.size < 3:
        return ""
    start = max(0, match.b - match.a)
    return f"; nearest text {text[start : start + len(wanted)]!r}"


def _end_token(parser: Parser, spec: TemplateSpec, findings: list[Finding]) -> None:
    for end in spec.assistant.ends:
        ids = parser.loaded.whole.encode(end, add_special_tokens=False).ids
        found = f"id {ids[0]}" if len(ids) == 1 else f"{len(ids)} tokens: {[parser.loaded.whole.id_to_token(i) for i in ids]}"
        findings.append(Finding(f"end of turn {end!r} is one token", "one id", found, len(ids) == 1))


def _bos(parser: Parser, findings: list[Finding], sample: Any) -> None:
    bos = parser.loaded.special_tokens.get("bos_token")
    # some templates begin every message with it (MiniMax M3): there it is a header
    if bos in parser.control and bos not in parser.spec.assistant.header:
        first = list(itertools.takewhile(lambda control: control[2] == parser.control[bos], sample.rendering.controls))
        count = sum(1 for i, control in enumerate(first) if control[0] == sum(c[1] - c[0] for c in first[:i]))
        findings.append(Finding("at most one BOS at the start", "0 or 1", str(count), count <= 1))


def _emission(parser: Parser, findings: list[Finding], sample: Any, content: str, reasoning: str | None) -> None:
    turn = sample.turns[-1]
    emission = sample.rendering.text[turn.start : turn.end]
    findings.append(Finding("the answer is in the trained span", repr(content), repr(emission), content in emission))
    if reasoning:
        findings.append(Finding("the reasoning is in the trained span", repr(reasoning), repr(emission), reasoning in emission))


def _last_id(parser: Parser, spec: TemplateSpec, findings: list[Finding], sample: Any) -> None:
    """In ids, too, a turn must end with its end token (one that swallows white space, or is split, would not)."""
    turn = sample.turns[-1]
    expected = {parser.control[end] for end in spec.assistant.ends if end in parser.control}
    if not expected or not turn.stopped or spec.assistant.supervise_trailing:
        return
    claim = "the last trained id is the end of turn"
    try:
        encoded = parser.encoder.encode(sample.rendering.text, sample.rendering.controls, (turn.start, turn.end))
    except TokenizerError as error:
        findings.append(Finding(claim, f"one of {sorted(expected)}", str(error), False))
        return
    _, spans, _ = mask_tokens(encoded.edges, len(encoded.ids), [Emission(turn.message, turn.start, turn.end)])
    trained = [int(i) for i in encoded.ids[spans[0].start : spans[0].end]]
    findings.append(
        Finding(
            claim, f"one of {sorted(expected)}", f"trained ids end {trained[-3:]}", trained[-1:] != [] and trained[-1] in expected
        )
    )


def _history(parser: Parser, spec: TemplateSpec, findings: list[Finding], sample: Any, two: Conversation) -> None:
    thinks = spec.thinking.mode == "on"
    rewritten = parser.rewriting(sample)[0]
    first = sample.turns[0]
    if thinks:
        found = "dropped" if rewritten.get(first.message) == "emission" else "kept"
        claim = "reasoning of earlier turns (thinking.in_history)"
        findings.append(Finding(claim, spec.thinking.in_history, found, found == spec.thinking.in_history))
        last = "kept" if sample.turns[-1].message not in rewritten else "lost"
        claim = "the last turn keeps its reasoning between the tags"
        findings.append(Finding(claim, f"kept, between {spec.thinking.open} and {spec.thinking.close}", last, last == "kept"))
    if spec.assistant.history_header is not None:
        forms = [[turn.form for turn in sample.turns]]
        if thinks:
            # some templates write another header only before turns that do not think (GLM-4.7, Nemotron-3)
            with suppress(RejectedRow):
                forms.append([turn.form for turn in _sample(parser, spec, _thoughtless(two)).turns])
        shown = "; without reasoning ".join(", then ".join(found) for found in forms)
        claim = "history_header stands before earlier turns"
        findings.append(
            Finding(
                claim,
                # without its history gate a template may write the served header everywhere
                "history (at least in the first turn)" + (", or nowhere" if spec.preserve_thinking else ""),
                shown,
                spec.preserve_thinking or any(found[0] == "history" for found in forms),
            )
        )


def _edges(parser: Parser, spec: TemplateSpec, findings: list[Finding], chat: Conversation) -> None:
    """What stands in an emission around a plain answer: behind it only the end token, before it what the served turn has too."""
    try:
        sample = _sample(parser, spec, chat)
    except RejectedRow:
        return  # shown by the other claims
    parts = []
    answers = [message for message in sample.prepared.messages if message["role"] == "assistant"]
    for turn, message in zip(sample.turns, answers, strict=True):
        before, _, behind = sample.rendering.text[turn.start : turn.end].partition(message["content"])
        parts.append((before, behind))
    trailing = (spec.assistant.trailing or "") if spec.assistant.supervise_trailing else ""
    ends = {"", *(end + trailing for end in spec.assistant.ends)}
    bare = {end.strip() for end in ends}
    odd = next((b for _, b in parts if b.strip() not in bare and not _closes(parser, spec, b.strip())), None)
    claim = "only the end of turn stands behind an answer in the trained span"
    findings.append(
        Finding(claim, " or ".join(repr(end) for end in sorted(ends) if end) or "nothing", repr(odd or parts[-1][1]), odd is None)
    )
    early, late = parts[0][0], parts[-1][0]
    tags = [tag for tag in (spec.thinking.open, spec.thinking.close) if tag and tag in early + late]
    if spec.thinking.mode in ("off", "none"):
        claim, ok = "nothing but the header stands before an answer", early == late and not tags
    else:
        claim, ok = "what stands before an answer is the same in history, or left out", early in ("", late)
    findings.append(Finding(claim, "as served, or nothing", f"{early!r} in history, {late!r} in the last turn", ok))


def _closes(parser: Parser, spec: TemplateSpec, behind: str) -> bool:
    """May a closing of several tokens be the model's? Kimi K3 closes its channels first, Cohere its response; but where the end is
    the next message's header, or no token at all, whatever token stands before it is the end that was meant."""
    tokens = parser.encoder.pattern.findall(behind)
    words = parser.encoder.pattern.sub("", behind).strip()
    return bool(tokens) and tokens[-1] in spec.assistant.ends and (spec.assistant.end_owner == "self" or bool(words))


def _renders_tools(parser: Parser, spec: TemplateSpec, plain: Conversation) -> bool:
    """Does the template show the tools that it is given?"""
    messages = [{k: v for k, v in message.items() if k != "reasoning_content"} for message in plain.messages]
    try:
        return TOOLS[0]["function"]["name"] in parser.template.render(messages, TOOLS, **spec.kwargs)  # type: ignore[index]
    except TemplateError:
        return False


def _with_null(called: Conversation) -> Conversation:
    """The agent conversation with null content beside the call."""
    messages = [{**message, "content": None} if message.get("tool_calls") else message for message in called.messages]
    return Conversation(messages, called.tools, called.flags, {})


def _null_content(parser: Parser, spec: TemplateSpec, called: Conversation) -> str | None:
    """Pass null content as None where the template copes (DeepSeek tests for it), else as an empty string."""
    parser.null_content = None
    try:
        sample = _sample(parser, spec, _with_null(called))
    except RejectedRow:
        return ""
    turn = sample.turns[0]
    return "" if "None" in sample.rendering.text[turn.start : turn.end] else None


def _other_form(parser: Parser, spec: TemplateSpec, findings: list[Finding], called: Conversation) -> None:
    """A template that takes no tool calls in the declared form, but does in the other one, makes the declaration wrong."""
    other = "json" if spec.tool_arguments == "dict" else "dict"
    try:
        _sample(parser, spec.model_copy(update={"tool_arguments": other}), called)
    except RejectedRow:
        return
    findings.append(Finding("tool_arguments is the form that the template takes", spec.tool_arguments, other, False))


def _after_tool(parser: Parser, spec: TemplateSpec, findings: list[Finding], sample: Any) -> None:
    """The header behind a tool's result must be what a server's prompt ends with there."""
    header = spec.assistant.served_header(True)
    if sample is None:
        findings.append(
            Finding("after_tool.header is the prompt behind a tool's result", repr(header), "tools are not supported", False)
        )
        return
    turn = sample.turns[-1]
    found = parser.served(sample, turn.message)
    served = "" if found is None else found[0]
    ok = served.endswith(header) and (bool(header) or served == sample.rendering.text[: turn.start])
    findings.append(Finding("after_tool.header is the prompt behind a tool's result", repr(header), repr(served[-60:]), ok))


def _results_untrained(findings: list[Finding], sample: Any) -> None:
    """A tool's result is never the model's text."""
    emissions = [sample.rendering.text[turn.start : turn.end] for turn in sample.turns]
    held = next((text for text in emissions if "Probe result." in text), None)
    findings.append(
        Finding("tool results are not in a trained span", "no result", repr(held) if held else "no result", held is None)
    )


def _never_none(parser: Parser, spec: TemplateSpec, findings: list[Finding], conversation: Conversation) -> None:
    try:
        sample = _sample(parser, spec, conversation)
    except RejectedRow as error:
        findings.append(Finding("null content beside a tool call", "rendered", _shown(error), False))
        return
    turn = sample.turns[0]
    emission = sample.rendering.text[turn.start : turn.end]
    findings.append(
        Finding("null content beside a tool call never prints None", "no None", repr(emission), "None" not in emission)
    )


def _markers(parser: Parser, spec: TemplateSpec, called: Conversation) -> None:
    """Emission markers: control tokens that the template writes inside an assistant's emission and nowhere else."""
    try:
        sample = _sample(parser, spec, Conversation(called.messages, None, called.flags, {}))
    except RejectedRow:
        sample = _sample(parser, spec, called)
    emissions = [(turn.start, turn.end) for turn in sample.turns]
    inside: set[str] = set()
    outside: set[str] = set()
    for start, end, _ in sample.rendering.controls:
        literal = sample.rendering.text[start:end]
        (inside if any(a <= start < b for a, b in emissions) else outside).add(literal)
    structure = set(parser.loaded.special_tokens.values()) | set(spec.assistant.ends)
    parser.markers = parser.markers | frozenset(inside - outside - structure)


def _triggers(parser: Parser, spec: TemplateSpec, called: Conversation, two: Conversation) -> None:
    """When does the template rewrite an earlier turn: at any later message, or only at a later user message? It may differ for
    turns with reasoning and without."""

    def first_is_rewritten(conversation: Conversation) -> bool:
        try:
            sample = _sample(parser, spec, conversation)
        except RejectedRow:
            return False
        turn = sample.turns[0]
        return turn.form == "history" or parser.rewriting(sample)[0].get(turn.message) == "emission"

    for thinks in (True, False) if spec.thinking.mode == "on" else (False,):
        chain, chat = (conversation if thinks else _thoughtless(conversation) for conversation in (called, two))
        late = "user" if first_is_rewritten(chat) else "none"
        parser.trigger[spec.thinking.mode, thinks] = "any" if first_is_rewritten(chain) else late


def _thoughtless(conversation: Conversation) -> Conversation:
    """The conversation without reasoning."""
    messages = [{k: v for k, v in message.items() if k != "reasoning_content"} for message in conversation.messages]
    return Conversation(messages, conversation.tools, conversation.flags, {})


def _stability(parser: Parser, spec: TemplateSpec, findings: list[Finding], conversations: list[Conversation]) -> None:
    breaks: dict[int, str] = {}
    thoughtless = [_thoughtless(conversation) for conversation in conversations] if spec.thinking.mode == "on" else []
    for conversation in [*conversations, *thoughtless]:
        try:
            sample = _sample(parser, spec, conversation)
        except RejectedRow:
            continue
        found_here = parser.served_text_breaks(sample)
        breaks = breaks or found_here
        predicted = parser.rewriting(sample)[0]
        lost = {i for i, kind in predicted.items() if kind == "emission"}
        parser.predicts = parser.predicts and set(predicted) - lost == set(found_here) - lost
    found = "stable" if not breaks else f"not stable: turn {next(iter(breaks))} {next(iter(breaks.values()))}"
    expected = "stable" if spec.prefix_stable else "not stable (declared)"
    findings.append(
        Finding("served prompts are prefixes of the training text", expected, found, not breaks or not spec.prefix_stable)
    )

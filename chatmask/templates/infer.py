"""infer: a spec from a tokenizer's chat template, found by probing and proven by the oracle before it is given out.

Every fact is read off renderings of conversations whose texts are known: the header is what `add_generation_prompt` adds, the
end token is the first control token behind an answer, the thinking tags are what stands around a reasoning. The spec made of
them is then compiled (the probe checks each claim) and compared with what the server would send, turn by turn. What cannot be
exact is said, with the reason and the first difference; nothing is guessed silently.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import yaml

from ..canonical import first_unequal
from ..conversation import Conversation
from ..encoding import control_tokens, matcher
from ..errors import ChatmaskError, RejectedRow, SpecError, TemplateError, TokenizerError
from .environment import variables
from .probe import TOOLS, Report, _assistant, _user, generation_prompt
from .spec import TemplateSpec, merge
from .tracing import ChatTemplate, Gap, Traced

if TYPE_CHECKING:
    from ..parsers.parser import Parser
    from ..tokenizers import Tokenizer

# names by which public templates take their thinking option and the fate of earlier reasoning, most common first
_SWITCHES = ("enable_thinking", "thinking", "enable_reasoning", "think", "reasoning")
_HISTORY = {
    "preserve_thinking": True,
    "clear_thinking": False,
    "keep_past_thinking": True,
    "truncate_history_thinking": False,
    "preserved_thinking": True,
}
_EFFORTS = {"reasoning_effort": ("low", "medium", "high")}
_DATE = "2026-01-01"
_Q = ("Qalpha first question?", "Qbravo second question?")
_A = ("Aalpha first answer.", "Abravo second answer.")
_R = ("Ralpha first reasoning.", "Rbravo second reasoning.")


@dataclass(frozen=True)
class Inferred:
    """What was found for one tokenizer.

    Attributes:
        spec: the proven spec.
        exact: every trained turn of every tried conversation has exactly the prefix that the server sends, and no turn is
            rewritten.
        reasons: why not, where it is not exact; also what a user should know (dates, dropped fields).
        variants: further modes as specs that extend `spec` (thinking on or off, effort levels), with only what differs.
    """

    spec: TemplateSpec
    exact: bool
    reasons: tuple[str, ...]
    variants: tuple[dict[str, Any], ...] = ()

    def to_yaml(self) -> str:
        """The spec as a YAML file, with the reasons as comments on top."""
        verdict = "exact: every turn's prefix is what the server sends" if self.exact else "not exact everywhere:"
        lines = [f"# inferred by `chatmask infer`; {verdict}", *(f"#   {reason}" for reason in self.reasons)]
        return "\n".join(lines) + "\n" + to_yaml(_written(self.spec))


def infer_spec(tokenizer: Any, name: str = "inferred") -> TemplateSpec:
    """The proven spec for a tokenizer: hub id, directory, or a loaded transformers tokenizer.

    Raises:
        SpecError: no mode of the template can be described; the message is the verdict.
        TokenizerError: the tokenizer cannot be had.
    """
    from ..tokenizers import load_tokenizer

    return infer(load_tokenizer(tokenizer), name).spec


@dataclass
class _Mode:
    """One way to call the template, and what it does then."""

    kwargs: dict[str, Any]
    thinks: bool | None  # None: no reasoning in the data at all
    spec: TemplateSpec | None = None
    parser: Parser | None = None
    breaks: list[str] = field(default_factory=list)  # of trained turns
    notes: list[str] = field(default_factory=list)  # turns that are rewritten and so not trained
    failure: str = ""


def infer(tokenizer: Tokenizer, name: str = "inferred") -> Inferred:
    """Infer a spec.

    Args:
        tokenizer: with a chat template.
        name: name of the spec.

    Raises:
        SpecError: no mode of the template can be described; the message says for each what is in the way.
    """
    if tokenizer.chat_template is None:
        raise SpecError(f"the tokenizer {tokenizer.name} has no chat template to infer from")
    source = tokenizer.chat_template
    template = ChatTemplate(source, dict(tokenizer.special_tokens), _DATE)
    try:
        template.render([_user(_Q[0]), _assistant(_A[0])])
    except TemplateError as error:
        raise SpecError(
            f"no spec can be inferred for {tokenizer.name}: its template refuses a question and an answer ({error})"
        ) from None
    modes = [mode for kwargs in _kwargs(template) for mode in (_Mode(kwargs, None), _Mode(kwargs, True))]
    for mode in modes:
        _describe(mode, template, tokenizer, name)
    described = [mode for mode in modes if mode.spec is not None]
    if not described:
        why = "\n".join(dict.fromkeys(f"  {_called(mode)}: {mode.failure}" for mode in modes))
        raise SpecError(f"no spec can be inferred for {tokenizer.name}:\n{why}")
    # exact before inexact, a spec that takes reasoning before one that refuses it, few rewritten turns before many
    best = min(described, key=lambda mode: (len(mode.breaks), not mode.thinks, len(mode.notes)))
    assert best.spec is not None
    reasons = [*best.breaks, *best.notes]
    if "strftime_now" in source:
        reasons.append(f"the template prints today's date; it is pinned to {_DATE}, set `date:` to the day that you serve")
    return Inferred(best.spec, not best.breaks, tuple(reasons), tuple(_variants(described, best)))


def _called(mode: _Mode) -> str:
    given = ", ".join(f"{k}={v!r}" for k, v in mode.kwargs.items()) or "default mode"
    return given + (", with reasoning" if mode.thinks else "")


def _kwargs(template: ChatTemplate) -> Iterator[dict[str, Any]]:
    """Ways to call the template: as it is, its thinking switch on and off, history switches, effort levels; the first two of a
    kind that render alike count once."""
    known = variables(template.source)
    switches = [name for name in _SWITCHES if name in known]
    history = {name: value for name, value in _HISTORY.items() if name in known}
    efforts = [{name: value} for name, values in _EFFORTS.items() if name in known for value in values]
    candidates: list[dict[str, Any]] = [{}]
    candidates += [{name: value} for name in switches for value in (True, False)]
    candidates += efforts
    if history:
        candidates += [{**given, **history} for given in list(candidates)]
    seen: dict[Any, dict[str, Any]] = {}
    for kwargs in candidates:
        shown = tuple(_shown(template, kwargs))
        if all(text is None for text in shown):
            continue
        # an explicit option is worth more than the default that renders alike: it is then passed at serving, too
        if shown not in seen or (not seen[shown] and len(kwargs) == 1):
            seen[shown] = kwargs
    yield from seen.values()


def _shown(template: ChatTemplate, kwargs: Mapping[str, Any]) -> Iterator[str | None]:
    plain = [_user(_Q[0]), _assistant(_A[0]), _user(_Q[1]), _assistant(_A[1])]
    thought = [_user(_Q[0]), _think(_A[0], _R[0]), _user(_Q[1]), _think(_A[1], _R[1])]
    for messages, prompt in ((plain[:1], True), (plain, False), (thought, False)):
        try:
            yield template.render(messages, None, add_generation_prompt=prompt, **kwargs)
        except TemplateError:
            yield None


def _think(content: str, reasoning: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "reasoning_content": reasoning, "thinking": reasoning}


# --- one mode -----------------------------------------------------------------------------------------------------------------


def _describe(mode: _Mode, template: ChatTemplate, tokenizer: Tokenizer, name: str) -> None:
    """Fill in the mode's spec and what breaks parity, or why it has none."""
    try:
        facts = _facts(mode, template, tokenizer)
        facts = {"name": name, "kwargs": mode.kwargs, **facts}
        if "strftime_now" in template.source:
            facts["date"] = _DATE
        try:
            _prove(mode, facts, tokenizer)
        except SpecError:
            # some templates write turns behind a tool's result in no form that a spec can say: then without tools
            if facts["assistant"].pop("after_tool", None) is None:
                raise
            _prove(mode, facts, tokenizer)
    except (SpecError, TemplateError, TokenizerError, RejectedRow) as error:
        mode.failure = str(error).replace("\n", " ")[:400]


def _facts(mode: _Mode, template: ChatTemplate, tokenizer: Tokenizer) -> dict[str, Any]:
    """Header, end of turn, trailing text and thinking tags of one mode, read off its renderings."""
    answer = _think if mode.thinks else lambda content, _: _assistant(content)
    messages = [_user(_Q[0]), answer(_A[0], _R[0]), _user(_Q[1]), answer(_A[1], _R[1])]
    template.tagged = True
    traced = template.trace(messages, None, **mode.kwargs)
    text = traced.text
    for i in (1, 3):
        if _A[i // 2] not in text:
            raise SpecError(f"the template does not write the answer of message {i}")
    if mode.thinks and _R[1] not in text:
        raise SpecError("the template writes no reasoning")
    forms = [text[gap.before : gap.first] for gap in (_place(traced, messages, 1), _place(traced, messages, 3))]
    header = _header(mode, template, tokenizer, messages[0], forms)
    thinking = _thinking(mode, text, header)
    ending = _end(traced, messages, tokenizer, template, mode)
    history = None
    if header not in forms[0]:
        history = _history_header(header, forms[0])
        if not history.strip():
            raise SpecError(f"the generation prompt is {header!r} but an earlier turn begins {forms[0][-80:]!r}")
    form = _arguments(mode, template)
    behind = _after_tool(mode, template, header, form)
    after = {} if behind is None else {"after_tool": {"header": behind}}
    return {
        "assistant": {"header": header, "history_header": history, **after, **ending},
        "thinking": thinking,
        "tool_arguments": form,
    }


def _after_tool(mode: _Mode, template: ChatTemplate, header: str, form: str) -> str | None:
    """The prompt behind a tool's result where it is not the header: what stands there from where the template begins with the
    answer up to where the server's prompt ends. None where it is the header, or tools cannot be shown."""
    why = _R[0] if mode.thinks else None
    call = _assistant("", why, call=True)
    if form == "json":
        call["tool_calls"][0]["function"]["arguments"] = json.dumps(call["tool_calls"][0]["function"]["arguments"])
    result = {"role": "tool", "content": "Talpha result.", "tool_call_id": "call00001", "name": "probe_tool"}
    last = _think(_A[1], _R[1]) if mode.thinks else _assistant(_A[1])
    messages = [_user(_Q[0]), {**call, **({"thinking": why} if why else {})}, result, last]
    try:
        traced = template.trace(messages, TOOLS, **mode.kwargs)
        served = template.render(messages[:-1], TOOLS, add_generation_prompt=True, **mode.kwargs)
    except TemplateError:
        return None
    start = next((a for a, _ in traced.ranges().get(3, [])), None)
    if start is None or not traced.text.startswith(served) or len(served) < start or served.endswith(header or " "):
        return None
    return traced.text[start : len(served)]


def _place(traced: Traced, messages: Sequence[dict[str, Any]], message: int) -> Gap:
    """Where a message's own strings stand: by their marks, or inside its range where the template makes new strings of them."""
    marked = traced.gaps().get(message)
    if marked:
        return Gap(marked[0].before, marked[0].first, marked[-1].last, marked[-1].after)
    content = messages[message]["content"]
    words = messages[message].get("reasoning_content") or content
    for start, end in traced.ranges().get(message, []):
        first, last = traced.text.find(words, start, end), traced.text.find(content, start, end)
        if first >= 0 and last >= 0:
            return Gap(start, first, last + len(content), end)
    raise SpecError(f"the template makes new text of message {message}, so that nothing tells where it begins and ends")


def _header(mode: _Mode, template: ChatTemplate, tokenizer: Tokenizer, question: dict[str, Any], forms: Sequence[str]) -> str:
    """What the prompt adds. Where it adds nothing, what the template writes before every answer, as far as it is always the same;
    '' where that is nothing, and the model's text begins right behind the question's."""
    header = generation_prompt(template, tokenizer, question, **mode.kwargs)
    before = template.render([question], None, **mode.kwargs)
    if before != template.render([question], None, add_generation_prompt=True, **mode.kwargs):
        return header
    tokens = [match.span() for match in matcher(control_tokens(tokenizer, template.source)).finditer(header)]
    starts = [k for k in range(len(header)) if not any(a < k < b for a, b in tokens)]
    shared = next((header[k:] for k in starts if all(header[k:] in form for form in forms)), "")
    return shared if shared.strip() else ""


def _history_header(header: str, form: str) -> str:
    """What stands before an earlier answer where the header does not: from where it begins like the header up to the answer."""
    for size in range(len(header), 0, -1):
        at = form.rfind(header[:size])
        if at >= 0:
            return form[at:]
    return ""


def _thinking(mode: _Mode, text: str, header: str) -> dict[str, Any]:
    """Tags and history of the reasoning."""
    if not mode.thinks:
        tags = re.search(r"(<[^<>\s]*think[^<>\s]*>)\s*(</[^<>\s]*think[^<>\s]*>)", header)
        return {"mode": "off", "open": tags.group(1), "close": tags.group(2)} if tags else {"mode": "none"}
    start = text.rindex(_R[1])
    before, between = text[:start], text[start + len(_R[1]) : text.rindex(_A[1])]
    opening = re.search(r"(\S+)\s*$", before)
    closing = re.match(r"\s*(\S+?)(?=\s|$)", between)
    if opening is None or closing is None:
        raise SpecError(f"no tags stand around the reasoning: {text[start - 40 : start + 80]!r}")
    kept = _R[0] in text
    open_tag = _last_tag(opening.group(1))
    return {"mode": "on", "open": open_tag, "close": closing.group(1), "in_history": "kept" if kept else "dropped"}


def _last_tag(text: str) -> str:
    """The last tag of a run of them (`<|im_start|>assistant<think>` -> `<think>`)."""
    found = re.search(r"(?:<[^<>]*>|\[[^\[\]]*\]|[^<>\[\]]+)$", text)
    return found.group() if found else text


def _end(
    traced: Traced, messages: Sequence[dict[str, Any]], tokenizer: Tokenizer, template: ChatTemplate, mode: _Mode
) -> dict[str, Any]:
    """How turns end: the end token, who writes it, what stands behind it, and what history makes of it."""
    text, ranges = traced.text, traced.ranges()
    pattern = matcher(control_tokens(tokenizer, template.source))
    early, late = _place(traced, messages, 1), _place(traced, messages, 3)
    stop = next((b for a, b in ranges.get(1, []) if a <= early.last <= b), None)
    if stop is None and pattern.search(text, late.last):
        stop = early.after
    elif stop is None:
        # nothing closes the last turn and no range tells where the next message begins: with what stands before the first one, too
        before, between = text[: _place(traced, messages, 0).first], text[early.last : early.after]
        stop = early.after - first_unequal(before[::-1], between[::-1])
    first = _closing(pattern, text, early.last, min(stop, early.after), tokenizer) or pattern.search(
        text, early.last, early.after
    )
    own = next((b for a, b in ranges.get(3, []) if a <= late.last <= b), len(text))
    last = _closing(pattern, text, late.last, own, tokenizer) or pattern.search(text, late.last)
    written = text[early.last : stop] if stop != early.after else ""
    if written.strip() and not pattern.search(written):
        return _no_end(written, tokenizer)  # closed by words of the template's own
    if first is None and last is None:
        return _no_end(text[early.last : stop], tokenizer)
    if last is None:
        assert first is not None
        if first.start() >= stop:
            return {"end_of_turn": _next_ends(template, pattern, first.group(), mode), "end_owner": "next"}
        # earlier turns are closed, the last one stays open, as for a reply that is to be continued
        return {"end_of_turn": first.group(), "allow_untrained_stop": True}
    if first is None:
        return {"end_of_turn": last.group(), "allow_untrained_stop": True}
    if first.start() >= stop and first.group() == last.group():
        return {"end_of_turn": last.group(), "end_owner": "next"}  # closed by what follows, be it a message or the end
    facts: dict[str, Any] = {"end_of_turn": last.group(), "end_owner": "self"}
    if first.group() != last.group():
        facts["history_end"] = first.group()
        return facts
    behind = text[first.end() : stop] if stop >= first.end() else None
    closing = text[last.end() : own] if own >= last.end() else None
    if behind is not None and behind == closing:
        facts["trailing"] = behind
    return facts


def _closing(pattern: re.Pattern[str], text: str, start: int, stop: int, tokenizer: Tokenizer) -> re.Match[str] | None:
    """The token that ends the turn among those behind an answer: the tokenizer's EOS, else the last one where words stand between
    them (Kimi K3 closes its channels first), else the last of those that follow each other directly (Cohere)."""
    found = list(pattern.finditer(text, start, stop))
    if not found:
        return None
    eos = next((match for match in found if match.group() == tokenizer.special_tokens.get("eos_token")), None)
    if eos or any(text[a.end() : b.start()].strip() for a, b in itertools.pairwise(found)):
        return eos or found[-1]
    adjacent = itertools.takewhile(lambda pair: pair[0].end() == pair[1].start(), itertools.pairwise(found))
    return next(reversed([found[0], *(after for _, after in adjacent)]))


def _no_end(region: str, tokenizer: Tokenizer) -> dict[str, Any]:
    """No control token stands behind an answer: the turn just stops, or its end is text that is no token here."""
    if region.strip():
        ids = tokenizer.whole.encode(region.strip(), add_special_tokens=False).ids
        raise SpecError(
            f"the template ends a turn with {region.strip()[:60]!r}, which is {len(ids)} tokens of {tokenizer.name} and no single id; "
            "add it to the tokenizer as a special token"
        )
    return {"end_of_turn": [], "allow_untrained_stop": True}


def _next_ends(template: ChatTemplate, pattern: re.Pattern[str], user: str, mode: _Mode) -> list[str]:
    """Stop tokens that are the headers of what follows: a user's, and a tool result's where that differs."""
    found = [user]
    for form in ({"path": "a"}, '{"path": "a"}'):
        call = {"id": "call00001", "type": "function", "function": {"name": "probe_tool", "arguments": form}}
        messages = [
            _user(_Q[0]),
            {"role": "assistant", "content": _A[0], "tool_calls": [call]},
            {"role": "tool", "content": "Talpha", "tool_call_id": "call00001", "name": "probe_tool"},
            _assistant(_A[1]),
        ]
        try:
            traced = template.trace(messages, TOOLS, **mode.kwargs)
        except TemplateError:
            continue
        start = next((a for a, _ in traced.ranges().get(2, [])), None)
        match = pattern.search(traced.text, start) if start is not None else None
        if match and start is not None and not traced.text[start : match.start()].strip():
            return list(dict.fromkeys([*found, match.group()]))
    return found


def _arguments(mode: _Mode, template: ChatTemplate) -> str:
    """The form of tool arguments that renders the argument's own text once, unescaped; `dict` where both do."""
    for form, arguments in (("dict", {"path": "probe/argument"}), ("json", '{"path": "probe/argument"}')):
        call = {"id": "call00001", "type": "function", "function": {"name": "probe_tool", "arguments": arguments}}
        messages = [_user(_Q[0]), {"role": "assistant", "content": _A[0], "tool_calls": [call]}]
        try:
            text = template.render(messages, TOOLS, **mode.kwargs)
        except TemplateError:
            continue
        if "probe/argument" in text and '\\"' not in text.rpartition(_A[0])[2]:
            return form
    return "dict"


# --- proof --------------------------------------------------------------------------------------------------------------------


def _prove(mode: _Mode, facts: dict[str, Any], tokenizer: Tokenizer) -> None:
    """Compile the spec and compare every turn with the oracle; declare what breaks, with the reason."""
    from ..parsers.parser import Parser

    breaks: list[str] = []
    notes: list[str] = []
    drops: list[str] = []
    stable = True
    if facts["assistant"].get("allow_untrained_stop"):
        ends = facts["assistant"]["end_of_turn"]
        notes.append(
            "the template writes no end token behind the last turn" if ends else "the template writes no end-of-turn token at all"
        )
    spec = TemplateSpec.model_validate({**facts, "prefix_stable": False})
    parser = Parser(spec, tokenizer, check=False)
    from .probe import compile_probe

    report = compile_probe(parser, spec)
    if not report.ok and _system_dropped(report):
        drops.append("system")
        notes.append("the template leaves system messages out of some conversations")
        spec = spec.model_copy(update={"drops": ["system"]})
        parser = Parser(spec, tokenizer, check=False)
        report = compile_probe(parser, spec)
    if not report.ok:
        failed = next(finding for finding in report.findings if not finding.ok)
        raise SpecError(f"{failed.claim}: expected {failed.expected}, found {failed.found}")
    for what, conversation in _conversations(mode, parser.renders_tools):
        try:
            sample = parser.sample(conversation)
            example = parser.example(conversation, oracle=True)
        except RejectedRow as error:
            if what in ("one turn", "two turns"):
                raise
            if (
                error.reason.value == "template_drops_content"
                and "content" in error.detail
                and what.startswith("a tool call beside text")
            ):
                drops += ["content_with_tool_calls"] if "content_with_tool_calls" not in drops else []
            elif what == "one turn, without reasoning":
                notes.append(f"turns without reasoning are refused ({error.reason.value}); give such rows another spec")
            elif what.startswith("a tool call") and what.endswith("call"):
                notes.append(f"{what} and its result are refused ({error.reason.value})")
            continue
        for turn in sample.turns:
            if parser.served(sample, turn.message) is None:
                breaks.append(f"{what}: the template cannot render what the server sends before message {turn.message}")
        trained = {span.message for span in example.spans if span.trained}
        for found in example.parity:
            if found.kind == "text" or not found.declared:
                stable = False
                text = _reason(what, found.message, found.kind, found.detail, facts)
                (breaks if found.message in trained else notes).append(text)
        notes += [
            f"{what}: the reasoning of message {i} is dropped from history; the turn is not trained"
            for i, kind in example.rewritten.items()
            if kind == "emission"
        ]
    final = {**facts, "prefix_stable": stable, **({"drops": drops} if drops else {})}
    mode.spec = TemplateSpec.model_validate(final)
    mode.parser = Parser(mode.spec, tokenizer)
    mode.breaks, mode.notes = list(dict.fromkeys(breaks)), list(dict.fromkeys(notes))


def _system_dropped(report: Report) -> bool:
    return any(
        not f.ok and f.claim == "a system message" and f.found.startswith("template_drops_content") for f in report.findings
    )


def _reason(what: str, message: int, kind: str, detail: str, facts: Mapping[str, Any]) -> str:
    opening = facts["thinking"].get("open")
    header = facts["assistant"]["header"]
    served, _, trained = detail.partition(", trained on ")
    if opening and opening in header and kind == "text" and opening in served and opening not in trained:
        return f"{what}: the generation prompt holds {opening} but history drops it (message {message}, {detail})"
    return f"{what}: message {message} has another prefix than the server sends ({kind}: {detail})"


def _conversations(mode: _Mode, tools: bool) -> Iterator[tuple[str, Conversation]]:
    """What the spec is proven on."""
    yield from _chats(_R if mode.thinks else (None, None), "", tools)
    if mode.thinks:
        yield from _chats((None, None), ", without reasoning", tools)


def _chats(why: Sequence[str | None], kind: str, shown: bool) -> Iterator[tuple[str, Conversation]]:
    def chat(*messages: dict[str, Any], tools: bool = False) -> Conversation:
        return Conversation(list(messages), TOOLS if tools and shown else None, (None,) * len(messages), {})

    system = {"role": "system", "content": "Salpha system."}
    result = {"role": "tool", "content": "Talpha result.", "tool_call_id": "call00001", "name": "probe_tool"}
    yield f"one turn{kind}", chat(_user(_Q[0]), _assistant(_A[0], why[0]))
    yield f"two turns{kind}", chat(_user(_Q[0]), _assistant(_A[0], why[0]), _user(_Q[1]), _assistant(_A[1], why[1]))
    yield f"a system message{kind}", chat(system, _user(_Q[0]), _assistant(_A[0], why[0]))
    yield (
        f"a tool call{kind}",
        chat(_user(_Q[0]), _assistant("", why[0], call=True), result, _assistant(_A[1], why[1]), tools=True),
    )
    yield (
        f"agent steps, then another question{kind}",
        chat(
            _user(_Q[0]),
            _assistant("", why[0], call=True),
            result,
            _assistant(_A[0], why[0]),
            _user(_Q[1]),
            _assistant(_A[1], why[1]),
            tools=True,
        ),
    )
    yield (
        f"a tool call beside text{kind}",
        chat(_user(_Q[0]), _assistant(_A[0], why[0], call=True), result, _assistant(_A[1], why[1]), tools=True),
    )


# --- writing ------------------------------------------------------------------------------------------------------------------


def _variants(described: Sequence[_Mode], best: _Mode) -> Iterator[dict[str, Any]]:
    """The other modes, each as the fields in which it differs from the best one."""
    assert best.spec is not None
    base = best.spec.model_dump(mode="json")
    names: set[str] = set()
    for mode in sorted(described, key=lambda m: len(m.breaks)):
        if mode is best or mode.spec is None:
            continue
        data = mode.spec.model_dump(mode="json")
        name = f"{best.spec.name}-{_suffix(mode)}"
        if name in names or {k: v for k, v in data.items() if k != "name"} == {k: v for k, v in base.items() if k != "name"}:
            continue
        changed = {k: v for k, v in data.items() if v != base[k] and k != "name"}
        if _compiles({**merge(base, changed), "name": name}, best):
            names.add(name)
            yield {"name": name, "extends": best.spec.name, **changed}


def _compiles(data: dict[str, Any], best: _Mode) -> bool:
    """Does a variant hold as it is written, on top of the base (whose kwargs it cannot take away)?"""
    from ..parsers.parser import Parser

    assert best.parser is not None
    try:
        Parser(TemplateSpec.model_validate(data), best.parser.loaded)
    except ChatmaskError:
        return False
    return True


def _suffix(mode: _Mode) -> str:
    assert mode.spec is not None
    parts = [str(value) for key, value in mode.kwargs.items() if key in _EFFORTS]
    parts += ["preserved"] if any(key in _HISTORY for key in mode.kwargs) else []
    switch = next((value for key, value in mode.kwargs.items() if key in _SWITCHES), None)
    word = {"on": "thinking", "off": "instruct", "none": "instruct"}[mode.spec.thinking.mode]
    if switch is False and word == "thinking":
        word = "thinking-off"
    return "-".join([word, *parts])


def _written(spec: TemplateSpec) -> dict[str, Any]:
    """The fields that say something (defaults left out)."""
    return _without_defaults(spec.model_dump(mode="json"), TemplateSpec)


class _Dumper(yaml.SafeDumper):
    """YAML in which text with line breaks or tags is double-quoted, as in the packaged specs."""


def _quoted(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    style = '"' if re.search(r"[\n<>|{}\[\]]", value) or value in ("on", "off") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _quoted)


def to_yaml(data: dict[str, Any]) -> str:
    """A spec's fields as the text of a spec file."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)


def _without_defaults(data: dict[str, Any], model: Any) -> dict[str, Any]:
    result = {}
    for key, value in data.items():
        info = model.model_fields[key]
        default = info.get_default(call_default_factory=True)
        inner = getattr(info.annotation, "model_fields", None)
        if inner is not None and isinstance(value, dict):
            kept = _without_defaults(value, info.annotation)
            if kept:
                result[key] = kept
        elif info.is_required() or value != default:
            result[key] = value
    return result

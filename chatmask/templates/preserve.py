"""preserve_thinking: a template's history gate taken out, so that the reasoning of every turn is written as that of the last one.

Many templates write the reasoning of an earlier turn only behind a test on its position (`loop.index0 > ns.last_query_index`,
`loop.last`, a variable made of such a test). Which test that is, is found by trying, not by name:

1. The template's syntax tree is instrumented: each *leaf* of a condition (an operand of `and`, `or`, `not`; a comparison; what an
   `if` tests) reports its value, and can be forced to another one.
2. Probe conversations are rendered whole, and cut behind each assistant turn, where that turn is the last. A leaf that gives other
   values for the same turns then depends on the position; the value that it has where the turn is last is what it may be forced to.
   Leaves that look at nothing but a message's own fields are left alone.
3. The smallest set of forced leaves is searched with which every turn's reasoning is written as the template itself writes it where
   that turn is last, and nothing else changes: what stands before each answer is the text of the turn as the last one (or, for a
   turn that loses no reasoning, the text of before), all other text is the template's own, the generation prompt too.
4. The leaves are replaced by `true` or `false` *in the template's text*. That this text is the tree that was tried is proven: it is
   parsed, and the two trees must be equal. So a server can be given the very template that the data was made with.

A template whose own variable does the same is not rewritten: the error names the variable.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any, Literal

import jinja2
from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from ..errors import SpecError, TemplateError
from .environment import environment, variables
from .probe import TOOLS
from .tracing import ChatTemplate

Verdict = Literal["preserved", "kept", "switch", "unread", "refused"]
Forced = tuple[tuple[int, bool], ...]  # leaves by number, and the value that each is forced to
Give = Callable[[dict[str, Any]], dict[str, Any]]  # a probe's message in the form that the template wants

_LEAF = "__chatmask_leaf"
_POSITIONS = {"index", "index0", "revindex", "revindex0", "first", "last", "length", "previtem", "nextitem"}
_LARGEST = 3  # leaves that are forced together, where they are searched exhaustively
_MOST = 24  # candidates that are combined so
_TOKEN = re.compile(r"\w+|//|\*\*|[<>=!]=|[^\s\w]")  # a string is several: a line may begin inside one
_GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "pad_token", "unk_token"}


@dataclass(frozen=True)
class Gate:
    """One condition that was forced.

    Attributes:
        line: its line in the stock template.
        text: the condition, as the template writes it.
        value: what stands in its place.
    """

    line: int
    text: str
    value: bool

    def __str__(self) -> str:
        return f"line {self.line}: `{' '.join(self.text.split())}` is always {'true' if self.value else 'false'}"


@dataclass(frozen=True)
class Outcome:
    """What was found out about one template.

    Attributes:
        verdict: `preserved`; `kept`: it keeps all reasoning by itself; `switch`: an own variable of it does it; `unread`: it
            writes no reasoning, not even that of the last turn; `refused`: it drops reasoning, and no set of conditions helps.
        why: the same in a sentence, for people.
        source: the rewritten template (`preserved` only).
        gates: the conditions that were forced, in the order of the text.
    """

    verdict: Verdict
    why: str
    source: str | None = None
    gates: tuple[Gate, ...] = ()


def preserve(
    source: str, special: Mapping[str, Any], kwargs: Mapping[str, Any], date: str | None = None, give: Give | None = None
) -> Outcome:
    """Take the history gate out of a template.

    Args:
        source: the Jinja text.
        special: what every rendering gets (special tokens).
        kwargs: the template's variables, with thinking on.
        date: pinned date for `strftime_now`.
        give: brings a message (`content`, `reasoning_content`, `tool_calls` with a dictionary of arguments) into the form that the
            template is given; without it, reasoning goes into the fields `reasoning_content` and `thinking`.

    Raises:
        TemplateError: the text is not valid Jinja.
    """
    return _Search(source, dict(special), dict(kwargs), date, give or in_fields).outcome()


@lru_cache(maxsize=64)
def _cached(source: str, given: str, date: str | None, join: str | None, arguments: str) -> Outcome:
    special, kwargs = json.loads(given)

    def give(message: dict[str, Any]) -> dict[str, Any]:
        message = in_fields(message) if join is None else in_content(message, join)
        return with_json_arguments(message) if arguments == "json" else message

    return preserve(source, special, kwargs, date, give)


def preserved(
    source: str, special: Mapping[str, Any], kwargs: Mapping[str, Any], date: str | None, join: str | None, arguments: str
) -> Outcome:
    """As `preserve`, for a spec's `thinking.join` and `tool_arguments`; found once per process.

    Raises:
        SpecError: the template has no history gate, has a variable of its own for it, or is not understood; says which.
    """
    found = _cached(source, json.dumps([dict(special), dict(kwargs)], sort_keys=True), date, join, arguments)
    if found.verdict != "preserved":
        raise SpecError(f"preserve_thinking: {found.why}")
    return found


def in_fields(message: dict[str, Any]) -> dict[str, Any]:
    """A message with its reasoning in the two fields that templates read."""
    reasoning = message.get("reasoning_content")
    return {**message, "thinking": reasoning} if reasoning else dict(message)


def in_content(message: dict[str, Any], join: str) -> dict[str, Any]:
    """A message with its reasoning inside content, in the form of `thinking.join`."""
    result = {key: value for key, value in message.items() if key != "reasoning_content"}
    if message.get("reasoning_content"):
        result["content"] = join.replace("{reasoning}", message["reasoning_content"]).replace("{content}", message["content"])
    return result


def with_json_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose calls have their arguments as JSON text."""
    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


# --- leaves of conditions -------------------------------------------------------------------------------------------------------


class _Leaves(NodeTransformer):
    """Walks every leaf of every condition, in an order that is always the same, and puts in its place what `replace` returns."""

    def __init__(self, replace: Callable[[int, nodes.Expr], nodes.Expr]) -> None:
        self.replace = replace
        self.count = 0

    def _condition(self, node: Any) -> Any:
        if isinstance(node, (nodes.And, nodes.Or)):
            node.left, node.right = self._condition(node.left), self._condition(node.right)
            return node
        if isinstance(node, nodes.Not):
            node.node = self._condition(node.node)
            return node
        inside: Any = self.generic_visit(node) if isinstance(node, nodes.Compare) else self.visit(node)
        self.count += 1
        return self.replace(self.count - 1, inside)

    visit_And = visit_Or = visit_Not = visit_Compare = _condition

    def visit_If(self, node: nodes.If) -> Any:
        """The test, then all branches."""
        node.test = self._condition(node.test)
        for branch in (node.body, node.elif_, node.else_):
            branch[:] = [self.visit(child) for child in branch]
        return node

    def visit_CondExpr(self, node: nodes.CondExpr) -> Any:
        """`a if test else b`, likewise."""
        node.test = self._condition(node.test)
        node.expr1 = self.visit(node.expr1)
        node.expr2 = node.expr2 and self.visit(node.expr2)
        return node


def _with_calls(source: str) -> tuple[nodes.Template, list[nodes.Expr]]:
    """The tree with a call around each leaf, and the leaves themselves (of a tree of their own)."""
    plain: list[nodes.Expr] = []
    _Leaves(lambda _, node: plain.append(node) or node).visit(environment().parse(source))  # type: ignore[func-returns-value]

    def called(number: int, node: nodes.Expr) -> nodes.Expr:
        name = nodes.Name(_LEAF, "load", lineno=node.lineno)
        return nodes.Call(name, [nodes.Const(number), node], [], None, None, lineno=node.lineno)

    return _Leaves(called).visit(environment().parse(source)), plain


def _with_constants(source: str, forced: Forced) -> nodes.Template:
    """The tree with constants in place of leaves."""
    values = dict(forced)

    def constant(number: int, node: nodes.Expr) -> nodes.Expr:
        return nodes.Const(values[number], lineno=node.lineno) if number in values else node

    tree: nodes.Template = _Leaves(constant).visit(environment().parse(source))
    return tree


def _assigned(source: str) -> frozenset[str]:
    """Names that the template sets itself, and parameters of its macros."""
    tree = environment().parse(source)
    every: Iterator[Any] = tree.find_all((nodes.Name, nodes.NSRef))
    names = {node.name for node in every if getattr(node, "ctx", "store") in ("store", "param")}
    loops = {name.name for loop in tree.find_all(nodes.For) for name in _names(loop.target)}
    sets = {name.name for node in tree.find_all(nodes.Assign) for name in _names(node.target)}
    return frozenset(names - (loops - sets))


def _names(node: nodes.Node) -> Iterator[Any]:
    if isinstance(node, (nodes.Name, nodes.NSRef)):
        yield node
    yield from node.find_all((nodes.Name, nodes.NSRef))


def _rank(leaf: nodes.Expr, assigned: frozenset[str]) -> int | None:
    """How likely a leaf is a history gate, 0 most; None: it looks at nothing that could tell a position."""
    parts = [leaf, *leaf.find_all(nodes.Node)]
    loops = any(
        isinstance(p, nodes.Getattr) and p.attr in _POSITIONS and isinstance(p.node, nodes.Name) and p.node.name == "loop"
        for p in parts
    )
    sets = any(isinstance(p, nodes.Name) and p.name in assigned for p in parts)
    orders = isinstance(leaf, nodes.Compare) and any(operand.op in ("lt", "lteq", "gt", "gteq") for operand in leaf.ops)
    if orders and (loops or sets):
        return 0
    return 1 if loops else 2 if sets else None


# --- probes ---------------------------------------------------------------------------------------------------------------------


def _conversations() -> Iterator[list[dict[str, Any]]]:
    """Conversations whose every text is unique: a letter for each message: u(ser), s(ystem), t(ool result); assistant turns that
    r(eason) or p(lainly answer), R and P with a call, E a call with reasoning and no text."""
    for shape in ("ur", "up", "sur", "urur", "upup", "surupur", "urupurur", "uRtr", "uRturur", "sururuRtr", "uRtRtpuruRtr", "uPtrupur",
                  "uRttr", "uEturuEtr", "uRtruRtRtrup"):  # fmt: skip
        yield [_message(kind, i, shape) for i, kind in enumerate(shape)]


def _message(kind: str, i: int, shape: str) -> dict[str, Any]:
    words = f"Word{i:02d}{kind.upper()}"
    if kind in "us":
        return {"role": "user" if kind == "u" else "system", "content": words}
    if kind == "t":
        called = max(k for k in range(i) if shape[k] in "RPE")
        return {"role": "tool", "content": words, "tool_call_id": f"call{called:02d}00{i - called - 1}", "name": "probe_tool"}
    message: dict[str, Any] = {"role": "assistant", "content": "" if kind == "E" else words}
    if kind in "rRE":
        message["reasoning_content"] = f"Thought{i:02d}"
    if kind in "RPE":
        count = len(shape[i + 1 :]) - len(shape[i + 1 :].lstrip("t"))
        message["tool_calls"] = [
            {
                "id": f"call{i:02d}00{n}",
                "type": "function",
                "function": {"name": "probe_tool", "arguments": {"path": f"{words}call{n}", "depth": 7}},
            }
            for n in range(max(1, count))
        ]
    return message


def _marker(message: Mapping[str, Any]) -> str:
    """The text by which a message is found: its content, or its first call's argument."""
    return str(message["content"] or message["tool_calls"][0]["function"]["arguments"]["path"])


def _between(text: str, markers: Sequence[str]) -> list[str] | None:
    """What stands before each marker and behind the last one; None where one of them is not there once, or not in order."""
    pieces, at = [], 0
    for marker in markers:
        found = text.find(marker)
        if found < at or text.find(marker, found + 1) >= 0:
            return None
        pieces.append(text[at:found])
        at = found + len(marker)
    return [*pieces, text[at:]]


@dataclass(frozen=True)
class _Probe:
    """One conversation, or the prompt behind a part of one.

    Attributes:
        messages, tools, prompt: what is rendered.
        markers: one text a message.
        stock: what the stock template writes before each of them, and behind the last.
        served: for each assistant message, what it writes before it where it is the last turn; None where it is none, or refused.
        reasons: messages whose reasoning the stock template writes where they are last.
    """

    messages: tuple[dict[str, Any], ...]
    tools: Any
    prompt: bool
    markers: tuple[str, ...]
    stock: tuple[str, ...]
    served: tuple[str | None, ...]
    reasons: tuple[int, ...]

    def kept(self, text: str) -> int | None:
        """How many of the turns that reason stand as served; None where anything else is not as the template allows."""
        pieces = _between(text, self.markers)
        if pieces is None:
            return None
        for piece, stock, served in zip(pieces, self.stock, (*self.served, None), strict=True):
            if piece not in (stock, served):
                return None
        return sum(pieces[i] == self.served[i] for i in self.reasons)


class _Search:
    def __init__(self, source: str, special: dict[str, Any], kwargs: dict[str, Any], date: str | None, give: Give) -> None:
        self.source, self.kwargs, self.date, self.give = source, kwargs, date, give
        self.template = ChatTemplate(source, special, date)
        tree, self.leaves = _with_calls(source)
        env = environment(date)
        tree.set_environment(env)
        try:
            self.code = jinja2.Template.from_code(env, env.compile(tree), env.globals.copy())
        except (jinja2.TemplateError, SyntaxError, RecursionError, ValueError) as error:
            raise TemplateError(f"chat template: {error}") from None
        self.assigned = _assigned(source)

    # --- rendering

    def _stock(self, messages: Sequence[dict[str, Any]], tools: Any, prompt: bool = False, **more: Any) -> str | None:
        try:
            return self.template.render(messages, tools, add_generation_prompt=prompt, **{**self.kwargs, **more})
        except TemplateError:
            return None

    def _with(self, more: dict[str, Any], probe: _Probe) -> str | None:
        return self._stock(probe.messages, probe.tools, probe.prompt, **more)

    def _forced(
        self, messages: Sequence[dict[str, Any]], tools: Any, prompt: bool, forced: Forced, seen: list[list[Any]] | None = None
    ) -> str | None:
        values = dict(forced)

        def leaf(number: int, value: Any) -> Any:
            if seen is not None:
                seen[number].append(value)
            return values.get(number, value)

        given = self.template._given(messages, tools, prompt, self.kwargs)
        try:
            return str(self.code.render({**given, _LEAF: leaf}))
        except Exception:  # a template may raise anything, and a forced one more than that
            return None

    # --- probes

    @cached_property
    def probes(self) -> list[_Probe]:
        """Every conversation that the stock template renders with its texts, and the prompts on the way through it."""
        found = []
        for messages in _conversations():
            tools = TOOLS if any("tool_calls" in m for m in messages) else None
            shown = [self.give(message) for message in messages]
            markers = [_marker(message) for message in messages]
            served: list[str | None] = []
            for i, message in enumerate(messages):
                ends = (i + 1, next((k for k in range(i + 1, len(messages)) if messages[k]["role"] != "tool"), len(messages)))
                texts = (self._stock(shown[:end], tools) for end in ends) if message["role"] == "assistant" else ()
                pieces = (_between(text, markers[: i + 1]) for text in texts if text is not None)
                served.append(next((piece[-2] for piece in pieces if piece is not None), None))
            cuts = [(len(messages), False)]
            cuts += [(k, True) for k in range(1, len(messages) + 1) if messages[k - 1]["role"] in ("user", "tool")]
            for end, prompt in cuts:
                text = self._stock(shown[:end], tools, prompt)
                stock = None if text is None else _between(text, markers[:end])
                if stock is None:
                    continue
                written = [(i, str(messages[i].get("reasoning_content")), served[i]) for i in range(end)]
                reasons = tuple(i for i, thought, piece in written if piece is not None and thought in piece)
                part = (tuple(shown[:end]), tools, prompt, tuple(markers[:end]), tuple(stock), tuple(served[:end]), reasons)
                found.append(_Probe(*part))
        # the telling ones first: a forced leaf that does harm shows it there
        return sorted(found, key=lambda probe: (probe.prompt, not probe.reasons, len(probe.messages)))

    def _score(self, render: Callable[[_Probe], str | None]) -> int | None:
        """Over all probes, how many turns that reason stand as served; None where one of them is no sound rendering."""
        total = 0
        for probe in self.probes:
            text = render(probe)
            kept = None if text is None else probe.kept(text)
            if kept is None:
                return None
            total += kept
        return total

    # --- the search

    def outcome(self) -> Outcome:
        """Find out what the template does, and rewrite it where it has a gate."""
        wanted = sum(len(probe.reasons) for probe in self.probes)
        if not any(probe.reasons == (1,) and len(probe.messages) == 2 for probe in self.probes):
            if not self.probes:
                return Outcome("unread", "the template renders none of the probe's conversations as they are")
            return Outcome("unread", "the template writes no reasoning, not even that of the last turn")
        if self._score(partial(self._with, {})) == wanted:
            return Outcome("kept", "the template keeps the reasoning of all turns by itself; leave the option out")
        for name, value in self._switches():
            if self._score(partial(self._with, {name: value})) == wanted:
                advice = f"set kwargs.{name}={json.dumps(value)} and leave the option out"
                return Outcome("switch", f"the template has a variable for it; {advice}")
        candidates = self._candidates()
        forced = self._search(candidates, wanted)
        if forced is None:
            tried = ", ".join(f"`{self._shown(k)}` (line {self.leaves[k].lineno})" for k in dict(candidates)) or "none"
            return Outcome(
                "refused",
                "the template drops the reasoning of earlier turns, and no set of its conditions on position, made constant, keeps it "
                f"without other changes; tried: {tried}",
            )
        source, gates = self._rewritten(forced)
        if source is None:
            return Outcome(
                "refused", f"the condition `{gates[-1].text}` (line {gates[-1].line}) cannot be replaced in the template's text"
            )
        proof = ChatTemplate(source, self.template.variables, self.date)

        def render(probe: _Probe) -> str | None:
            try:
                return proof.render(probe.messages, probe.tools, add_generation_prompt=probe.prompt, **self.kwargs)
            except TemplateError:
                return None

        if self._score(render) != wanted:
            raise AssertionError(
                "the rewritten text renders otherwise than the tree it was made of; this is a defect of chatmask"
            )
        return Outcome("preserved", "; ".join(map(str, gates)), source, gates)

    def _switches(self) -> Iterator[tuple[str, bool]]:
        """Variables of the template's own, with values that they do not have."""
        for name in sorted(variables(self.source) - _GIVEN - set(self.template.variables)):
            for value in (True, False):
                if self.kwargs.get(name) is not value:
                    yield name, value

    def _candidates(self) -> list[tuple[int, bool]]:
        """(leaf, value it has for a turn that is last), likeliest first: leaves whose value depends on what comes later."""
        found: dict[tuple[int, bool], None] = {}
        for probe in self.probes:
            if probe.prompt:
                continue
            lost = [i for i in probe.reasons if probe.stock[i] != probe.served[i]]
            whole: list[list[Any]] = [[] for _ in self.leaves]
            self._forced(probe.messages, probe.tools, False, (), whole)
            for i in lost:
                cut: list[list[Any]] = [[] for _ in self.leaves]
                self._forced(probe.messages[: i + 1], probe.tools, False, (), cut)
                for number, (values, later) in enumerate(zip(cut, whole, strict=True)):
                    if values != later[: len(values)] and all(isinstance(value, bool) for value in values + later):
                        found.update({(number, value): None for value in dict.fromkeys(reversed(values))})
        ranked = [
            (rank, -number, value) for number, value in found if (rank := _rank(self.leaves[number], self.assigned)) is not None
        ]
        order = {key: place for place, key in enumerate(found)}
        ranked.sort(key=lambda entry: (entry[0], entry[1], order[-entry[1], entry[2]]))
        return [(-number, value) for _, number, value in ranked]

    def _search(self, candidates: list[tuple[int, bool]], wanted: int) -> Forced | None:
        """The smallest set that keeps all reasoning."""

        def score(forced: Forced) -> int | None:
            return self._score(lambda probe: self._forced(probe.messages, probe.tools, probe.prompt, forced))

        helps: list[tuple[int, bool]] = []
        base = score(()) or 0
        for candidate in candidates:
            got = score((candidate,))
            if got == wanted:
                return (candidate,)
            if got is not None and got > base:
                helps.append(candidate)
        for size in range(2, _LARGEST + 1):
            for forced in itertools.combinations(candidates[:_MOST] if size == 2 else candidates[: _MOST // 2], size):
                if len(dict(forced)) == size and score(forced) == wanted:
                    return forced
        # more gates than that: those that help alone, together, and of them what is needed
        together = tuple({number: (number, value) for number, value in reversed(helps)}.values())
        if len(together) > _LARGEST and score(together) == wanted:
            for candidate in together:
                fewer = tuple(other for other in together if other != candidate)
                together = fewer if score(fewer) == wanted else together
            return together
        return None

    # --- the template's text

    def _shown(self, number: int) -> str:
        """A leaf as the template's text has it."""
        return next((self.source[a:b] for a, b in self._places(self.source, number)), type(self.leaves[number]).__name__)

    def _places(self, source: str, number: int) -> Iterator[tuple[int, int]]:
        """Where a leaf's expression may stand in the text: from its line on, whatever parses to the same tree."""
        leaf = self.leaves[number]
        starts = [0, *(match.end() for match in re.finditer(r"\r\n|\r|\n", source)), len(source)]
        # the parser's count of lines may be off by a few where blocks strip white space
        for line in sorted(range(max(1, leaf.lineno - 3), min(len(starts), leaf.lineno + 4)), key=lambda n: abs(n - leaf.lineno)):
            begin, end = starts[line - 1], starts[line]
            tokens = [match.span() for match in _TOKEN.finditer(source, begin, min(len(source), end + 1000))]
            for i, (a, _) in enumerate(tokens):
                if a >= end:
                    break
                closes = min((at for at in (source.find("%}", a), source.find("}}", a)) if at >= 0), default=len(source))
                ends = [b for _, b in tokens[i:] if b <= closes]
                yield from ((a, b) for b in reversed(ends) if _expression(source[a:b]) == leaf)

    def _rewritten(self, forced: Forced) -> tuple[str | None, tuple[Gate, ...]]:
        """The text with constants in place of the leaves, each step proven on the tree; None where that fails."""
        source, gates = self.source, []
        done: list[tuple[int, bool]] = []
        for number, value in sorted(forced, reverse=True):  # from the end, so that lines before stay where they are
            done.append((number, value))
            wanted = _with_constants(self.source, tuple(done))
            for a, b in self._places(source, number):
                text = source[:a] + ("true" if value else "false") + source[b:]
                if _parsed(text) == wanted:
                    gates.append(Gate(len(re.findall(r"\r\n|\r|\n", source[:a])) + 1, source[a:b], value))
                    source = text
                    break
            else:
                gates.append(Gate(self.leaves[number].lineno, type(self.leaves[number]).__name__, value))
                return None, tuple(gates)
        return source, tuple(reversed(gates))


def _parsed(source: str) -> nodes.Template | None:
    try:
        return environment().parse(source)
    except jinja2.TemplateError:
        return None


@lru_cache(maxsize=4096)
def _expression(text: str) -> nodes.Node | None:
    """The tree of an expression, or None where the text is none."""
    tree = _parsed("{{ (" + text + ") }}")
    output = tree.body[0] if tree is not None and len(tree.body) == 1 else None
    return output.nodes[0] if isinstance(output, nodes.Output) and len(output.nodes) == 1 else None

"""The mutants. Each is one text that occurs exactly once in a file of the package, and what to put in its place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One wrong change.

    Attributes:
        name: what goes wrong.
        file: path inside the package.
        old: text that occurs exactly once in that file; if it does not, the mutant is stale and must be brought up to date.
        new: the wrong text.
    """

    name: str
    file: str
    old: str
    new: str


_MASKING, _TURNS, _SHIELD = "masking.py", "parsers/turns.py", "parsers/shielding.py"
_PARSER, _THINKING, _MESSAGES = "parsers/parser.py", "parsers/thinking.py", "parsers/messages.py"
_TRACING, _SPEC = "templates/tracing.py", "templates/spec.py"
_ENCODING, _SPECFORGE = "encoding.py", "parsers/specforge.py"
_SHAPES, _OPAQUE, _PREFIXES = "parsers/shapes.py", "parsers/opaque.py", "parsers/prefixes.py"
_SET = "mask[first:last] = 1"
_FIND = "            shield = find_quoted(strings, "
_FLAG = "self.quoted.append((literal, sampled and literal in self.markers))"

MUTANTS = (
    # the mask
    Mutant("first target lost", _MASKING, _SET, "mask[first + 1 : last] = 1"),
    Mutant("last token of the header trained", _MASKING, _SET, "mask[max(first - 1, 0) : last] = 1"),
    Mutant("end token lost", _MASKING, _SET, "mask[first : last - 1] = 1"),
    Mutant("token behind the end trained", _MASKING, _SET, "mask[first : last + 1] = 1"),
    Mutant("everything behind the first header trained", _MASKING, _SET, "mask[first:] = 1"),
    Mutant("untrained parts trained", _MASKING, "mask[low:high] = 0", "pass"),
    Mutant("a token across a part's border trained", _MASKING, "begin.token - begin.over)", "begin.token)"),
    Mutant("last turn only", _MASKING, "if not emission.reason:\n", "if not emission.reason and emission is emissions[-1]:\n"),
    Mutant("untrained turns trained", _MASKING, "if not emission.reason:\n", "if True:\n"),
    Mutant("straddle flipped", _MASKING, 'first -= straddle == "include"', 'first -= straddle == "exclude"'),
    Mutant("straddles not counted", _MASKING, "straddles += 1\n        first", "first"),
    Mutant(
        "span starts one token late",
        _MASKING,
        "first, last, straddles = start.token,",
        "first, last, straddles = start.token + 1,",
    ),
    # the short ways
    Mutant(
        "a header's end one token late",
        _ENCODING,
        "left, at = left[len(spelled) :], at + 1",
        "left, at = left[len(spelled) :], at + 2",
    ),
    Mutant(
        "a border behind a control token late", _ENCODING, "(controls[i][1], places[i] + 1)", "(controls[i][1], places[i] + 2)"
    ),
    Mutant("a normalised header believed", _ENCODING, "if not spelled or not left.startswith(spelled):", "if not spelled:"),
    Mutant("control tokens of content believed", _ENCODING, "if len(places) != len(expected) or", "if False and"),
    Mutant("shapes fit any string", _SHAPES, "(equal and text in equal) or search(text):", "False:"),
    Mutant("blanks not trimmed in a shape", _SHAPES, "if trimmed and (text[0].isspace() or text[-1].isspace()):", "if False:"),
    Mutant(
        "a template that looks into strings has shapes",
        _OPAQUE,
        "        self.log.spoiled = True\n        return getattr(str",
        "        return getattr(str",
    ),
    Mutant(
        "a search in another string is not watched",
        _OPAQUE,
        "if isinstance(part, Opaque) and isinstance(whole, str):",
        "if False:",
    ),
    Mutant("functions are not watched", _OPAQUE, "and _hold([args, kwargs]):", "and False:"),
    Mutant("cuts are believed", _PREFIXES, "if shared and len(text) == cut.characters and text.endswith(cut.tail):", "if True:"),
    Mutant(
        "a cut's turn trained one token early",
        _PREFIXES,
        "mask[shift + first : shift + last] = 1",
        "mask[shift + first - 1 : shift + last] = 1",
    ),
    Mutant(
        "a cut keeps the base's own turn",
        _PREFIXES,
        "spans=(*longest.spans[: cut.place], span)",
        "spans=(*longest.spans[: cut.place + 1], span)",
    ),
    # turns
    Mutant(
        "header trained",
        _TURNS,
        "turn = Turn(message, at - len(header), at, at, form)",
        "turn = Turn(message, at - len(header), at - len(header), at, form)",
    ),
    Mutant(
        "what follows the end token trained",
        _TURNS,
        '== "allow" else rendering.first_control',
        '== "allow" else rendering.last_control',
    ),
    Mutant(
        "history header forgotten",
        _SPEC,
        "both = {of.header, of.header if of.history_header is None else of.history_header}",
        "both = {of.header}",
    ),
    Mutant(
        "history taken for served",
        _TURNS,
        'if header == spec.assistant.served_header(after_tool) else "history"',
        'if header is not None else "history"',
    ),
    Mutant(
        "header behind a tool forgotten",
        _SPEC,
        "return self.after_tool if after_tool and self.after_tool is not None else self\n",
        "return self\n",
    ),
    Mutant("header behind a tool taken everywhere", _PARSER, 'roles[max(0, i - 1)] == "tool",', "True,"),
    Mutant(
        "results within a turn trained",
        _TURNS,
        "        return turn._replace(end=own[1])\n    if own is not None:",
        "        return turn._replace(end=stop)\n    if own is not None:",
    ),
    Mutant("trailing text trained", _TURNS, "if spec.assistant.supervise_trailing:", "if True:"),
    Mutant("trailing text never trained", _TURNS, "if spec.assistant.supervise_trailing:", "if False:"),
    Mutant("lost reasoning not noticed", _TURNS, "if not reasoning:\n        return True", "return True"),
    Mutant("lost content not noticed", _TURNS, "if not emission.startswith(content) and content not in emission:", "if False:"),
    Mutant(
        "short header taken for the long one",
        _SPEC,
        "return tuple(sorted(both, key=len, reverse=True))",
        "return tuple(sorted(both, key=len))",
    ),
    # shielding
    Mutant("shield skipped", _PARSER, _FIND, "            shield = None and find_quoted(strings, "),
    Mutant("markers lose their ids", _SHIELD, _FLAG, "self.quoted.append((literal, False))"),
    Mutant("assistant text makes structure", _SHIELD, _FLAG, "self.quoted.append((literal, sampled))"),
    Mutant("any text makes markers", _SHIELD, _FLAG, "self.quoted.append((literal, literal in self.markers))"),
    Mutant("literals changed in user text", _SHIELD, _FLAG, "self.quoted.append((literal.strip('<'), False))"),
    Mutant(
        "keys not shielded",
        _SHIELD,
        "{self.text(key) if isinstance(key, str) else key: self.value(item)",
        "{key: self.value(item)",
    ),
    Mutant("lists not shielded", _SHIELD, "return [self.value(item) for item in value]", "return value"),
    Mutant("positions not mapped back", _SHIELD, "return self.after[i] + position - self.before[i]", "return position"),
    Mutant("tools not searched", _SHIELD, "[tools] if tools else []", "[]"),
    Mutant("composed control tokens live", _PARSER, "composable = self.fragments.in_any(strings)", "composable = False"),
    Mutant(
        "call named in words taken for a call",
        _TURNS,
        'emission.count(function["name"]) <= words',
        'emission.count(function["name"]) < words',
    ),
    Mutant("keys not searched", _SHIELD, "strings += [key for key in node if isinstance(key, str)]\n", "pass\n"),
    # the parser
    Mutant(
        "steering not noticed",
        _PARSER,
        "if text != self.template.render(prepared.given, prepared.tools, **prepared.spec.kwargs):",
        "if False:",
    ),
    Mutant("reasoning not refused", _PARSER, 'if prepared.spec.thinking.mode not in ("off", "none"):', "if True:"),
    Mutant("another message's text trained", _PARSER, "check_foreign(self, sample)\n", "pass\n"),
    Mutant("drop check skipped", _PARSER, "check_dropped(self, sample)\n", "pass\n"),
    Mutant(
        "text encoded with live control tokens",
        _ENCODING,
        "if self.foreign_control_ids(found[0], controls) else found",
        "if False else found",
    ),
    Mutant("joined tags lose their ids", _PARSER, "or tag(c)]", "]"),
    Mutant("reasoning not joined", _MESSAGES, "if joins(message, thinking):", "if False:"),
    Mutant("a result keeps the call's old id", _MESSAGES, 'elif message["role"] == "tool":', "elif False:"),
    Mutant("white space at the end lost", _PARSER, "blanks = content[len(content.rstrip()) :]", 'blanks = ""'),
    # SpecForge's rules
    Mutant(
        "a missing header trains all",
        _SPECFORGE,
        "Turn(message, begin, begin, begin,",
        "Turn(message, begin, begin, len(rendering.text),",
    ),
    Mutant(
        "a quoted end closes a span",
        _SPECFORGE,
        "rendering.count_controls(begin, end) == controls if controls else at_edge",
        "True",
    ),
    Mutant("the next header trained", _SPECFORGE, "pair[spec.specforge.until_included]", "pair[1]"),
    Mutant("ignored text trained", _SPECFORGE, "for literal in spec.specforge.ignore\n", "for literal in ()\n"),
    Mutant("flags ignored", _PARSER, "elif turn.message in sample.prepared.excluded:", "elif False:"),
    Mutant("zero supervision passes", _PARSER, "if not mask.any():", "if False:"),
    Mutant("rewritten turns trained", _PARSER, "getattr(spec.rewritten, kind) if kind else", '"train" if kind else'),
    Mutant(
        "rewriting not predicted",
        _PARSER,
        'elif turn.form == "history" or changed:',
        'elif turn.form == "history":',
    ),
    Mutant("indices count the added system text", _PARSER, "Span(s.message - shift", "Span(s.message"),
    Mutant(
        "control text rejected in vain",
        _PARSER,
        "any(not kept for _, kept in shield.quoted)",
        "all(kept for _, kept in shield.quoted)",
    ),
    # thinking and messages
    Mutant("conflict check skipped", _THINKING, "if text and isinstance(content, str) and text in content:", "if False:"),
    Mutant("wrong option looked for", _THINKING, '{"on": "off", "off": "on"}', '{"on": "on", "off": "off"}'),
    Mutant("inline reasoning lost", _THINKING, 'result["reasoning_content"] = reasoning', "pass"),
    Mutant("two reasonings, one taken", _THINKING, "if given and given.strip() != reasoning.strip():", "if False:"),
    Mutant("unclosed tag accepted", _THINKING, "if opened and not closed:", "if False:"),
    Mutant("strip does nothing", _MESSAGES, "if spec.thinking.strip:", "if False:"),
    Mutant(
        "wrong mode: auto always on",
        _MESSAGES,
        "spec.for_sample(any(reasoning_of(message) for message in messages))",
        "spec.for_sample(True)",
    ),
    Mutant(
        "wrong mode: auto always off",
        _MESSAGES,
        "spec.for_sample(any(reasoning_of(message) for message in messages))",
        "spec.for_sample(False)",
    ),
    Mutant("flags slip by one", _MESSAGES, "excluded[i + added_system] = why", "excluded[i] = why"),
    Mutant("arguments stay text", _MESSAGES, 'parsed if form == "dict" else arguments', "arguments"),
    Mutant(
        "arguments always an object", _MESSAGES, 'parsed if form == "dict" else json.dumps(parsed, ensure_ascii=False)', "parsed"
    ),
    Mutant("arguments not read", _MESSAGES, "parsed = _object(arguments, index, number)", "parsed = arguments"),
    # tracing
    Mutant("loops never end", _TRACING, "return [node, self._report(_END, [nodes.Const(scope)], node.lineno)]", "return node"),
    Mutant(
        "a neighbour looked at becomes the owner",
        _TRACING,
        "if assigned and any(not entry[2] or entry[0] == scope for entry in stack):",
        "if False:",
    ),
    Mutant("marks stay in front when text is joined", _TRACING, "marks.extend((length + at, mark)", "marks.extend((at, mark)"),
    Mutant(
        "marks slip when text is stripped", _TRACING, "return self._cut(text, len(self) - len(text))", "return self._cut(text, 0)"
    ),
    Mutant("a scope entered again keeps its old message", _TRACING, "del stack[depth:]", "pass"),
)

"""Inspected rows as one self-contained HTML page: no script, no request to anywhere, readable in black and white.

Content is hostile: every text goes through `visible_lines` and is escaped, and a content-security policy in the page forbids
everything but its own style.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING

from .inspecting_text import FOLD, folded, in_words, verdict, visible_lines, visible_text

if TYPE_CHECKING:
    from .inspecting_view import Inspected, Segment

_LABELS = {"supervised": "trained", "untrained": "masked", "header": "header", "context": "context"}
_LEGEND = {
    "supervised": "the loss is taken on these tokens",
    "untrained": "written by the model, but not trained",
    "header": "generation prompt: the server writes it",
    "context": "everything else",
}
_OPEN_ROWS = 20  # pages with more rows start closed, so that the summary is not followed by a mile of text

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --faint: #59636e; --line: #d1d9e0; --panel: #f6f8fa;
  --good: #0a5c36; --good-bg: #e3f6ea; --odd: #7a4100; --odd-bg: #fff6e5; --bad: #a40e26; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --paper: #0d1117; --faint: #9198a1; --line: #3d444d;
  --panel: #161b22; --good: #7ee2a8; --good-bg: #10291c; --odd: #f0c070; --odd-bg: #2b2110; --bad: #ff8182; } }
body { margin: 0 auto; padding: 1.5rem; max-width: 70rem; font: 15px/1.5 system-ui, sans-serif; color: var(--ink);
  background: var(--paper); }
h1 { font-size: 1.35rem; margin: 0 0 1rem; overflow-wrap: anywhere; }
table { border-collapse: collapse; margin: .5rem 0 1rem; }
th, td { padding: .2rem .7rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
td.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
table.spans th:not(:last-child) { text-align: right; }
thead th { color: var(--faint); font-weight: 600; font-size: .85rem; }
details.row { border: 1px solid var(--line); border-radius: 6px; margin: 0 0 1rem; }
details.row > summary { padding: .5rem .8rem; background: var(--panel); cursor: pointer; overflow-wrap: anywhere; border-radius: 6px; }
details.row > div { padding: .6rem .8rem; }
.seg { display: grid; grid-template-columns: 5rem minmax(0, 1fr); margin: 2px 0; }
.kind { font-size: .72rem; padding: .2rem .5rem 0 0; text-align: right; color: var(--faint); user-select: none; }
pre { margin: 0; padding: .1rem .6rem; white-space: pre-wrap; overflow-wrap: anywhere; border-left: 3px solid transparent;
  font: 13px/1.5 ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; unicode-bidi: isolate; }
.supervised pre { background: var(--good-bg); border-left: 6px solid var(--good); text-decoration: underline solid var(--good) 1px;
  text-underline-offset: 3px; }
.supervised .kind { color: var(--good); font-weight: 700; }
.untrained pre { border: 2px dashed var(--odd); background: var(--odd-bg); }
.untrained .kind { color: var(--odd); font-weight: 700; }
.header pre { color: var(--faint); border-left: 3px double var(--faint); }
.header .kind { font-variant: small-caps; font-size: .85rem; }
.context pre { border-left-color: var(--line); }
.fold > summary { cursor: pointer; color: var(--faint); padding: 0 .6rem; border-left: 3px solid var(--line); }
.why { font-size: .8rem; padding: 0 .6rem; color: var(--odd); }
.reject { color: var(--bad); font-weight: 700; }
.faint { color: var(--faint); }
.legend { max-width: 34rem; margin: 0 0 1.5rem; }
p.mono { font: 13px/1.5 ui-monospace, monospace; overflow-wrap: anywhere; }
"""


def render_html(items: Iterable[Inspected], title: str) -> str:
    """One page for all items.

    Args:
        items: from `inspect_rows`.
        title: heading of the page, any text.

    Returns:
        A whole HTML document. Characters that cannot be seen are shown by signs, as in the terminal.
    """
    rows = list(items)
    body = [_summary(rows), _legend(), *(_row(item, len(rows) <= _OPEN_ROWS) for item in rows)]
    heading = _safe(title)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{heading}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{heading}</h1>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _safe(text: str) -> str:
    return escape(visible_text(text))


def _table(head: Iterable[str], rows: Iterable[Iterable[str | int]]) -> str:
    """A table; numbers stand at the right. Strings must be escaped already."""
    names = "".join(f"<th>{name}</th>" for name in head)
    parts = ['<table class="spans">' if names else "<table>"]
    if names:
        parts.append(f"<thead><tr>{names}</tr></thead>")
    for row in rows:
        cells = (f'<td class="n">{cell:,}</td>' if isinstance(cell, int) else f"<td>{cell}</td>" for cell in row)
        parts.append(f"<tr>{''.join(cells)}</tr>")
    return "\n".join([*parts, "</table>"])


def _summary(rows: list[Inspected]) -> str:
    shown = [item for item in rows if item.reject is None]
    tokens = sum(item.tokens for item in shown)
    supervised = sum(item.supervised_tokens for item in shown)
    spans = [span for item in shown for span in item.spans]
    turns = [turn for item in shown for turn in item.turns]
    trained = [turn for turn in turns if any(span.trained for span in turn)]
    in_part = sum(len(turn) > 1 for turn in trained)
    untrained = Counter(turn[0].reason for turn in turns if not any(span.trained for span in turn))
    rejects = Counter(item.reject.reason for item in rows if item.reject is not None)
    rewritten = Counter(turn[0].rewritten for turn in turns if turn[0].rewritten)
    straddles = sum(span.straddles for span in spans)
    names = sorted({f"spec {item.spec}, {item.tokenizer}" for item in rows})
    lines: list[tuple[str | int, ...]] = [
        ("rows shown", len(shown), ""),
        ("tokens", tokens, ""),
        ("supervised tokens", supervised, f"{supervised / max(tokens, 1):.1%} of all tokens"),
        ("assistant turns", len(turns), ""),
        ("trained turns", len(trained), f"{in_part} of them in part" if in_part else ""),
    ]
    lines += [(f"not trained: {_safe(name)}", n, _safe(in_words(name))) for name, n in sorted(untrained.items())]
    lines += [(f"rewritten in history: {_safe(name)}", n, "") for name, n in sorted(rewritten.items())]
    lines += [("straddling tokens", straddles, "")] if straddles else []
    lines += [(f"rejected lines: {_safe(name)}", n, "") for name, n in sorted(rejects.items())]
    made = "".join(f'<p class="faint">{_safe(name)}</p>' for name in names)
    return made + _table((), lines)


def _legend() -> str:
    lines = (_segment_html(kind, f"<pre>{text}</pre>") for kind, text in _LEGEND.items())
    return '<div class="legend">' + "".join(lines) + "</div>"


def _row(item: Inspected, opened: bool) -> str:
    source = f"<b>row {item.row}</b> {_safe(item.file)}:{item.line}"
    if item.sample or item.variant:
        source += f" sample {item.sample}, variant {item.variant}"
    start = f'<details class="row"{" open" if opened else ""}><summary>{source}'
    if item.reject is not None:
        where = "" if item.reject.message is None else f"message {item.reject.message}: "
        return (
            f'{start} <span class="reject">rejected: {_safe(item.reject.reason)}</span></summary>\n<div>'
            f'<p class="mono">{where}{_safe(item.reject.detail)}</p><p>What to do: {_safe(item.reject.advice)}</p></div></details>'
        )
    share = item.supervised_tokens / max(item.tokens, 1)
    start += f' <span class="faint">{item.tokens:,} tokens, {item.supervised_tokens:,} supervised ({share:.1%})</span></summary>\n<div>'
    segments = "\n".join(_segment(segment) for segment in item.segments)
    spans = _table(
        ("message", "from token", "to token", "tokens", "verdict"),
        ((span.message, span.start, span.end, span.end - span.start, _safe(verdict(span))) for span in item.spans),
    )
    notes = "".join(f'<p class="mono">note: {_safe(note)}</p>' for note in item.notes)
    return f"{start}{segments}\n{spans}{notes}</div></details>"


def _segment(segment: Segment) -> str:
    lines = visible_lines(segment.text)
    head, hidden, tail = folded(lines, FOLD, segment.kind in ("supervised", "header"))
    if hidden:
        middle = lines[len(head) : len(head) + hidden]
        inner = f'{_pre(head)}<details class="fold"><summary>… {hidden:,} lines</summary>{_pre(middle)}</details>{_pre(tail)}'
    else:
        inner = _pre(head)
    if segment.kind == "untrained":
        inner += f'<div class="why">not trained: {_safe(segment.note)}</div>'
    return _segment_html(segment.kind, inner)


def _segment_html(kind: str, inner: str) -> str:
    return f'<div class="seg {kind}"><span class="kind">{_LABELS[kind]}</span><div>{inner}</div></div>'


def _pre(lines: list[str]) -> str:
    # a browser drops a line break right behind <pre>; a first empty line needs one more
    text = "\n".join(lines)
    return f"<pre>{chr(10) if text.startswith(chr(10)) else ''}{escape(text)}</pre>"

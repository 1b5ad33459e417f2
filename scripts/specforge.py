"""Write docs/specforge.md: each `specforge/*` entry beside our own spec for the same model, measured on the snapshot cases.

python scripts/specforge.py            write it
python scripts/specforge.py --check    exit 1 if it would change
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from chatmask.cases import CASES, conversation  # noqa: E402
from chatmask.errors import RejectedRow  # noqa: E402
from chatmask.example import Example  # noqa: E402
from chatmask.parsers.parser import Parser  # noqa: E402
from chatmask.templates.registry import list_specs, load_spec  # noqa: E402
from chatmask.tokenizers import load_tokenizer  # noqa: E402
from tests import references  # noqa: E402

PAGE = ROOT / "docs" / "specforge.md"
INTRO = """# SpecForge's masks

Specs named `specforge/<entry>` give the ids and masks that SpecForge gives for its registry entry of that name, so that a run begun
with it can be continued, and a difference in loss be traced. The plain names (`qwen3-thinking`) are ours, with the rules of
[rules.md](rules.md). This page is written by `scripts/specforge.py`.

## SpecForge's rules (its `specforge/data/parse.py` and `template.py`, August 2026)

- The entry's system text is put in front where the conversation has none. `general` entries take no reasoning; `thinking` and
  `glm` ones do, and pass `enable_thinking`. `gpt-oss` writes harmony by itself, one channel a message (roles `assistant_analysis`,
  `assistant_commentary`, `assistant_final`; an effort as `assistant_reasoning_effort`).
- The rendered text is searched for the entry's assistant header. All behind it is trained, up to and with the end-of-turn text, which
  for several entries includes the newline behind the token; `glm`, `inkling` and harmony run on to the next user header, which stays
  outside; `longcat` to the next `[Round n] USER:`, which is trained. Text listed as ignored is taken out again.
- Token positions are lengths of encoded prefixes: a token that straddles a border is not trained, as with us.

`tests/peer_specforge.py` does this anew on the text; `tests/test_specforge.py` compares every entry with it, token for token.

## Where `specforge/*` is not SpecForge, on purpose

| SpecForge | here |
|---|---|
| a header quoted in content opens a span, a quoted end token closes one | headers count at a message's own boundary, ends where the template writes them |
| a turn whose header is not found trains nothing, without a word | the same mask; the turn stands in the span table as `header_not_found`, and a row of only such turns is refused (`zero_supervision`) |
| `general` drops reasoning fields without a word | `reasoning_in_no_think_spec`, or `--set thinking.strip=true` |
| leading messages before the first user turn, and all behind a role out of order, are cut off | nothing is cut off |
| arguments that are no JSON become `{}` | `bad_tool_arguments` |
| a template that fails is replaced by header, content and end token | `template_refused` |
| an over-long row is cut to 2,048 tokens by default, also inside a turn | nothing is cut |
| `deepseek-r1-distill` cannot be built: its entry has no end-of-turn token | the model's own end token |

## Entry by entry

On the snapshot cases that both take. "Trains more" and "trains less" compare the supervised text of each assistant turn with that of our spec.

| entry | our spec | turns | equal | SpecForge trains more | SpecForge trains less |
|---|---|---|---|---|---|
"""


def main(check: bool) -> int:
    """Write the page, or compare it; returns the exit code."""
    rows = [row(name) for name in list_specs() if name.startswith("specforge/")]
    text = INTRO + "".join(rows)
    if check:
        return 0 if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text else 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


def row(name: str) -> str:
    """One line of the table."""
    spec = load_spec(name)
    ours = spec.note.rpartition("Our own rules: ")[2].rstrip(".")
    if spec.reference is None:
        return f"| `{name}` | - | not tried: {spec.note} | | | |\n"
    theirs = Parser(spec, load_tokenizer(references.for_spec(spec)))
    own = load_spec(ours)
    mine = Parser(own, load_tokenizer(references.for_spec(own)))
    more: Counter[str] = Counter()
    less: Counter[str] = Counter()
    turns = equal = 0
    for case in CASES:
        try:
            a = theirs.parse(conversation(case, spec))
            b = mine.parse(conversation(case, own))
        except RejectedRow:
            continue
        tools = [str(m["content"]) for m in CASES[case][1] if m["role"] == "tool"]
        for message, text in trained(b).items():
            turns += 1
            got = trained(a).get(message, "")
            equal += got == text
            lead, behind, missing = difference(got, text)
            more.update(kind(part, tools, own.assistant.ends) for part in (lead, behind) if part)
            less.update(kind(part, tools, own.assistant.ends) for part in missing if part)
    return f"| `{name}` | `{ours}` | {turns} | {equal} | {shown(more)} | {shown(less)} |\n"


def trained(example: Example) -> dict[int, str]:
    """Supervised text by message (of the data)."""
    found: dict[int, str] = {}
    for span, turn in zip(example.spans, example.turns, strict=True):
        found[span.message] = found.get(span.message, "") + (example.text[turn.start : turn.end] if span.trained else "")
    return found


def difference(theirs: str, ours: str) -> tuple[str, str, tuple[str, ...]]:
    """What stands in front of and behind the common part in SpecForge's text, and what of ours it lacks."""
    if not theirs:
        return "", "", (("a whole turn",) if ours else ())
    if not ours:
        return "a whole turn", "", ()
    if ours in theirs:
        lead, _, behind = theirs.partition(ours)
        return lead, behind, ()
    if theirs in ours:
        lead, _, behind = ours.partition(theirs)
        return "", "", (lead, behind)
    size = max(n for n in range(min(len(theirs), len(ours)) + 1) if theirs[:n] == ours[:n])
    cut = theirs.rfind("<", 0, size)
    size = cut if cut > theirs.rfind(">", 0, size) else size  # not inside a tag
    if not size:
        tail = max(n for n in range(min(len(theirs), len(ours)) + 1) if n == 0 or theirs[-n:] == ours[-n:])
        return theirs[: len(theirs) - tail], "", (ours[: len(ours) - tail],)
    return "", theirs[size:], (ours[size:],)


def kind(part: str, tools: list[str], ends: tuple[str, ...]) -> str:
    """A part in words."""
    if part == "a whole turn":
        return part
    if any(tool and tool in part for tool in tools):
        return "tool results"
    if not part.strip():
        return "white space behind the end token"
    if part.strip() in ends:
        return "the end-of-turn token"
    clean = part.strip().replace("\n", "\\n").replace("|", "\\|")
    return f"`{clean}`" if len(clean) < 40 else "other text"


def shown(counts: Counter[str]) -> str:
    """Counts in words, the most frequent first."""
    return ", ".join(f"{what} ({n})" for what, n in counts.most_common()) or "-"


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))

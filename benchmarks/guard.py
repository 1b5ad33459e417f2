"""A guard against regressions that no clock can make flaky: it counts function calls.

    python -m benchmarks.guard            compare with what is recorded
    python -m benchmarks.guard --record   record anew, after a change that is meant

Counted are the calls (of Python and of built-in functions) of a build on the demo tokenizer, less those of a build of half the
input, so that start-up drops out. Calls a message must not grow with the length of the conversation, nor much beyond what is
recorded in `guard.json`. Work inside one call (an encoder that is given a longer text) is not seen.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import chatmask

from . import corpus

RECORDED = Path(__file__).with_name("guard.json")
SPEC = "ling-3.0"
SHORT_TURNS, LONG_TURNS = 20, 80
FLAT = 1.3  # calls a message at LONG_TURNS over those at SHORT_TURNS
SLACK = 1.25  # over what is recorded: versions of Python and of libraries differ by less


@dataclass(frozen=True)
class Calls:
    """Calls of a build for each message, and for each thousand tokens."""

    message: float
    thousand_tokens: float


def count(turns: int, conversations: int = 2) -> Calls:
    """Count the calls for conversations of so many assistant turns.

    Args:
        turns: assistant turns of each.
        conversations: how many more the larger build has.
    """
    pool = corpus.Pool(0, files=40, standard=True)
    records = [corpus.trajectory(pool, random.Random(f"guard {turns} {n}"), turns, short=True) for n in range(2 * conversations)]
    with tempfile.TemporaryDirectory() as folder:
        few, few_tokens = _build(Path(folder), "few", records[:conversations])
        all_calls, all_tokens = _build(Path(folder), "all", records)
    messages = sum(len(record["messages"]) for record in records[conversations:])
    calls = all_calls - few
    return Calls(calls / messages, 1_000 * calls / (all_tokens - few_tokens))


def _build(folder: Path, name: str, records: Sequence[corpus.Record]) -> tuple[int, int]:
    source = folder / f"{name}.jsonl"
    corpus.write(source, records)
    calls = 0

    def seen(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        result = chatmask.build(source, SPEC, folder / name, demo=True, parity="off")
    finally:
        sys.setprofile(before)
    return calls, sum(shard["tokens"] for shard in result.manifest["shards"])


def measure() -> dict[str, float]:
    """All figures that are recorded."""
    count(2, 1)  # imports and caches of the process
    short, long = count(SHORT_TURNS), count(LONG_TURNS)
    return {
        "calls_per_message_short": round(short.message, 1),
        "calls_per_message_long": round(long.message, 1),
        "calls_per_thousand_tokens_long": round(long.thousand_tokens, 1),
    }


def problems(found: dict[str, float], recorded: dict[str, float]) -> list[str]:
    """What is wrong with figures, in words; empty when nothing is."""
    ratio = found["calls_per_message_long"] / found["calls_per_message_short"]
    wrong = []
    if ratio > FLAT:
        wrong.append(
            f"a message costs {ratio:.2f} times as many calls in conversations of {LONG_TURNS} turns as in those of {SHORT_TURNS} "
            f"(at most {FLAT}): something looks at all messages for each message"
        )
    for name, value in found.items():
        if name not in recorded:
            wrong.append(f"{name} is {value} and nothing is recorded; python -m benchmarks.guard --record")
        elif value > SLACK * recorded[name]:
            wrong.append(
                f"{name} is {value}, recorded are {recorded[name]} (at most {SLACK} times that); if it is meant: "
                "python -m benchmarks.guard --record"
            )
    return wrong


def recorded() -> dict[str, float]:
    """What `guard.json` says; raises FileNotFoundError where it is missing."""
    figures: dict[str, float] = json.loads(RECORDED.read_text(encoding="utf-8"))
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, or record; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.guard", description="Count the calls of a build.")
    parser.add_argument("--record", action="store_true", help="write the figures to guard.json")
    given = parser.parse_args(arguments)
    found = measure()
    print(json.dumps(found))
    if given.record:
        RECORDED.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        return 0
    wrong = problems(found, recorded())
    print("\n".join(wrong), file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())

"""Peak memory of `chatmask build` at 1x and 10x the input: it must not grow with the number of rows.

    python benchmarks/memory.py

Prints one JSON object: for each size the rows, bytes and peak resident memory (MiB) of a whole build in its own process.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

ROWS = 4_000
WORDS = Path(__file__).resolve().parent.parent.joinpath("fixtures", "demo_corpus.txt").read_text(encoding="utf-8").split()


def write_rows(path: Path, count: int) -> None:
    """A seeded file of chats of one to three exchanges with reasoning."""
    rng = random.Random(1)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            messages = []
            for _ in range(rng.randint(1, 3)):
                text = [" ".join(rng.choices(WORDS, k=rng.randint(20, 120))) for _ in range(3)]
                messages.append({"role": "user", "content": text[0]})
                messages.append({"role": "assistant", "content": text[1], "reasoning_content": text[2]})
            file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")


def measure(source: Path, target: Path) -> float:
    """Peak resident memory of one build, in MiB."""
    script = (
        "import chatmask, resource, sys;"
        "chatmask.build(sys.argv[1], 'ling-3.0-thinking', sys.argv[2], demo=True);"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(source), str(target)], check=True, capture_output=True, text=True)
    return int(done.stdout.split()[-1]) / (1024 if sys.platform.startswith("linux") else 1024 * 1024)


def main() -> None:
    """Measure both sizes and print the ratio."""
    peaks: list[float] = []
    result: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder:
        for factor in (1, 10):
            source = Path(folder, f"{factor}.jsonl")
            write_rows(source, ROWS * factor)
            peak = measure(source, Path(folder, f"d{factor}"))
            peaks.append(peak)
            result[f"{factor}x"] = {"rows": ROWS * factor, "bytes": source.stat().st_size, "peak_mib": round(peak, 1)}
    result["ratio"] = round(peaks[1] / peaks[0], 3)
    print(json.dumps(result))


if __name__ == "__main__":
    main()

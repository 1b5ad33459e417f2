"""Compare chatmask with other programs, side by side: `make bench`, or

    python -m benchmarks.run [--full] [--specforge DIR] [--areal DIR]

Every figure is a ratio inside one repetition: the contenders take turns (A B C, B C A, ...) on the same slice of the corpus, each
repetition on a slice of its own, and each is divided by the bare `tokenizers` library in the same repetition. So a machine that
is busy, or slower than another, moves a ratio less than it moves a time. First all contenders' ids and masks are compared.

Writes `docs/benchmarks.md`, and the raw figures to `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from . import corpus
from .peers import IM_END, PEERS, training_template

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
BASE = "tokenizers"
Job = dict[str, Any]


class Disagreement(SystemExit):
    """Two contenders give other ids or masks where their rules agree."""


@dataclass(frozen=True)
class Size:
    """How much is measured.

    Attributes:
        repetitions: of every section; at least 5 for figures that are told to others.
        traj, chat, per_turn: conversations of one slice.
        large: contenders that are fast, or have start-up of their own, get this many times as many.
        curve: assistant turns of the points, and how many turns the conversations of a point have together.
        agree: conversations on which ids and masks are compared.
    """

    repetitions: int = 5
    traj: int = 5
    chat: int = 1_000
    per_turn: int = 1
    large: int = 8
    curve: tuple[int, ...] = (10, 25, 50, 100, 200)
    curve_turns: int = 200
    curve_repetitions: int = 3
    agree: int = 5


QUICK = Size()
FULL = Size(
    repetitions=7, traj=12, chat=5_000, per_turn=2, large=6, curve=corpus.CURVE, curve_turns=400, curve_repetitions=5, agree=25
)
SMOKE = Size(2, 2, 150, 1, 2, (10, 40), 40, 1, 1)  # tries every path; its figures mean nothing


@dataclass(frozen=True)
class Row:
    """One line of a table: a contender and how it is asked.

    Attributes:
        label: what the table says.
        peer: name in `PEERS`.
        op: `memory` or `arrow`.
        slow: gets one conversation of a slice instead of all.
        large: gets a slice `Size.large` times as large.
        workers: processes; as many input files are given.
        parallel: the `tokenizers` library's parallel code path, with one thread.
        parity: chatmask's comparison with the served prompts. Its default asks for lines 1 to 16 and every 64th, which is every
            line of a slice but few of a real input; so the rows say `off`, or `full`.
    """

    label: str
    peer: str
    op: str = "memory"
    slow: bool = False
    large: bool = False
    workers: int = 1
    parallel: bool = False
    parity: str = "off"


ROWS = (
    Row("tokenizers", BASE),
    Row("tokenizers, parallel code path with one thread", BASE, parallel=True),
    Row("fastokens", "fastokens", large=True),
    Row("transformers, in memory", "transformers"),
    Row("TRL, in memory", "trl"),
    Row("renderers, in memory", "renderers"),
    Row("AReaL pair mode, in memory", "areal"),
    Row("SpecForge, in memory", "specforge", slow=True),
    Row("TRL, to Arrow", "trl", "arrow"),
    Row("chatmask, 1 process", "chatmask", "arrow", parallel=True),
    Row("chatmask, 1 process, every turn compared with its served prompt", "chatmask", "arrow", parallel=True, parity="full"),
    Row("chatmask, 2 processes", "chatmask", "arrow", large=True, workers=2, parallel=True),
    Row("chatmask, fastokens, 1 process", "chatmask-fast", "arrow", large=True, parallel=True),
    Row("chatmask, fastokens, 2 processes", "chatmask-fast", "arrow", large=True, workers=2, parallel=True),
)
PER_TURN = {"tokenizers", "fastokens", "areal", "chatmask", "chatmask-fast"}
ON_CURVE = {"tokenizers", "trl", "renderers", "specforge", "chatmask", "chatmask-fast"}


# --- contenders -----------------------------------------------------------------------------------------------------------------


class Contender:
    """A process of `benchmarks.peers`.

    Attributes:
        unavailable: '' or why it cannot run here.
        versions: of what it is made of.
    """

    def __init__(self, peer: str, parallel: bool, settings: argparse.Namespace) -> None:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "RAYON_NUM_THREADS": "1"}
        environment["TOKENIZERS_PARALLELISM"] = "true" if parallel else "false"
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [environment.get("PYTHONPATH")])])
        command = [settings.python, "-m", "benchmarks.peers", peer, "--tokenizer", str(settings.tokenizer)]
        command += ["--specforge", settings.specforge, "--areal", settings.areal]
        self.peer = peer
        self.log = (settings.work / f"{peer}{'-parallel' if parallel else ''}.log").open("w+", encoding="utf-8")
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True
        )
        ready = self._reply()
        self.unavailable, self.versions = ready["unavailable"], ready["versions"]
        if self.unavailable:
            self.close()

    def ask(self, **job: Any) -> dict[str, Any]:
        """One job; raises RuntimeError with the contender's own message."""
        assert self.process.stdin is not None
        print(json.dumps(job, default=str), file=self.process.stdin, flush=True)
        return self._reply()

    def _reply(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            raise RuntimeError(f"{self.peer} ended with code {self.process.wait()}:\n{self.log.read()[-3000:]}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise RuntimeError(f"{self.peer}: {reply['error']} (its output: {self.log.name})")
        return reply

    def close(self) -> None:
        """End it."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.wait()


@dataclass
class Bench:
    """Everything of one run."""

    settings: argparse.Namespace
    size: Size
    contenders: dict[tuple[str, bool], Contender] = field(default_factory=dict)
    fresh: Iterator[int] = field(default_factory=lambda: iter(range(10**9)))

    def contender(self, peer: str, parallel: bool = False) -> Contender:
        """Started when first asked for."""
        key = (peer, parallel)
        if key not in self.contenders:
            self.contenders[key] = Contender(peer, parallel, self.settings)
        return self.contenders[key]

    def folder(self) -> Path:
        """A new empty folder."""
        path: Path = self.settings.work / f"out-{next(self.fresh)}"
        path.mkdir()
        return path

    def write(self, name: str, records: Sequence[corpus.Record], parts: int = 1) -> list[Path]:
        """JSONL files with every `parts`-th record each, of about one size."""
        lots: list[list[corpus.Record]] = [[] for _ in range(parts)]
        if parts == 1:
            lots[0] = list(records)
        else:
            sizes = [len(json.dumps(record)) for record in records]
            filled = [0] * parts
            for i in sorted(range(len(records)), key=lambda i: -sizes[i]):
                least = filled.index(min(filled))
                lots[least].append(records[i])
                filled[least] += sizes[i]
        paths = [self.settings.work / f"{name}-{part}-of-{parts}.jsonl" for part in range(parts)]
        for path, lot in zip(paths, lots, strict=True):
            corpus.write(path, lot)
        return paths

    def measure(self, row: Row, name: str, records: Sequence[corpus.Record], per_turn: bool) -> dict[str, Any]:
        """One row once: seconds and CPU seconds of the work, without loading and start-up."""
        contender = self.contender(row.peer, row.parallel)
        job: Job = {"op": row.op, "per_turn": per_turn, "workers": row.workers, "parity": row.parity}
        given = list(records[:1]) if row.slow else list(records)
        inputs = self.write(name, given, row.workers)
        if row.peer.startswith("chatmask"):
            job["short"] = [str(self.write(f"{name}-short", [_SHORT])[0])]
        done = self._ask(contender, job, inputs)
        if row.workers > 1:
            done["cpu"] = None  # that of other processes is known at their end only, start-up included
        return done

    def _ask(self, contender: Contender, job: Job, inputs: list[Path]) -> dict[str, Any]:
        out = self.folder()
        reply = contender.ask(**job, inputs=inputs, out=out / "data" if contender.peer.startswith("chatmask") else out)
        shutil.rmtree(out)
        return reply


_CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
_TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}},
}
_SHORT: corpus.Record = {
    "messages": [
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "1", "name": "add", "content": "4"},
        {"role": "assistant", "content": "4."},
    ],
    "tools": [_TOOL],
}


# --- do they agree? ------------------------------------------------------------------------------------------------------------


def agreement(bench: Bench) -> list[str]:
    """Compare ids and masks; returns a line for each comparison, raises Disagreement at the first difference."""
    count = bench.size.agree
    records = [*corpus.records("traj", count), *corpus.records("chat", 20 * count), *corpus.records("other", 4 * count)]
    inputs = bench.write("agree", records)
    lines = []

    few = bench.write(
        "agree-few", [*corpus.records("chat", 10 * count), corpus.trajectory(corpus.shared_pool(), random.Random(0), 20)]
    )

    def dump(peer: str, way: str = "memory", inputs: list[Path] = inputs, **job: Any) -> dict[str, Any] | None:
        contender = bench.contender(peer)
        if contender.unavailable:
            return None
        out = bench.folder()
        save = out / "save.json"
        contender.ask(op="dump", way=way, inputs=inputs, out=out / "data", save=save, **job)
        made: dict[str, Any] = json.loads(save.read_text())
        shutil.rmtree(out)
        return made

    def compare(left: str, mine: dict[str, Any] | None, right: str, theirs: dict[str, Any] | None, rule: str = "") -> None:
        if mine is None or theirs is None:
            return
        parts = ["ids"] + (["masks"] if mine["masks"] and theirs["masks"] else [])
        for part in parts:
            if len(mine[part]) != len(theirs[part]):
                raise Disagreement(f"{left} gives {len(mine[part])} samples, {right} {len(theirs[part])}")
            for number, (a, b) in enumerate(zip(mine[part], theirs[part], strict=True)):
                if a != b:
                    at = next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
                    near = {name: made["ids"][number][max(0, at - 6) : at + 6] for name, made in ((left, mine), (right, theirs))}
                    raise Disagreement(
                        f"{left} and {right} disagree on the {part} of sample {number} ({inputs[0]}) at token {at} of "
                        f"{len(a)} and {len(b)}: {a[at : at + 4]} and {b[at : at + 4]}; ids around: {near}"
                    )
        tokens = sum(map(len, mine["ids"]))
        lines.append(f"| {left} | {right} | {' and '.join(parts)} | {len(mine['ids']):,} | {tokens:,} | {rule} |")

    end = _id_of(bench.settings.tokenizer, IM_END)
    trained = ["template=" + str(_template_file(bench)), "thinking.in_history=kept", "prefix_stable=true"]
    stock = dump("chatmask", "arrow")
    compare("chatmask", stock, BASE, dump(BASE), "whole rendered texts, each encoded at once")
    compare("chatmask", stock, "fastokens", dump("fastokens"), "the same")
    compare("chatmask", stock, "chatmask-fast", dump("chatmask-fast", "arrow"))
    per_turn = dump("chatmask", "arrow", few, per_turn=True)
    compare("chatmask per turn", per_turn, BASE, dump(BASE, inputs=few, per_turn=True), "conversations cut behind each turn")
    thinking = dump("chatmask", "arrow", spec="qwen3-thinking")
    compare("chatmask, qwen3-thinking", thinking, "renderers", dump("renderers"))
    if not bench.contender("trl").unavailable:
        marked = dump("chatmask", "arrow", spec="qwen3-thinking", overrides=trained)
        rule = "TRL's template; it also trains the line break behind `<|im_end|>`, which is left out of the comparison"
        name = "chatmask, qwen3-thinking"
        compare(name, marked, "transformers", _without_break(dump("transformers"), end), rule)
        compare(name, marked, "TRL, in memory", _without_break(dump("trl"), end), rule)
        compare(name, marked, "TRL, to Arrow", _without_break(dump("trl", "arrow"), end), rule)
    return lines


def _template_file(bench: Bench) -> Path:
    """TRL's template as a file of the run; its interpreter knows where it lies."""
    asked = "from benchmarks.peers import training_template; print(training_template())"
    source = (
        training_template() if bench.settings.python == sys.executable else Path(_output([bench.settings.python, "-c", asked]))
    )
    return Path(shutil.copy(source, bench.settings.work))


def _id_of(tokenizer: Path, literal: str) -> int:
    added = json.loads((tokenizer / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    return int(next(token["id"] for token in added if token["content"] == literal))


def _without_break(made: dict[str, Any] | None, end: int) -> dict[str, Any] | None:
    """The masks without the token behind each trained end-of-turn token."""
    if made is None:
        return None
    masks = [
        [int(bit and not (k and ids[k - 1] == end)) for k, bit in enumerate(mask)]
        for ids, mask in zip(made["ids"], made["masks"], strict=True)
    ]
    return {**made, "masks": masks}


# --- sections -------------------------------------------------------------------------------------------------------------------


def section(
    bench: Bench, name: str, rows: Sequence[Row], slices: Callable[[int, int], list[corpus.Record]], per_turn: bool = False
) -> dict[str, list[dict[str, Any]]]:
    """Measure rows in turns; label -> figures of each repetition. `slices(repetition, factor)` gives the conversations."""
    figures: dict[str, list[dict[str, Any]]] = {row.label: [] for row in rows}
    for repetition in range(bench.size.repetitions):
        small, large = slices(repetition, 1), slices(repetition, bench.size.large)
        turn = repetition % len(rows)
        tokens: dict[str, int] = {}
        for row in [*rows[turn:], *rows[:turn]]:
            _say(f"{name} {repetition + 1}/{bench.size.repetitions}: {row.label}")
            done = bench.measure(row, f"{name}-{repetition}", large if row.large else small, per_turn)
            figures[row.label].append(done)
            if row.peer in (BASE, "chatmask", "chatmask-fast") and not row.large:
                tokens[row.label] = done["tokens"]
        if len(set(tokens.values())) > 1:
            raise Disagreement(f"{name}, repetition {repetition}: not the same number of tokens: {tokens}")
        for row in rows:  # what a row has done, in tokens of the bare tokenizer: templates differ by a few tokens a turn
            if not row.large and not row.slow:
                figures[row.label][-1]["tokens"] = next(iter(tokens.values()))
    return figures


def ratios(figures: Mapping[str, Sequence[Mapping[str, Any]]], label: str, key: str = "seconds") -> list[float]:
    """Speed of a row over that of the base, repetition by repetition."""
    return [
        (mine["tokens"] / mine[key]) / (base["tokens"] / base[key])
        for mine, base in zip(figures[label], figures[ROWS[0].label], strict=True)
    ]


def curve(bench: Bench, rows: Sequence[Row]) -> dict[str, dict[int, list[float]]]:
    """Microseconds a token by assistant turns; the conversations of each point have as many turns together."""
    found: dict[str, dict[int, list[float]]] = {row.label: {turns: [] for turns in bench.size.curve} for row in rows}
    pool = corpus.shared_pool()
    for repetition in range(bench.size.curve_repetitions):
        for turns in bench.size.curve:
            rng = random.Random(f"curve {turns} {repetition}")
            records = [corpus.trajectory(pool, rng, turns) for _ in range(max(1, bench.size.curve_turns // turns))]
            base = next(row for row in rows if row.peer == BASE)
            counted = 0
            for row in [base, *(row for row in rows if row is not base)]:
                if row.slow and turns > 50:
                    continue  # minutes for one conversation
                _say(f"curve {repetition + 1}/{bench.size.curve_repetitions}: {turns} turns: {row.label}")
                done = bench.measure(row, f"curve-{turns}", records, False)
                counted = done["tokens"] if row is base else counted
                found[row.label][turns].append(1e6 * done["seconds"] / (done["tokens"] if row.slow else counted))
    return found


def start_up(bench: Bench) -> dict[str, list[float]]:
    """Seconds of whole processes: the help text, and a build of one short row."""
    source = bench.write("one", [_SHORT])[0]
    build = ["build", "--spec", "qwen3-instruct", "--tokenizer", str(bench.settings.tokenizer), str(source), "--out"]
    found: dict[str, list[float]] = {"chatmask --help": [], "chatmask build, one row": []}
    for _ in range(bench.size.repetitions):
        for label, arguments in zip(found, (["--help"], [*build, str(bench.folder() / "d")]), strict=True):
            started = time.perf_counter()
            _output([bench.settings.python, "-m", "chatmask", *arguments])
            found[label].append(time.perf_counter() - started)
    return found


def _output(command: Sequence[str]) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def _say(text: str) -> None:
    print(
        f"\r\x1b[K{text}" if sys.stderr.isatty() else text, end="" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True
    )


# --- the report ------------------------------------------------------------------------------------------------------------------


def _spread(values: Sequence[float]) -> str:
    middle = statistics.median(values)
    form = ".2f" if middle < 10 else ".1f"
    return f"{middle:{form}} [{min(values):{form}}-{max(values):{form}}]"


def _table(figures: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    lines = ["| | speed / tokenizers | by CPU time | million tokens a second |", "|---|---|---|---|"]
    for label, made in figures.items():
        cpu = "-" if made[0]["cpu"] is None else _spread(ratios(figures, label, "cpu"))
        speed = statistics.median(one["tokens"] / one["seconds"] / 1e6 for one in made)
        lines.append(f"| {label} | {_spread(ratios(figures, label))} | {cpu} | {speed:.3f} |")
    return lines


def report(bench: Bench, sections: Mapping[str, Any], agreed: Sequence[str]) -> str:
    """The page: tables of ratios, and all that is needed to read and repeat them."""
    size, settings = bench.size, bench.settings
    versions = {name: v for contender in bench.contenders.values() for name, v in contender.versions.items()}
    lines = [
        "# Benchmarks",
        "",
        f"Written by `{'make bench FULL=1' if size is FULL else 'make bench'}` (`benchmarks/run.py`); do not edit. Each speed is divided by that of the bare `tokenizers` library "
        "(one thread, `TOKENIZERS_PARALLELISM=false`, texts already rendered) in the same repetition: median [least-most] of "
        f"{size.repetitions} repetitions, contenders in rotated order, every repetition on conversations of its own. Loading and start-up are "
        "left out: a contender's process has loaded before it is timed, and a build is timed from when one short row is done (with two processes the second has yet to load) to "
        "the finished dataset. "
        "`build` compares trained prefixes with served prompts on lines 1 to 16 and on every 64th; here rows "
        "of chatmask are without that, but for the one that says that every turn is compared.",
        "",
        f"Machine: {machine()}; load average {os.getloadavg()[0]:.1f} at the end. Python {platform.python_version()}; "
        + ", ".join(f"{name} {v}" for name, v in sorted(versions.items()))
        + ".",
        "",
        "Qwen3's own tokenizer and template, spec `qwen3-instruct`. One slice: "
        f"{size.traj} trajectories of 20 to 120 assistant turns; {size.chat:,} chats of one to three exchanges; per turn {size.per_turn} trajectory(ies), one sample a turn. "
        f"Rows that are fast, or use two processes, get {size.large} times as much. The corpus is synthetic (`benchmarks/corpus.py`).",
        "",
    ]  # fmt: skip
    for title, key in (("Trajectories", "traj"), ("Short chats", "chat"), ("One sample a turn (expanded text)", "per_turn")):
        lines += [f"## {title}", "", *_table(sections[key]), ""]
    lines += ["## Time against length", "", "Microseconds a token, medians. Flat is linear in the conversation's length.", ""]
    points = bench.size.curve
    lines += ["| assistant turns | " + " | ".join(map(str, points)) + " |", "|---" * (len(points) + 1) + "|"]
    for label, made in sections["curve"].items():
        cells = [f"{statistics.median(made[turns]):.2f}" if made[turns] else "-" for turns in points]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    lines += ["", "## Start-up", "", "| whole process | seconds |", "|---|---|"]
    lines += [f"| `{label}` | {_spread(made)} |" for label, made in sections["start"].items()]
    lines += ["", "## What was compared before", "", "The run stops at the first difference.", ""]
    lines += ["| | with | equal | samples | tokens | |", "|---|---|---|---|---|---|", *agreed]
    lines += ["", "## Who", ""]
    lines += [f"- **{name}**: {peer.does}." for name, peer in PEERS.items()]
    gone = {peer: c.unavailable for (peer, _), c in bench.contenders.items() if c.unavailable}
    lines += ["", "Not measured here:", "", *(f"- {peer}: {why}." for peer, why in gone.items())] if gone else []
    command = "python -m benchmarks.run" + "".join(f" --{n} DIR" for n in ("specforge", "areal") if getattr(settings, n))
    lines += ["", f"Again: `make bench`, `make bench FULL=1` (larger), or `{command}`.", ""]
    return "\n".join(lines)


def machine() -> str:
    """Processor and memory, in words."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        model = names[0] if names else model
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{model}, {os.cpu_count()} logical processors, {memory:.0f} GiB, {platform.system()}"


# --- main ------------------------------------------------------------------------------------------------------------------------


def run(bench: Bench) -> str:
    """All sections; returns the page."""
    size = bench.size
    rows = [row for row in ROWS if not bench.contender(row.peer, row.parallel).unavailable]
    agreed = agreement(bench)
    _say(f"ids and masks agree in {len(agreed)} comparisons")

    def slices(kind: str, count: int) -> Callable[[int, int], list[corpus.Record]]:
        def take(repetition: int, factor: int) -> list[corpus.Record]:
            start = (10 + repetition) * count * size.large
            return list(corpus.records(kind, count * factor, start=start))

        return take

    per_turn = [row for row in rows if row.peer in PER_TURN and row.parity == "off"]
    whole = [row for row in rows if row.peer != "areal"]
    on_curve = [replace(row, large=False) for row in rows if row.peer in ON_CURVE and row.workers == 1 and row.parity == "off"]
    on_curve = [row for row in on_curve if row.op == "arrow" or not row.parallel]
    sections = {
        "traj": section(bench, "traj", whole, slices("traj", size.traj)),
        "chat": section(bench, "chat", whole, slices("chat", size.chat)),
        "per_turn": section(bench, "per_turn", per_turn, slices("traj", size.per_turn), True),
        "curve": curve(bench, on_curve),
        "start": start_up(bench),
    }
    raw = {"machine": machine(), "size": vars(size), "sections": sections, "agreed": agreed}
    (bench.settings.work / "figures.json").write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")
    return report(bench, sections, agreed)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, write the page and the raw figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description="Compare chatmask with other programs.")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--full", action="store_true", help="larger slices, more repetitions (an hour)")
    how.add_argument("--smoke", action="store_true", help="tries every path on a few rows; writes no page")
    parser.add_argument("--tokenizer", type=Path, help="folder of Qwen3's tokenizer; default: the one that the tests fetch")
    parser.add_argument("--python", default=sys.executable, help="interpreter in which the contenders run")
    parser.add_argument("--specforge", default="", metavar="DIR", help="source folder of SpecForge")
    parser.add_argument("--areal", default="", metavar="DIR", help="source folder of AReaL")
    parser.add_argument("--out", type=Path, default=PAGE, help="the page")
    settings = parser.parse_args(arguments)
    if settings.tokenizer is None:
        import chatmask
        from tests import references

        settings.tokenizer = references.for_spec(chatmask.load_spec("qwen3-instruct"))
    settings.work = RESULTS / f"run-{time.strftime('%Y%m%d-%H%M%S')}"
    settings.work.mkdir(parents=True)
    bench = Bench(settings, FULL if settings.full else SMOKE if settings.smoke else QUICK)
    started = time.monotonic()
    try:
        page = run(bench)
    finally:
        for contender in bench.contenders.values():
            contender.close()
    for path in settings.work.glob("*.jsonl"):
        path.unlink()
    if settings.smoke:
        print(page)
    else:
        settings.out.write_text(page, encoding="utf-8")
    _say(f"{settings.work / 'figures.json'}; {time.monotonic() - started:.0f} s\n")


if __name__ == "__main__":
    main()

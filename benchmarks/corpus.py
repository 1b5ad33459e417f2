"""A seeded corpus of conversations as they are trained on: agents' trajectories and short chats.

    python -m benchmarks.corpus traj --count 400 --out traj.jsonl

Text comes from what is installed beside Python (source files, their documentation), so nothing is fetched. The same seed, Python
and packages give the same bytes. No text holds a control token of a chat template: what a program does with those is a question
of correctness (docs/rules.md), and here all must encode the same text.
"""

from __future__ import annotations

import argparse
import difflib
import json
import random
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

Record = dict[str, Any]
Message = dict[str, Any]

CURVE = (10, 25, 50, 100, 200, 400)  # assistant turns
MOST_FILES = 3_000
SMALLEST_FILE, LARGEST_FILE = 800, 80_000  # bytes
_CONTROL = re.compile(r"<\||\|>|<｜|</?(?:think|tool_call|tool_response|role|s)>|\[/?INST\]|[\ue000-\uf8ff\ufffd]")

# One sentence in a hundred is one of these, with a number, so that texts outside ASCII are not all alike.
_FOREIGN = (
    "请先运行第 {n} 个测试，然后再修改解析器。",
    "这个函数在输入为空时返回了错误的结果，已经出现 {n} 次。",
    "我们需要在提交之前检查所有 {n} 个配置文件。",
    "この関数は {n} 行目で例外を投げるようです。",
    "設定を読み込んだ後、キャッシュを {n} 秒で消去してください。",
    "테스트 {n}개가 실패했으니 로그를 먼저 확인해 주세요.",
    "Проверьте, почему тест №{n} падает только на медленных машинах.",
    "После {n} попыток соединение всё равно закрывается без ответа.",
    "Файл настроек читается дважды, и это занимает {n} мс.",
    "Η δοκιμή {n} αποτυγχάνει όταν ο φάκελος είναι κενός.",
    "يجب إعادة تشغيل الخدمة بعد {n} دقيقة.",
    "कृपया चरण {n} के बाद परिणाम की जाँच करें।",
)
_EMOJI = ("✅", "🚀", "🐛", "⚠️", "👩‍💻", "🎉", "🇯🇵", "👍🏽", "❌", "🔥")
_VERBS = ("Look at", "Open", "Check", "Run", "Search", "Compare", "Change", "Fix", "Undo", "Test")
_LEVELS = ("\x1b[32mINFO\x1b[0m", "\x1b[33mWARNING\x1b[0m", "\x1b[31mERROR\x1b[0m", "DEBUG")


@dataclass(frozen=True)
class Source:
    """One installed source file: where an agent would find it, and its lines."""

    path: str
    lines: tuple[str, ...]


class Pool:
    """What conversations are made of: installed source files, sentences of their documentation, and the shared openings.

    Args:
        seed: chooses the files and the openings.
        files: at most this many source files.
        standard: take files of the standard library only (small, and the same in every environment of one Python).
    """

    def __init__(self, seed: int = 0, files: int = MOST_FILES, standard: bool = False) -> None:
        rng = random.Random(f"pool {seed}")
        self.sources = _sources(rng, files, standard)
        self.sentences = _sentences(self.sources)
        self.systems = tuple(self._system(rng) for _ in range(8))
        self.tools = tuple(self._tools(rng) for _ in range(4))

    def sentence(self, rng: random.Random, foreign: float = 0.01) -> str:
        """A sentence; with probability `foreign` not an English one, and once in two hundred with an emoji."""
        if rng.random() < foreign:
            return rng.choice(_FOREIGN).format(n=rng.randrange(2, 900))
        text = rng.choice(self.sentences)
        return f"{text} {rng.choice(_EMOJI)}" if rng.random() < 0.005 else text

    def prose(self, rng: random.Random, fewest: int, most: int, foreign: float = 0.01) -> str:
        """A paragraph of that many sentences."""
        return " ".join(self.sentence(rng, foreign) for _ in range(rng.randint(fewest, most)))

    def _system(self, rng: random.Random) -> str:
        size, parts = rng.randint(3_000, 5_000), ["You are an agent that mends software in a sandbox.\n\n# Rules\n"]
        while sum(map(len, parts)) < size - 150:
            parts.append(f"- {rng.choice(_VERBS)} first: {self.sentence(rng)}\n")
        return "".join(parts)[:size]

    def _tools(self, rng: random.Random) -> list[dict[str, Any]]:
        """Schemas of 6 to 9 kB; the four tools that trajectories call are always among them."""
        size = rng.randint(6_000, 8_600)
        tools: list[dict[str, Any]] = []
        names = ["bash", "view", "edit", "search"]
        while len(tools) < 4 or len(json.dumps(tools)) < size:
            name = names[len(tools)] if len(tools) < 4 else f"{rng.choice(('list', 'find', 'move', 'test'))}_{len(tools)}"
            fields = _FIELDS.get(name, ("path", "pattern", "limit"))
            properties = {f: {"type": "string", "description": self.prose(rng, 1, 2, 0.0)} for f in fields}
            parameters = {"type": "object", "properties": properties, "required": list(fields[:1])}
            function = {"name": name, "description": self.prose(rng, 2, 4, 0.0), "parameters": parameters}
            tools.append({"type": "function", "function": function})
        return tools


_FIELDS = {
    "bash": ("command", "timeout"),
    "view": ("path", "view_range"),
    "edit": ("path", "old_text", "new_text"),
    "search": ("pattern", "path"),
}


@cache
def shared_pool(seed: int = 0) -> Pool:
    """The whole pool of a seed, made once in a process."""
    return Pool(seed)


# --- conversations ---------------------------------------------------------------------------------------------------------------


def trajectory(pool: Pool, rng: random.Random, turns: int, reasoning: bool = False, short: bool = False) -> Record:
    """One agent's trajectory: a task, `turns` assistant turns of which all but the last call a tool, and their results.

    Args:
        pool: the text.
        rng: every choice is drawn from it.
        turns: assistant turns.
        reasoning: give assistant turns `reasoning_content`.
        short: tool results of a few lines (the regression guard counts calls, not bytes).
    """
    task = "\n\n".join(pool.prose(rng, 2, 6) for _ in range(rng.randint(1, 4)))
    source = rng.choice(pool.sources)
    at = rng.randrange(len(source.lines))
    messages: list[Message] = [
        {"role": "system", "content": rng.choice(pool.systems)},
        {"role": "user", "content": f"{task}\n\n```python\n{_part(source, at, 12)}\n```\n(`{source.path}`, line {at + 1})"},
    ]
    for turn in range(turns):
        message: Message = {"role": "assistant", "content": pool.prose(rng, 1, 4) if rng.random() < 0.8 else ""}
        if reasoning:
            message["reasoning_content"] = pool.prose(rng, 1, 8)
        if turn == turns - 1:
            message["content"] = "\n\n".join(pool.prose(rng, 2, 5) for _ in range(2))
            messages.append(message)
            break
        name, arguments, result = _step(pool, rng, short)
        call = {"id": f"call_{turn}", "type": "function", "function": {"name": name, "arguments": arguments}}
        message["tool_calls"] = [call]
        messages += [message, {"role": "tool", "tool_call_id": f"call_{turn}", "name": name, "content": result}]
    return {"messages": messages, "tools": rng.choice(pool.tools)}


def chat(pool: Pool, rng: random.Random, reasoning: bool = False, foreign: float = 0.01) -> Record:
    """One to three exchanges; one chat in four has a system message."""
    messages: list[Message] = []
    if rng.random() < 0.25:
        messages.append({"role": "system", "content": pool.prose(rng, 1, 3, foreign)})
    for _ in range(rng.randint(1, 3)):
        answer: Message = {"role": "assistant", "content": pool.prose(rng, 1, 7, foreign)}
        if reasoning:
            answer["reasoning_content"] = pool.prose(rng, 1, 5, foreign)
        messages += [{"role": "user", "content": pool.prose(rng, 1, 3, foreign)}, answer]
    return {"messages": messages}


def other(pool: Pool, rng: random.Random, reasoning: bool = False) -> Record:
    """A chat in another style: mostly not English, emoji, Markdown tables, lists and code."""
    record = chat(pool, rng, reasoning, foreign=0.7)
    for message in record["messages"]:
        if message["role"] == "assistant":
            message["content"] = "\n\n".join((message["content"], _markdown(pool, rng)))
    return record


def _markdown(pool: Pool, rng: random.Random) -> str:
    source = rng.choice(pool.sources)
    title = f"## {rng.choice(_EMOJI)} {rng.choice(_FOREIGN).format(n=rng.randrange(99))}"
    rows = [f"| {rng.randrange(10**6)} | **{rng.choice(_EMOJI)}** | {pool.sentence(rng, 0.6)[:60]} |" for _ in range(4)]
    items = [f"{k}. *{pool.sentence(rng, 0.6)}* {rng.choice(_EMOJI)}" for k in range(1, 4)]
    code = f"```python\n{_part(source, rng.randrange(len(source.lines)), 8)}\n```"
    return "\n".join([title, "", "| n | ok | 说明 |", "|--:|:-:|:--|", *rows, "", *items, "", code, "---"])


# --- what tools answer ------------------------------------------------------------------------------------------------------------


def _step(pool: Pool, rng: random.Random, short: bool) -> tuple[str, dict[str, Any], str]:
    """A tool's name, its arguments and its result."""
    source = rng.choice(pool.sources)
    return rng.choices(_STEPS, weights=(4, 2, 2, 1, 1, 1))[0](pool, rng, source, 5 if short else rng.randint(30, 270))


def _cat(pool: Pool, rng: random.Random, source: Source, size: int) -> tuple[str, dict[str, Any], str]:
    start = rng.randrange(max(1, len(source.lines) - size))
    lines = source.lines[start : start + size]
    text = "\n".join(f"{start + k:6d}\t{line}" for k, line in enumerate(lines, 1))
    return "view", {"path": source.path, "view_range": [start + 1, start + len(lines)]}, text


def _grep(pool: Pool, rng: random.Random, source: Source, size: int) -> tuple[str, dict[str, Any], str]:
    words = re.findall(r"[A-Za-z_]{4,}", rng.choice(source.lines)) or ["return"]
    word, found = rng.choice(words), []
    for file in (source, *rng.sample(pool.sources, min(6, len(pool.sources)))):
        found += [f"{file.path}:{number}:{line}" for number, line in enumerate(file.lines, 1) if word in line]
    return "search", {"pattern": word, "path": "."}, "\n".join(found[: size // 2]) or "no matches"


def _diff(pool: Pool, rng: random.Random, source: Source, size: int) -> tuple[str, dict[str, Any], str]:
    start = rng.randrange(max(1, len(source.lines) - size))
    before = list(source.lines[start : start + size])
    after = list(before)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(after))
        after[at : at + rng.randint(0, 2)] = rng.choice(pool.sources).lines[: rng.randint(1, 4)]
    arguments = {"path": source.path, "old_text": "\n".join(before[:6]), "new_text": "\n".join(after[:6])}
    return "edit", arguments, "\n".join(difflib.unified_diff(before, after, f"a/{source.path}", f"b/{source.path}", lineterm=""))


def _pytest(pool: Pool, rng: random.Random, source: Source, size: int) -> tuple[str, dict[str, Any], str]:
    name = Path(source.path).stem
    dots = "\n".join(f"tests/test_{name}.py {'.' * rng.randint(5, 60)}{'F' * rng.randint(0, 2)}" for _ in range(4))
    failure = f"\x1b[31m\x1b[1m____ test_{name} ____\x1b[0m\n{_part(source, rng.randrange(len(source.lines)), size // 3)}\nE   {pool.sentence(rng)}"
    tail = f"\x1b[31m{rng.randint(1, 9)} failed\x1b[0m, {rng.randint(5, 400)} passed in {rng.random() * 30:.2f}s"
    return "bash", {"command": f"python -m pytest tests/test_{name}.py -x", "timeout": 120}, f"{dots}\n{failure}\n{tail}"


def _traceback(pool: Pool, rng: random.Random, source: Source, size: int) -> tuple[str, dict[str, Any], str]:
    lines = ["Traceback (most recent call last):"]
    for file in rng.choices(pool.sources, k=max(2, size // 12)):
        at = rng.randrange(len(file.lines))
        lines += [f'  File "/usr/lib/python3/{file.path}", line {at + 1}, in run', f"    {file.lines[at].strip()}"]
    lines.append(f"RuntimeError: {pool.sentence(rng)}")
    return "bash", {"command": f"python {source.path}"}, "\n".join(lines)


def _log(pool: Pool, rng: random.Random, source: Source, size: int) -> tuple[str, dict[str, Any], str]:
    clock, lines = rng.randrange(10**9), []
    for _ in range(size // 2):
        clock += rng.randrange(9_000)
        stamp = (
            f"2025-03-{1 + clock % 28:02d} {clock // 3600 % 24:02d}:{clock // 60 % 60:02d}:{clock % 60:02d},{clock % 1000:03d}"
        )
        lines.append(f"{stamp} {rng.choice(_LEVELS)} [{rng.getrandbits(64):016x}] {pool.sentence(rng)}")
    return "bash", {"command": f"tail -n {size} /var/log/{Path(source.path).stem}.log"}, "\n".join(lines)


_STEPS: tuple[Callable[[Pool, random.Random, Source, int], tuple[str, dict[str, Any], str]], ...] = (
    _cat, _grep, _diff, _pytest, _traceback, _log,
)  # fmt: skip


def _part(source: Source, start: int, count: int) -> str:
    return "\n".join(source.lines[start : start + count])


# --- the installed text --------------------------------------------------------------------------------------------------------------


def _sources(rng: random.Random, most: int, standard: bool) -> tuple[Source, ...]:
    roots = [Path(sysconfig.get_path("stdlib")), *([] if standard else [Path(sysconfig.get_path("purelib"))])]
    paths = {
        path.relative_to(root).as_posix(): path
        for root in roots
        for path in root.rglob("*.py")
        if not {"site-packages", "__pycache__"} & set(path.relative_to(root).parts)
    }
    found: list[Source] = []
    for name in rng.sample(sorted(paths), len(paths)):
        if len(found) == most:
            break
        if SMALLEST_FILE <= paths[name].stat().st_size <= LARGEST_FILE:
            try:
                text = paths[name].read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
            if not _CONTROL.search(text):
                found.append(Source(name, tuple(text.splitlines())))
    if not found:
        raise RuntimeError(f"no Python source files below {', '.join(map(str, roots))}; the corpus is made of installed sources")
    return tuple(found)


def _sentences(sources: Sequence[Source]) -> tuple[str, ...]:
    """Sentences of the sources' docstrings, each once."""
    found: dict[str, None] = {}
    for source in sources:
        for doc in re.findall(r'"""(.*?)"""', "\n".join(source.lines), re.DOTALL):
            for sentence in re.split(r"(?<=[.!?])\s+", " ".join(doc.split())):
                if 25 <= len(sentence) <= 220 and sentence[0].isupper() and sentence[-1] in ".!?":
                    found[sentence] = None
    return tuple(found)


# --- kinds ----------------------------------------------------------------------------------------------------------------------------


def records(
    kind: str, count: int | None = None, seed: int = 0, reasoning: bool = False, pool: Pool | None = None, start: int = 0
) -> Iterator[Record]:
    """The conversations of one kind.

    Args:
        kind: `traj` (20 to 120 assistant turns, 400), `chat` (50,000), `monster` (one of 200 turns), `curve` (one for each count
            of turns in `CURVE`), `other` (2,000).
        count: how many; None for the number in parentheses. `curve` takes the first so many.
        seed: another seed gives other conversations.
        reasoning: give assistant turns `reasoning_content`.
        pool: the text; None makes the seed's.
        start: number of the first one, so that disjoint slices can be made.

    Raises:
        ValueError: there is no such kind.
    """
    if kind not in KINDS:
        raise ValueError(f"no kind of corpus is called {kind!r}; known: {', '.join(KINDS)}")
    if count is not None and count < 1:
        raise ValueError(f"count is {count}; at least 1")
    pool = pool or shared_pool(seed)
    most = min(count or KINDS[kind], len(CURVE)) if kind == "curve" else count or KINDS[kind]
    for number in range(start, start + most):
        rng = random.Random(f"{kind} {seed} {number}")  # each by itself: the first N are the same whatever the count
        if kind == "chat":
            yield chat(pool, rng, reasoning)
        elif kind == "other":
            yield other(pool, rng, reasoning)
        else:
            turns = {"monster": 200, "curve": CURVE[number % len(CURVE)]}.get(kind) or round(rng.triangular(20, 120, 30))
            yield trajectory(pool, rng, turns, reasoning)


KINDS = {"traj": 400, "chat": 50_000, "monster": 1, "curve": len(CURVE), "other": 2_000}


def write(path: Path, lines: Iterator[Record] | Sequence[Record]) -> int:
    """Write JSONL; returns the number of bytes."""
    size = 0
    with path.open("wb") as file:
        for record in lines:
            size += file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
    return size


def main(arguments: Sequence[str] | None = None) -> None:
    """Write one kind of corpus."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.corpus", description="Write a seeded corpus as JSONL.")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--out", type=Path, help="default: KIND.jsonl")
    parser.add_argument("--count", type=int, help="conversations; default: " + ", ".join(f"{k} {n}" for k, n in KINDS.items()))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reasoning", action="store_true", help="give assistant turns reasoning")
    given = parser.parse_args(arguments)
    out = given.out or Path(f"{given.kind}.jsonl")
    size = write(out, records(given.kind, given.count, given.seed, given.reasoning))
    print(f"{out}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()

"""The build: raw lines in, a finished dataset out. Read it from `build` downwards; it follows a record.

`plan -> for each chunk: read -> parse -> normalise -> make (sampling.py: samples, examples) -> shard + receipt -> commit`
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import multiprocessing
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from . import __version__
from .canonical import canonical_json, differences, fingerprint
from .conversation import MAX_MESSAGES
from .errors import ChatmaskError, CheckFailed, DamagedDataset, InputError, OptionError, RejectedRow, SpecError, TooManyRejects
from .example import Example, Row
from .ledger import Ledger
from .loading import check_files
from .manifest import MANIFEST, commit, finished_shard, read_manifest, read_receipt, receipt_path, write_receipt
from .parsers.parser import ALL_CHECKS, NO_CHECKS, Checks, Parser
from .parsers.prefixes import Unsound
from .policy import DEFAULT, WORDS, Policy, PolicyLike, load_policy
from .records import MAX_DEPTH, MAX_LINE_BYTES, Chunk, InputFile, Record, parse, plan, read, size_of
from .sampling import Draft, Entry, Made, Place, begin, complete, encode, entries_of, left_out, parser_for, refuse_unknown
from .shards import ShardInfo, ShardWriter, shard_name
from .shuffling import deal, part_name
from .storage import Storage, staging
from .templates.registry import SpecLike
from .templates.spec import TemplateSpec
from .tokenizers import Tokenizer
from .trajectories import Sample

MIN_CHUNK, MAX_CHUNK, MANY_CHUNKS = 4 << 20, 32 << 20, 64  # bytes, bytes, shards that let workers share a middling input
SHOWN_REJECTS = 10
# `parity: sample` compares prompts on lines 1 to 16 of each file and every 64th: at 12 turns on the first 4, at 3 on the others
ORACLE_FIRST, ORACLE_EVERY, ORACLE_WHOLE, ORACLE_TURNS = 16, 64, 4, 3
# one line in so many has its text, and the ids of its beginning (so many characters, since the plain way takes a hundred times as long
# and a record may be very long), compared with what the plain ways to them give
REFERENCE_EVERY, REFERENCE_CHARACTERS = 500, 1 << 15
BATCH_CHARACTERS, BATCH_RECORDS = 4 << 20, 1024  # of what is encoded in one go
GROUP_BYTES, GROUP_RECORDS = 1 << 20, 64  # of what goes through the steps before that together
COLLECT_EVERY = 200_000  # objects made; a batch of records holds several times as many
FAST_FROM = 3 << 20  # bytes of input from which loading the fast tokenizer pays
RUN = "run.json"  # in the staging folder: what the build in progress is a build of
_IDENTITY = ("chatmask", "spec", "tokenizer", "template", "versions", "options", "inputs")


@dataclass(frozen=True)
class Options:
    """What a worker needs to know besides the parser."""

    parity: Literal["sample", "full", "off"] = "sample"
    keep_rejected: bool = False
    max_line_bytes: int = MAX_LINE_BYTES
    max_depth: int = MAX_DEPTH
    max_messages: int = MAX_MESSAGES
    policy: Policy = DEFAULT
    left_out: Mapping[Place, str] = field(
        default_factory=dict
    )  # follows from inputs and policy, so it is no part of the identity


@dataclass(frozen=True)
class BuildResult:
    """What a build did. `summary` has the keys of `build --json`.

    Attributes:
        backend: what encoded, with its version, and why it was not the fast tokenizer.
        profile: seconds by step, over all workers; steps in the order in which a record takes them.
    """

    dataset: Path
    manifest: Mapping[str, Any]
    ledger: Ledger
    seconds: float
    already_built: bool = False
    resumed_shards: int = 0
    restarted: tuple[str, ...] = ()
    backend: str = ""
    profile: Mapping[str, float] = field(default_factory=dict)

    @property
    def summary(self) -> dict[str, Any]:
        """The object that `build --json` prints."""
        return {
            "dataset": str(self.dataset),
            "spec": self.manifest["spec"]["name"],
            "demo": self.manifest["tokenizer"]["demo"],
            **self.ledger.to_dict(),
            "shards": len(self.manifest["shards"]),
            "seconds": round(self.seconds, 3),
            "already_built": self.already_built,
            "resumed_shards": self.resumed_shards,
            "restarted": list(self.restarted),
            "backend": self.backend,
        }


def build(
    inputs: str | Path | Sequence[str | Path],
    spec: SpecLike,
    out: str | Path | None = None,
    *,
    tokenizer: Any = None,
    demo: bool = False,
    overrides: Mapping[str, str] | Sequence[str] = (),
    bad_rows: Literal["fail", "skip"] = "fail",
    workers: int = 1,
    parity: Literal["sample", "full", "off"] = "sample",
    policy: PolicyLike | None = None,
    policy_overrides: Mapping[str, str] | Sequence[str] = (),
    backend: Backend = "auto",
    keep_rejected: bool = False,
    max_line_bytes: int = MAX_LINE_BYTES,
    max_depth: int = MAX_DEPTH,
    max_messages: int = MAX_MESSAGES,
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
    storage: Storage | None = None,
) -> BuildResult:
    """Build a dataset.

    Args:
        inputs: one or several: JSON lines (plain, gzip or zstd), `.traj`, Parquet, directories as `datasets.save_to_disk` writes them.
        spec: packaged name, YAML file or spec object.
        out: directory; without it `./<input name>.<spec>/`.
        tokenizer: hub id, directory or loaded transformers tokenizer; without it the spec's own id.
        demo: use the embedded demo tokenizer (written into the manifest; `load` then wants `allow_demo=True`).
        overrides: `KEY=VALUE` changes to the spec.
        bad_rows: `fail` writes nothing visible when a row is rejected; `skip` writes rejects to `rejects.jsonl`.
        workers: processes; the bytes do not depend on it.
        parity: compare trained prefixes with what the server would have sent: on a sample, on all rows, or not at all.
        policy: which samples are made of a record and which turns are trained: name, YAML file or Policy; None: one sample with
            all turns.
        policy_overrides: `KEY=VALUE` changes to the policy (`split=per_turn`).
        backend: what encodes. `auto`: the fast tokenizer where it is installed, gives the same ids and the input is worth loading it;
            `fast`: demand it; `tokenizers`: do without. The ids are the same.
        keep_rejected: write the content of rejected lines too.
        max_line_bytes, max_depth, max_messages: limits of one line, of its nesting, and of one conversation; beyond them a row is
            rejected by name.
        force: replace a finished dataset that was built otherwise, or is damaged.
        progress: called with (chunks done, chunks in all).
        storage: where output goes through (fault tests inject here).

    Returns:
        The result; `.summary` is what `build --json` prints.

    Raises:
        SpecError, TokenizerError, InputError: before any data is read.
        TooManyRejects: rejected rows under `bad_rows="fail"`; nothing visible is left.
        CheckFailed: nothing supervised, or a served prompt differs where the spec does not say so.
        BuildLocked: another build holds the directory.
    """
    started = time.monotonic()
    storage = storage or Storage()
    paths = [inputs] if isinstance(inputs, (str, Path)) else list(inputs)
    if not paths:
        raise InputError("no input file given")
    if workers < 1:
        raise InputError(f"workers is {workers}; at least 1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # its parallel code path is the faster one with a single thread, too
    chosen = load_policy(policy, policy_overrides)
    parser = parser_for(chosen, spec, tokenizer, demo, overrides)
    directory = Path(out) if out is not None else default_directory(paths[0], parser.spec.name)
    if directory.exists() and not directory.is_dir():
        raise InputError(f"{directory}: is a file; give a directory with --out")
    files, chunks = plan(paths, _chunk_bytes(paths))
    if not chunks:
        raise InputError(f"{', '.join(map(str, paths))}: no lines")
    refuse_unknown(chosen, parser.spec)
    why_not = _choose_backend(parser, backend, sum(chunk.bytes for chunk in chunks))
    options = Options(parity, keep_rejected, max_line_bytes, max_depth, max_messages, chosen)
    identity = _identity(parser, files, options)
    with storage.lock(directory) as created:
        finished = _finished(directory, identity, force)
        if finished is not None:
            storage.rmtree(staging(directory))  # left by a build that was killed between its last two steps
            named = _named(parser, why_not)
            return BuildResult(
                directory, finished, Ledger.from_dict(finished["ledger"]), time.monotonic() - started, True, backend=named
            )
        restarted = _begin(storage, directory, identity)
        try:
            receipts, resumed, profile = _build_shards(
                parser, storage, directory, chunks, identity, options, workers, bad_rows, progress
            )
            ledger = Ledger.total(Ledger.from_dict(receipt["ledger"]) for receipt in receipts).close(str(directory))
            _refuse_nothing(ledger, parser.spec)
        except (TooManyRejects, CheckFailed):
            storage.discard(directory, created)
            raise
        shards = [ShardInfo.from_dict(receipt["shard"]) for receipt in receipts]
        if chosen.shuffle:
            shards = deal(storage, directory, shards, fingerprint(identity), chosen.seed)
        manifest = commit(storage, directory, shards, {**identity, "ledger": ledger.to_dict()}, _reject_lines(receipts))
    return BuildResult(
        directory,
        manifest,
        ledger,
        time.monotonic() - started,
        False,
        resumed,
        tuple(restarted),
        _named(parser, why_not),
        profile,
    )


Backend = Literal["auto", "fast", "tokenizers"]


def _choose_backend(parser: Parser, backend: Backend, size: int) -> str:
    """Turn the fast tokenizer on or off; '' or why it is off."""
    if backend == "tokenizers":
        parser.encoder.fast = None
        return "as demanded"
    if backend == "auto" and size < FAST_FROM and parser.encoder.fast is None:
        return "a small input"
    why_not = parser.encoder.speed_up()
    if why_not and backend == "fast":
        raise OptionError(f"the fast tokenizer cannot be used: {why_not}")
    return why_not


def _named(parser: Parser, why_not: str) -> str:
    return parser.encoder.fast.name if parser.encoder.fast is not None else f"tokenizers {version('tokenizers')} ({why_not})"


def default_directory(first: str | Path, spec: str) -> Path:
    """`./<input name>.<spec>/`: the name of the input (a file without its endings, or a dataset directory), in the current directory."""
    name = Path(first).resolve().name if Path(first).name in ("", "..") else Path(first).name
    for ending in (".zst", ".gz", ".jsonl", ".json", ".traj", ".parquet"):
        name = name.removesuffix(ending)
    return Path(f"{name}.{spec.replace('/', '-')}")


# --- one chunk: a record's way to the shard -----------------------------------------------------------------------------------


STEPS = ("read", "parse", "normalise", "render", "encode", "mask", "write", "again")


class Clock:
    """Where the time goes: each lap adds the time since the one before to a step."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(STEPS, 0.0)
        self._last = time.perf_counter()

    def lap(self, step: str) -> None:
        """What was done since the last lap was this step."""
        now = time.perf_counter()
        self.seconds[step] += now - self._last
        self._last = now

    def move(self, seconds: float, source: str, target: str) -> None:
        """A part of one step belongs to another."""
        self.seconds[source] -= seconds
        self.seconds[target] += seconds


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Within it, Python's collector of reference cycles runs seldom. A build makes millions of small objects and hardly a cycle;
    looking at them all again and again takes a fifth of the time."""
    before = gc.get_threshold()
    gc.freeze()  # the parser and all modules are there to stay
    gc.set_threshold(COLLECT_EVERY, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def build_shard(
    parser: Parser, storage: Storage, directory: Path, chunk: Chunk, count: int, run: str, options: Options
) -> dict[str, float]:
    """Build one shard and its receipt. Depends on the chunk's bytes only, never on who runs it or what ran before.

    Returns:
        Seconds by step.
    """
    clock = Clock()
    fast, notes = parser.encoder.fast, Counter[str]()
    try:
        while True:
            try:
                with seldom_collected():
                    _build_shard(parser, storage, directory, chunk, count, run, options, notes, clock)
                return clock.seconds
            except Unsound as error:
                clock.lap("again")
                # once more, the long way: nothing of the first try is kept
                notes[f"{error.what}_refused"] += 1
                parser.short_ways = False
                if error.what == "fast_tokenizer":
                    parser.encoder.fast = None
    finally:
        parser.encoder.fast, parser.short_ways = fast, True


def _build_shard(
    parser: Parser,
    storage: Storage,
    directory: Path,
    chunk: Chunk,
    count: int,
    run: str,
    options: Options,
    notes: Counter[str],
    clock: Clock,
) -> None:
    ledger = Ledger(notes=Counter(notes))
    rejects: list[dict[str, Any]] = []
    shown: list[str] = []  # quotes content, so it stays in the receipt, which does not outlive the build
    name = _name(chunk.index, count, options)
    with ShardWriter(storage, staging(directory) / name) as writer:
        for record, made in rows_of(parser, chunk, options, clock):
            ledger.lines += 1
            if made is None:
                ledger.blanks += 1
                continue
            if isinstance(made, RejectedRow):
                ledger.rejects[made.reason.value] += 1
                rejects.append(_reject(record, made, options))
                if len(shown) < SHOWN_REJECTS:
                    shown.append(f"{record.path}:{record.line}: {made}")
                continue
            rows: Sequence[tuple[Sample, Example]] = made.rows
            if options.left_out:
                rows = [(s, e) for s, e in made.rows if (record.path, record.line, s.index) not in options.left_out]
                made.dropped.update(
                    options.left_out[place]
                    for s, _ in made.rows
                    if (place := (record.path, record.line, s.index)) in options.left_out
                )
            if rows:
                ledger.kept += 1
                if made.dropped:
                    ledger.notes.update({f"dropped_{reason}": n for reason, n in made.dropped.items()})
            else:
                ledger.dropped[max(made.dropped, key=lambda reason: made.dropped[reason], default="no_trained_turn")] += 1
            for sample, example in rows:
                _refuse_undeclared(record, sample, example, options, parser)
                ledger.add_example(example)
                writer.add(Row(example.ids, example.mask, example.spans, record.path, record.line, sample.index, sample.variant))
    ledger.close(f"{chunk.path}, lines {chunk.line} to {chunk.line + chunk.lines - 1}")
    receipt = {"fingerprint": run, "shard": writer.info.to_dict(), "ledger": ledger.to_dict(), "rejects": rejects, "shown": shown}
    write_receipt(storage, receipt_path(directory, name), receipt)
    clock.lap("write")


def _name(index: int, count: int, options: Options) -> str:
    """File name of what a chunk gives: a shard, or a part that `shuffle` deals into shards afterwards."""
    return (part_name if options.policy.shuffle else shard_name)(index, count)


def survey(parser: Parser, chunk: Chunk, options: Options) -> list[Entry]:
    """What the choice over a whole build (equal samples, balance) must know of one chunk; rejected rows have no part in it."""
    entries: list[Entry] = []
    for record, made in rows_of(parser, chunk, replace(options, parity="off"), Clock()):
        if isinstance(made, Made):
            entries += entries_of(made, options.policy, record.path, record.line)
    return entries


def rows_of(parser: Parser, chunk: Chunk, options: Options, clock: Clock) -> Iterator[tuple[Record, Made | RejectedRow | None]]:
    """Every record of a chunk, in order, with what it gave, why it is rejected, or None for a blank line.

    A record's way: strict JSON, conversation, samples, rendering and spans; then tokens and masks, for many records at once.

    Raises:
        Unsound: a short way gave something else than the long way.
    """
    waiting: list[tuple[Record, Draft | RejectedRow | None]] = []
    characters = 0
    for group in _groups(read(chunk, options.max_line_bytes)):
        clock.lap("read")
        drafts = _begun(group, parser, options, clock)
        characters += sum(draft.characters for draft in drafts if isinstance(draft, Draft))
        waiting += zip(group, drafts, strict=True)
        clock.lap("render")
        if characters >= BATCH_CHARACTERS or len(waiting) >= BATCH_RECORDS:
            yield from _completed(waiting, parser, clock)
            waiting, characters = [], 0
    yield from _completed(waiting, parser, clock)


def _groups(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Records by a few at a time, so that each step has several to do."""
    group: list[Record] = []
    size = 0
    for record in records:
        group.append(record)
        size += len(record.raw)
        if size >= GROUP_BYTES or len(group) >= GROUP_RECORDS:
            yield group
            group, size = [], 0
    yield group


def _begun(group: Sequence[Record], parser: Parser, options: Options, clock: Clock) -> list[Draft | RejectedRow | None]:
    """Records up to their tokens; None for a blank one."""

    def each(given: Iterable[Any], step: Callable[[Record, Any], Any]) -> list[Any]:
        found = []
        for record, value in zip(group, given, strict=True):
            if value is not None and type(value) is not RejectedRow:
                try:
                    value = step(record, value)
                except RejectedRow as error:
                    value = error
            found.append(value)
        return found

    parsed = each([None if record.blank else record for record in group], lambda record, _: parse(record, options.max_depth))
    clock.lap("parse")
    conversations = each(parsed, lambda _, data: parser.read(data, options.max_messages))
    clock.lap("normalise")
    return each(
        conversations,
        lambda record, one: begin(one, options.policy, parser, f"{record.path}:{record.line}", _checks(record, options)),
    )


def _completed(
    waiting: Sequence[tuple[Record, Draft | RejectedRow | None]], parser: Parser, clock: Clock
) -> Iterator[tuple[Record, Made | RejectedRow | None]]:
    before = parser.encoder.seconds
    examples = iter(encode([draft for _, draft in waiting if isinstance(draft, Draft)]))
    made: list[Made | RejectedRow | None] = []
    for _, draft in waiting:
        if not isinstance(draft, Draft):
            made.append(draft)
            continue
        try:
            made.append(complete(draft, next(examples)))
        except RejectedRow as error:
            made.append(error)
    clock.lap("mask")
    clock.move(parser.encoder.seconds - before, "mask", "encode")
    for (record, _), one in zip(waiting, made, strict=True):
        yield record, one
    clock.lap("write")


def _checks(record: Record, options: Options) -> Checks:
    """What is checked of a record besides what is always checked: a function of its place in its file alone."""
    if options.parity == "full":
        return ALL_CHECKS
    line = record.line
    turns = 0
    if options.parity == "sample" and (line <= ORACLE_FIRST or line % ORACLE_EVERY == 0):
        turns = ORACLE_TURNS if line > ORACLE_WHOLE else 4 * ORACLE_TURNS
    reference = REFERENCE_CHARACTERS if line % REFERENCE_EVERY == 1 else 0
    return Checks(turns, reference) if turns or reference else NO_CHECKS


def _refuse_undeclared(record: Record, sample: Sample, example: Example, options: Options, parser: Parser) -> None:
    # a policy that changes what stands before a turn breaks parity by choice
    chosen = options.policy.strip_thinking != "none" or options.policy.strip_probability or options.policy.empty_think != "none"
    for found in example.parity:
        if not found.declared and not chosen:
            if parser.encoder.fast is not None and found.kind == "tokens":
                raise Unsound("fast_tokenizer", found.detail)  # it may be to blame; without it the break stays, or does not
            raise CheckFailed(
                f"{record.path}:{record.line}: message {sample.origin[found.message]}: the training prefix is not what the server sends "
                f"({found.kind}): {found.detail}; if the template is known to do this, say `prefix_stable: false` in the spec"
            )


def _reject(record: Record, error: RejectedRow, options: Options) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "source": record.path,
        "line": record.line,
        "offset": record.offset,
        "reason": error.reason.value,
        "message": error.message,
        "advice": error.reason.advice,
        "sha256": hashlib.sha256(record.raw).hexdigest(),
    }
    if options.keep_rejected:
        entry["detail"] = error.detail
        entry["content"] = record.raw.decode("utf-8", "backslashreplace")
    return entry


# --- all chunks -----------------------------------------------------------------------------------------------------------------


def _build_shards(
    parser: Parser,
    storage: Storage,
    directory: Path,
    chunks: Sequence[Chunk],
    identity: Mapping[str, Any],
    options: Options,
    workers: int,
    bad_rows: str,
    progress: Callable[[int, int], None] | None,
) -> tuple[list[dict[str, Any]], int, dict[str, float]]:
    """Build what no receipt of this run vouches for; all receipts in order, how many were there already, and seconds by step."""
    profile: dict[str, float] = {}
    run = fingerprint(identity)
    count = len(chunks)
    missing = [chunk for chunk in chunks if finished_shard(directory, _name(chunk.index, count, options), run) is None]
    if missing and (options.policy.dedup or options.policy.max_no_thinking_ratio is not None):
        surveyed = _run(parser, storage, directory, chunks, count, run, options, min(workers, len(chunks)), _survey)
        options = replace(options, left_out=left_out(itertools.chain.from_iterable(surveyed), options.policy))
    built = _run(parser, storage, directory, missing, count, run, options, min(workers, len(missing)), _work)
    waiting = {chunk.index for chunk in missing}
    receipts: list[dict[str, Any]] = []
    for chunk in chunks:
        if chunk.index in waiting:
            for step, seconds in next(built).items():
                profile[step] = profile.get(step, 0.0) + seconds
        receipt = finished_shard(directory, _name(chunk.index, count, options), run)
        if receipt is None:
            raise DamagedDataset(f"{directory}: shard {chunk.index} vanished while the build ran; run it again")
        if receipt["rejects"] and bad_rows == "fail":
            raise _too_many(receipts, receipt, chunk.index + 1, count)
        receipts.append(receipt)
        if progress:
            progress(len(receipts), count)
    return receipts, count - len(missing), profile


def _run(
    parser: Parser,
    storage: Storage,
    directory: Path,
    chunks: Sequence[Chunk],
    count: int,
    run: str,
    options: Options,
    workers: int,
    work: Callable[..., Any],
) -> Iterator[Any]:
    """What `work` gives for each chunk, in order. The process that builds is one of the workers, so that nobody waits for the others
    to load their tokenizers."""
    own: _Setup = (parser, storage, directory, count, run, options)
    if workers <= 1:
        for chunk in chunks:
            yield work(chunk, own)
        return
    # spawn, not fork: the tokenizers library has threads of its own, which a fork would leave behind half-way
    tokenizer = Tokenizer(**{**_fields(parser.loaded), "source": None})
    setup = (parser.spec, tokenizer, storage, directory, count, run, options, parser.encoder.fast is not None)
    context = multiprocessing.get_context("spawn")
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(workers - 1, context, _start_worker, setup) as pool:
        try:
            yield from _shared_out(pool, workers - 1, chunks, work, own)
        except BaseException:
            # what they were at is in the staging folder and not vouched for by a receipt; nobody need wait for it
            for child in set(multiprocessing.active_children()) - others:
                child.terminate()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _shared_out(
    pool: ProcessPoolExecutor, helpers: int, chunks: Sequence[Chunk], work: Callable[..., Any], own: _Setup
) -> Iterator[Any]:
    """As `_run`. Each helper has one chunk in hand from the start, and one waiting once it works; the others are done here."""
    first, *rest = enumerate(chunks)
    left = deque(rest)
    given: dict[Future[Any], int] = {}
    done: dict[int, Any] = {}
    shown = 0

    def give(most: int) -> None:
        while left and len(given) < most:
            place, chunk = left.popleft()
            given[pool.submit(work, chunk)] = place

    give(helpers)
    left.appendleft(first)  # done here, so that something is told early
    working = 0  # helpers that have finished something, so that more may wait for them
    while shown < len(chunks):
        if left:
            place, chunk = left.popleft()
            try:
                done[place] = work(chunk, own)
            except Exception as error:
                done[place] = error
        else:
            wait(given, return_when=FIRST_COMPLETED)
        for future in [future for future in given if future.done()]:
            done[given.pop(future)] = future.exception() or future.result()
            working = min(helpers, working + 1)
        if any(isinstance(one, BaseException) for one in done.values()):
            left.clear()  # what stands behind is not asked for; what stands before may be refused for another reason, which goes first
        give(helpers + working)
        while shown in done:
            if isinstance(done[shown], BaseException):
                raise done[shown]
            yield done.pop(shown)
            shown += 1


def _fields(tokenizer: Tokenizer) -> dict[str, Any]:
    return {name: getattr(tokenizer, name) for name in tokenizer.__dataclass_fields__}


_Setup = tuple[Parser, Storage, Path, int, str, Options]
_worker: _Setup | None = None  # of a process that a build has started


def _start_worker(
    spec: TemplateSpec,
    tokenizer: Tokenizer,
    storage: Storage,
    directory: Path,
    count: int,
    run: str,
    options: Options,
    fast: bool,
) -> None:
    global _worker
    os.environ["RAYON_NUM_THREADS"] = "1"  # the processes are the threads
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    parser = Parser(spec, tokenizer)
    if fast:
        parser.encoder.speed_up(proven=True)
    _worker = (parser, storage, directory, count, run, options)


def _end_with_parent(parent: int) -> None:
    """A worker whose build was killed must not live on (and hold its pipes open)."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _survey(chunk: Chunk, own: _Setup | None = None) -> list[Entry]:
    setup = own or _worker
    assert setup is not None
    parser, _, _, _, _, options = setup
    return survey(parser, chunk, options)


def _work(chunk: Chunk, own: _Setup | None = None) -> dict[str, float]:
    setup = own or _worker
    assert setup is not None
    parser, storage, directory, count, run, options = setup
    return build_shard(parser, storage, directory, chunk, count, run, options)


def _too_many(before: Sequence[dict[str, Any]], last: dict[str, Any], shards: int, count: int) -> TooManyRejects:
    ledger = Ledger.total(Ledger.from_dict(receipt["ledger"]) for receipt in [*before, last])
    shown = [f"  {line}" for line in last["shown"]]
    more = f"\n  ... and {len(last['rejects']) - len(shown)} more" if len(last["rejects"]) > len(shown) else ""
    part = "" if shards == count else f" (stopped after part {shards} of {count})"
    return TooManyRejects(
        f"{ledger.rejects.total()} of {ledger.lines} lines rejected{part}; nothing was written. Mend them, or set them aside with "
        "--bad-rows skip:\n" + "\n".join(shown) + more,
        ledger.to_dict(),
    )


def _refuse_nothing(ledger: Ledger, spec: TemplateSpec) -> None:
    if not ledger.supervised_tokens:
        reasons = ", ".join(f"{n} {reason}" for reason, n in (ledger.rejects + ledger.dropped).most_common()) or "no rows"
        raise CheckFailed(
            f"the spec {spec.name} supervises nothing on this input ({ledger.lines} lines: {reasons})", ledger.to_dict()
        )


def _reject_lines(receipts: Sequence[dict[str, Any]]) -> Iterable[bytes]:
    for receipt in receipts:
        yield b"".join(canonical_json(entry) for entry in receipt["rejects"])


# --- identity: what makes two builds the same -------------------------------------------------------------------------------


def _identity(parser: Parser, files: Sequence[InputFile], options: Options) -> dict[str, Any]:
    spec, tokenizer = parser.spec, parser.loaded
    return {
        "chatmask": __version__,
        "spec": {"name": spec.name, "sha256": spec.sha256, "resolved": spec.model_dump(mode="json")},
        "tokenizer": {
            "sha256": tokenizer.sha256,
            "demo": tokenizer.demo,
            "vocab_size": tokenizer.whole.get_vocab_size(),
            "special_tokens": dict(tokenizer.special_tokens),
        },
        "template": _template_identity(parser),
        "versions": {name: version(name) for name in ("tokenizers", "jinja2", "pyarrow")},
        "options": {
            **{k: v for k, v in asdict(options).items() if k != "left_out"},
            "policy": options.policy.model_dump(mode="json", exclude=WORDS),
        },
        "inputs": [asdict(file) for file in files],
    }


def _template_identity(parser: Parser) -> dict[str, Any]:
    """The template that was rendered; where `preserve_thinking` rewrote it, also the one that it was made of, and how."""
    entry: dict[str, Any] = {"sha256": hashlib.sha256(parser.template_text.encode()).hexdigest()}
    if parser.gates:
        entry["stock_sha256"] = hashlib.sha256(parser.stock_text.encode()).hexdigest()
        entry["rewritten"] = [str(gate) for gate in parser.gates]
    return entry


def _finished(directory: Path, identity: Mapping[str, Any], force: bool) -> dict[str, Any] | None:
    """The manifest of an equal finished dataset, or None where there is nothing yet; refuses to overwrite anything else."""
    if (directory / MANIFEST).exists():
        try:
            manifest = read_manifest(directory)
        except DamagedDataset as error:
            if force:
                return None
            raise DamagedDataset(f"{error}; --force replaces it") from None
        # through JSON, as the manifest went: tuples are lists there
        changed = differences({k: manifest.get(k) for k in _IDENTITY}, dict(identity))
        if not changed and _whole(directory, manifest, force):
            return manifest
        if force or not changed:
            return None
        raise SpecError(
            f"{directory} is finished and was built otherwise; --force replaces it. What differs:\n  " + "\n  ".join(changed)
        )
    foreign = [
        p.name for p in directory.iterdir() if not p.name.startswith((".chatmask", "data-", "dataset_info", "state.", "rejects."))
    ]
    if foreign and not force:
        raise ChatmaskError(f"{directory} holds other files ({', '.join(sorted(foreign)[:3])}); choose an empty directory")
    return None


def _whole(directory: Path, manifest: Mapping[str, Any], force: bool) -> bool:
    """Are the files of a finished dataset what its manifest says? Damage is an error without --force."""
    try:
        check_files(directory, manifest)
    except DamagedDataset as error:
        if force:
            return False
        raise DamagedDataset(f"{error} (--force builds it anew)") from None
    return True


def _begin(storage: Storage, directory: Path, identity: Mapping[str, Any]) -> list[str]:
    """Open the staging folder for this run; what a stopped run of another kind had left there is named and goes."""
    path = staging(directory) / RUN
    before = read_receipt(path)
    changed = differences({k: v for k, v in before.items() if k in _IDENTITY}, dict(identity)) if before else []
    if changed:
        storage.rmtree(staging(directory))
    if before is None or changed:
        storage.mkdir(staging(directory))
        write_receipt(storage, path, identity)
    return changed


def _chunk_bytes(paths: Sequence[str | Path]) -> int:
    """Bytes of input for one shard: a function of the inputs alone. What cannot be read counts nothing; `plan` refuses it by name."""
    total = sum(size_of(path) for path in paths)
    return max(MIN_CHUNK, min(MAX_CHUNK, total // MANY_CHUNKS))

"""Reference snapshots: what a spec made of a conversation when somebody last looked, and in what way it differs now.

`specs/snapshots/<spec>/<case>.json` holds conversation, text, ids, mask and spans. `check` runs the conversation again and names
the kind of drift. Where a spec has a demo template, its snapshots hold the embedded demo tokenizer's ids, so the check runs
anywhere; the others hold the ids of the tokenizer that the spec's `reference` names. On any other tokenizer (`tokenizer=`) the same
conversations are run, and text and spans must be the same.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .canonical import fingerprint, first_unequal
from .cases import CASES, conversation
from .errors import ChatmaskError, CheckFailed, RejectedRow, SpecError
from .example import by_turn
from .parsers.parser import Parser
from .storage import Storage
from .templates.probe import compile_probe
from .templates.registry import SpecLike, list_specs, load_spec, packaged_template, spec_file, specs_dir
from .templates.spec import TemplateSpec
from .tokenizers import Tokenizer, demo_tokenizer, load_tokenizer

# most severe first; the first that applies is the headline
DRIFTS = {
    "zero_supervision": "nothing of the conversation is trained any more",
    "lost_supervision": "tokens that were trained no longer are",
    "stop_token_lost": "the end-of-turn token is no longer trained",
    "boilerplate_supervised": "tokens are trained that the template writes, not the model",
    "tool_text_supervised": "text of a tool result is trained",
    "span_moved": "a span begins or ends elsewhere",
    "text_changed": "the template renders other text",
    "tokens_changed": "the same text has other ids",
    "parity_broken": "the trained prefix differs from the served prompt in another way than before",
    "refusal_changed": "a conversation that was refused is accepted, or refused for another reason",
    "no_snapshots": "the spec has no snapshots yet",
    "snapshot_edited": "the snapshot file was changed by hand, or damaged",
}


@dataclass(frozen=True)
class Drift:
    """One snapshot that no longer holds.

    Attributes:
        spec, case: which one.
        kinds: names from `DRIFTS`, most severe first.
        detail: conversation, first difference, decoded context; several lines.
    """

    spec: str
    case: str
    kinds: tuple[str, ...]
    detail: str


@dataclass(frozen=True)
class CheckReport:
    """What `check` found: how much was compared, the drifts, what `--accept` wrote, and specs without a tokenizer at hand."""

    specs: int
    cases: int
    drifts: tuple[Drift, ...]
    accepted: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The object that `check --json` prints."""
        return {
            "specs": self.specs,
            "cases": self.cases,
            "ok": not self.drifts,
            "drifts": [{"spec": d.spec, "case": d.case, "drift": d.kinds[0], "kinds": list(d.kinds), "detail": d.detail} for d in self.drifts],
            "accepted": list(self.accepted),
            "skipped": list(self.skipped),
        }  # fmt: skip


def check(
    specs: Sequence[SpecLike] = (),
    *,
    tokenizer: Any = None,
    tokenizers: str | Path | None = None,
    accept: bool = False,
    reason: str | None = None,
    storage: Storage | None = None,
) -> CheckReport:
    """Compare specs with their snapshots.

    Args:
        specs: names or files; none means all packaged specs (those without a tokenizer at hand are listed as skipped).
        tokenizer: run on this tokenizer (ids are compared only if the snapshots were taken on it).
        tokenizers: folder that holds a tokenizer for each spec: `<spec name>` or `<hub id>` in it. Ids are compared.
        accept: write what is found as the new snapshots; needs a reason, refused where the variable CI is set.
        reason: one line that stays in the snapshot.

    Raises:
        SpecError: a spec cannot be read; `--accept` without a reason, in CI, or of demo snapshots with another tokenizer.
        TokenizerError: a tokenizer that was asked for cannot be had.
    """
    if accept:
        _refuse_careless(reason)
    if tokenizer is not None and not specs:
        raise SpecError("name the specs that are to be checked on this tokenizer: chatmask check SPEC... --tokenizer DIR")
    choose = _Tokenizers(tokenizer, None if tokenizers is None else Path(tokenizers))
    drifts: list[Drift] = []
    accepted: list[str] = []
    skipped: list[str] = []
    cases = 0
    names = list(specs) or list_specs()
    for like in names:
        spec = load_spec(like)
        folder = snapshot_folder(like, spec)
        kept = {path.stem: _read(path) for path in sorted(folder.glob("*.json"))}
        if not specs and not choose.at_hand(spec):
            skipped.append(spec.name)
            continue
        if not kept and not accept:
            drifts.append(Drift(spec.name, "-", ("no_snapshots",), f"  none in {folder}; make them with --accept --reason TEXT"))
            continue
        loaded = choose(spec)
        if accept and tokenizer is not None and spec.demo_template is not None:
            raise SpecError(f"the snapshots of {spec.name} hold the demo tokenizer's ids; --accept them without --tokenizer")
        parser, complaint = _compile(spec, loaded)
        if complaint and tokenizer is not None:
            raise SpecError(complaint)
        for case in sorted({*kept, *(CASES if accept else ())}):
            cases += 1
            before = kept.get(case)
            record = before["conversation"] if before else conversation(case, spec)
            now = take(parser, case, record)
            same = tokenizer is None or (before is not None and before["hashes"].get("tokenizer") == loaded.sha256)
            kinds, detail = ((), "") if before is None else compare(before, now, parser, same_tokenizer=same or accept)
            if accept:
                if before is None or kinds:
                    _write(storage or Storage(), folder / f"{case}.json", now, before, str(reason), kinds)
                    accepted.append(f"{spec.name}/{case}")
            elif kinds:
                drifts.append(Drift(spec.name, case, kinds, detail))
        if complaint and not accept and not any(drift.spec == spec.name for drift in drifts):
            drifts.append(Drift(spec.name, "probe", ("parity_broken",), complaint))
        if complaint and accept:
            raise SpecError(f"{complaint}\nnothing may be accepted while the probe fails")
    return CheckReport(len(names) - len(skipped), cases, tuple(drifts), tuple(accepted), tuple(skipped))


class _Tokenizers:
    """Which tokenizer a spec is checked on: the one given, one from the folder, the demo one, or the spec's own by its id."""

    def __init__(self, given: Any, folder: Path | None) -> None:
        self.given = None if given is None else load_tokenizer(given)
        self.folder = folder
        self.last: tuple[Path, Tokenizer] | None = None  # specs of a family lie side by side and share it

    def _path(self, spec: TemplateSpec) -> Path | None:
        if self.folder is None:
            return None
        places = [self.folder / name for name in (spec.name, spec.tokenizer.id) if name]
        return next((place.resolve() for place in places if place.is_dir()), None)

    def at_hand(self, spec: TemplateSpec) -> bool:
        return self.given is not None or spec.demo_template is not None or self._path(spec) is not None

    def __call__(self, spec: TemplateSpec) -> Tokenizer:
        if self.given is not None:
            return self.given
        if spec.demo_template is not None:
            return demo_tokenizer(packaged_template(spec.demo_template))
        path = self._path(spec)
        if path is None:
            if spec.tokenizer.id is None:
                raise SpecError(f"the spec {spec.name} names no tokenizer; give one with --tokenizer DIR")
            return load_tokenizer(spec.tokenizer.id, spec.tokenizer.revision)
        if self.last is None or self.last[0] != path:
            self.last = (path, load_tokenizer(path))
        return self.last[1]


def snapshot_folder(like: SpecLike, spec: TemplateSpec) -> Path:
    """Where a spec's snapshots lie: beside its file, in `snapshots/<name>`; a packaged spec's with the packaged ones."""
    if isinstance(like, TemplateSpec) or specs_dir() in spec_file(like).resolve().parents:
        return specs_dir() / "snapshots" / spec.name
    return spec_file(like).parent / "snapshots" / spec.name


def rewritten_kinds(spec: TemplateSpec) -> list[str]:
    """Which kinds of rewriting (`context`, `emission`) the kept snapshots of a packaged spec show, sorted."""
    kept = [_read(path) for path in sorted((specs_dir() / "snapshots" / spec.name).glob("*.json"))]
    return sorted({kind for value in kept for kind in value.get("rewritten", {}).values()})


def take(parser: Parser, case: str, record: Mapping[str, Any]) -> dict[str, Any]:
    """The snapshot of one conversation, as plain JSON values (unsealed)."""
    base: dict[str, Any] = {
        "spec": parser.spec.name,
        "case": case,
        "about": CASES[case][0] if case in CASES else "",
        "conversation": record,
    }
    hashes = {"template": hashlib.sha256(parser.template_text.encode()).hexdigest(), "tokenizer": parser.loaded.sha256}
    try:
        example = parser.example(_normal(parser, record), oracle=True)
    except RejectedRow as error:
        # some details name the tokenizer by its folder, which is another one on every machine
        detail = error.detail.replace(parser.loaded.name, "this tokenizer")
        base["refused"] = {"reason": error.reason.value, "message": error.message, "detail": detail}
    else:
        thinks = any("reasoning_content" in m for m in record["messages"])
        base |= {
            "kwargs": parser.spec.for_sample(thinks).kwargs,
            "text": example.text,
            "spans": [
                {
                    "message": span.message,
                    "start": span.start,
                    "end": span.end,
                    "trained": span.trained,
                    "reason": span.reason,
                    "text": example.text[turn.start : turn.end],
                }
                for spans, turn in zip(by_turn(example.spans), example.turns, strict=True)
                for span in spans
            ],
            "rewritten": {str(i): kind for i, kind in sorted(example.rewritten.items())},
            "parity": [{"message": b.message, "kind": b.kind, "declared": b.declared} for b in example.parity],
            "straddles": example.straddles,
            "control_text": example.control_text,
            "input_ids": example.input_ids,
            "loss_mask": example.loss_mask,
        }  # fmt: skip
        hashes["text"] = hashlib.sha256(example.text.encode()).hexdigest()
    return {**base, "hashes": hashes}


def compare(
    before: Mapping[str, Any], now: Mapping[str, Any], parser: Parser, same_tokenizer: bool = True
) -> tuple[tuple[str, ...], str]:
    """Kinds of drift between a kept snapshot and a new one, most severe first, and the difference in words."""
    kinds: set[str] = set()
    notes: list[str] = []
    sealed = before.get("sha256")
    if sealed != fingerprint({k: v for k, v in before.items() if k != "sha256"}):
        kinds.add("snapshot_edited")
        notes.append("the snapshot's own sha256 does not fit its contents")
    if ("refused" in before) != ("refused" in now):
        if "refused" in now:
            kinds.add("zero_supervision" if any(before["loss_mask"]) else "refusal_changed")
            notes.append(f"now refused: {now['refused']['reason']}: {now['refused']['detail']}")
        else:
            kinds.add("refusal_changed")
            notes.append(f"was refused ({before['refused']['reason']}), now trains {_trained_text(now)}")
    elif "refused" in before:
        if before["refused"]["reason"] != now["refused"]["reason"]:
            kinds.add("refusal_changed")
            notes.append(
                f"was refused for {before['refused']['reason']}, now for {now['refused']['reason']}: {now['refused']['detail']}"
            )
    else:
        _compare_examples(before, now, parser, same_tokenizer, kinds, notes)
    if same_tokenizer and not kinds and before["hashes"] != now["hashes"]:
        changed = [key for key in now["hashes"] if before["hashes"].get(key) != now["hashes"][key]]
        kinds.add("tokens_changed" if changed == ["tokenizer"] else "text_changed")
        notes.append(
            f"hash of the {' and '.join(changed)} changed, this conversation's text and ids did not; look, then --accept"
        )
    if not kinds:
        return (), ""
    shown = "\n".join(
        f"    {m['role']}: {json.dumps(m.get('content'), ensure_ascii=False)}" for m in before["conversation"]["messages"]
    )
    return tuple(k for k in DRIFTS if k in kinds), "\n".join([*(f"  {note}" for note in notes), "  conversation:", shown])


def _compare_examples(
    before: Mapping[str, Any], now: Mapping[str, Any], parser: Parser, same_tokenizer: bool, kinds: set[str], notes: list[str]
) -> None:
    if before["text"] != now["text"]:
        kinds.add("text_changed")
        at = first_unequal(before["text"], now["text"])
        notes.append(
            f"text, character {at}: was {before['text'][max(0, at - 20) : at + 60]!r}, is {now['text'][max(0, at - 20) : at + 60]!r}"
        )
    if same_tokenizer and before["text"] == now["text"] and before["input_ids"] != now["input_ids"]:
        kinds.add("tokens_changed")
        at = first_unequal(before["input_ids"], now["input_ids"])
        notes.append(
            f"ids, token {at}: was {before['input_ids'][at : at + 4]}, is {now['input_ids'][at : at + 4]} {_context(parser, now, at)}"
        )
    if any(before["loss_mask"]) and not any(now["loss_mask"]):
        kinds.add("zero_supervision")
    for key in ("rewritten", "parity"):
        if before[key] != now[key] and not (key == "parity" and not same_tokenizer):
            kinds.add("parity_broken")
            notes.append(f"{key}: was {json.dumps(before[key])}, is {json.dumps(now[key])}")
    undeclared = [b for b in now["parity"] if not b["declared"]]
    if undeclared:
        kinds.add("parity_broken")
        notes.append(f"message {undeclared[0]['message']}: the trained prefix is not the served prompt ({undeclared[0]['kind']})")
    _compare_spans(before, now, kinds, notes, same_tokenizer)
    if same_tokenizer and before["input_ids"] == now["input_ids"] and before["loss_mask"] != now["loss_mask"]:
        _compare_masks(before, now, parser, kinds, notes)


def _compare_spans(
    before: Mapping[str, Any], now: Mapping[str, Any], kinds: set[str], notes: list[str], same_tokenizer: bool
) -> None:
    """Spans by what they hold: the same under any tokenizer that renders the same text."""
    old, new = _numbered(before["spans"]), _numbered(now["spans"])
    fields = (
        ("message", "start", "end", "trained", "reason", "text") if same_tokenizer else ("message", "trained", "reason", "text")
    )
    for key in sorted({*old, *new}):
        message = key[0]
        a, b = old.get(key), new.get(key)
        if a is not None and b is not None and all(a[f] == b[f] for f in fields):
            continue
        notes.append(f"message {message}: was {_span(a)}, is {_span(b)}")
        if a is None or b is None:
            kinds.add("lost_supervision" if b is None else "boilerplate_supervised")
        elif a["trained"] != b["trained"]:
            kinds.add("lost_supervision" if a["trained"] else "boilerplate_supervised")
        elif a["reason"] != b["reason"] or a["text"] == b["text"]:
            kinds.add("span_moved")
        else:
            _classify_text(a["text"], b["text"], before, message, kinds)


def _numbered(spans: Sequence[Mapping[str, Any]]) -> dict[tuple[int, int], Mapping[str, Any]]:
    """Spans by message and by which of the message's spans they are (SpecForge's may be several)."""
    found: dict[tuple[int, int], Mapping[str, Any]] = {}
    for span in spans:
        found[span["message"], sum(message == span["message"] for message, _ in found)] = span
    return found


def _classify_text(was: str, now: str, before: Mapping[str, Any], message: int, kinds: set[str]) -> None:
    """How one span's text changed: more in front is boilerplate, more behind is the next message's, less is lost."""
    if now.endswith(was):
        kinds.add("boilerplate_supervised")
    elif now.startswith(was):
        messages = before["conversation"]["messages"]
        follows = messages[message + 1]["role"] if message + 1 < len(messages) else ""
        kinds.add("tool_text_supervised" if follows == "tool" and now[len(was) :].strip() else "boilerplate_supervised")
    elif was.startswith(now):
        kinds.add("stop_token_lost")
    elif was.endswith(now):
        kinds.add("lost_supervision")
    else:
        kinds.add("span_moved")


def _compare_masks(before: Mapping[str, Any], now: Mapping[str, Any], parser: Parser, kinds: set[str], notes: list[str]) -> None:
    old, new = before["loss_mask"], now["loss_mask"]
    if len(old) != len(new):
        kinds.add("span_moved")
        notes.append(f"mask: was {len(old)} long, is {len(new)}")
        return
    gained = [k for k, (a, b) in enumerate(zip(old, new, strict=True)) if b and not a]
    lost = [k for k, (a, b) in enumerate(zip(old, new, strict=True)) if a and not b]
    if gained and "tool_text_supervised" not in kinds:
        kinds.add("boilerplate_supervised")
    if lost:
        ends = {s["end"] - 1 for s in before["spans"] if s["trained"]}
        kinds.add("stop_token_lost" if set(lost) <= ends else "lost_supervision")
    at = min(gained + lost)
    notes.append(f"mask, token {at}: was {old[at]}, is {new[at]} {_context(parser, now, at)}")


# --- files ----------------------------------------------------------------------------------------------------------------------


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
        if not isinstance(value, dict) or not {"conversation", "hashes"} <= set(value):
            raise ValueError("fields are missing")
    except ValueError as error:
        raise CheckFailed(f"{path}: not a snapshot ({error}); restore it, or delete it and --accept") from None
    return value


def _write(
    storage: Storage, path: Path, now: Mapping[str, Any], before: Mapping[str, Any] | None, reason: str, kinds: Sequence[str]
) -> None:
    history = [*(before.get("accepted", ()) if before else ()), {"reason": reason, "drift": list(kinds)}]
    body = {**now, "versions": {n: version(n) for n in ("jinja2", "tokenizers")}, "accepted": history}
    body["sha256"] = fingerprint(body)
    for folder in reversed([p for p in (path.parent, *path.parent.parents) if not p.is_dir()]):
        storage.mkdir(folder)
    storage.write_atomic(path, _pretty(body))


def _pretty(value: Mapping[str, Any]) -> bytes:
    """One line a field or a list item, so that a diff shows what changed; ids and mask stay on one line each."""
    lines = []
    for key, item in value.items():
        if (
            key in ("input_ids", "loss_mask", "hashes", "versions", "kwargs", "rewritten")
            or not isinstance(item, (list, dict))
            or not item
        ):
            text = json.dumps(item, ensure_ascii=False)
        elif isinstance(item, list):
            text = "[\n" + ",\n".join(f"    {json.dumps(x, ensure_ascii=False)}" for x in item) + "\n  ]"
        elif key == "conversation":
            inner = ",\n".join(
                f'    "{k}": [\n' + ",\n".join(f"      {json.dumps(x, ensure_ascii=False)}" for x in v) + "\n    ]"
                for k, v in item.items()
            )
            text = "{\n" + inner + "\n  }"
        else:
            text = json.dumps(item, ensure_ascii=False)
        lines.append(f"  {json.dumps(key)}: {text}")
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def _refuse_careless(reason: str | None) -> None:
    if not reason or not reason.strip():
        raise SpecError(
            "--accept needs --reason TEXT: one line that says why the new masks are right; it is kept in the snapshot"
        )
    if os.environ.get("CI"):
        raise SpecError(
            "--accept is refused in CI: look at the drift on a machine of yours, accept there, and commit the snapshots"
        )


# --- small helpers --------------------------------------------------------------------------------------------------------------


def _compile(spec: TemplateSpec, loaded: Tokenizer) -> tuple[Parser, str]:
    """A parser even of a spec that fails its probe (so that the drift can be named), and what the probe says."""
    parser = Parser(spec, loaded, check=False)
    complaints = []
    for variant in parser.variants:
        try:
            compile_probe(parser, variant).raise_if_failed()
        except ChatmaskError as error:
            complaints.append(str(error))
    return parser, "\n".join(complaints)


def _normal(parser: Parser, record: Mapping[str, Any]) -> Any:
    from .conversation import normalise

    return normalise(record, roles=parser.spec.roles)


def _context(parser: Parser, now: Mapping[str, Any], at: int) -> str:
    ids = now["input_ids"]
    return f"in {parser.loaded.decode(ids[max(0, at - 6) : at])!r} >> {parser.loaded.decode(ids[at : at + 1])!r} << {parser.loaded.decode(ids[at + 1 : at + 7])!r}"


def _trained_text(value: Mapping[str, Any]) -> str:
    return ", ".join(repr(s["text"]) for s in value["spans"] if s["trained"])


def _span(span: Mapping[str, Any] | None) -> str:
    if span is None:
        return "no span"
    state = "trained" if span["trained"] else f"not trained ({span['reason']})"
    return f"{state} {span['start']}:{span['end']} {span['text']!r}"


def drift_lines(report: CheckReport) -> Iterable[str]:
    """The report in words, for a terminal."""
    for drift in report.drifts:
        yield f"{drift.spec}/{drift.case}: {', '.join(drift.kinds)}: {DRIFTS[drift.kinds[0]]}"
        yield drift.detail

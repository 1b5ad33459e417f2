"""The ledger: what became of every input line, and what is supervised. One per shard, added up for the build.

`lines = kept + rejected + dropped + blanks` holds in every ledger; `close` checks it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from .errors import CheckFailed
from .example import Example, by_turn


@dataclass
class Ledger:
    """Counts of one shard or one build.

    Attributes:
        lines: input lines (records), blank ones included.
        blanks: lines of nothing but white space.
        kept: lines that gave at least one sample.
        rejects: lines set aside as bad, by reason.
        dropped: lines set aside by a declared option, by reason.
        samples, tokens, supervised_tokens: what was written.
        turns, trained_turns: assistant turns over all samples, and those that are trained.
        untrained: turns that are not trained, by reason.
        rewritten: turns that the template renders otherwise than served, by kind (`context`, `emission`).
        content_dropped: messages of which a declared part was left out.
        control_text: control-token literals found in content.
        straddles: tokens that straddle a span border.
        notes: further counts of the normalisation.
        parity: turns compared with the served prompt, and breaks by kind.
    """

    lines: int = 0
    blanks: int = 0
    kept: int = 0
    rejects: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    samples: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    turns: int = 0
    trained_turns: int = 0
    untrained: Counter[str] = field(default_factory=Counter)
    rewritten: Counter[str] = field(default_factory=lambda: Counter(context=0, emission=0))
    content_dropped: int = 0
    control_text: int = 0
    straddles: int = 0
    notes: Counter[str] = field(default_factory=Counter)
    parity: Counter[str] = field(default_factory=lambda: Counter(turns=0, text=0, tokens=0))

    def add_example(self, example: Example) -> None:
        """Count one sample."""
        self.samples += 1
        self.tokens += len(example.ids)
        assistant = {turn.message for turn in example.turns}  # under `train_on: all_text` other messages have spans, too
        self.supervised_tokens += sum([end - start for _, start, end, trained, _ in example.spans if trained])
        for turn in by_turn(example.spans):
            if assistant and turn[0].message not in assistant:
                continue
            trained = turn[0].trained or len(turn) > 1  # several: trained and not by turns
            self.turns += 1
            self.trained_turns += trained
            if not trained:
                self.untrained[turn[0].reason] += 1
            elif len(turn) > 1:
                self.notes["turns_trained_in_part"] += 1
        self.content_dropped += example.content_dropped
        self.control_text += example.control_text
        self.straddles += example.straddles
        if example.rewritten:
            self.rewritten.update(example.rewritten.values())
        if example.notes:
            self.notes.update(example.notes)
        if example.compared:
            self.parity["turns"] += example.compared
            self.parity.update(found.kind for found in example.parity)

    def close(self, where: str) -> Ledger:
        """Check the equation of promise 4; raises CheckFailed."""
        accounted = self.kept + self.rejects.total() + self.dropped.total() + self.blanks
        if self.lines != accounted:
            raise CheckFailed(
                f"{where}: {self.lines} lines but {accounted} accounted for; this is a defect of chatmask, please report it"
            )
        return self

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, keys as in `build --json`."""
        return {f.name: dict(sorted(v.items())) if isinstance(v := getattr(self, f.name), Counter) else v for f in fields(self)}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Ledger:
        """What `to_dict` gave."""
        result = cls()
        for f in fields(cls):
            given = value[f.name]
            setattr(result, f.name, Counter(given) if isinstance(given, dict) else given)
        return result

    @classmethod
    def total(cls, ledgers: Iterable[Ledger]) -> Ledger:
        """Sum over shards."""
        result = cls()
        for ledger in ledgers:
            for f in fields(cls):
                value = getattr(ledger, f.name)
                if isinstance(value, Counter):
                    getattr(result, f.name).update(value)
                else:
                    setattr(result, f.name, getattr(result, f.name) + value)
        return result

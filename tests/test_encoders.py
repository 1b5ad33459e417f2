"""Encoders that nobody here wrote give the same ids and masks, but for differences that are named (`docs/encoders.md`)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests import encoders
from tests.encoders import PAIRS, RULES, Encoded, Pair, compare

QUICK = {
    "openai-harmony/gpt-oss",
    "encoding_dsv4.py/deepseek-v4-thinking",
    "mistral-common/mistral-nemo",
    "renderers: qwen3/qwen3-thinking",
}


def pair(name: str) -> Pair:
    return next(pair for pair in PAIRS if str(pair) == name)


def unexplained(result: encoders.Result) -> str:
    return "\n".join(f"{name}: {difference}" for name, difference in result.unexplained)


@pytest.mark.parametrize("name", sorted(QUICK))
def test_other_encoders_agree(name: str) -> None:
    """One pair of each encoder: no difference without a rule, in the snapshot cases and a few generated conversations."""
    result = compare(pair(name), generated=3)
    assert result.compared
    assert not result.unexplained, unexplained(result)


@pytest.mark.long
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_all_pairs_agree(pair: Pair) -> None:
    """Every pair, on all conversations of the page: no difference without a rule."""
    result = compare(pair, encoders.GENERATED)
    assert result.compared
    assert not result.unexplained, unexplained(result)


def test_rules_are_used() -> None:
    """Every rule holds for some pair."""
    named = {rule for pair in PAIRS for rule in pair.rules}
    assert named == set(RULES)


def _wrong(how: str, pair: Pair) -> Pair:
    """The pair with an encoder that is wrong in one place of each conversation: at the start or the end of its last sampled run."""
    encode = encoders.encoder(pair)

    def wrong(record: encoders.Conversation) -> Encoded:
        done = encode(record)
        ids, mask = list(done.ids), list(done.mask)
        last = max(k for k, bit in enumerate(mask) if bit)
        first = max(k for k in range(last) if mask[k] == 0) + 1
        if how == "header trained":
            mask[first - 1] = 1
        elif how == "first token untrained":
            mask[first] = 0
        elif how == "end token untrained":
            mask[last] = 0
        elif how == "other id":
            ids[first] = ids[last]
        elif how == "token lost":
            del ids[first], mask[first]
        elif how == "token added":
            ids.insert(first, ids[first])
            mask.insert(first, 1)
        return Encoded(ids, mask)

    return replace(pair, make=lambda parser, folder: wrong)


MISTAKES = ("header trained", "first token untrained", "end token untrained", "other id", "token lost", "token added")


@pytest.mark.parametrize("name", sorted(QUICK))
def test_no_rule_hides_a_wrong_token(name: str) -> None:
    """An encoder that is wrong by one token or by one bit of the mask is noticed in every conversation."""
    for how in MISTAKES:
        result = compare(_wrong(how, pair(name)), generated=0)
        assert {found for found, _ in result.unexplained} == set(result.names), how

"""A small, fast part of the tests in one process: exit code 0 when all hold, 1 at the first that does not.

Run as `python -m tests.mutants.checker PACKAGE_FOLDER`, which must be the folder that `chatmask` is imported from. What is
cheap comes first, since most mutants die of it; the tests of tracing come last, since importing hypothesis takes half a second.
"""

from __future__ import annotations

import random
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import chatmask
from chatmask.conversation import normalise
from chatmask.templates.environment import environment
from tests import public_cases
from tests.properties import forms, made_up, oracles, short


def _render(parser: Any) -> Callable[..., str]:
    template = environment().from_string(parser.template_text)

    def render(messages: list[dict[str, Any]], **options: Any) -> str:
        return template.render(messages=messages, documents=None, **options)

    return render


def _all_hold(check: Callable[..., Any], conversations: list[dict[str, Any]], *more: Any) -> None:
    for conversation in conversations:
        check(conversation, *more)


def _turns(spec: str) -> None:
    _all_hold(partial(oracles.check_turns, oracles.parser_of(spec, "demo")), oracles.good(spec, 1, 6))


def _inline() -> None:
    """What a parser refuses of a conversation that no policy went through before."""
    parser = oracles.parser_of("qwen3-thinking", "demo")
    for answer in ({"content": "<think>a"}, {"content": "<think>a</think>b", "reasoning_content": "c"}):
        talk = [{"role": "user", "content": "q"}, {"role": "assistant", **answer}]
        try:
            parser.example(normalise({"messages": talk}))
        except chatmask.RejectedRow:
            continue
        raise AssertionError(f"taken: {answer}")


def checks() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Every check by name, in order."""
    for spec in oracles.SPECS:
        yield f"turns {spec}", partial(_turns, spec)
    for case in public_cases.CASES:
        if not case.overrides:
            yield f"case {case.report} {case.spec}", partial(public_cases.check_case, case)
    yield "inline blocks", _inline
    yield "drops", made_up.check_drops
    yield "added system", made_up.check_added_system
    yield "argument forms", made_up.check_argument_forms
    yield "calls named in words", made_up.check_calls_named_in_words
    yield "what follows the end", made_up.check_what_follows_the_end
    yield "foreign text", made_up.check_foreign_text
    yield "composed control tokens", made_up.check_composed
    for form in forms.CHECKS:
        yield form.__name__, form
    yield "short ways", short.check_short_ways
    rng, refused = random.Random(3), Counter[str]()
    for spec in oracles.SPECS:
        parser = oracles.parser_of(spec, "demo")
        for lead in ("\n", "\n\n", " "):
            yield f"lead {spec}", partial(oracles.check_lead, parser, lead)
        yield f"poison {spec}", partial(_all_hold, partial(oracles.check_poison, parser), oracles.good(spec, 2, 5), rng, refused)
        yield (
            f"hostile {spec}",
            partial(_all_hold, partial(oracles.check_hostile, parser), oracles.hostile_for(parser, 3, 5), refused),
        )
        yield (
            f"parity {spec}",
            partial(
                _all_hold,
                partial(oracles.check_parity, parser),
                [*oracles.good(spec, 4, 4), oracles.fitting(oracles.agent_steps(), spec)],
                _render(parser),
            ),
        )
        for conversation in oracles.good(spec, 5, 3):
            assistants = [i for i, m in enumerate(conversation["messages"]) if m["role"] == "assistant"]
            yield f"flags {spec}", partial(oracles.check_flags, parser, conversation, set(assistants[:1]))
            yield f"all flags {spec}", partial(oracles.check_flags, parser, conversation, set(assistants))
    for case in public_cases.CASES:
        if case.overrides:
            yield f"case {case.report} {case.spec} {case.overrides}", partial(public_cases.check_case, case)
    yield "tracing", _tracing


def _tracing() -> None:
    from tests.properties import test_tracing

    for style in test_tracing.STYLES:
        test_tracing.test_each_message_owns_its_words(style)
    test_tracing.test_marks_that_get_lost_take_no_text_with_them()
    test_tracing.test_marked_text_behaves_as_the_string_it_is()


def main(package: str) -> int:
    """Run the checks in order and stop at the first failure; returns the exit code."""
    assert chatmask.__file__ is not None
    found = Path(chatmask.__file__).resolve().parent
    if found != Path(package).resolve():
        print(f"chatmask was imported from {found}, not from {package}", file=sys.stderr)
        return 2
    name = "compiling the specs"
    try:
        for at, check in checks():
            name = at
            check()
    except Exception:  # a mutant may raise anything
        traceback.print_exc(limit=-3)
        print(f"noticed by: {name}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

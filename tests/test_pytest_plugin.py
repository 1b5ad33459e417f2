"""The pytest plugin: one line makes a test of a spec's snapshots."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from chatmask.templates.registry import specs_dir

pytest_plugins = ["pytester"]


@pytest.fixture
def drifted(tmp_path: Path) -> Path:
    """A spec that trains one tag too much, with the packaged snapshots beside it."""
    path = tmp_path / "ling-3.0-thinking.yaml"
    path.write_text('name: ling-3.0-thinking\nextends: ling-3.0-thinking\nassistant: {header: "<role>ASSISTANT</role>\\n"}\n')
    shutil.copytree(specs_dir() / "snapshots" / "ling-3.0-thinking", tmp_path / "snapshots" / "ling-3.0-thinking")
    return path


def test_one_line_of_configuration_makes_a_test(pytester: pytest.Pytester, drifted: Path) -> None:
    """Each spec named in the ini file is one test; a drift fails it and is shown in words, without a traceback."""
    pytester.makeini(f"[pytest]\nchatmask_check =\n  ling-3.0\n  {drifted}\n")
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*boilerplate_supervised*"])
    result.stdout.no_fnmatch_line("*Traceback*")


def test_the_option_and_the_fixture_do_the_same(pytester: pytest.Pytester, drifted: Path) -> None:
    """`--chatmask-check SPEC` and the fixture `chatmask_check` run the same check."""
    pytester.makepyfile(
        f"""
        import pytest

        def test_holds(chatmask_check):
            chatmask_check("qwen3-thinking")

        def test_drifts(chatmask_check):
            with pytest.raises(AssertionError, match="boilerplate_supervised"):
                chatmask_check({str(drifted)!r})
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "--chatmask-check", "ling-3.0-auto")
    result.assert_outcomes(passed=3)


def test_an_unknown_spec_fails_by_name(pytester: pytest.Pytester) -> None:
    """A spec that does not exist is a failed test that names near ones, never a test that is not there."""
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "--chatmask-check", "ling-3.0-thinkin")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*did you mean*ling-3.0-thinking*"])

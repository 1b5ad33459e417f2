"""The package as installed: the wheel carries specs, snapshots and the demo tokenizer; imports stay light; docs are true."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the repository."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--outdir", str(folder), str(ROOT)], check=True, capture_output=True
    )
    return next(folder.glob("*.whl"))


def test_the_wheel_builds_a_dataset_elsewhere(wheel: Path, tmp_path: Path) -> None:
    """Unpacked in an empty folder, without the repository, the wheel builds, checks and inspects."""
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    (tmp_path / "raw.jsonl").write_bytes((ROOT / "fixtures" / "swe_raw.jsonl").read_bytes())
    for arguments in (
        ["build", "--spec", "ling-3.0-thinking", "--demo", "raw.jsonl"],
        ["verify", "raw.ling-3.0-thinking"],
        ["check"],
        ["inspect", "raw.ling-3.0-thinking", "--row", "0"],
    ):
        script = (
            f"import sys; sys.path.insert(0, {str(site)!r}); import chatmask; assert chatmask.__file__.startswith({str(site)!r});"
            f"from chatmask.cli import main; sys.argv = ['chatmask', *{arguments!r}]; main()"
        )
        done = subprocess.run([sys.executable, "-I", "-c", script], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_nothing_heavy_is_imported_before_it_is_needed() -> None:
    """The command line's help imports neither numpy nor pyarrow; a build imports neither torch, datasets nor transformers."""
    script = "import sys, chatmask.cli; print({'numpy', 'pyarrow', 'pydantic', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip() == "set()"
    script = (
        "import sys, tempfile, chatmask;"
        f"chatmask.build({str(ROOT / 'fixtures' / 'swe_raw.jsonl')!r}, 'ling-3.0-thinking', tempfile.mkdtemp() + '/d', demo=True);"
        "print({'torch', 'datasets', 'transformers', 'pandas'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip() == "set()"


def test_every_test_says_what_it_promises() -> None:
    """Each test has a docstring of one sentence."""
    silent = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                text = ast.get_docstring(node) or ""
                if not text.strip().endswith((".", "?", ")")) or len(text.split("\n\n")) > 1:
                    silent.append(f"{path.name}:{node.name}")
    assert silent == []


def test_public_names_exist() -> None:
    """Every name in `chatmask.__all__` can be imported."""
    import chatmask

    assert all(getattr(chatmask, name) is not None for name in chatmask.__all__)


def test_no_pickle_and_no_remote_code() -> None:
    """The package never unpickles, and never turns on trust_remote_code."""
    for path in (ROOT / "chatmask").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"\bpickle\.(load|loads)|trust_remote_code\s*=\s*True|\beval\(|\bexec\(", text), path


def test_the_readme_shows_what_the_commands_print() -> None:
    """The report in the README's demo block is that of a build made now, line by line."""
    import chatmask
    from chatmask.cli import _ledger_lines

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    import tempfile

    result = chatmask.build(ROOT / "fixtures" / "swe_raw.jsonl", "ling-3.0-thinking", tempfile.mkdtemp() + "/d", demo=True)
    shown = [line for line in _ledger_lines(result)[1:] if not line.startswith("  time")]
    assert len(shown) >= 6
    for line in shown:
        assert line in readme


def test_the_readme_counts_the_specs() -> None:
    """The number of specs in the README is the number that `chatmask specs list` prints."""
    from chatmask.templates.registry import list_specs

    found = re.search(r"`chatmask specs list` shows (\d+)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert found is not None
    assert int(found.group(1)) == len(list_specs())

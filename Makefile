# make demo, make test: a fresh clone with Python 3.11 to 3.13 and pip is enough
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

LOW := .venv-lowest
BENCH := .venv-bench

.PHONY: demo test test-long test-lowest lint docs bench clean

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

$(STAMP): pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@ $(VENV)/.demo

demo: $(VENV)/.demo
	@$(BIN)/chatmask build --spec ling-3.0-thinking --demo fixtures/swe_raw.jsonl
	@$(BIN)/chatmask inspect swe_raw.ling-3.0-thinking --row 9

test: $(STAMP)
	$(BIN)/python -m pytest -m "not long" -n 2

test-long: $(STAMP)
	$(BIN)/python -m pytest -n 2

$(LOW)/.installed: pyproject.toml tests/lowest.txt
	$(PYTHON) -m venv $(LOW)
	$(LOW)/bin/python -m pip install --quiet --disable-pip-version-check -e . pytest pytest-xdist hypothesis -c tests/lowest.txt
	touch $@

# the snapshots again, with the lowest versions that pyproject.toml allows
test-lowest: $(LOW)/.installed
	$(LOW)/bin/python -m pytest tests/test_check.py tests/test_snapshots_real.py tests/test_specforge.py -m "not long" -n 2

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python scripts/cli_reference.py --check

docs: $(STAMP)
	$(BIN)/python scripts/cli_reference.py

$(BENCH)/.installed: pyproject.toml benchmarks/requirements.txt
	$(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/python -m pip install --quiet --disable-pip-version-check -e . -r benchmarks/requirements.txt
	touch $@

# ratios to other programs, written to docs/benchmarks.md; FULL=1: larger slices; memory against the number of rows
bench: $(BENCH)/.installed
	$(BENCH)/bin/python -m benchmarks.run $(if $(FULL),--full) $(BENCH_OPTIONS)
	$(BENCH)/bin/python benchmarks/memory.py

clean:
	rm -rf $(VENV) $(LOW) $(BENCH) swe_raw.* dist

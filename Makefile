# The lock pins every package and its hash; `make lock` writes it anew.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: install run test check crash lock clean

install: $(STAMP)

$(STAMP): requirements/lock.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/lock.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $(STAMP)

run: install  ## start the daemon in the foreground, with the embedded engine
	exec $(BIN)/ramakv serve --config config.toml

test: install  ## everything that the project promises, without network services
	$(BIN)/pytest $(PYTEST_ARGS)

check: install  ## style, types, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

crash: install  ## kill the daemon under load, 30 times, and look for anything lost
	$(BIN)/python -m tests.crash_rounds --rounds $(or $(ROUNDS),30)

lock:  ## write requirements/lock.txt anew (needs uv)
	uv pip compile --universal --generate-hashes --no-header \
	    --python-version 3.11 --group dev pyproject.toml --output-file requirements/lock.txt

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist

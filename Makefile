# The lock pins every package and its hash; `make lock` writes it anew.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: install run test test-lmcache check crash churn faults soak mutants lock clean fuzz overload idle test-openapi bench bench-quick bench-residency test-browser screenshots package

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

# A slow install, and not part of `test`. A CPU build of torch is enough: where the index gives a
# CUDA one, name another, as in `make test-lmcache TORCH=/path/to/a/cpu/build.whl`.
TORCH         ?= torch==2.13.0
LMCACHE_VENV  := .venv-lmcache
LMCACHE_PIP   := $(LMCACHE_VENV)/bin/pip --quiet --disable-pip-version-check
LMCACHE_STAMP := $(LMCACHE_VENV)/.installed

test-lmcache: install $(LMCACHE_STAMP)  ## the client and the embedded engine beside a real LMCache
	RAMAKV_REAL_LMCACHE=$(CURDIR)/$(LMCACHE_VENV)/bin/python \
	    $(BIN)/pytest $(PYTEST_ARGS) tests/test_lmcache_real.py

$(LMCACHE_STAMP): requirements/lmcache-real.txt | install
	$(BIN)/python -m venv $(LMCACHE_VENV)
	$(LMCACHE_PIP) install $(TORCH)
	$(LMCACHE_PIP) install --no-deps lmcache==0.4.4
	$(LMCACHE_PIP) install -r requirements/lmcache-real.txt
	touch $(LMCACHE_STAMP)

check: install  ## style, types, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

crash: install  ## kill the daemon 200 times: at work, starting, migrating, stopping
	$(BIN)/python -m tests.crash --rounds $(or $(ROUNDS),200) $(if $(SEED),--seed $(SEED))

churn: install  ## sessions and chunks that are new all the time, for 10 minutes: nothing may grow
	$(BIN)/python -m tests.churn --minutes $(or $(MINUTES),10) $(if $(SEED),--seed $(SEED))

faults: install  ## let every single operation fail, and kill the daemon at every point
	RAMAKV_EVERY_FAULT=1 $(BIN)/pytest $(PYTEST_ARGS) --durations=0 tests/simulation

soak: install  ## play made-up histories of events and faults to the service for MINUTES
	$(BIN)/python -m tests.simulation soak --minutes $(or $(MINUTES),10)

# Its own environment: the fuzzer is large, and nothing else needs it.
FUZZ_VENV  := .venv-fuzz
FUZZ_PIP   := $(FUZZ_VENV)/bin/pip --quiet --disable-pip-version-check
FUZZ_STAMP := $(FUZZ_VENV)/.installed

fuzz: $(FUZZ_STAMP)  ## search the decoder for bytes that break it, for SECONDS=60
	$(FUZZ_VENV)/bin/python -m tests.hostile.fuzz_decoder --seconds $(or $(SECONDS),60)

$(FUZZ_STAMP): requirements/fuzz.txt requirements/lock.txt | install
	$(BIN)/python -m venv $(FUZZ_VENV)
	$(FUZZ_PIP) install --require-hashes -r requirements/lock.txt
	$(FUZZ_PIP) install -r requirements/fuzz.txt
	touch $(FUZZ_STAMP)

overload: install  ## give the daemon more than it can bear, for SECONDS=60, and print figures
	$(BIN)/python -m tests.hostile.overload --seconds $(or $(SECONDS),60)

idle: install  ## what 5,000 idle connections cost
	$(BIN)/python -m tests.hostile.idle --connections $(or $(CONNECTIONS),5000)

OPENAPI_VENV  := .venv-openapi
OPENAPI_STAMP := $(OPENAPI_VENV)/.installed

test-openapi: install $(OPENAPI_STAMP)  ## check docs/openapi.json, and have schemathesis play it
	$(OPENAPI_VENV)/bin/openapi-spec-validator docs/openapi.json
	$(BIN)/python -m tests.openapi_live --schemathesis $(OPENAPI_VENV)/bin/schemathesis

$(OPENAPI_STAMP): requirements/openapi.txt | install
	$(BIN)/python -m venv $(OPENAPI_VENV)
	$(OPENAPI_VENV)/bin/pip --quiet --disable-pip-version-check install --require-hashes \
	    -r requirements/openapi.txt
	touch $(OPENAPI_STAMP)

PACKAGE_VENV  := .venv-package
PACKAGE_STAMP := $(PACKAGE_VENV)/.installed

package: install $(PACKAGE_STAMP)  ## build wheel and sdist into dist/, and try each somewhere else
	$(PACKAGE_VENV)/bin/hadolint Containerfile
	$(PACKAGE_VENV)/bin/kubernetes-validate --strict deploy/kubernetes/*.yaml
	$(BIN)/python -m tests.package

$(PACKAGE_STAMP): requirements/package.txt | install
	$(BIN)/python -m venv $(PACKAGE_VENV)
	$(PACKAGE_VENV)/bin/pip --quiet --disable-pip-version-check install --require-hashes \
	    -r requirements/package.txt
	touch $(PACKAGE_STAMP)

mutants: install  ## break ramakv on purpose, one way at a time, and see that tests notice
	$(BIN)/python -m tests.mutants

BROWSER_STAMP := $(VENV)/.browser-installed

test-browser: $(BROWSER_STAMP)  ## the live page in headless Chromium, which is installed where missing
	RAMAKV_BROWSER_TESTS=1 $(BIN)/pytest $(PYTEST_ARGS) tests/browser

screenshots: $(BROWSER_STAMP)  ## take the pictures of the live page in docs/images anew
	$(BIN)/python -m tests.browser.screenshots docs/images

$(BROWSER_STAMP): requirements/browser.txt | install
	command -v chromium >/dev/null || \
	    { apt-get update -qq && apt-get install -y -qq chromium fonts-wqy-zenhei; } || \
	    { echo "install Chromium (Debian: apt-get install chromium), then try again"; exit 1; }
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/browser.txt
	touch $(BROWSER_STAMP)

BENCH_STAMP := $(VENV)/.bench-installed

bench: $(BENCH_STAMP)  ## every figure beside its floor, and the targets: about half an hour (needs wrk)
	$(BIN)/python -m bench run $(BENCH_ARGS)

bench-quick: $(BENCH_STAMP)  ## the same in under two minutes, with fewer scenarios
	$(BIN)/python -m bench run --quick $(BENCH_ARGS)

TRACES ?= $(RAMAKV_TRACES)

bench-residency: $(BENCH_STAMP)  ## replay each trace in the folder TRACES, in virtual time
	@test -d "$(TRACES)" || { echo "name a folder of traces: make bench-residency TRACES=…"; exit 2; }
	set -e; for trace in "$(TRACES)"/*.jsonl.gz; do \
	    $(BIN)/python -m bench.residency "$$trace" \
	        --out build/bench/residency/$$(basename "$$trace" .jsonl.gz) $(BENCH_ARGS); \
	done

$(BENCH_STAMP): requirements/bench.txt | install
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/bench.txt
	touch $(BENCH_STAMP)

lock:  ## write the files in requirements/ anew, but for fuzz and lmcache-real (needs uv)
	uv pip compile --universal --generate-hashes --no-header \
	    --python-version 3.11 --group dev --extra otel pyproject.toml \
	    --output-file requirements/lock.txt
	uv pip compile --universal --generate-hashes --no-header \
	    --python-version 3.11 --group pyproject.toml:bench -c requirements/lock.txt \
	    --output-file requirements/bench.txt
	uv pip compile --universal --generate-hashes --no-header \
	    --python-version 3.11 -c requirements/lock.txt \
	    pyproject.toml --output-file requirements/run.txt
	for group in browser build openapi package; do \
	    uv pip compile --universal --generate-hashes --no-header \
	        --python-version 3.11 --group pyproject.toml:$$group -c requirements/lock.txt \
	        --output-file requirements/$$group.txt || exit 1; \
	done

clean:
	rm -rf $(VENV) $(LMCACHE_VENV) $(FUZZ_VENV) $(OPENAPI_VENV) $(PACKAGE_VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist

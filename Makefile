# Everything a fresh checkout needs: `make demo`, `make test`. Each does its own set-up.

# The first of these that is a working Python 3.11; name another with `make PYTHON=/path/to/python3.11 ...`.
PYTHON ?= $(shell for p in python3.11 python3 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null && echo "$$p" && break; done)
# A version of SGLang, `make test SGLANG=0.5.22`, has an environment of its own; the default has .venv.
SGLANG ?=
VENV := .venv$(SGLANG:%=-%)
BIN := $(VENV)/bin
READY := $(VENV)/.setup/done
# `make setup COMPILE=no` does without compiling the router's hot modules, which takes a minute or two.
COMPILE ?=
PYTEST_ARGS ?=
SMOKE := tests/patches tests/engine tests/test_plugin.py tests/integration/cache/test_same_answer.py \
	tests/integration/pd/test_pd.py
# Tests of the modules that `make setup` compiles.
HOT := tests/fuzz tests/cost_model tests/radix_global tests/engine/cache tests/engine/events \
	$(addprefix tests/router/,http index policies placing dispatch fleet telemetry tenancy api tokens app endpoints)

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-fast test-sources smoke test-long test-rdma check compile current format docs docs-serve dist lock clean distclean

help:  ## Show the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile

setup: $(READY)  ## Prepare .venv (CPU build; SGLANG=VERSION: .venv-VERSION); does only what is missing

$(READY): pyproject.toml $(wildcard requirements/*.txt) sglang_ext/patches/versions.py scripts/setup.py
	@if [ -z "$(PYTHON)" ]; then \
		echo "make: no Python 3.11 found as python3.11, python3 or python. Install it, or name it:" \
			"make PYTHON=/path/to/python3.11" >&2; exit 1; fi
	@"$(PYTHON)" scripts/setup.py --venv $(VENV) $(SGLANG:%=--sglang %) $(if $(filter no,$(COMPILE)),--no-compile)

demo: $(READY)  ## Hold conversations with servers that share their KV, then with prefill and decode apart
	@$(BIN)/python -m examples.demo

check: $(READY)  ## Lint, formatting and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/python -m mypy

compile: $(READY)  ## Compile the router's hot modules, where there is a C compiler (a minute or two); again after edits
	$(BIN)/python scripts/compile_router.py

test-sources: $(READY)  ## Tests of the compiled modules, without compiling: what runs where there is no C compiler
	SGLANG_EXT_NATIVE=0 $(BIN)/python -m pytest -q $(HOT) $(PYTEST_ARGS)

format: $(READY)  ## Put the formatting right
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

test: check current  ## All tests in their short form (after `make check`), with the hot modules compiled
	$(BIN)/python scripts/run_tests.py $(PYTEST_ARGS)

test-fast: $(READY) current  ## Tests that start no server and take seconds, in under two minutes
	$(BIN)/python scripts/run_tests.py --fast $(PYTEST_ARGS)

current: $(READY)  # Compiled modules of these sources, where there is a C compiler
	@$(BIN)/python scripts/compile_router.py || true

smoke: $(READY)  ## What touches SGLang, a server and a prefill-decode pair; for SGLANG=VERSION
	$(BIN)/python -m pytest $(SMOKE) $(PYTEST_ARGS)

test-long: check current  ## All tests in their long form: full matrices and counts, hours
	$(BIN)/python -m pytest --long --durations=30 $(PYTEST_ARGS)

test-rdma: $(READY)  ## The RDMA transport in a virtual machine with Soft-RoCE; skips where qemu cannot run
	@bash tests/rdma/run.sh $(BIN)/python; status=$$?; [ $$status = 77 ] || exit $$status

docs: $(READY)  ## Build the documentation's site into build/site
	$(BIN)/python -m mkdocs build --strict

docs-serve: $(READY)  ## Serve the documentation on http://127.0.0.1:8000, and follow its changes
	$(BIN)/python -m mkdocs serve --strict --dev-addr 127.0.0.1:8000

dist: $(READY)  ## Build wheel, sdist and the client packages into dist/, each tried in a fresh environment
	$(BIN)/python scripts/dist.py

lock:  ## Resolve the dependencies anew and write requirements/
	@"$(PYTHON)" scripts/setup.py --lock

clean:  ## Remove build outputs and caches
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .numba_cache
	find . -path './.venv*' -prune -o -name __pycache__ -type d -print0 | xargs -0r rm -rf

distclean: clean  ## Remove the environments too
	rm -rf .venv .venv-*

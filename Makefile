# Everything runs in an environment of its own, $(VENV); the stamp files remember what it holds.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
CODE := benchmarks canopy common draft_service kernels models router tools verify_service
TWO := -n 2 --dist loadfile --no-loadscope-reorder  # files side by side: two cores, and much of a test is waiting
PIP_INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-slow aot prove check check-deploy format protos deploy-files bench clean
.DEFAULT_GOAL := help

help:  ## List the targets.
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 or later found; install one, or say PYTHON=..."; exit 1; }
	@$(PYTHON) -m venv $(VENV) 2>/dev/null || { \
		$(PYTHON) -m venv --clear --without-pip $(VENV) && \
		$(PYTHON) -m pip --python $@ install --quiet --disable-pip-version-check pip; }

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing canopy into $(VENV)"
	@$(PIP_INSTALL) -e .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	@echo "installing the tools of test and check into $(VENV)"
	@$(PIP_INSTALL) -e '.[test,train]'
	@touch $@

$(VENV)/.installed-tpu: $(VENV)/.installed-test
	@echo "installing the compiler for TPU into $(VENV)"
	@$(PIP_INSTALL) -e '.[tpu]'
	@touch $@

$(VENV)/.installed-deploy: $(VENV)/.installed-test tools/fetch_helm.py
	@echo "installing the tools of check-deploy into $(VENV)"
	@$(PIP_INSTALL) -e '.[deploy]'
	@$(BIN)/python tools/fetch_helm.py $(BIN)
	@touch $@

demo: $(VENV)/.installed  ## Fetch a model, start the three services, stream an answer.
	@$(BIN)/canopy demo

test: $(VENV)/.installed-test  ## The fast suite, end-to-end tests included.
	$(BIN)/python -m pytest -m "e2e and not slow" tests/e2e
	$(BIN)/python -m pytest $(TWO) -m "not e2e and not slow and not deploy and not aot"

test-slow: $(VENV)/.installed-test $(VENV)/.installed-deploy  ## What the fast suite leaves out.
	$(BIN)/python -m pytest -m slow

aot: $(VENV)/.installed-tpu  ## Compile the kernels for every TPU generation; needs no TPU.
	$(BIN)/python -m pytest -n 2 -m aot tests/aot

prove: $(VENV)/.installed-tpu  ## Real shapes and whole steps, static schedules: what is stale.
	$(BIN)/python -m benchmarks.prove

check: $(VENV)/.installed-test  ## Format, lint, types, protos.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy $(CODE)
	$(BIN)/buf lint protos

check-deploy: $(VENV)/.installed-deploy  ## Chart, rules, dashboards and their queries on a live stack.
	@for tool in promtool prometheus; do command -v $$tool >/dev/null || { \
		echo "make: $$tool is missing; install Debian's package prometheus"; exit 1; }; done
	$(BIN)/python -m pytest -m "deploy and not slow" tests/deploy

format: $(VENV)/.installed-test  ## Rewrite what check would complain of, where a tool can.
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/buf format --write protos

protos: $(VENV)/.installed-test  ## Generate canopy/v1 from protos/.
	$(BIN)/python tools/generate_stubs.py

deploy-files: $(VENV)/.installed-deploy  ## Generate the chart's schema, dashboards and docs/metrics.md.
	$(BIN)/python -m tools.chart_schema
	$(BIN)/python -m tools.metrics_doc
	$(BIN)/python -m tools.dashboards

bench: $(VENV)/.installed  ## Losslessness and speed on a few prompts of our own.
	$(BIN)/python -m benchmarks.lossless --limit 4 --max-tokens 48
	$(BIN)/python -m benchmarks.decode --limit 4 --max-tokens 64

clean:  ## Remove the environment and what tools leave behind.
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# kvlaunch: everything a checkout does. A fresh machine needs make and Python 3.11 with venv.
#
#   make env      build what an engine needs, kvlaunch in it; prints the environment's folder as its last line
#   make up       build it and serve: kvlaunch engine=$(ENGINE) $(ARGS)
#   make test     build both engines' environments, then all checks and all tests, in each what belongs to it
#   make check    lint, format, types, documentation
#   make chaos    repeat the tests of failures N times, and report
#   make bench    benchmarks: a table, and JSON in benchmarks/results
#   make docs     the documentation as a site in site/
#   make lock     resolve locks/*.in again and rewrite locks/*.txt
#   make clean    remove what was built in this checkout (the shared base environment stays)

PYTHON ?= python3.11
ENGINE ?= vllm
ARGS ?= tp=2 pp=2 model=tiny-qwen3
TESTS ?= tests
PYTEST_ARGS ?=
BENCH_ARGS ?=
N ?= 3
# Added to pip's command line when the base environment is built, and by `make lock`.
PIP_ARGS ?=
export PIP_ARGS
# The theme's announcements are no warnings of ours.
export NO_MKDOCS_2_WARNING := 1

BIN := .venv/$(ENGINE)/bin
STEP := $(BIN)/python tools/steps.py

.DEFAULT_GOAL := help
.PHONY: help env up test check chaos bench docs lock clean

help:
	@sed -n 's/^#   //p' Makefile

env:
	@$(PYTHON) tools/env.py $(ENGINE)

up: env
	@exec $(BIN)/kvlaunch engine=$(ENGINE) $(ARGS)

check: env
	@$(STEP) "ruff check" -- $(BIN)/ruff check .
	@$(STEP) "ruff format" -- $(BIN)/ruff format --check .
	@$(STEP) "mypy --strict" -- $(BIN)/mypy --strict kvlaunch tools
	@$(STEP) "key table of the documentation" -- $(BIN)/python tools/config_docs.py --check
	@$(STEP) "support table of the documentation" -- $(BIN)/python tools/support_docs.py --check
	@$(STEP) "mkdocs build --strict" -- $(BIN)/mkdocs build --strict

# Last, so that pytest's closing line is the last thing said.
test: check
	@for engine in vllm sglang; do $(PYTHON) tools/env.py $$engine >/dev/null || exit; done
	@exec $(PYTHON) tools/run_tests.py $(TESTS) $(PYTEST_ARGS)

chaos: env
	@exec $(BIN)/python tools/chaos.py $(N) $(PYTEST_ARGS)

bench: env
	@exec $(BIN)/python -m benchmarks $(BENCH_ARGS)

docs: env
	@$(STEP) "key table of the documentation" -- $(BIN)/python tools/config_docs.py
	@$(STEP) "support table of the documentation" -- $(BIN)/python tools/support_docs.py
	@$(STEP) "mkdocs build" -- $(BIN)/mkdocs build --strict
	@echo "site/index.html"

lock:
	@$(PYTHON) tools/lock.py

clean:
	rm -rf .venv build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find kvlaunch tests benchmarks tools -name __pycache__ -prune -exec rm -rf {} +

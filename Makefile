# `make` lists the targets. Each installs what it needs into .venv; nothing is done twice.

PYTHON ?= python3
BIN := .venv/bin
INSTALL = $(PYTHON) tools/install.py

# Some images set it, and then every start compiles thousands of modules anew: twice the time.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo serve accuracy test lint install clean

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 16

demo:  ## write a tiny NVFP4 checkpoint, serve it, compare it with a reference
	@started=$$(date +%s.%N) && $(INSTALL) quantize && exec $(BIN)/python tools/demo.py --started $$started $(ARGS)

serve:  ## serve a checkpoint: make serve MODEL=PATH [ARGS='--port 8000 …']
	@test -n "$(MODEL)" || { echo "Say what to serve: make serve MODEL=PATH [ARGS='…']" >&2; exit 2; }
	@$(INSTALL) && exec $(BIN)/vllm serve "$(MODEL)" $(ARGS)

accuracy:  ## serve a trained tiny model in each format and judge its answers
	@$(INSTALL) accuracy && HF_HUB_OFFLINE=1 $(BIN)/python tools/accuracy.py $(ARGS)

test:  ## run the tests: make test [ARGS='tests/fork -x']
	@$(INSTALL) test && HF_HUB_OFFLINE=1 $(BIN)/python -m pytest $(ARGS)

lint:  ## ruff, mypy and the fork's own checks
	@$(INSTALL) dev
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python tools/type_check.py
	$(BIN)/python ./fork check

install:  ## install the fork with all that development needs
	@$(INSTALL) dev

clean:  ## remove .venv, the composed tree, the demo's files and caches
	rm -rf .venv .fork .demo .accuracy build dist .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

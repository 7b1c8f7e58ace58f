# Everything here works on a fresh Linux machine with Python 3.11 or later, without root.
PYTHON ?= $(firstword $(foreach p,python3.11 python3.12 python3.13 python3.14 python3,$(shell command -v $(p) 2>/dev/null)))
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: quickstart test test-vllm test-sglang check bench clean

quickstart: $(STAMP)
	$(BIN)/sostenuto quickstart

test: $(STAMP)
	$(BIN)/python -m pytest -q -rs

# Each builds an environment for its engine beside ours, once, and starts servers on 127.0.0.1.
# vLLM: ten minutes, 3.4 GB; SOSTENUTO_VLLM_ENV names a folder that holds one, or another place for it.
test-vllm: $(STAMP)
	$(BIN)/python -m benchmarks.vllm_adapter

# SGLang: ten minutes, 2.5 GB; SOSTENUTO_SGLANG_ENV likewise.
test-sglang: $(STAMP)
	$(BIN)/python -m benchmarks.sglang_truth

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright
	$(BIN)/lint-imports

bench: $(STAMP)
	$(BIN)/python benchmarks/foundation.py
	$(BIN)/python benchmarks/scheduling.py
	$(BIN)/python benchmarks/tools.py
	$(BIN)/python benchmarks/recovery.py
	$(BIN)/python benchmarks/publication_gate.py

$(STAMP): pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or later is needed; name it with: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV) || \
	  { echo "the venv module is missing; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	$(BIN)/pip install --quiet --disable-pip-version-check -c requirements.lock -e '.[train,parquet,dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) runs build

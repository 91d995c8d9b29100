# One entry point for people and for CI. Needs Python >= 3.11 and make, nothing else.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Another place to take the torch wheel from, e.g. PIP_ARGS="--index-url URL --extra-index-url URL".
PIP_ARGS ?=
PYTEST_ARGS ?= -n 2 --dist loadgroup
BENCH_ARGS ?=
PROFILE_ARGS ?=

.PHONY: setup check test test-full demo bench profile docs format proto clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt setup.py $(wildcard common/model/native/csrc/*)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "moerelay needs Python 3.11 or newer; set PYTHON=")'
	@echo "Installing moerelay into $(VENV), with what it needs: torch's CPU wheel alone is about 200 MB. It takes a few minutes."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[worker,dev,load]'
	touch $@

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/python scripts/generate_proto.py --check
	$(BIN)/python scripts/generate_openapi.py --check
	$(BIN)/python scripts/generate_config_reference.py --check
	$(BIN)/python scripts/generate_readme_numbers.py --check
	$(BUILD_DOCS)

test: setup
	$(BIN)/python -m pytest -m "not slow" $(PYTEST_ARGS)

test-full: setup
	$(BIN)/python -m pytest $(PYTEST_ARGS)

demo: setup
	$(BIN)/python -m deploy.demo

# Beside vLLM, which is installed into .bench/ unless BENCH_VLLM names an environment that has it. Wants an idle machine,
# and takes half an hour: BENCH_ARGS="--repetitions 3" for less, "--only serving" for one part.
bench: setup
	$(BIN)/python -m benchmarks.bench $(BENCH_ARGS)
	$(if $(BENCH_ARGS),,$(BIN)/python -m benchmarks.scaling)

profile: setup
	$(BIN)/python -m benchmarks.profiling $(PROFILE_ARGS)

# Every page is read anew, because warnings of pages that are not would be lost.
BUILD_DOCS := $(BIN)/python -m sphinx -q -n -E -W --keep-going -d .site/.doctrees docs .site

docs: setup
	$(BUILD_DOCS)

format: setup
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

proto: setup
	$(BIN)/python scripts/generate_proto.py
	$(BIN)/python scripts/generate_openapi.py
	$(BIN)/python scripts/generate_config_reference.py
	$(BIN)/python scripts/generate_readme_numbers.py

clean:
	rm -rf $(VENV) .site .mypy_cache .ruff_cache .pytest_cache

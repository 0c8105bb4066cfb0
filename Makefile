# flashxla. `make demo` and `make test` set everything up by themselves, in .venv of this checkout.
PYTHON ?= python3
JOBS ?= 2
BIN := .venv/bin
NATIVE_SOURCES := CMakeLists.txt $(shell find csrc -type f)

.DEFAULT_GOAL := help
.PHONY: help demo test lint format build wheel lock clean

help:  ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: .venv/built  ## a language model writes text through paged attention compiled by XLA
	@PJRT_DEVICE=CPU $(BIN)/flashxla generate --frontend openxla --temperature 0.6 --top-p 0.9 --max-new-tokens 160

test: lint .venv/built  ## everything that must hold
	@PJRT_DEVICE=CPU $(BIN)/python -m pytest -n $(JOBS)

lint: .venv/built  ## style and types
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/clang-format --dry-run --Werror $$(git ls-files 'csrc/*.h' 'csrc/*.cc')
	@$(BIN)/mypy

format: .venv/built  ## put the style right
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format
	@$(BIN)/clang-format -i $$(git ls-files 'csrc/*.h' 'csrc/*.cc')

build: .venv/built  ## the packages and the native library, in .venv

wheel: .venv/packages  ## dist/flashxla-*.whl, one for every Python
	@$(BIN)/uv build --wheel --out-dir dist

.venv/packages: requirements.lock
	@echo "== packages into .venv (about 3 GB to download, 1 to 3 minutes)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -q "$$(grep -oE '^uv==[^ ]+' requirements.lock)"
	@$(BIN)/uv pip install -q --python $(BIN)/python --require-hashes -r requirements.lock
	@touch $@

.venv/built: .venv/packages pyproject.toml $(NATIVE_SOURCES)
	@echo "== native library (about 1 minute)"
	@$(BIN)/uv pip install -q --python $(BIN)/python --no-deps --editable . -C build.verbose=true
	@touch $@

lock: .venv/packages  ## choose the versions in requirements.lock anew
	@$(BIN)/uv pip compile -q --upgrade pyproject.toml --universal --python-version 3.11 --generate-hashes \
	  --extra torch-xla --extra generate --extra bench --group dev --no-emit-index-url --no-emit-find-links \
	  --custom-compile-command "make lock" -o requirements.lock

clean:  ## forget what was built
	@rm -rf .venv build dist

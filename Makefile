# flashxla. `make demo` and `make test` set everything up by themselves, in .venv of this checkout.
PYTHON ?= python3
JOBS ?= 2
BIN := .venv/bin
VLLM_BIN := .venv-vllm/bin
LEGACY_BIN := .venv-vllm-legacy/bin
TORCHTPU_BIN := .venv-torchtpu/bin
WHEEL_BIN := .venv-wheel/bin
DOCS_BIN := .venv-docs/bin
# Tests of whole programs, which `make test` leaves to `make test-programs`.
PROGRAMS := tests/transformers tests/examples tests/generate
NATIVE_SOURCES := CMakeLists.txt $(shell find csrc -type f -not -path 'csrc/cuda/*')
# What `make cuda` compiles for. `make test` needs one, unless more are there already.
CUDA_ARCHITECTURES ?= 80;90a
TEST_CUDA_ARCHITECTURES ?= 90a
# What a wheel has code for: by default all (wheels/build.py).
WHEEL_CUDA_ARCHITECTURES ?=
NVCC := $(or $(CUDACXX),$(shell command -v nvcc))
CLANG_FORMATTED = $$(git ls-files '*.h' '*.cc' '*.cu' '*.cuh')

.DEFAULT_GOAL := help
.PHONY: help demo test test-programs lint format build docs lock-docs cuda cuda-for-test wheel wheel-cuda test-wheel lock-wheel lock-cuda12 lock \
  vllm test-vllm soak-vllm lock-vllm vllm-legacy test-vllm-legacy lock-vllm-legacy torchtpu test-torchtpu lock-torchtpu clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: .venv/built  ## a language model writes text through paged attention compiled by XLA
	@PJRT_DEVICE=CPU $(BIN)/flashxla generate --frontend openxla --temperature 0.6 --top-p 0.9 --max-new-tokens 160

test: lint .venv/built build/jaxlib cuda-for-test  ## style, types, the operations in every front end
	@# Tests start many processes: without compiled modules each takes seconds more to import PyTorch.
	@PYTHONDONTWRITEBYTECODE= PJRT_DEVICE=CPU $(BIN)/python -m pytest -n $(JOBS) $(addprefix --ignore=,$(PROGRAMS))

test-programs: .venv/built  ## whole programs: generate, models of transformers, the examples
	@PYTHONDONTWRITEBYTECODE= PJRT_DEVICE=CPU $(BIN)/python -m pytest -n $(JOBS) $(PROGRAMS)

lint: .venv/built  ## style and types
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/clang-format --dry-run --Werror $(CLANG_FORMATTED)
	@$(BIN)/mypy

format: .venv/built  ## put the style right
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format
	@$(BIN)/clang-format -i $(CLANG_FORMATTED)

build: .venv/built  ## the packages and the native library, in .venv

cuda: .venv/built build/jaxlib  ## the library for NVIDIA GPUs, in .venv (needs nvcc; JOBS=2 CUDA_ARCHITECTURES="80;90a")
	@$(BIN)/python cmake/build_cuda.py --jobs $(JOBS) --architectures "$(CUDA_ARCHITECTURES)"

# CI's check that it compiles: for one architecture, or what build/cuda is set up for.
cuda-for-test: .venv/built build/jaxlib
ifeq ($(NVCC),)
	@echo "== no nvcc on this machine: the CUDA library is neither built nor tested"
else
	@$(BIN)/python cmake/build_cuda.py --jobs $(JOBS) --default-architectures "$(TEST_CUDA_ARCHITECTURES)"
endif

# The headers that the library is built with: those of the build requirement.
build/jaxlib: pyproject.toml .venv/packages
	@rm -rf $@
	@$(BIN)/uv pip install -q --python $(BIN)/python --no-deps --target $@ "$$(grep -oE 'jaxlib==[0-9.]+' pyproject.toml)"
	@touch $@

# Wheels have a small environment of their own: a compiler, and no framework.
wheel: .venv-wheel/packages  ## dist: flashxla's wheels for x86_64 and aarch64, for every Python, and its sdist
	@$(WHEEL_BIN)/python wheels/build.py cpu

# CUDA=12 without CUDACXX: by a compiler that is fetched.
WHEEL_NVCC := $(or $(CUDACXX),$(if $(filter 12,$(CUDA)),build/cuda12/bin/nvcc))

wheel-cuda: .venv-wheel/packages $(filter build/%,$(WHEEL_NVCC))  ## dist: the wheel of the library for NVIDIA GPUs, flashxla-cuda12 or -cuda13 by nvcc's version (CUDA=12: fetches one)
	@$(if $(WHEEL_NVCC),CUDACXX=$(if $(filter build/%,$(WHEEL_NVCC)),$(CURDIR)/)$(WHEEL_NVCC)) $(WHEEL_BIN)/python wheels/build.py cuda --jobs $(JOBS) \
	  $(if $(CUDA),--cuda $(CUDA)) $(if $(WHEEL_CUDA_ARCHITECTURES),--architectures "$(WHEEL_CUDA_ARCHITECTURES)")

build/cuda12/bin/nvcc: .venv-wheel/packages wheels/cuda12/toolkit.py wheels/cuda12/headers.lock wheels/cuda12/runtime.lock
	@echo "== a compiler of CUDA 12 into build/cuda12 (about 120 MB to download, 10 seconds)"
	@$(WHEEL_BIN)/python wheels/cuda12/toolkit.py
	@touch $@

lock-cuda12: .venv-wheel/packages  ## take the hashes of what wheels/cuda12/*.in name
	@for name in headers runtime; do $(WHEEL_BIN)/uv pip compile -q --no-deps wheels/cuda12/$$name.in --python-version 3.11 \
	  --generate-hashes --no-emit-index-url --no-emit-find-links --custom-compile-command "make lock-cuda12" \
	  -o wheels/cuda12/$$name.lock || exit; done

test-wheel: wheel  ## the wheels and the sdist, checked and installed into empty environments (REQUIRE=3.11,3.12: must be there)
	@$(WHEEL_BIN)/python wheels/test.py $(if $(REQUIRE),--require $(REQUIRE))

.venv-wheel/packages: wheels/requirements.lock
	@echo "== tools for wheels into .venv-wheel (about 200 MB to download, half a minute)"
	@$(PYTHON) -m venv --clear .venv-wheel
	@$(WHEEL_BIN)/python -m pip install -q "$$(grep -oE '^uv==[^ ]+' wheels/requirements.lock)"
	@$(WHEEL_BIN)/uv pip install -q --python $(WHEEL_BIN)/python --no-deps --require-hashes -r wheels/requirements.lock
	@touch $@

lock-wheel: .venv-wheel/packages  ## choose the versions in wheels/requirements.lock anew
	@$(WHEEL_BIN)/uv pip compile -q --upgrade wheels/requirements.in --universal --python-version 3.11 --generate-hashes \
	  --no-emit-package numpy --no-emit-package scipy --no-emit-package ml-dtypes --no-emit-index-url --no-emit-find-links \
	  --custom-compile-command "make lock-wheel" -o wheels/requirements.lock

docs: .venv-docs/packages  ## the documentation as a site, in build/site; a link that leads nowhere is an error
	@$(DOCS_BIN)/mkdocs build -q -f website/mkdocs.yml
	@echo "build/site/index.html"

.venv-docs/packages: website/requirements.lock
	@$(PYTHON) -m venv --clear .venv-docs
	@$(DOCS_BIN)/python -m pip install -q --require-hashes -r website/requirements.lock
	@touch $@

lock-docs: .venv/packages  ## choose the versions in website/requirements.lock anew
	@$(BIN)/uv pip compile -q --upgrade website/requirements.in --universal --python-version 3.11 --generate-hashes \
	  --no-emit-index-url --no-emit-find-links --custom-compile-command "make lock-docs" -o website/requirements.lock

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
	  --extra torch-xla --extra generate --extra bench --group dev --group examples --no-emit-index-url --no-emit-find-links \
	  --custom-compile-command "make lock" -o requirements.lock

# vLLM on XLA has an environment of its own: Python 3.12, and versions that flashxla itself does not depend on.
vllm: .venv-vllm/built  ## vLLM with flashxla, in .venv-vllm (Python 3.12; docs/vllm.md)

test-vllm: .venv-vllm/built  ## vLLM on a CPU: models, scheduling, server
	@PYTHONDONTWRITEBYTECODE= $(VLLM_BIN)/python -m pytest -c vllm-plugin/pyproject.toml --rootdir . -v \
	  -n $(JOBS) tests/vllm

soak-vllm: .venv-vllm/built  ## an hour of random requests and aborts
	@PYTHONDONTWRITEBYTECODE= FLASHXLA_VLLM_SOAK_SECONDS=3600 $(VLLM_BIN)/python -m pytest -c vllm-plugin/pyproject.toml \
	  --rootdir . -o timeout=0 -o faulthandler_timeout=0 -s tests/vllm/test_soak.py

.venv-vllm/packages: vllm-plugin/requirements.lock vllm-plugin/vllm.lock
	@echo "== packages into .venv-vllm (about 3 GB to download, 2 to 4 minutes)"
	@python=$$(vllm-plugin/find-python) && "$$python" -m venv --clear .venv-vllm
	@$(VLLM_BIN)/python -m pip install -q "$$(grep -oE '^uv==[^ ]+' requirements.lock)"
	@$(VLLM_BIN)/uv pip install --python $(VLLM_BIN)/python --no-deps --require-hashes -r vllm-plugin/requirements.lock
	@echo "== vLLM, without kernels of its own (half a minute)"
	@VLLM_TARGET_DEVICE=empty $(VLLM_BIN)/uv pip install --python $(VLLM_BIN)/python --no-deps --no-build-isolation \
	  --no-binary vllm --require-hashes -r vllm-plugin/vllm.lock
	@touch $@

.venv-vllm/built: .venv-vllm/packages pyproject.toml $(NATIVE_SOURCES) $(shell find src -name '*.py') vllm-plugin/pyproject.toml
	@echo "== flashxla into .venv-vllm (about 1 minute)"
	@$(VLLM_BIN)/uv pip install -q --python $(VLLM_BIN)/python --no-deps --reinstall-package flashxla . -C build-dir=build/vllm
	@$(VLLM_BIN)/uv pip install -q --python $(VLLM_BIN)/python --no-deps --editable ./vllm-plugin
	@touch $@

lock-vllm: .venv-vllm/packages  ## choose the versions in vllm-plugin/*.lock anew
	@mkdir -p build
	@$(VLLM_BIN)/python -c "from importlib.metadata import requires; \
	  print(*(r for r in requires('vllm') if 'extra ==' not in r), sep='\n')" > build/vllm-requires.txt
	@$(VLLM_BIN)/uv pip compile -q --upgrade vllm-plugin/requirements.in build/vllm-requires.txt --override vllm-plugin/overrides.txt \
	  --python-version 3.12 --generate-hashes --no-emit-index-url --no-emit-find-links \
	  --custom-compile-command "make lock-vllm" -o vllm-plugin/requirements.lock
	@grep -oE 'vllm==[0-9.]+' vllm-plugin/pyproject.toml | $(VLLM_BIN)/uv pip compile -q - --no-deps --python-version 3.12 \
	  --no-binary vllm --generate-hashes --no-emit-index-url --no-emit-find-links \
	  --custom-compile-command "make lock-vllm" -o vllm-plugin/vllm.lock

# The last vLLM with a runner for PyTorch/XLA, in a third environment.
vllm-legacy: .venv-vllm-legacy/built  ## vLLM 0.13 on PyTorch/XLA with flashxla, in .venv-vllm-legacy (docs/vllm-legacy.md)

test-vllm-legacy: .venv-vllm-legacy/built  ## vLLM 0.13 on a CPU: tokens, scheduling, server
	@PYTHONDONTWRITEBYTECODE= $(LEGACY_BIN)/python -m pytest -c vllm-legacy/pyproject.toml --rootdir . -v tests/vllm_legacy

.venv-vllm-legacy/packages: vllm-legacy/requirements.lock vllm-legacy/vllm.lock
	@echo "== packages into .venv-vllm-legacy (about 3 GB to download, 2 to 4 minutes)"
	@python=$$(vllm-plugin/find-python) && "$$python" -m venv --clear .venv-vllm-legacy
	@$(LEGACY_BIN)/python -m pip install -q "$$(grep -oE '^uv==[^ ]+' requirements.lock)"
	@$(LEGACY_BIN)/uv pip install --python $(LEGACY_BIN)/python --no-deps --require-hashes -r vllm-legacy/requirements.lock
	@echo "== vLLM 0.13, without kernels of its own"
	@VLLM_TARGET_DEVICE=empty $(LEGACY_BIN)/uv pip install --python $(LEGACY_BIN)/python --no-deps --no-build-isolation \
	  --no-binary vllm --require-hashes -r vllm-legacy/vllm.lock
	@touch $@

.venv-vllm-legacy/built: .venv-vllm-legacy/packages pyproject.toml $(NATIVE_SOURCES) $(shell find src -name '*.py') vllm-legacy/pyproject.toml
	@echo "== flashxla into .venv-vllm-legacy (about 1 minute)"
	@$(LEGACY_BIN)/uv pip install -q --python $(LEGACY_BIN)/python --no-deps --reinstall-package flashxla . -C build-dir=build/vllm-legacy
	@$(LEGACY_BIN)/uv pip install -q --python $(LEGACY_BIN)/python --no-deps --editable ./vllm-legacy
	@touch $@

lock-vllm-legacy: .venv-vllm-legacy/packages  ## choose the versions in vllm-legacy/*.lock anew
	@mkdir -p build
	@$(LEGACY_BIN)/python -c "from importlib.metadata import requires; \
	  print(*(r for r in requires('vllm') if 'extra ==' not in r), sep='\n')" > build/vllm-legacy-requires.txt
	@$(LEGACY_BIN)/uv pip compile -q --upgrade vllm-legacy/requirements.in build/vllm-legacy-requires.txt \
	  --override vllm-legacy/overrides.txt --python-version 3.12 --generate-hashes --no-emit-index-url --no-emit-find-links \
	  --custom-compile-command "make lock-vllm-legacy" -o vllm-legacy/requirements.lock
	@grep -oE 'vllm==[0-9.]+' vllm-legacy/pyproject.toml | $(LEGACY_BIN)/uv pip compile -q - --no-deps --python-version 3.12 \
	  --no-binary vllm --generate-hashes --no-emit-index-url --no-emit-find-links \
	  --custom-compile-command "make lock-vllm-legacy" -o vllm-legacy/vllm.lock

# The PyTorch of today on XLA: TorchTPU and torchax, in a fourth environment.
torchtpu: .venv-torchtpu/built  ## TorchTPU and torchax with flashxla, in .venv-torchtpu (Python 3.12)

# Each takes PyTorch's one place for another backend, so each has a process.
test-torchtpu: .venv-torchtpu/built  ## TorchTPU and torchax on a CPU: the operations, in place; programs without Python
	@JAX_PLATFORMS=cpu PYTHONDONTWRITEBYTECODE= $(TORCHTPU_BIN)/python -m pytest -n 2 -k torchtpu \
	  tests/torchtpu tests/ops tests/generate/test_verify.py --frontends torchtpu,torchtpu_compiled
	@JAX_PLATFORMS=cpu PYTHONDONTWRITEBYTECODE= $(TORCHTPU_BIN)/python -m pytest -n 2 \
	  tests/torchax tests/ops tests/generate/test_verify.py -k torchax --frontends torchax,torchax_jit
	@JAX_PLATFORMS=cpu PYTHONDONTWRITEBYTECODE= $(TORCHTPU_BIN)/python -m pytest tests/bench/test_step.py -k front_ends \
	  --frontends torchax
	@# Programs without Python: flashxla export and a C++ program; beside it torch.export and AOTInductor.
	@JAX_PLATFORMS=cpu PYTHONDONTWRITEBYTECODE= $(TORCHTPU_BIN)/python -m pytest -n 2 --dist loadfile tests/export

.venv-torchtpu/packages: torchtpu/requirements.lock
	@echo "== packages into .venv-torchtpu (about 3 GB to download, 2 to 4 minutes)"
	@python=$$(vllm-plugin/find-python) && "$$python" -m venv --clear .venv-torchtpu
	@$(TORCHTPU_BIN)/python -m pip install -q "$$(grep -oE '^uv==[^ ]+' requirements.lock)"
	@$(TORCHTPU_BIN)/uv pip install --python $(TORCHTPU_BIN)/python --no-deps --require-hashes -r torchtpu/requirements.lock
	@touch $@

.venv-torchtpu/built: .venv-torchtpu/packages pyproject.toml $(NATIVE_SOURCES) $(shell find src -name '*.py')
	@echo "== flashxla into .venv-torchtpu (about 1 minute)"
	@$(TORCHTPU_BIN)/uv pip install -q --python $(TORCHTPU_BIN)/python --no-deps --reinstall-package flashxla . -C build-dir=build/torchtpu
	@touch $@

lock-torchtpu: .venv/packages  ## choose the versions in torchtpu/requirements.lock anew
	@$(BIN)/uv pip compile -q --upgrade torchtpu/requirements.in --override torchtpu/overrides.txt \
	  --python-version 3.12 --python-platform x86_64-manylinux_2_31 --generate-hashes --no-emit-index-url --no-emit-find-links \
	  --custom-compile-command "make lock-torchtpu" -o torchtpu/requirements.lock

clean:  ## forget what was built
	@rm -rf .venv .venv-vllm .venv-vllm-legacy .venv-torchtpu .venv-wheel .venv-docs build dist

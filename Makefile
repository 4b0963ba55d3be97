# make train     set up everything and train a robot
# make test      set up everything and pass the tests
# make docs      set up everything and build the documentation into build/site
# make test-all  install every extra (JAX, EnvPool, Minari: 1 GB more) and run all tests that need no GPU, the slow ones too
VENV   ?= .venv
PYTHON ?= python3
TASK   ?= Ant-v5
TIME   ?= 5m
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: setup train test check check-types check-docs check-style check-imports check-collection docs test-all test-slow test-gpu clean

setup: $(READY)

# torch first and pinned: an unpinned install takes gigabytes of CUDA packages. Modules are compiled when they are first
# imported: pip would compile four times as many.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "rayagi needs Python 3.11 or later, this is " + sys.version.split()[0] + "; set PYTHON=python3.12, say")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(READY)

train: setup
	$(BIN)/rayagi train $(TASK) --time $(TIME) --evaluate-every 40

# Two at a time: each of them works on one core.
check: setup
	@$(MAKE) --no-print-directory -j 2 --output-sync check-types check-docs check-style check-imports check-collection

check-types:
	$(BIN)/mypy

check-docs:
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

check-style:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

check-imports:
	$(BIN)/lint-imports

# Every file of tests can be imported, those of slow and GPU tests, too. It compiles them and what they import, for all workers.
check-collection:
	$(BIN)/python -m pytest --collect-only -qq >/dev/null

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# With `apt-get install qemu-user gcc-aarch64-linux-gnu`, the C that orders shared memory is tested for aarch64, too.
# Tests that start Ray mostly wait for its processes: two files of them at a time (tests/cluster/conftest.py), by themselves.
# A head with a dashboard and its jobs are work for all cores.
test: check
	$(BIN)/python -m pytest -n 2 -m "not slow and not gpu" --ignore tests/cluster
	$(BIN)/python -m pytest -m "not slow and not gpu" tests/cluster/test_job_submit.py
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not gpu" tests/cluster --ignore tests/cluster/test_job_submit.py

test-all: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,gpu,envpool,jax,minari]'
	$(MAKE) test
	$(MAKE) test-slow

test-slow: setup
	$(BIN)/python -m pytest -m "slow and not gpu"

# Each file in a process of its own: an error of CUDA may spoil its process. `timeout` also ends one that waits in CUDA.
test-gpu: setup
	@failed=; for file in tests/gpu/test_*.py; do \
		timeout --foreground 480 $(BIN)/python -m pytest $$file || failed="$$failed $$file"; \
	done; \
	test -z "$$failed" || { echo "failed, or not done within 480 s:$$failed"; exit 1; }

clean:
	rm -rf $(VENV) build dist *.egg-info

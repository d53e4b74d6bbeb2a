# Needs make and Python 3.11 or newer; everything else goes into .venv.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/$(if $(filter Windows_NT,$(OS)),Scripts,bin)

# The oldest Python and the lowest versions of all packages that pyproject.toml allows: every operator, and training.
OLDEST_PYTHON ?= python3.11
MINIMUM := .venv-minimum
REAL := .venv-real
FLOOR := .venv-triton
INTEGRATIONS := .venv-integrations
FLOWER := .venv-flower
OPTIMUM := build/optimum
GPU_RUNTIME := build/onnxruntime-gpu
INTEGRATION_TESTS := tests/torch/test_patching.py tests/portable/test_flower.py tests/libraries/test_architectures.py
MINIMUM_TESTS := tests/operators/test_ops.py::test_fewest_dimensions tests/training/test_training.py tests/training/test_checkpoint.py \
	tests/gradients/test_statistics.py tests/test_cli.py::test_help_explains_every_command \
	-k "bfloat16 or training or checkpoint or statistics or help"

# Bytecode is kept, whatever the environment says: a process of the tests that compiles NumPy, Numba and PyTorch from their
# sources takes 4 s longer.
export PYTHONDONTWRITEBYTECODE =

# A process that dies ends the run, where pytest-xdist would replace it and may then wait for ever; so does one whose
# test takes a quarter of an hour, with all its threads' tracebacks. pytest 8 does without the last.
PARALLEL := --numprocesses auto --maxprocesses 4 --max-worker-restart 0 \
	--override-ini faulthandler_timeout=900 --override-ini faulthandler_exit_on_timeout=true

.PHONY: setup train test try gpu test-triton test-avx2 test-gate test-ptx test-threads test-minimum test-portable test-integrations test-onnxruntime-gpu test-real fuzz test-arm64 test-haswell \
	test-nehalem lint docs docs-serve notebooks bench tables dist review clean help

help:
	@echo "make setup   both environments that tests need; with --jobs 2 at once"
	@echo "make train   set up, then train a real ONNX training graph on scanned digits"
	@echo "make test    set up, then run the tests; CASES=all: all combinations of their parameters"
	@echo "make try OP=softmax_grad  one operator, in five seconds once its kernels are compiled"
	@echo "make gpu     on a machine with a GPU, without installing: right? how fast? in eight minutes; DRY=1 without a GPU"
	@echo "make test-triton  compile all CUDA kernels with the oldest Triton, and run some from what they are compiled to"
	@echo "make test-avx2  those of the CPU's kernels once more with AVX2 alone, on a processor that has more"
	@echo "make test-gate  set up, then run every case of the CUDA tests"
	@echo "make test-ptx   set up, then run a tenth of them on what the CUDA kernels are compiled to, without a GPU"
	@echo "make test-threads  tests of all operators, each in four threads at once"
	@echo "make test-minimum  a few of them with the lowest versions of all dependencies"
	@echo "make test-portable  set up, then run exported steps in Node, in Chromium and from C++; needs these, and npm"
	@echo "make test-integrations  with transformers, peft, accelerate, onnxruntime-genai, flwr and optimum-onnx, which it downloads"
	@echo "make test-onnxruntime-gpu  the operators of CUDA's provider with onnxruntime-gpu, which it downloads, without a GPU"
	@echo "make test-real  train models that ship inside packages, which it downloads"
	@echo "make test-arm64  some of them on an emulated arm64; test-haswell, test-nehalem: on older x86-64; need qemu-user"
	@echo "make fuzz    readers of others' files and native calls, SECONDS=60 each; FUZZ: which; downloads atheris"
	@echo "make lint    ruff, mypy, and zizmor on the workflows"
	@echo "make docs    the documentation's site, into build/site; docs-serve shows it while you write"
	@echo "make notebooks  run the notebooks of the documentation anew"
	@echo "make bench   measure every operator against the peers installed"
	@echo "make tables  rewrite the generated tables of README and docs"
	@echo "make dist    sdist and wheels, also such as carry compiled kernels, with their checks, into dist; PACK: which kernels"
	@echo "make review  what scientific-python's repo-review says"
	@echo "make clean   remove the environment"

setup: $(VENV)/.torch $(MINIMUM)/.installed

train: $(VENV)/.train
	$(RUN)/opgrad train examples/digits

# Of a test with several parameters as many cases as have every level of each, of one marked `one_in` a part of them,
# others for each commit; CASES=all runs all.
CASES := levels
CHOSEN := OPGRAD_CASES=$(CASES) OPGRAD_TURN=$$(git rev-parse HEAD 2>/dev/null)

test: $(VENV)/.torch
	$(CHOSEN) $(RUN)/python -m pytest $(PARALLEL) --dist loadfile --no-loadscope-reorder

try: $(VENV)/.torch
	$(RUN)/python tools/try_operator.py $(OP)

# Those that hold for any instruction set are left out, and all where `make test` has run these very kernels.
HELD_DOWN := NUMBA_CPU_NAME=haswell NUMBA_CPU_FEATURES=+avx,+avx2,+fma,+f16c,+bmi,+bmi2
# One test in so many, others for each commit.
AVX2_SHARE := 1
VECTOR_BYTES := from opgrad.cpu.compiler.decorators import vector_bytes; print(vector_bytes())

test-avx2: $(VENV)/.torch
	@set -e; bytes=$$($(RUN)/python -c "$(VECTOR_BYTES)"); if [ "$$bytes" -gt 32 ]; then set -x; \
		$(HELD_DOWN) OPGRAD_SHARE=$(AVX2_SHARE) $(CHOSEN) $(RUN)/python -m pytest $(PARALLEL) --dist loadfile \
			-m "not any_cpu" tests/cpu tests/contract tests/operators; \
	else echo "test-avx2: vectors of this processor have $$bytes bytes, those of AVX2 32: nothing to do"; fi

# Everything that only a device can show, with the Python, PyTorch and Triton that are there.
OUT ?= build/gpu
DRY :=

gpu:
	$(if $(wildcard $(VENV)/.torch),$(RUN)/python,$(PYTHON)) tools/gpu --out $(OUT) $(if $(DRY),--dry)

# The first steps of it, with the lowest Triton that pyproject.toml allows.
test-triton: $(FLOOR)/.installed
	$(FLOOR)/bin/python tools/gpu --dry --steps facts,smoke,compile,correctness --out build/gpu-triton

test-gate: $(VENV)/.torch
	OPGRAD_GATE=full $(RUN)/python -m pytest tests/cuda

# For A100, H100 and H200, and B200.
ARCHITECTURES := 80 90 100
PTX_TESTS := tests/cuda/test_grid.py tests/cuda/test_elements.py tests/cuda/test_gather.py \
	tests/cuda/test_regimes.py tests/cuda/test_primitive.py tests/cuda/test_sample_losses.py \
	tests/cuda/test_vocab_parallel.py tests/libraries/test_cupy.py
# One test in so many for each architecture, others for each. PTX_SHARE=1 runs all of them, GATE=full every case of each.
PTX_SHARE := 10
GATE :=

test-ptx: $(VENV)/.torch
	set -e; for architecture in $(ARCHITECTURES); do OPGRAD_PTX=$$architecture OPGRAD_TURN=$$architecture OPGRAD_SHARE=$(PTX_SHARE) \
		OPGRAD_GATE=$(GATE) $(RUN)/python -m pytest $(PARALLEL) $(PTX_TESTS); done

# Each test runs in four threads at once.
test-threads: $(VENV)/.threads $(VENV)/.torch
	$(RUN)/python -m pytest -p no:xdist --parallel-threads 4 tests/operators/test_ops.py -k fewest_dimensions

# What an old package says of newer ones that it imports is no fault of ours.
test-minimum: $(MINIMUM)/.installed
	$(MINIMUM)/bin/python -m pytest $(PARALLEL) --dist loadfile -W ignore::DeprecationWarning \
		$(MINIMUM_TESTS)

# Chromium is the system's: CHROMIUM names it where it is not /usr/bin/chromium.
test-portable: $(VENV)/.portable examples/browser/node_modules examples/node/node_modules
	OPGRAD_PORTABLE=1 $(RUN)/python -m pytest tests/portable

# In an environment of its own: atheris has wheels for Linux alone. FUZZ: names of targets.
FUZZING := .venv-fuzz
SECONDS ?= 60

fuzz: $(FUZZING)/.installed
	$(FUZZING)/bin/python tools/fuzz --seconds $(SECONDS) $(FUZZ)

# The models lie within the environment, and are fetched once.
test-real: $(REAL)/.installed
	$(REAL)/bin/python tests/support/real_models.py $(REAL)/models
	OPGRAD_REAL=$(REAL)/models $(REAL)/bin/python -m pytest tests/real

# Every test that needs one of the libraries of the extra; one that is skipped for want of a package fails here. CASES=all
# runs every architecture in every precision.
test-integrations: $(INTEGRATIONS)/.installed $(FLOWER)/.installed $(OPTIMUM)/.installed
	$(CHOSEN) OPGRAD_INTEGRATIONS=1 FLOWER=$(FLOWER)/bin/python OPTIMUM=$(OPTIMUM) $(INTEGRATIONS)/bin/python -m pytest $(PARALLEL) $(INTEGRATION_TESTS)

# onnxruntime-gpu, which has the same modules as onnxruntime, lies beside the environment: 256 MB. No device is needed.
test-onnxruntime-gpu: $(VENV)/.torch $(GPU_RUNTIME)/.installed
	PYTHONPATH=$(GPU_RUNTIME) $(RUN)/python -m pytest tests/onnxruntime/test_cuda_provider.py tests/cuda/test_nodes.py tests/training/test_device.py

# On processors that qemu emulates: kernels of some operators; on older x86-64 the shared object and sessions, too, for
# which onnxruntime's library for arm64 crashes in qemu 7.2 when it is loaded.
KERNEL_TESTS := fewest_dimensions and float32 and (softmax or relu or gather)
EMULATED = $$($(RUN)/python tools/emulated.py $(1) .emulated) -m pytest -p no:xdist tests/operators/test_ops.py $(2)
STUB_TESTS := tests/onnxruntime/test_stub.py tests/onnxruntime/test_sessions.py -k "stub or registering or outlive or ($(KERNEL_TESTS))"

test-haswell: $(VENV)/.torch
	$(call EMULATED,Haswell,$(STUB_TESTS))

test-nehalem: $(VENV)/.torch
	$(call EMULATED,Nehalem,$(STUB_TESTS))

# Afterwards without a compiler, from a wheel's pack that is made here and linked there. Packs fit one Python, there 3.11.
test-arm64: $(VENV)/.dev $(VENV)/.release
	$(call EMULATED,arm64,-k "$(KERNEL_TESTS)")
	$(RUN)/python -c "import sys; sys.exit(sys.version_info[:2] != (3, 11))"
	$(RUN)/python tools/wheels.py --kernels --ops softmax,softmax_grad --dtypes float32
	$(RUN)/python -m zipfile -e dist/opgrad-*-cp311-*_aarch64.whl .emulated/arm64/packed
	PYTHONPATH=$(CURDIR)/.emulated/arm64/packed $$($(RUN)/python tools/emulated.py arm64 .emulated) tools/packed.py softmax softmax_grad

examples/%/node_modules: examples/%/package.json
	cd examples/$* && npm install --no-package-lock --no-audit --no-fund --ignore-scripts
	@touch $@

lint: $(VENV)/.torch
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy
	$(RUN)/zizmor --offline --quiet .github

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(RUN)/mkdocs build --quiet

docs-serve: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(RUN)/mkdocs serve --no-strict

notebooks: $(VENV)/.torch $(VENV)/.notebooks
	$(RUN)/python tools/notebooks.py

# BENCH: more options.
bench: $(VENV)/.torch
	$(RUN)/python -m bench $(BENCH)

# PACK: words of `opgrad compile` that say which kernels wheels carry; without any, those of all operators' plain calls.
dist: $(VENV)/.dev $(VENV)/.release
	$(RUN)/python tools/wheels.py --kernels $(PACK)

review: $(VENV)/.review
	$(RUN)/repo-review .

tables: $(VENV)/.dev
	$(RUN)/python tools/report.py

clean:
	rm -rf $(VENV) $(MINIMUM) $(FLOOR) $(REAL) $(INTEGRATIONS) $(FLOWER) $(FUZZING) build dist

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "opgrad needs Python 3.11 or newer; name one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.torch: $(VENV)/.dev tools/install_torch.py
	$(RUN)/python tools/install_torch.py
	@touch $@

$(VENV)/.%: $(VENV)/.python pyproject.toml
	$(RUN)/python -m pip install --quiet --disable-pip-version-check --editable ".[$*]"
	@touch $@

$(MINIMUM)/.installed: pyproject.toml tools/minimum.py
	$(OLDEST_PYTHON) -m venv $(MINIMUM)
	$(OLDEST_PYTHON) tools/minimum.py > $(MINIMUM)/constraints.txt
	$(MINIMUM)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(MINIMUM)/constraints.txt \
		--editable ".[train,test]"
	@touch $@

$(FLOOR)/.installed: pyproject.toml tools/minimum.py
	$(PYTHON) -m venv $(FLOOR)
	$(PYTHON) tools/minimum.py | awk '/^triton==/ && !found++' > $(FLOOR)/constraints.txt
	$(FLOOR)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(FLOOR)/constraints.txt \
		--editable ".[cuda,test]"
	@touch $@

$(FUZZING)/.installed: pyproject.toml
	$(PYTHON) -m venv $(FUZZING)
	$(FUZZING)/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[tune,fuzz]"
	@touch $@

$(INTEGRATIONS)/.installed: pyproject.toml tools/install_torch.py
	$(PYTHON) -m venv $(INTEGRATIONS)
	$(INTEGRATIONS)/bin/python tools/install_torch.py
	$(INTEGRATIONS)/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[integrations]"
	@touch $@

# Flower wants older releases of protobuf, rich and typer than the others, and its example imports no opgrad.
$(FLOWER)/.installed: Makefile
	$(PYTHON) -m venv $(FLOWER)
	$(FLOWER)/bin/python -m pip install --quiet --disable-pip-version-check "flwr[simulation]>=1.42" "onnxruntime>=1.18" numpy
	@touch $@

# optimum-onnx exports models of transformers 4 alone, which lies beside the environment, with what it wants older.
$(OPTIMUM)/.installed: $(INTEGRATIONS)/.installed
	$(INTEGRATIONS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(OPTIMUM) \
		"optimum-onnx==0.1.*" "optimum==2.1.*" "transformers==4.57.*" "tokenizers<0.23.1" "huggingface-hub<1" \
		requests urllib3 certifi charset-normalizer idna
	@touch $@

$(GPU_RUNTIME)/.installed: $(VENV)/.torch
	$(RUN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(GPU_RUNTIME) "onnxruntime-gpu>=1.31"
	@touch $@

$(REAL)/.installed: pyproject.toml
	$(PYTHON) -m venv $(REAL)
	$(REAL)/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[train,test]"
	@touch $@

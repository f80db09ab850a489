# `make demo` and `make test` work from a clean clone with Python 3.11 or newer and a C++ compiler.
# Everything is installed below the repository: .venv/ (this project) and .compat/ (other versions of its peers).
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# The interpreter that creates .venv: the first of these that is new enough. Override: make PYTHON=/path/to/python3.11
CANDIDATES := python3.11 python3 python3.12 python3.13 python3.14 python
PYTHON ?= $(firstword $(foreach python,$(CANDIDATES),$(shell \
	$(python) -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $(python))))

VENV ?= .venv
BIN := $(VENV)/bin
# DeepSpeed's op is compiled for each environment, and waits for no lock that a killed compiler of another has left.
export TORCH_EXTENSIONS_DIR := $(abspath $(VENV))/torch_extensions
# What is imported is compiled then: all of torch and transformers would be 20 s.
PIP_INSTALL := -m pip --disable-pip-version-check --no-input install --quiet --no-compile
CONSTRAINTS := constraints.txt
INSTALL := $(BIN)/python $(PIP_INSTALL) --constraint $(CONSTRAINTS)
EXTRAS := examples,test

TORCH := torch==2.13.0
# Releases of torch that PART is run on besides the pinned one: the oldest that is supported, between, and the newest.
TORCHES := 2.11.0 2.12.1 2.14.1 2.15.0
ACCELERATE := accelerate==1.15.0
FABRIC := lightning-fabric==2.6.6 lightning-utilities==0.15.3
# Libraries around transformers that tests/ecosystem trains with, each with what only it needs.
ECOSYSTEM := peft==0.21.2 bitsandbytes==0.50.2 $(ACCELERATE) psutil
ECOSYSTEM += trl==1.16.0 sentence-transformers==6.2.0 setfit==1.2.0
ECOSYSTEM += apollo-torch==1.0.3 galore-torch==1.0 grokadamw==0.1.2 lomo-optim==0.1.1 schedulefree==1.4.1 torch-optimi==0.3.3 torchao==0.18.0
ECOSYSTEM += optuna==5.0.0 alembic==1.20.1 colorlog==6.12.0 mako==1.4.3 sqlalchemy==2.1.9
# Zensical is the maintained successor of mkdocs-material (which ends in May 2027) and reads its files; ruff sets signatures.
DOCS := zensical==0.0.73 mkdocstrings==1.0.8 mkdocstrings-python==2.0.11 ruff
# A kernel for notebooks and a client that runs cells in it.
NOTEBOOK := nbclient==0.11.0 ipykernel==7.4.0
# Releases of transformers that the Trainer is tested on besides the pinned one, each with what only that release needs.
TRANSFORMERS := 5.17.0 5.20.0 5.24.0
NEEDS_5.17.0 := huggingface_hub==1.33.0 httpx==0.28.1 httpcore==1.0.9
NEEDS_5.20.0 :=
NEEDS_5.24.0 :=

# Ray with what its extra `train` needs and the other environments lack.
RAY := ray==2.60.0 tensorboardx==2.6.5
# In an environment of its own: it wants other versions of what the tests have.
SKYPILOT := skypilot==0.14.1
# Debian's packages with slurmctld, slurmd, the commands and the libraries they load.
SLURM := slurmctld slurmd slurm-client slurm-wlm-basic-plugins libmunge2 libhwloc15 libnuma1 liblz4-1 libpmix2

# A client and a server of S3 for tests/stores.
STORES := s3fs==2026.9.0 moto[s3]==5.2.5 flask==3.1.3 flask-cors==6.0.5

# What to run: make test TESTS=tests/config PYTEST_ARGS="-x -k yaml"
TESTS ?=
# What stands around the package, which imports none of it.
AROUND := $(addprefix tests/,benchmarks contrib documents examples gpu)
MATRIX_TESTS ?= tests/trainer tests/strategies/parallel/test_sequence_parallel.py tests/test_imports.py
# What other releases of torch and Python, and the lowest of all requirements, are tried with: each strategy trains, saves,
# resumes and is compared; compile, precisions, launcher, reports of hangs, planner and private names.
PART ?= tests/conformance tests/runtime tests/integrations tests/test_precision.py tests/test_imports.py \
	$(addprefix tests/strategies/,test_ddp.py test_single.py test_gradients.py fsdp2 parallel) \
	$(addprefix tests/accelerator/,test_checkpointing.py test_resume.py test_prepared.py test_collectives_per_step.py \
		test_waits_per_step.py) \
	tests/checkpoint/test_torch_files.py tests/data/test_loader.py tests/data/test_prefetch_to_device.py \
	tests/contrib/test_planner.py tests/launch/test_launch.py tests/launch/test_torchrun.py \
	$(addprefix tests/trainer/,test_training.py test_parallel_layouts.py test_deepspeed.py test_nonfinite.py \
		checkpoint/test_resuming.py arguments/test_field_effects.py)
PYTEST_ARGS ?=
# Processes that share the files of the whole suite. Ranks and launchers wait for each other: one takes 0.8 of a core.
WORKERS ?= 3
BENCH_ARGS ?=
# What to measure on a GPU, and with what: make gpu GPU_PYTHON=python3 GPU_ARGS="speed saving"; to try it: DEVICE=cpu TINY=1
GPU_PYTHON ?= $(firstword $(wildcard $(BIN)/python) python3)
GPU_ARGS ?=
DEVICE ?= cuda
TINY ?=
SOAK_ARGS ?=
# Some of the faults, or a busy machine: make test-faults FAULT_ARGS="--only kill9-.*-Trainer --slack 10"
FAULT_ARGS ?=
LOSS_ARGS ?=
# Without a server that is gone for 30 s: make test-stores STORES_ARGS="-m 'not slow'"
STORES_ARGS ?=
# As in CI: make test-ray RAY_ARGS="-m 'not slow'"
RAY_ARGS ?=
# Some of the families: make test-families FAMILY_ARGS="--only qwen.*"
FAMILY_ARGS ?=
# Some of the odd things: make test-odd ODD_ARGS="--only tied.* --on zero3"
ODD_ARGS ?=
# A Python with which `make test-slow` runs the part on the newest torch too: NEWEST_PYTHON=/path/to/python3.14
NEWEST_PYTHON ?=
NEWEST := $(lastword $(TORCHES))
# What `make test-slow` runs, each line as a user would; some of it: make test-slow SLOW_RUNS=soak
define SLOW_RUNS
test-cells
test-ecosystem PYTEST_ARGS="-m 'cell or not cell'"
test-odd
test-families
test-faults
test-losses
test-losses LOSS_ARGS="--random 60 --returns"
test-losses LOSS_ARGS="--random 12 --hsdp --returns"
test-slow-ranks
test-stores
soak
bench BENCH_ARGS="--only peaks1 peaks2 peaks4"
$(if $(NEWEST_PYTHON),test-part PYTHON=$(NEWEST_PYTHON) VENV=.compat/newest CONSTRAINTS=.compat/torch-$(NEWEST).txt TORCH=torch==$(NEWEST))
endef
export SLOW_RUNS
DEMO_RANKS ?= 2
DEMO_CONFIG ?= fsdp_configs/full_shard.yaml
DEMO_ARGS ?=

# Some images set it: every rank would compile its test module anew, and every process that a test starts our package.
unexport PYTHONDONTWRITEBYTECODE
# DeepSpeed compiles its ops with the ninja of the environment, which it looks for on the PATH.
export PATH := $(abspath $(BIN)):$(PATH)
# A save waits for its disk a dozen times, 3 ms and more each: files of tests lie in memory where there are 8 GB of it, and
# programs may run there.
TESTS_TMP ?= $(or $(TMPDIR),$(shell [ "$$(df --output=avail /dev/shm | tail -1)" -ge 8000000 ] && \
	! grep -q ' /dev/shm .*noexec' /proc/mounts && echo /dev/shm))
PYTEST := $(if $(TESTS_TMP),TMPDIR=$(TESTS_TMP) )$(BIN)/python -m pytest --override-ini tmp_path_retention_count=1 $(PYTEST_ARGS)
# By files: tests of one share what its fixtures have computed. In the order of tests/conftest.py, longest first, and not
# in that of how many tests they have.
SHARED := --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder
with_path = PYTHONPATH="$(CURDIR)/.compat/$(1)$${PYTHONPATH:+:$$PYTHONPATH}"

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo
demo: $(VENV)/.installed ## fine-tune a classifier under FSDP on two processes (GPUs when there are enough)
	gpus=$$($(BIN)/python -c 'import torch; print(torch.cuda.device_count())'); \
	$(BIN)/accel-trainer launch --config_file $(DEMO_CONFIG) --num_processes $(DEMO_RANKS) \
		$$([ "$$gpus" -ge $(DEMO_RANKS) ] || echo --cpu) examples/finetune_classifier.py $(DEMO_ARGS)

.PHONY: test
test: $(VENV)/$(if $(TESTS),.installed,.built) ## run the tests of the package
	$(PYTEST) $(or $(TESTS),$(SHARED) $(AROUND:%=--ignore=%))

.PHONY: test-around
test-around: $(VENV)/$(if $(TESTS),.installed,.built) ## run the tests of what stands around it: contrib, examples, documentation, benchmarks
	$(PYTEST) $(SHARED) $(or $(TESTS),$(AROUND))

.PHONY: test-cells
test-cells: $(VENV)/.installed ## the cells of matrices (layout x behaviour, ...) beyond the sample that `make test` runs: about 7 minutes
	$(PYTEST) $(SHARED) -m cell $(TESTS)

.PHONY: test-faults
test-faults: $(VENV)/.installed ## one rank of two fails, is killed, stopped, ...: 588 cases, about 8 minutes
	$(BIN)/python -m tests.fault_matrix $(FAULT_ARGS)

.PHONY: test-losses
test-losses: $(VENV)/.installed ## one of four ranks is killed, and the others go on; at random times, and others return: LOSS_ARGS="--random 200 --returns"
	$(BIN)/python -m tests.loss_matrix $(LOSS_ARGS)

.PHONY: test-families
test-families: $(VENV)/.installed ## every family of transformers with a plan for tensor or expert parallelism: two ranks beside one process
	$(BIN)/python -m tests.family_matrix $(FAMILY_ARGS)

.PHONY: test-odd
test-odd: $(VENV)/.installed ## odd models and loops under each strategy, beside a plain PyTorch loop, about 5 minutes
	$(BIN)/python -m tests.odd $(ODD_ARGS)

.PHONY: soak
soak: $(VENV)/.installed .compat/stores/.installed ## kill 200 runs while they save and 400 while they upload, load 20,000 changed checkpoints, send runs 20 signals
	$(BIN)/python -m tests.checkpoint.soak $(SOAK_ARGS)
	$(call with_path,stores) $(BIN)/python -m tests.stores.soak $(STORE_SOAK_ARGS)
	$(BIN)/python -m tests.trainer.signal_soak

.PHONY: test-slow-ranks
test-slow-ranks: $(VENV)/.installed ## a rank that sleeps 200 ms in each phase is named, in 60 trials; 60 without are silent: about 20 minutes
	$(BIN)/python -m tests.slow_rank_trials $(SLOW_ARGS)

.PHONY: test-slow
test-slow: ## all matrices and trials above and below that are too long for each change, in a row: hours, once a week
	said=; red=0; while read -r run; do [ -n "$$run" ] || continue; \
		begin=$$SECONDS; rc=0; eval "$(MAKE) $$run" </dev/null || { rc=$$?; red=1; }; \
		said+="$$(printf '%4d %6d s  make %s' $$rc $$((SECONDS - begin)) "$$run")"$$'\n'; \
	done <<<"$$SLOW_RUNS"; printf '\n  rc   time\n%s' "$$said"; exit $$red

.PHONY: test-accelerate
test-accelerate: $(VENV)/.installed .compat/accelerate/.installed ## run the tests that meet Hugging Face accelerate where it is present
	$(call with_path,accelerate) $(PYTEST) $(SHARED) $(or $(TESTS),-m beside_accelerate tests/trainer tests/strategies/fsdp2/test_presharded.py tests/test_imports.py tests/migration/test_accelerate_scripts.py tests/migration/test_compat.py)

.PHONY: test-ecosystem
test-ecosystem: $(VENV)/.installed .compat/ecosystem/.installed ## run the tests with libraries around transformers (PEFT, ...)
	$(call with_path,ecosystem) $(PYTEST) $(SHARED) $(or $(TESTS),tests/ecosystem)

.PHONY: test-ray
test-ray: $(VENV)/.installed .compat/ray/.installed ## run the tests with a local Ray: Train, Tune and Data
	$(call with_path,ray) $(PYTEST) $(RAY_ARGS) $(or $(TESTS),tests/ecosystem/test_ray.py tests/ecosystem/test_ray_reports.py)

.PHONY: test-skypilot
test-skypilot: $(VENV)/.installed .compat/skypilot/.installed ## read printed tasks with SkyPilot's own parser
	$(PYTEST) tests/contrib/test_skypilot.py

.PHONY: test-slurm
test-slurm: $(VENV)/.installed .compat/slurm/.installed ## run printed jobs under a real SLURM of two nodes on the loopback
	$(PYTEST) tests/contrib/test_slurm.py

.PHONY: test-stores
test-stores: $(VENV)/.installed .compat/stores/.installed ## run the tests with an object store on the loopback
	$(call with_path,stores) $(PYTEST) $(STORES_ARGS) $(or $(TESTS),tests/stores)

.PHONY: test-notebook
test-notebook: $(VENV)/.installed .compat/notebook/.installed ## run the notebook launcher in a real kernel
	$(call with_path,notebook) $(PYTEST) tests/launch/test_notebook_kernel.py

.PHONY: test-matrix
test-matrix: $(TRANSFORMERS:%=test-transformers-%) ## run the tests of Trainer and layouts on other releases of transformers

.PHONY: $(TRANSFORMERS:%=test-transformers-%)
$(TRANSFORMERS:%=test-transformers-%): test-transformers-%: $(VENV)/.installed .compat/transformers-%/.installed
	$(call with_path,transformers-$*) $(BIN)/python -c \
		'import transformers; assert transformers.__version__ == "$*", transformers.__version__'
	$(call with_path,transformers-$*) $(PYTEST) $(SHARED) $(MATRIX_TESTS)

.PHONY: test-part
test-part: $(VENV)/.installed ## run a part of the tests that shows whether another torch or Python will do: a few minutes
	$(PYTEST) $(SHARED) -m "cell or not cell" $(PART)

.PHONY: test-torch
test-torch: $(TORCHES:%=test-torch-%) ## run that part on the oldest and the newest torch, and between

.PHONY: $(TORCHES:%=test-torch-%)
$(TORCHES:%=test-torch-%): test-torch-%: .compat/torch-%.txt
	$(MAKE) VENV=.compat/torch-$* CONSTRAINTS=$< TORCH=torch==$* test-part

.PHONY: test-python
test-python: ## run that part on another Python: make test-python PYTHON=/path/to/python3.13
	$(MAKE) VENV=.compat/$(notdir $(PYTHON)) test-part

.PHONY: test-floors
test-floors: .compat/floors.txt ## run that part on the lowest releases that pyproject.toml accepts
	$(MAKE) VENV=.compat/floors CONSTRAINTS=$< TORCH=torch test-part

.PHONY: docs
docs: $(VENV)/.installed .compat/docs/.installed ## build the documentation into site/, strictly, and open pages in a browser
	$(BIN)/python -m tests.documents.site .compat/docs/bin/zensical

.PHONY: release-check
release-check: $(VENV)/.installed ## install wheel and sdist into an empty environment, and use them
	$(BIN)/python tests/release/check.py

.PHONY: check
check: $(VENV)/.dev ## lint, format, floors and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy

.PHONY: format
format: $(VENV)/.dev ## mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: bench
bench: $(VENV)/.installed .compat/accelerate/.installed .compat/fabric/.installed .compat/stores/.installed ## compare with plain PyTorch, upstream's Trainer and Fabric
	$(BIN)/python benchmarks/run.py $(BENCH_ARGS)

.PHONY: gpu
gpu: ## measure on one GPU what docs/gpu.md wants to know; installs nothing
	$(GPU_PYTHON) benchmarks/gpu/kit.py $(GPU_ARGS) --device $(DEVICE) $(if $(TINY),--tiny)

.PHONY: names
names: $(VENV)/.installed ## write docs/accelerate_names.md, the table of accelerate's names
	$(BIN)/python -m tests.migration.names

.PHONY: clean
clean: ## remove everything that these targets created
	rm -rf $(VENV) .compat .cache build dist site docs/reference *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

# Each step leaves a stamp, so that a step runs again only when what it depends on has changed.

$(VENV)/.created:
	@[ -n "$(PYTHON)" ] || { echo "No Python 3.11 or newer was found (looked for: $(CANDIDATES))." \
		"Install one, or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
		f"{sys.executable} is Python {sys.version.split()[0]}; accel_trainer needs 3.11 or newer. Name one: make PYTHON=/path/to/python3.11")'
	"$(PYTHON)" -m venv $(VENV)
	@touch $@

# torch first: the largest wheel, and the one whose build (CPU, CUDA) the machine's own pip configuration chooses.
$(VENV)/.torch: $(CONSTRAINTS) | $(VENV)/.created
	$(INSTALL) $(TORCH) setuptools wheel
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(INSTALL) --no-build-isolation --editable '.[$(EXTRAS)]'
	@touch $@

# DeepSpeed's collectives and a stand-in for an accelerator are compiled, and mypy reads transformers.
$(VENV)/.built: tests/builds.py tests/stand_in.cpp $(VENV)/.installed
	$(BIN)/python -m tests.builds
	@touch $@

$(VENV)/.dev: $(VENV)/.installed
	$(INSTALL) --no-build-isolation --editable '.[dev]'
	@touch $@

.compat/accelerate/.installed: $(VENV)/.torch
	rm -rf $(@D)
	$(INSTALL) --no-deps --target $(@D) $(ACCELERATE) psutil
	@touch $@

.compat/fabric/.installed: Makefile | $(VENV)/.torch
	rm -rf $(@D)
	$(INSTALL) --no-deps --target $(@D) $(FABRIC)
	@touch $@

.compat/docs/.installed: Makefile | $(VENV)/.created
	rm -rf $(@D)
	$(BIN)/python -m venv $(@D)
	$(@D)/bin/python $(PIP_INSTALL) --constraint constraints.txt $(DOCS)
	@touch $@

.compat/ecosystem/.installed: Makefile | $(VENV)/.torch
	rm -rf $(@D)
	$(INSTALL) --no-deps --target $(@D) $(ECOSYSTEM)
	@touch $@

.compat/notebook/.installed: Makefile | $(VENV)/.torch
	rm -rf $(@D)
	$(INSTALL) --target $(@D) $(NOTEBOOK)
	@touch $@

.compat/ray/.installed: Makefile | $(VENV)/.torch
	rm -rf $(@D)
	$(INSTALL) --no-deps --target $(@D) $(RAY)
	@touch $@

.compat/skypilot/.installed: Makefile | $(VENV)/.created
	rm -rf $(@D)
	$(BIN)/python -m venv $(@D)
	$(@D)/bin/python $(PIP_INSTALL) $(SKYPILOT)
	@touch $@

# Unpacked, not installed. Where apt has no lists yet: apt-get update.
.compat/slurm/.installed: Makefile
	rm -rf $(@D)
	mkdir -p $(@D)
	cd $(@D) && apt-get download $(SLURM) && for package in *.deb; do dpkg -x $$package .; done && rm *.deb
	@touch $@

.compat/stores/.installed: Makefile | $(VENV)/.torch
	rm -rf $(@D)
	$(BIN)/python $(PIP_INSTALL) --target $(@D) $(STORES)
	@touch $@

.compat/transformers-%/.installed: Makefile | $(VENV)/.torch
	rm -rf $(@D)
	$(BIN)/python $(PIP_INSTALL) --no-deps --target $(@D) transformers==$* $(NEEDS_$*)
	@touch $@

# torch up to 2.12 wants an older setuptools than the pinned one; the project's licence, in words, one from 77 on.
.compat/torch-%.txt: constraints.txt
	@mkdir -p $(@D)
	sed 's/^torch==.*/torch==$*/; s/^setuptools==.*/setuptools>=77/' $< >$@

.compat/floors.txt: pyproject.toml tests/release/floors.py | $(VENV)/.created
	@mkdir -p $(@D)
	$(BIN)/python -m tests.release.floors >$@

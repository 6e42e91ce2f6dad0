# The front door. `make` lists what there is; the work is in scripts/ and CMake.
#
# Variables: PRESET (CMake preset: release, cpu-only, separate, debug, asan-ubsan, tsan, clang), JOBS, TEST_JOBS, PREFIX
# (install), FUZZ_SECONDS, PART (of the nightly tests), ARGS (passed to the demo trainer, the tests, the fuzzers or the benchmarks).

SHELL := /bin/bash
JOBS ?= $(shell nproc)
TEST_JOBS ?= $(shell expr $(JOBS) + 2)  # many tests mostly wait
PREFIX ?= /usr/local
ARGS ?=
PART ?=
comma := ,
FUZZ_SECONDS ?= 300

NVCC := $(or $(shell command -v nvcc),$(wildcard /usr/local/cuda/bin/nvcc))
PRESET ?= $(if $(NVCC),release,cpu-only)

.DEFAULT_GOAL := help
.PHONY: help deps demo demo-faults build packages test test-nightly test-all test-cuda test-integrations test-integrations-nightly test-sanitized test-threads test-sanitizers fuzz mutants soak bench bundle install figures docs format lint check-layers clean

help: ## print this
	@echo "lossd: the loss head of a language model as a server"
	@echo
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|'
	@echo
	@echo "PRESET=$(PRESET) JOBS=$(JOBS) PREFIX=$(PREFIX); README.md says more."

deps: ## install the distribution packages for everything below
	@scripts/install-deps all

demo: ## train a small language model through a running server (under five minutes)
	@scripts/demo $(ARGS)

demo-faults: ## train twice, once with kill -9 of trainer and server in the middle, and compare every bit (two minutes)
	@scripts/demo-faults $(ARGS)

# For the GPUs of this machine, which compiles CUDA units in half the time; what is installed or packed is for all.
build: ## configure and compile everything, for this machine's GPUs
	@scripts/install-deps build test
	@cmake --preset $(PRESET) -DLOSSD_CUDA_ARCHITECTURES=here -DLOSSD_TESTS=ON -DLOSSD_BENCH=ON -DLOSSD_EXAMPLES=ON
	@cmake --build --preset $(PRESET) -j $(JOBS)

test: build ## build, then run what proves a change: every kind of test once; without a GPU, tests of the GPU are skipped
	@scripts/install-deps demo browser
	@ctest --preset $(PRESET) --output-on-failure -j $(TEST_JOBS) -LE nightly $(ARGS)

# Every kind of test again with other transports, divisions and devices, and in its long form. PART=3/8: the third of eight parts.
test-nightly: build ## the tests that `make test` leaves out: repetitions and long forms (PART=3/8 for the third of eight parts)
	@scripts/install-deps demo browser
	@ctest --preset $(PRESET) --output-on-failure -j $(TEST_JOBS) -L nightly $(if $(PART),-I $(subst /,$(comma)$(comma),$(PART))) $(ARGS)

test-all: build ## all of both suites, before a release
	@scripts/install-deps demo browser
	@ctest --preset $(PRESET) --output-on-failure -j $(TEST_JOBS) $(ARGS)

test-cuda: ## compile everything that has to do with CUDA (needs a CUDA compiler) and run those of its tests that need no GPU
	@scripts/install-deps build test
	@cmake --preset release -ULOSSD_CUDA_ARCHITECTURES -DLOSSD_TESTS=ON -DLOSSD_BENCH=ON -DLOSSD_EXAMPLES=ON
	@cmake --build --preset release -j $(JOBS) --target cuda_programs
	@ctest --preset release --output-on-failure -j $(TEST_JOBS) -L cuda $(ARGS)

test-sanitized: ## tests of engine, protocol, service and clients under address + undefined-behaviour sanitizers (clang)
	@scripts/install-deps build test check
	@cmake --preset fuzz
	@cmake --build --preset fuzz -j $(JOBS) --target sanitized_tests
	@ctest --preset fuzz -L sanitized -j $(TEST_JOBS) $(ARGS)

mutants: ## make small changes to the code, one at a time, and say which of them no test notices (ARGS="--count=100 server/engine")
	@scripts/install-deps build test
	@python3 tests/mutants/mutants.py --jobs=$(JOBS) $(ARGS)

fuzz: ## run the fuzzers for FUZZ_SECONDS each, one a core (ARGS="NAME..." for some of them)
	@scripts/install-deps build test check
	@cmake --preset fuzz
	@cmake --build --preset fuzz -j $(JOBS) --target fuzzers
	@scripts/fuzz --jobs $(JOBS) --seconds $(FUZZ_SECONDS) $(if $(FUZZ_SEED),--seed $(FUZZ_SEED)) $(ARGS)

soak: ## train for an hour under kills, cuts, slow readers and scrapes; fails if anything grows (ARGS=--seconds=600)
	@scripts/install-deps build test
	@cmake --preset $(PRESET) -DLOSSD_TESTS=ON
	@cmake --build --preset $(PRESET) -j $(JOBS) --target lossd lossd_shared
	@ctest --preset $(PRESET) -R '^python_package_test$$' --output-on-failure
	@LOSSD_BINARY=$(CURDIR)/build/$(PRESET)/bin/lossd build/$(PRESET)/tests/client/python/venv/bin/python tests/soak/soak.py \
	  --report=build/$(PRESET)/soak.json $(ARGS)

test-integrations: ## test the Python client with current torch, transformers, trl, ... from PyPI (700 MB), on the CPU
	@scripts/install-deps build test
	@cmake --preset $(PRESET) -DLOSSD_TESTS=ON -DLOSSD_BENCH=ON -DLOSSD_EXAMPLES=ON
	@cmake --build --preset $(PRESET) -j $(JOBS) --target lossd lossd_shared lossctl
	@scripts/test-integrations build/$(PRESET) $(ARGS)

test-integrations-nightly: ## what of test-integrations takes minutes: every class of models of transformers
	@$(MAKE) test-integrations PRESET=cpu-only ARGS="-m nightly tests/client/python/integrations"

test-threads: ## tests of engine, calls and metrics, and the simulation, under the thread sanitizer
	@scripts/install-deps build test
	@cmake --preset tsan
	@cmake --build --preset tsan -j $(JOBS) --target threads_tests
	@ctest --preset tsan -L threads -j $(JOBS) $(ARGS)

test-sanitizers: ## run the tests under address, undefined-behaviour and thread sanitizers
	@scripts/install-deps build test demo
	@set -e; for preset in asan-ubsan tsan; do \
	  cmake --preset $$preset; \
	  cmake --build --preset $$preset -j $(JOBS); \
	  ctest --preset $$preset --output-on-failure $(ARGS); \
	done

bench: build ## build, then run the benchmarks, those of GPUs where there is one (ARGS="server_bench parts" for one of them)
	@set -e; run() { echo "== $$*"; "build/$(PRESET)/bin/$$1" "$${@:2}"; }; \
	$(if $(ARGS),run $(ARGS); exit;) \
	for command in service checkpoint parts; do run server_bench $$command; done; \
	run neighbours_bench; \
	if [ -x build/$(PRESET)/bin/cuda_bench ] && nvidia-smi -L >/dev/null 2>&1; then \
	  for command in loss optimizer embedding hopper; do run cuda_bench $$command; done; \
	fi

figures: ## draw the figures of docs/ from bench/results, with matplotlib from PyPI in a virtual environment
	@python3 -m venv build/figures-venv
	@build/figures-venv/bin/pip install --quiet --disable-pip-version-check --requirement bench/figures-requirements.txt
	@build/figures-venv/bin/python -B bench/figures.py $(ARGS)

docs: ## build the documentation as a site that needs no network, in build/docs/site
	@scripts/install-deps build test
	@cmake --preset $(PRESET)
	@cmake --build --preset $(PRESET) -j $(JOBS) --target lossd lossd_shared lossctl
	@scripts/docs $(ARGS) build/$(PRESET)

bundle: ## pack server, CLI, tests and benchmarks with their libraries into dist/
	@scripts/install-deps build test
	@cmake --preset $(PRESET) -ULOSSD_CUDA_ARCHITECTURES -DLOSSD_TESTS=ON -DLOSSD_BENCH=ON
	@cmake --build --preset $(PRESET) -j $(JOBS)
	@scripts/bundle build/$(PRESET)

packages: ## make wheels, a source distribution and a Debian package, to install without a compiler, in dist/packages
	@scripts/install-deps build test
	@cmake --preset $(PRESET) -ULOSSD_CUDA_ARCHITECTURES
	@cmake --build --preset $(PRESET) -j $(JOBS) --target lossd lossd_shared lossctl
	@scripts/packages build/$(PRESET)

install: ## install server and CLI below PREFIX
	@scripts/install-deps build
	@cmake --preset $(PRESET) -ULOSSD_CUDA_ARCHITECTURES
	@cmake --build --preset $(PRESET) -j $(JOBS) --target lossd lossd_shared lossctl
	@cmake --install build/$(PRESET) --prefix $(PREFIX)

format: ## format the C++ files
	@scripts/lint --fix-format

lint: ## check format, the dependency rule, the documentation, and clang-tidy (ARGS="FILE..." for some files only)
	@scripts/install-deps build test dev
	@scripts/lint $(ARGS)

check-layers: ## check the dependency rule between folders
	@scripts/check-layers

clean: ## remove what was built
	@rm -rf build dist

# The habits of this repository. Everything happens in .venv and build/: nothing is installed on the machine.
# Needs Python 3.11+, a C++17 compiler and make; CMake, Ninja and the linters come from PyPI (constraints.txt).

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
# Workers of pytest. A part of the tests waits for peers and deadlines; more workers than this only make them wait.
TEST_WORKERS ?= 6
# Passed on, e.g.: make test PYTEST_ARGS="-k doctor -x"   make bench BENCH_ARGS="-b 1M -e 64M"
PYTEST_ARGS ?=
# What `make check` compares with: a tag, branch or commit.
BASE ?=
BENCH_ARGS ?=
# What `make perf` compares with (a tag, branch or commit; default: the last release), and its options (see --help).
PERF_BASE ?=
PERF_ARGS ?=
# E.g.: make sweep SWEEP_ARGS="--networks 1G,10G+5ms"   (see --help)
SWEEP_ARGS ?=
# E.g.: make convergence CONVERGENCE_ARGS="--tasks digits --algorithms bytegrad --seeds 3"
CONVERGENCE_ARGS ?=

# E.g.: make wheel WHEEL_ARGS="--python python3.12"
WHEEL_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
# `python -m` and `python -c` would put the source tree, which has no compiled library, before the installed package.
export PYTHONSAFEPATH := 1
# The tests start some thousand interpreters: without byte code each would compile what it imports.
unexport PYTHONDONTWRITEBYTECODE
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)

# Directories are listed with their files: one that loses or gains a file has changed.
PACKAGE_SOURCES := $(shell find bagua net_plugin third_party tools/bench -name __pycache__ -prune -o -print 2>/dev/null)
CPP_SOURCES := $(shell find net_plugin bagua/kernels tests/cpp tools -name '*.cc' 2>/dev/null | sort)
CPP_HEADERS := $(shell find net_plugin bagua/kernels tests/cpp tools -name '*.h' 2>/dev/null | sort)
C_SOURCES := $(shell find tests/cpp -name '*.c' 2>/dev/null | sort)
PYTHON_SOURCES := bagua tests tools examples

CMAKE_CONFIGURE := $(BIN)/cmake -S . -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja --log-level=WARNING
CMAKE_CPP_TESTS := -DBAGUA_BUILD_TESTS=ON -DBAGUA_BUILD_PYTHON=OFF -DCMAKE_COMPILE_WARNING_AS_ERROR=ON

.PHONY: help
help: ## Show this list
	@echo "usage: make TARGET"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# --- set-up ----------------------------------------------------------------------------------------------------------

$(VENV)/.python:
	@command -v "$(PYTHON)" >/dev/null || { \
	  echo "make: no '$(PYTHON)' on the PATH; install Python 3.11 or newer, or name it: make PYTHON=python3.12" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "make: $$($(PYTHON) --version 2>&1) is too old, 3.11 or newer is needed; name it: make PYTHON=python3.12" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "make: $(PYTHON) lacks venv or ensurepip; install them (Debian: apt-get install python3-venv)" >&2; exit 1; }
	@"$(PYTHON)" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' || { \
	  echo "make: $(PYTHON) lacks its C headers; install them (Debian: apt-get install python3-dev)" >&2; exit 1; }
	@command -v "$${CXX:-c++}" >/dev/null || { \
	  echo "make: no C++ compiler '$${CXX:-c++}' on the PATH; install one (Debian: apt-get install g++) or set CXX" >&2; exit 1; }
	@echo "== virtual environment in $(VENV)"
	@"$(PYTHON)" -m venv $(VENV)
	@touch $@

# What builds comes first, so that the package is built while pip unpacks torch.
$(VENV)/.build-tools: constraints.txt $(VENV)/.python
	@sed -n '/^# build/,/^$$/p' constraints.txt | $(BIN)/python -m pip install -qq --no-compile --requirement /dev/stdin
	@touch $@

$(VENV)/.packages: constraints.txt $(VENV)/.build-tools
	@echo "== packages of constraints.txt (minutes when first loaded)"
	@$(BIN)/python -m pip install -qq --no-compile --requirement constraints.txt # what is imported compiles itself
	@touch $@

# A regular install, not an editable one: the tests and the benchmark see what a user's `pip install` gives. The object
# files stay in build/native, where the C++ tests link them: a changed line costs seconds. The plugin is compiled in
# groups, a third faster as a whole, like the trees of the sanitizers. Line tables are enough for stacks; to see variables:
# make clean, then NATIVE_FLAGS='-O0 -g'. The tests build wheels there, too, one of them with the interpreter of another
# environment, which is gone afterwards: hence Python_EXECUTABLE.
NATIVE_FLAGS ?= -O2 -g1 -DNDEBUG
NATIVE_SETTINGS := SKBUILD_BUILD_DIR=build/native SKBUILD_CMAKE_DEFINE="Python_EXECUTABLE=$(CURDIR)/$(BIN)/python;BAGUA_BUILD_TESTS=ON;BAGUA_PRECOMPILE_HEADERS=ON;$\
  BAGUA_UNITY_BUILD=ON;CMAKE_COMPILE_WARNING_AS_ERROR=ON;CMAKE_CXX_FLAGS_RELWITHDEBINFO=$(NATIVE_FLAGS)"
WHEEL_SOURCES := CMakeLists.txt pyproject.toml README.md LICENSE $(PACKAGE_SOURCES)
# A file that changes with the version, which names the commit. The tests build wheels, too: if these had another version,
# they would link the plugin again while other tests load it.
.PHONY: version-now
build/version: version-now | $(VENV)/.python
	@mkdir -p build
	@now=$$($(BIN)/python tools/release/git_version.py); [ "$$now" = "$$(cat $@ 2>/dev/null)" ] || echo "$$now" >$@
build/native/.wheel: $(WHEEL_SOURCES) build/version $(VENV)/.build-tools
	@echo "== build bagua"
	@rm -rf build/wheel
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(NATIVE_SETTINGS) \
	  $(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/wheel .
	@touch $@

$(VENV)/.bagua: $(WHEEL_SOURCES) build/version constraints.txt $(VENV)/.build-tools
	@$(MAKE) --no-print-directory -j 2 $(VENV)/.packages build/native/.wheel
	@$(BIN)/python -m pip install --quiet --no-deps --force-reinstall build/wheel/*.whl
	@touch $@

.PHONY: install
install: $(VENV)/.bagua ## Set .venv up with pinned packages and install bagua into it

build/%/build.ninja: $(VENV)/.packages
	@echo "== configure build/$*"
	@mkdir -p build
	@$(CMAKE_CONFIGURE) -B build/$* $(CMAKE_CPP_TESTS) $(CMAKE_FLAGS_$*) >build/$*.configure.log 2>&1 || { \
	  cat build/$*.configure.log >&2; exit 1; }

# Line tables are all that stacks need, and take half as long to build as full debug information; without NDEBUG,
# assertions are on. The optimizer takes longest over the sanitizers' checks: -Og builds them up to twice as fast as -O1.
CMAKE_FLAGS_asan := -DBAGUA_PRECOMPILE_HEADERS=ON -DBAGUA_UNITY_BUILD=ON -DBAGUA_SANITIZE=address,undefined -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-Og -g1"
# With a clang that has libFuzzer, one tree serves the tests under ASan and the fuzzers. With -O0, which builds faster,
# these try 20 times fewer inputs in a second.
CMAKE_FLAGS_fuzz = -DCMAKE_COMPILE_WARNING_AS_ERROR=OFF -DBAGUA_PRECOMPILE_HEADERS=ON -DBAGUA_UNITY_BUILD=ON -DBAGUA_BUILD_FUZZERS=ON \
  -DBAGUA_SANITIZE=address,undefined \
  -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1 -g1" -DCMAKE_CXX_COMPILER=$(FUZZ_CXX) -DCMAKE_C_COMPILER=$(subst clang++,clang,$(FUZZ_CXX))
# ThreadSanitizer ignores fences. Those of the statistics page are for readers in other processes.
CMAKE_FLAGS_tsan := -DBAGUA_PRECOMPILE_HEADERS=ON -DBAGUA_UNITY_BUILD=ON -DBAGUA_SANITIZE=thread -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-Og -g1 -Wno-tsan"
CMAKE_FLAGS_asan-all := $(CMAKE_FLAGS_asan) -DBAGUA_SANITIZE_ALL=ON
CMAKE_FLAGS_tsan-all := $(CMAKE_FLAGS_tsan) -DBAGUA_SANITIZE_ALL=ON
# Never built: it gives clang-tidy the flags of every file, the Python extension's too.
CMAKE_FLAGS_lint = -DBAGUA_UNITY_BUILD=ON -DBAGUA_BUILD_FUZZERS=ON -DBAGUA_BUILD_PYTHON=ON -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python \
  -Dpybind11_DIR=$$($(BIN)/pybind11-config --cmakedir)

.PHONY: cpp-tests
cpp-tests: $(VENV)/.bagua
	@echo "== build the C++ tests (warnings are errors)"
	@$(BIN)/ninja -C build/native -j $(JOBS) --quiet tests/cpp/all tools/netlab/forwarder/all

# Otherwise each of the test workers would compile it, all at the same time.
$(VENV)/.byte-code: $(VENV)/.packages
	@$(BIN)/pytest --installed --collect-only -qq --ignore tests/cpp >/dev/null
	@touch $@

# --- the two commands ------------------------------------------------------------------------------------------------

.PHONY: bench
bench: $(VENV)/.bagua ## Measure the plugin on this machine: table, build/bench/results.{json,csv}
	@mkdir -p build/bench
	@echo "== bagua-net-bench $(BENCH_ARGS)"
	@$(BIN)/bagua-net-bench $(BENCH_ARGS) \
	  --json build/bench/results.json --csv build/bench/results.csv

# PYTHONPATH names tools/ alone, because the root has the sources of bagua without the library.
.PHONY: perf
perf: $(VENV)/.bagua ## Faster or slower than another commit? make perf PERF_BASE=<commit>
	@mkdir -p build/perf
	@echo "== perf $(PERF_BASE) $(PERF_ARGS)"
	@PYTHONPATH=tools $(BIN)/python -m perf $(PERF_BASE) $(PERF_ARGS)

.PHONY: sweep
sweep: $(VENV)/.bagua ## Which algorithm is the fastest at which rate and delay of the network? Needs root
	@mkdir -p build/sweep
	@echo "== sweep $(SWEEP_ARGS)"
	@PYTHONPATH=tools $(BIN)/python -m measure core --networks 1G,10G,1G+5ms,10G+5ms,1G+20ms,10G+20ms \
	  --algorithms algorithms --baseline with-bagua --device cpu --model wide --steps 4 --warmup 3 --rounds 3 \
	  --time-limit 720 --timeout 240 --json build/sweep/results.json $(SWEEP_ARGS)

.PHONY: convergence
convergence: $(VENV)/.bagua ## Does every algorithm train as well as gradient all-reduce? Half an hour on two cores
	@mkdir -p build/convergence
	@echo "== convergence $(CONVERGENCE_ARGS)"
	@PYTHONPATH=tools $(BIN)/python -m measure convergence \
	  --json build/convergence/results.json --plot build/convergence/curves.png $(CONVERGENCE_ARGS)

.PHONY: test
test: $(VENV)/.bagua ## Run every test, C++ and Python
	@$(MAKE) --no-print-directory -j 2 cpp-tests $(VENV)/.byte-code
	@echo "== pytest"
	@$(NATIVE_SETTINGS) $(BIN)/pytest --installed -n $(TEST_WORKERS) --dist worksteal $(PYTEST_ARGS)

# PYTHONPATH does not name the root, for the reason of `make perf`.
.PHONY: check
check: $(VENV)/.bagua ## Lint and test what a change reaches: make check BASE=<commit>
	@$(NATIVE_SETTINGS) PYTHONPATH=tools:tests $(BIN)/python -m check --base="$(BASE)" -- -n $(TEST_WORKERS) $(PYTEST_ARGS)

# What `make test` samples or leaves out: before a release. The tests that draw examples run again with more of them, and
# their limit of time is that of so many. The faults are as many of each kind on each of the NCCL tables.
DEEP_FAULTS ?= 1000
DEEP_FUZZ_SECONDS ?= 300
.PHONY: deep deep-tests deep-faults deep-fuzz
deep: $(VENV)/.bagua ## Before a release: all that is too long for `make test`; writes tests/deep-run.md
	@$(BIN)/python tools/release/deep_run.py
deep-tests: $(VENV)/.bagua
	@$(MAKE) --no-print-directory cpp-tests
	@$(NATIVE_SETTINGS) $(BIN)/pytest --installed -n $(TEST_WORKERS) --dist worksteal \
	  -m "deep or hypothesis" --hypothesis-profile=deep -o timeout=3600 $(PYTEST_ARGS)
deep-faults: cpp-tests
	@BAGUA_TEST_FAULTS=$(DEEP_FAULTS) BAGUA_CPP_SLOWDOWN=10 $(BIN)/pytest --installed -n $(JOBS) \
	  -k "survives_cuts or survives_flips" tests/cpp $(PYTEST_ARGS)
deep-fuzz:
	@$(MAKE) --no-print-directory fuzz FUZZ_SECONDS=$(DEEP_FUZZ_SECONDS)

# --- quality ---------------------------------------------------------------------------------------------------------

.PHONY: lint lint-python lint-types lint-format lint-tidy lint-tidy-all
lint: $(VENV)/.packages ## ruff, import-linter, mypy, clang-format, clang-tidy: every finding is an error
	@$(MAKE) --no-print-directory --keep-going -j $(JOBS) -O lint-python lint-types lint-format lint-tidy
lint-python: $(VENV)/.packages
	@echo "== ruff"
	@$(BIN)/ruff check --quiet $(wildcard $(PYTHON_SOURCES))
	@$(BIN)/ruff format --check --quiet $(wildcard $(PYTHON_SOURCES))
	@echo "== import-linter"
	@for config in pyproject.toml tools/imports.toml; do \
	  said=$$($(BIN)/lint-imports $$config --no-logo --no-cache 2>&1) || { echo "$$said" >&2; exit 1; }; done
# One after the other: the script is checked with what the first has read of torch. A finding of one does not hide the other's.
lint-types: $(VENV)/.bagua
	@echo "== mypy; mypy and basedpyright on the script of README.md, with the package that is installed"
	@failed=0; $(BIN)/mypy || failed=1; $(BIN)/python tools/docs/typed_programs.py || failed=1; exit $$failed
lint-format: $(VENV)/.packages
	@echo "== clang-format"
	@$(BIN)/clang-format --dry-run -Werror $(CPP_SOURCES) $(CPP_HEADERS) $(C_SOURCES)
# A room of the plugin is one unit, as in the sanitizers' trees: its headers are read once, which takes a third of the
# time. Not the C++ tests: they are compiled with all warnings and run under the sanitizers. The analyzer's search of paths
# takes half of the time: lint-tidy-all has it. Without it clang-tidy shows warnings of the compiler in system headers, which
# are theirs.
lint-tidy: TIDY_CHECKS := --checks=-clang-analyzer-*,-bugprone-suspicious-include --extra-arg=-Wno-deprecated-declarations
lint-tidy-all: TIDY_CHECKS := --checks=-bugprone-suspicious-include
lint-tidy lint-tidy-all: build/lint/build.ninja
	@echo "== clang-tidy"
	@$(BIN)/cmake build/lint >/dev/null # files that are new or gone
	@sed -n 's/^  "file": "\(.*\)",$$/\1/p' build/lint/compile_commands.json | grep -v -e /tests/ -e /third_party/ | sort -u | \
	  xargs -n 1 -P $(JOBS) $(BIN)/clang-tidy --quiet -p build/lint $(TIDY_CHECKS) 2>build/lint/tidy.err || { \
	  grep -v "^\[1/" build/lint/tidy.err | tail -n 20 >&2; exit 1; }

.PHONY: format
format: $(VENV)/.packages ## Rewrite Python and C++ sources in the house format
	@$(BIN)/ruff check --quiet --fix-only $(wildcard $(PYTHON_SOURCES))
	@$(BIN)/ruff format $(wildcard $(PYTHON_SOURCES))
	@$(BIN)/clang-format -i $(CPP_SOURCES) $(CPP_HEADERS) $(C_SOURCES)

# A sanitizer's report ends the case with a failure. ThreadSanitizer of older compilers cannot live with more than 28
# random bits in addresses, which newer kernels use: setarch -R takes them away. LeakSanitizer of older compilers crashes
# where the thread-locals of a loaded library begin 16 bytes into a page (github.com/google/sanitizers/issues/1322).
# Ours point to nothing, so that leak checks need not look at them.
export ASAN_OPTIONS := detect_leaks=1:detect_stack_use_after_return=1:strict_string_checks=1:intercept_tls_get_addr=0
export UBSAN_OPTIONS := halt_on_error=1:print_stacktrace=1
export TSAN_OPTIONS := halt_on_error=1:second_deadlock_stack=1:die_after_fork=0
# The tables between the oldest and the newest only convert arguments otherwise; `make test` runs these through all. The
# oldest has no threads of its own.
TABLES_LEFT_OUT := v6 or v7 or v8 or v9 or v10 or v11
tsan: TABLES_LEFT_OUT := v5 or $(TABLES_LEFT_OUT)
TSAN_RUN := $(shell [ "$$(cat /proc/sys/vm/mmap_rnd_bits 2>/dev/null || echo 28)" -gt 28 ] && echo setarch "$$(uname -m)" -R)

.PHONY: sanitize sanitize-all asan asan-clang tsan asan-all tsan-all
sanitize: $(VENV)/.packages ## Run each C++ test under a sanitizer: ASan + UBSan, TSan (tests/cpp/sanitizers.txt)
	@$(MAKE) --no-print-directory --keep-going -j 2 -O $(if $(CAN_FUZZ),asan-clang,asan) tsan # one builds while the other waits
sanitize-all: $(VENV)/.packages ## Run all C++ tests under ASan + UBSan and under TSan
	@$(MAKE) --no-print-directory --keep-going -j 2 -O asan-all tsan-all
# What .ci/run does while the tests run.
.PHONY: beside-tests sanitizer-trees
beside-tests: lint sanitizer-trees
sanitizer-trees: $(VENV)/.packages
	@$(MAKE) --no-print-directory --keep-going $(if $(CAN_FUZZ),fuzz-tree,asan-tree) tsan-tree
asan-tree tsan-tree fuzz-tree: %-tree: build/%/build.ninja
	@echo "== build build/$*"
	@$(BIN)/ninja -C build/$* -j $(JOBS) --quiet tests/cpp/all $(if $(filter fuzz,$*),$(FUZZ_TARGETS:%=%_fuzz))
asan asan-clang: export BAGUA_CPP_SANITIZER := address
tsan: export BAGUA_CPP_SANITIZER := thread
# $(call run-sanitized,TREE,SLOWDOWN,PREFIX)
define run-sanitized
@echo "== build and run with the sanitizer of build/$(1)"
@$(BIN)/ninja -C build/$(1) -j $(JOBS) --quiet tests/cpp/all
@BAGUA_CPP_BUILD=build/$(1) BAGUA_CPP_SLOWDOWN=$(2) $(3) $(BIN)/pytest -n $(TEST_WORKERS) \
  -k "not ((scenario_v or every_state_v) and ($(TABLES_LEFT_OUT)))" tests/cpp $(PYTEST_ARGS)
endef
asan asan-all: %: build/%/build.ninja
	$(call run-sanitized,$@,4)
asan-clang: build/fuzz/build.ninja
	$(call run-sanitized,fuzz,4)
tsan tsan-all: %: build/%/build.ninja
	$(call run-sanitized,$@,8,$(TSAN_RUN))

# clang with libFuzzer (Debian: apt-get install clang libclang-rt-dev). Findings and new inputs stay in build/fuzz.
FUZZ_SECONDS ?= 5
FUZZ_CXX ?= $(shell command -v clang++ $(addprefix clang++-,21 20 19 18 17 16 15 14) 2>/dev/null | head -n 1)
FUZZ_TARGETS := handshake frames sealed
.PHONY: can-fuzz fuzz
CAN_FUZZ = $(shell [ -n "$(FUZZ_CXX)" ] && echo 'extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }' | \
  "$(FUZZ_CXX)" -fsanitize=fuzzer,address,undefined -x c++ - -o /dev/null 2>/dev/null && echo yes)
can-fuzz:
	@[ -n "$(CAN_FUZZ)" ] || { \
	  echo "make: no clang with libFuzzer; install it (Debian: apt-get install clang libclang-rt-dev) or set FUZZ_CXX" >&2; exit 1; }
fuzz: can-fuzz build/fuzz/build.ninja ## Fuzz handshake and frames (needs clang): make fuzz FUZZ_SECONDS=300, each
	@$(BIN)/ninja -C build/fuzz -j $(JOBS) --quiet $(FUZZ_TARGETS:%=%_fuzz)
	@$(MAKE) --no-print-directory --keep-going -j $(words $(FUZZ_TARGETS)) -O $(FUZZ_TARGETS:%=fuzz-%)
fuzz-%:
	@echo "== fuzz $*"
	@mkdir -p build/fuzz/corpus/$*
	@build/fuzz/tests/cpp/fuzz/$*_fuzz -max_total_time=$(FUZZ_SECONDS) -max_len=2048 -timeout=10 -rss_limit_mb=1024 \
	  -print_final_stats=1 -artifact_prefix=build/fuzz/$*- build/fuzz/corpus/$* tests/cpp/fuzz/corpus/$* 2>build/fuzz/$*.log || { \
	  tail -n 60 build/fuzz/$*.log >&2; exit 1; }
	@grep -E 'DONE|stat::(number_of_executed|peak_rss)' build/fuzz/$*.log

.PHONY: docs
docs: $(VENV)/.bagua ## Generate the reference pages and build the site in build/site; broken links are errors
	@PYTHONPATH=tools/docs $(BIN)/python -m generate_settings
	@PYTHONPATH=tools/docs $(BIN)/python -m generate_cli
	@PYTHONPATH=tools $(BIN)/python -m results
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "Site in build/site. To read it: $(BIN)/python -m http.server -d build/site, then open http://localhost:8000"

.PHONY: wheel
wheel: $(VENV)/.packages ## Build sdist and manylinux wheels into dist/, each installed and checked; WHEEL_ARGS="--python PATH"
	@echo "== source distribution and wheels"
	@$(BIN)/python tools/release/build_wheels.py --output dist $(WHEEL_ARGS)

.PHONY: clean
clean: ## Remove what was built; .venv stays
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis $(VENV)/.bagua

.PHONY: distclean
distclean: clean ## Remove what was built and .venv
	rm -rf $(VENV)

# make run    the main job: sentences through a real transformer
# make view   the same sentences as a page to look into, in the browser
# make train  a small language model, from its first step to text
# make chat   text from a Llama, Qwen 3 or Gemma 3 that you have: MODEL=folder or MODEL=file.gguf,
#             prompts line by line, or by ARGS="'A prompt' --quantize q8_0", several of them
#             together; ARGS=--help shows more
# make test   the tests that take minutes, make test-all all of them; see also test-fresh,
#             test-peers, test-large, test-oldest-numpy, test-built-by-oldest-numpy, test-neon,
#             test-windows, test-browser, test-docs, test-below, test-frozen, test-kernels,
#             test-memory (LONGER=20: twenty times as many calls), test-free-threaded (SECONDS=600),
#             test-sdist, test-arm64, sanitize, sanitize-threads, lint, sweep-transformers (every
#             model of that package that can run on mha; some 10 minutes)
# make wheels for other systems (PLATFORMS=...); test-wheels runs those that can run here
# make lib    the C core without Python, for C and C++ programs: build/lib/libmha.{a,so}
# make docs   the documentation as a site: docs/_build/html/index.html
# make bench  mha beside its peers; see also bench-accuracy, bench-builds, bench-cliffs (SHAPES=200
#             at random: where is a peer ahead?), bench-grid, bench-kernels, bench-flex,
#             bench-latent, bench-linear, bench-masks, bench-quantised, bench-reshaping,
#             bench-training

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := -m pip install --quiet --disable-pip-version-check
INSTALL_WHEEL := $(INSTALL) --force-reinstall --no-deps dist/*.whl
PIP := $(BIN)/python $(INSTALL)
PYTEST := -m pytest -n auto --all
# Before a command that may be silent for long: what it does and how long that usually takes, on two
# quiet cores; a line every 15 s while nothing is printed.
TELL := @$(PYTHON) tests/tools/tell_progress.py
# In environments with a wheel, in processes that tests start too: else Python would find the mha of
# this folder before it. Programs then need to be told where their neighbours are.
OF_WHEEL := PYTHONSAFEPATH=1 PYTHONPATH=$(CURDIR)/tests/helpers:$(CURDIR)/examples
# What an extra of pyproject.toml asks for, without building mha once more.
EXTRA := $(BIN)/python -c 'import sys, tomllib; \
	project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	print(*project["optional-dependencies"][sys.argv[1]])'
# What a check says that finds something missing.
missing = { echo "make: missing $(1)"; exit 1; }
# Slow tests of what no instruction set changes; they measure memory or start processes, too, which
# sanitizers hinder.
without = $(patsubst %,--ignore %,$(foreach name,$(1),$(wildcard tests/*/test_$(name).py)))
NOT_OF_KERNELS := --ignore tests/examples --ignore tests/plot --ignore tests/testing \
	--ignore tests/parameters --ignore tests/dask \
	$(call without,plain_tutorial compat_help main memory threads) \
	--deselect tests/package/test_hostile_input.py::test_nothing_is_left_behind
# Of the arguments and what becomes of them, the same with every kernel set.
NOT_OF_BASELINE := $(NOT_OF_KERNELS) --ignore tests/package $(call without,layer_integrity)
# AVX-512's emulation, AMX among it, needs AVX2. AMX's beside the real AVX-512 is for ALL_FLOATS.
EMULATED = $(shell grep -qsw avx2 /proc/cpuinfo && echo AVX512; \
	test "$(ALL_FLOATS)" && grep -qsw avx512dq /proc/cpuinfo && echo AMX)
CORES := $(shell getconf _NPROCESSORS_ONLN)
SOURCES := setup.py pyproject.toml $(shell find csrc -type f)
SENTENCES := "A man is playing a guitar." "Someone plays music on a guitar." \
	"The stock market fell today."

.PHONY: help run view train chat docs test-docs lib coverage test test-all test-python \
	test-baseline test-below test-c test-neon test-windows test-fresh test-peers sweep-transformers \
	test-large test-oldest-numpy test-built-by-oldest-numpy test-sdist test-arm64 wheels test-wheels \
	test-kernels test-memory test-browser test-frozen test-free-threaded sanitize sanitize-threads \
	lint bench bench-accuracy bench-builds bench-cliffs bench-dask bench-view bench-grid \
	bench-kernels bench-flex bench-latent bench-linear bench-masks bench-quantised bench-reshaping \
	bench-training format clean check-prerequisites check-windows check-model

run: $(VENV)/.run
	$(BIN)/python examples/sentence.py $(SENTENCES)

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

view: $(VENV)/.run
	$(BIN)/python examples/sentence.py --view $(SENTENCES)

train: $(VENV)/.run
	$(BIN)/python examples/train_language_model.py

chat: check-model $(VENV)/.chat
	$(BIN)/python examples/llama.py "$(MODEL)" $(ARGS)

check-model:
	@test -n "$(MODEL)" || $(call missing,a model: make chat MODEL=file.gguf or MODEL=folder \
		(with config.json and *.safetensors and tokenizer.json))

$(VENV)/.docs: $(VENV)/.test
	$(PIP) $$($(EXTRA) docs)
	@touch $@

# Its own copies of the notebooks are run; warnings and broken links are errors. A cell may take
# MHA_CELL_SECONDS (600).
docs: $(VENV)/.docs
	@echo "running the notebooks (a minute or two on a quiet machine)"
	@$(BIN)/python docs/run_notebooks.py
	@echo "building the pages (about half a minute)"
	@$(BIN)/python -m sphinx --fail-on-warning --keep-going --jobs auto --quiet docs docs/_build/html
	@echo "docs: docs/_build/html/index.html"

# The same, and whether its pages fit their screens.
test-docs: docs $(VENV)/.browser
	$(BIN)/python tests/tools/page_widths.py docs/_build/html

lib: | check-prerequisites
	$(MAKE) --no-print-directory --jobs $(CORES) -C csrc

# The core alone, and the Python suite but for what takes long (marked `thorough`).
test: test-c $(VENV)/.test
	$(TELL) "the Python suite but for what takes long (usually 4 minutes)" \
		$(BIN)/python -m pytest -n auto

# The core alone, the whole Python suite with this machine's best kernels, and what kernels decide
# with those of every machine.
test-all: export ALL_FLOATS := 1
test-all: test-c test-python test-baseline

test-python: $(VENV)/.test
	$(TELL) "the whole Python suite, with this machine's best kernels (usually 10 minutes)" \
		$(BIN)/python $(PYTEST)

test-baseline: $(VENV)/.test
	$(TELL) "the Python suite, with the kernels of every machine (usually 5 minutes)" \
		env MHA_ISA=baseline $(BIN)/python $(PYTEST) $(NOT_OF_BASELINE)

# Says in one line what is missing, before anything is set up.
check-prerequisites:
	@command -v $(PYTHON) >/dev/null || $(call missing,$(PYTHON): install Python 3.11 or newer \
		(Debian: apt install python3 python3-venv python3-dev))
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "make: $(PYTHON) is too old: mha needs Python 3.11 or newer"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
		$(call missing,the venv module (Debian: apt install python3-venv))
	@command -v $${CC:-gcc} >/dev/null || \
		$(call missing,a C compiler (Debian: apt install gcc libc6-dev))
	@$(PYTHON) -c 'import os, sys, sysconfig; \
		headers = sysconfig.get_paths()["include"]; \
		sys.exit(not os.path.exists(os.path.join(headers, "Python.h")))' || \
		$(call missing,Python.h (Debian: apt install python3-dev))

$(VENV)/.created: | check-prerequisites
	$(TELL) "making a virtual environment in $(VENV) (usually 7 s)" $(PYTHON) -m venv $(VENV)
	@touch $@

# Editable: tests see the sources; the extension is rebuilt when a source is newer.
$(VENV)/.built: $(VENV)/.created $(SOURCES)
	$(TELL) "installing NumPy and matplotlib, and building mha and its C core (usually a minute)" \
		$(PIP) --editable '.[plot]'
	@touch $@

$(VENV)/.run: $(VENV)/.built examples/requirements.txt
	$(TELL) "installing a transformer of 90 MB and what reads it (usually 10 s)" \
		$(PIP) --no-deps -r examples/requirements.txt
	@touch $@

# Without the transformer.
$(VENV)/.chat: $(VENV)/.built examples/requirements.txt
	$(TELL) "installing what reads models and their words (usually 5 s)" \
		$(PIP) --no-deps $$(grep -v '^#\|^gt-' examples/requirements.txt)
	@touch $@

$(VENV)/.test: $(VENV)/.run
	$(TELL) "installing what the tests need, 400 MB (usually a minute)" $(PIP) $$($(EXTRA) test)
	@touch $@

# The wheel that users get, for environments that do not see the sources.
dist/.built: $(VENV)/.created $(SOURCES) \
		$(shell find mha -type f -not -name '*.so' -not -path '*/__pycache__/*')
	@rm -rf build dist
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	@touch $@

# The core alone, without Python: its own small test programs, with ALL_FLOATS=1 every float in
# them. Then with the wider instructions emulated, on every processor that can run the emulation, so
# that no machine hides a mistake in it.
test-c: | check-prerequisites
	$(TELL) "compiling and running the C tests (usually a minute)" \
		$(MAKE) --no-print-directory --jobs $(CORES) -C tests/c
	@set -e; for emulated in $(EMULATED); do \
		$(PYTHON) tests/tools/tell_progress.py \
			"the same with $$emulated emulated (usually half a minute)" \
		$(MAKE) --no-print-directory --jobs $(CORES) -C tests/c EMULATED_$$emulated=1; done

# The C tests and the quick Python suite as on a machine of the level below this one's.
test-below: $(VENV)/.test
	tests/tools/kernels.sh below

# The same for AArch64, in an emulator: NEON's kernels give the bits of AVX2's and AVX-512's.
test-neon:
	@command -v aarch64-linux-gnu-gcc >/dev/null || $(call missing,aarch64-linux-gnu-gcc \
		(Debian: apt install gcc-aarch64-linux-gnu libc6-dev-arm64-cross))
	@command -v qemu-aarch64-static qemu-aarch64 >/dev/null || \
		$(call missing,qemu-aarch64 (Debian: apt install qemu-user-static))
	$(MAKE) --no-print-directory --jobs $(CORES) -C tests/c EMULATED_NEON=1

# The same for Windows, under Wine; and the extension for it, which is looked at.
test-windows: check-windows $(VENV)/.built
	$(PIP) 'setuptools>=77' # the script builds without isolation
	tests/tools/windows.sh

check-windows:
	@command -v x86_64-w64-mingw32-gcc >/dev/null || \
		$(call missing,x86_64-w64-mingw32-gcc (Debian: apt install gcc-mingw-w64-x86-64))
	@command -v wine64 >/dev/null || test -x /usr/lib/wine/wine64 || \
		$(call missing,wine64 (Debian: apt install wine64))
	@command -v apt-get >/dev/null || \
		$(call missing,apt-get: it fetches Python's headers for Windows)

# What the README says, on a bare Debian; needs root.
test-fresh:
	tests/tools/fresh.sh

# What needs the peers themselves, in a virtual environment of their own. With
# MHA_CONFIGURATIONS=200, as at night, random ones are as many, and what takes long runs too.
.venv-peers/.built: dist/.built tests/peers/requirements.txt examples/requirements.txt
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python $(INSTALL) -r tests/peers/requirements.txt
	.venv-peers/bin/python $(INSTALL) --no-deps -r examples/requirements.txt
	.venv-peers/bin/python $(INSTALL_WHEEL)
	@touch $@

test-peers: .venv-peers/.built
	$(if $(MHA_CONFIGURATIONS),MHA_CONFIGURATIONS=$(MHA_CONFIGURATIONS)) $(OF_WHEEL) \
		.venv-peers/bin/python -m pytest -n auto $(if $(MHA_CONFIGURATIONS),--all) tests/peers

# Every model of transformers that asks for an attention implementation, and the page about it.
sweep-transformers: .venv-peers/.built
	$(OF_WHEEL):$(CURDIR)/tests/peers .venv-peers/bin/python -W ignore \
		tests/peers/sweep_transformers.py --table docs/transformers_models.md

# Whatever the kernels, ours and the peers': every value of the variables that choose them; hours.
test-kernels: $(VENV)/.test .venv-peers/.built
	tests/tools/kernels.sh $(NOT_OF_KERNELS)

# The page of mha.view in a real browser.
$(VENV)/.browser: $(VENV)/.test
	@command -v chromium google-chrome >/dev/null || \
		$(call missing,chromium (Debian: apt install chromium))
	$(PIP) $$($(EXTRA) browser)
	@touch $@

test-browser: $(VENV)/.browser
	$(BIN)/python $(PYTEST) tests/browser

# A program that PyInstaller froze has the page of mha.view.
.venv-frozen/.built: dist/.built
	$(PYTHON) -m venv .venv-frozen
	.venv-frozen/bin/python $(INSTALL) numpy 'pyinstaller>=6'
	.venv-frozen/bin/python $(INSTALL_WHEEL)
	@touch $@

test-frozen: .venv-frozen/.built
	tests/tools/frozen.sh .venv-frozen/bin/python

# GPT-3's attention layer: 96 heads x 12,288, 2.4 GB of weights.
test-large: $(VENV)/.built
	$(BIN)/python tests/tools/large_layer.py

.venv-oldest/.created: pyproject.toml $(VENV)/.created
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python $(INSTALL) 'numpy==1.26.0' 'setuptools>=77' $$($(EXTRA) test)
	.venv-oldest/bin/python -c 'import numpy; assert numpy.__version__ == "1.26.0", numpy.__version__'
	@touch $@

test-oldest-numpy: dist/.built .venv-oldest/.created
	.venv-oldest/bin/python $(INSTALL_WHEEL)
	$(OF_WHEEL) .venv-oldest/bin/python $(PYTEST) $(or $(TESTS),\
		--ignore tests/examples/test_examples.py --ignore tests/examples/test_classify.py \
		-k "not long_sequences and not keys_in_chunks")

# Wheels are compiled with NumPy 2's headers; here with the oldest's.
test-built-by-oldest-numpy: .venv-oldest/.created
	MHA_WERROR=1 .venv-oldest/bin/python $(INSTALL) --force-reinstall --no-deps --no-build-isolation .
	$(OF_WHEEL) .venv-oldest/bin/python $(PYTEST) @tests/quick.txt \
		tests/functions/test_bad_input.py tests/functions/test_half_precision.py \
		tests/package/test_dlpack.py tests/package/test_layering.py \
		tests/package/test_other_arrays.py

# The sdist is whole and builds without a network.
test-sdist: $(VENV)/.test
	$(PIP) 'setuptools>=77'
	tests/tools/sdist.sh

# The suite on NEON's kernels, in an emulator; some hours, and goes on where it was stopped; needs
# root.
test-arm64: $(VENV)/.test
	$(PIP) 'setuptools>=77'
	tests/tools/arm64.sh

.venv-wheels/.installed: pyproject.toml $(VENV)/.created
	$(PYTHON) -m venv .venv-wheels
	.venv-wheels/bin/python $(INSTALL) 'numpy>=2.0' $$($(EXTRA) release)
	@touch $@

# For other systems, compiled here, into wheelhouse/.
wheels: .venv-wheels/.installed
	tests/tools/wheels.sh $(PLATFORMS)

# Those of `make wheels` that can run here: on musl, and on AArch64 in an emulator.
test-wheels: $(VENV)/.test .venv-wheels/.installed
	tests/tools/musl.sh wheelhouse/mha-*-musllinux_1_2_x86_64.whl
	ARM64_WHEEL=$$(ls wheelhouse/mha-*-manylinux_2_28_aarch64.whl) tests/tools/arm64.sh $(ARM64_TESTS)

# Memory that runs out at every allocation, and arrays between forbidden pages.
test-memory: $(VENV)/.test
	LONGER=$(or $(LONGER),1) $(BIN)/python $(PYTEST) tests/memory

# Python without GIL, under the thread sanitizer; the first time it is built from its source. Not
# everything that tests compare with has wheels for it.
test-free-threaded: $(VENV)/.created
	tests/tools/free_threaded.sh $(or $(SECONDS),60) --all $(NOT_OF_KERNELS) \
		--ignore tests/package/test_public_api.py --ignore tests/package/test_other_arrays.py \
		--ignore tests/package/test_logging.py --ignore tests/compat/test_compat_threadpoolctl.py

# Address and undefined-behaviour sanitizers over the C tests and the Python suite.
sanitize: $(VENV)/.test
	$(PIP) 'setuptools>=77' # the script builds without isolation
	tests/tools/sanitize.sh $(or $(TESTS),--all $(NOT_OF_KERNELS))

# The thread sanitizer over the pool's C tests, and the parts of the Python suite that use threads.
sanitize-threads: $(VENV)/.test
	$(PIP) 'setuptools>=77'
	tests/tools/sanitize_threads.sh

coverage: $(VENV)/.test
	$(PIP) 'pytest-cov>=5' 'setuptools>=77' # the script builds without isolation
	tests/tools/coverage.sh

lint: $(VENV)/.test
	$(PIP) $$($(EXTRA) lint) 'setuptools>=77'
	tests/tools/lint.sh

# The peers (2 GB) in a virtual environment of their own; about 15 minutes on an idle machine.
.venv-bench/.installed: benchmarks/requirements.txt $(VENV)/.created
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/python $(INSTALL) torch==2.13.0
	.venv-bench/bin/python $(INSTALL) -r benchmarks/requirements.txt
	@touch $@

.venv-bench/.built: .venv-bench/.installed dist/.built
	.venv-bench/bin/python $(INSTALL_WHEEL)
	$(MAKE) --no-print-directory -C benchmarks/machine
	@touch $@

bench: .venv-bench/.built
	.venv-bench/bin/python benchmarks/bench.py --write

bench-grid: .venv-bench/.built
	.venv-bench/bin/python benchmarks/grid.py

bench-builds: $(VENV)/.run
	$(BIN)/python benchmarks/builds.py $(OTHER)

bench-kernels: | check-prerequisites
	$(MAKE) --no-print-directory -C benchmarks/machine
	benchmarks/machine/build/bench_kernels

bench-dask: $(VENV)/.test
	$(BIN)/python benchmarks/dask_scaling.py --write

bench-view: $(VENV)/.browser
	$(BIN)/python benchmarks/view.py

bench-accuracy: $(VENV)/.test
	$(BIN)/python benchmarks/accuracy.py --write

bench-training: $(VENV)/.run
	$(BIN)/python benchmarks/training_shares.py --write

bench-linear: $(VENV)/.test
	$(MAKE) --no-print-directory -C benchmarks/machine
	$(BIN)/python benchmarks/linear.py --write

bench-masks: $(VENV)/.run
	$(BIN)/python benchmarks/masks.py --write

bench-quantised: $(VENV)/.test
	$(MAKE) --no-print-directory -C benchmarks/machine
	$(BIN)/python benchmarks/bench_quantised.py --write

SHAPES ?= 200
SEED ?= 0
bench-cliffs: .venv-bench/.built
	.venv-bench/bin/python benchmarks/bench_cliffs.py --shapes $(SHAPES) --seed $(SEED) --write

bench-flex: .venv-bench/.built
	.venv-bench/bin/python benchmarks/flex.py --write

bench-latent: .venv-bench/.built
	.venv-bench/bin/python benchmarks/bench_latent.py --write

bench-reshaping: $(VENV)/.run
	$(BIN)/python benchmarks/reshaping.py --write

format: $(VENV)/.created
	$(BIN)/clang-format -i $$(git ls-files "csrc/*.c" "csrc/*.h" "csrc/*.inc" "tests/c/*.c" \
		"benchmarks/*.c" "benchmarks/*.h")

clean:
	rm -rf build dist *.egg-info mha/*.so tests/c/build benchmarks/machine/build \
		.venv .venv-peers .venv-oldest .venv-sanitize .venv-bench .venv-wheels .venv-frozen \
		wheelhouse .arm64 .musl

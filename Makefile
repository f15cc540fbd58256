# `make` without a target prints this text.
#
# `make test` and `make bench` do everything on a fresh machine: environment, dependencies, build, run. Both rebuild
# only changed parts. Each installs its own tools only.
#
#   make bench ARGS="--device cpu --plot"     arguments for benchmarks/attn.py, such as --budget: 240 seconds by default,
#                                             plus at most one running measurement
#   make test ARGS="-m 'not slow'"            arguments for pytest
#   make test TORCH="torch==2.8.0"            another torch
#   make test PYTHON=python3.12               another interpreter
#
# `make check` takes four minutes on two cores: lint, types, the operator on the CPU, the model and the documents.
# `make test` takes 14, but 21 the first time, to install and to compile what later runs find in TMPDIR and ~/.triton.
#
# `make test-machine` runs the compiled GPU kernels on the host (benchmarks/lib/machine). It takes hours; `make test`
# has a sample of it. It also runs tests that are marked `thorough`. A second run continues with tests that have not
# passed, or starts anew after a change of sources.
#
# `make gpu-counts` counts the instructions of the GPU kernels and of plain flash attention, on the host, and predicts
# their time.
#
# `make bench-suite` stores the operator's time in multiples of plain SDPA's; with COMPARE=1 it compares with the stored
# times instead, and fails if the operator is slower.
#
# `make docs` writes the docstrings into docs/api, builds the site, build/docs/index.html, with all tables of
# benchmarks/results, and checks its links.
#
# `make gpu-check` tests and measures on this machine's GPU with PYTHON's torch, Triton and pytest, without network or a
# new environment, in less than eight minutes. OUT=FOLDER: folder of the results.

PYTHON ?= python3
TORCH ?= torch==2.13.0
ARGS ?=
OUT ?= benchmarks/results

VENV := .venv
RUN := $(VENV)/bin/python
# Folders as well as files, so that a removed file counts as a change. Python sources are used in place.
SOURCES := $(wildcard csrc csrc/* csrc/*/* build_backend/*.py) setup.py pyproject.toml xlnet_kernels/_version.py

.PHONY: help test check test-machine gpu-counts bench bench-suite docs gpu-check clean FORCE

help:
	@sed '/^$$/,$$d; s/^# \{0,1\}//' Makefile

# A thread for each worker, to avoid waits for each other's; tests of kernels take several (tests/conftest.py).
PYTEST := OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1 $(RUN) -u -m pytest -n auto
test: $(VENV)/installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(PYTEST) --dist loadfile --no-loadscope-reorder --durations 30 --durations-min 20 $(ARGS)

# Names of tests that interpret or compile kernels, compile with torch or train; `make test` has them.
LONGER := triton or cuda or compile or forgotten
check: $(VENV)/installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(PYTEST) -q --dist loadfile --no-loadscope-reorder -m "not slow" -k "not ($(LONGER))" \
	  tests/operator tests/model tests/docs $(ARGS)

# tests/machine chooses architectures itself; the operator's tests are run on either.
RESUMED = XLNET_KERNELS_RESUME=build/machine-$(1).txt $(PYTEST) -p tests.machine.resume
MACHINE = XLNET_KERNELS_MACHINE=$(1) $(call RESUMED,$(2)) $(3) $(ARGS)
OPERATOR := tests/operator/test_operator.py tests/operator/test_dropout.py tests/triton/test_backend.py
test-machine: $(VENV)/installed
	$(call MACHINE,80,itself,tests/machine tests/docs/test_add_a_term.py)
	$(call MACHINE,80,80,$(OPERATOR))
	$(call MACHINE,90,90,$(OPERATOR))
	XLNET_KERNELS_EVERY_CASE=1 $(call RESUMED,thorough) --dist loadfile -m thorough $(ARGS)

gpu-counts: $(VENV)/installed
	$(RUN) -u benchmarks/gpu_counts.py --verbose --output $(OUT)/gpu-counts.json $(ARGS)

bench: $(VENV)/bench
	$(RUN) -u benchmarks/attn.py $(ARGS)

bench-suite: $(VENV)/bench
	$(RUN) -u benchmarks/attn.py --sections core --lengths 128 512 1024 --implementations xlnet_kernels "plain SDPA" \
	  --output .benchmarks/suite$(if $(COMPARE),-now.json --compare .benchmarks/suite.json,.json) $(ARGS)

SITE := build/docs-source
docs: $(VENV)/docs
	$(RUN) docs/api_pages.py
	rm -rf $(SITE) && mkdir -p $(SITE)/benchmarks $(SITE)/tests/docs
	ln -s $(addprefix $(CURDIR)/,README.md CHANGELOG.md CONTRIBUTING.md CITATION.cff docs) $(SITE) && ln -s $(CURDIR)/benchmarks/results $(SITE)/benchmarks
	ln -s $(CURDIR)/tests/README.md $(SITE)/tests && ln -s $(CURDIR)/tests/docs/key_bias.md $(SITE)/tests/docs
	$(RUN) benchmarks/report.py --page benchmarks/results/*.json $(SITE)/benchmarks/tables.md
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build

gpu-check:
	@$(PYTHON) -u benchmarks/gpu_check.py '$(OUT)'

clean:
	rm -rf $(VENV) build dist *.egg-info xlnet_kernels/*.so xlnet_kernels/_build_info.json

# Each stamp has the choice it was made for, and is written again only when the choice changes.
$(VENV)/interpreter: FORCE
	@echo '$(PYTHON)' | cmp -s - $@ || { \
	  $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo "$(PYTHON) is missing or older than Python 3.10: name another one with PYTHON=..."; exit 1; }; \
	  $(PYTHON) -c 'import venv, ensurepip' || \
	    { echo "$(PYTHON) has no venv module (Debian, Ubuntu: apt-get install python3-venv)"; exit 1; }; \
	  $(PYTHON) -m venv --clear $(VENV) && echo '$(PYTHON)' > $@; }

$(VENV)/torch: $(VENV)/interpreter FORCE
	@echo '$(TORCH)' | cmp -s - $@ || { $(RUN) -m pip install '$(TORCH)' && echo '$(TORCH)' > $@; }

# `make test` needs the tools of all three; `make bench` and `make docs` install only their own.
$(VENV)/installed: EXTRAS := bench,docs,test
$(VENV)/installed: COVERED := $(VENV)/bench $(VENV)/docs
$(VENV)/bench: EXTRAS := bench
$(VENV)/docs: EXTRAS := docs
$(VENV)/installed $(VENV)/bench $(VENV)/docs: $(VENV)/torch $(SOURCES)
	@echo "building and installing, 5 to 10 minutes on two cores the first time (log: $(VENV)/install.log) ..."
	@$(RUN) -m pip install -v -e '.[$(EXTRAS)]' > $(VENV)/install.log 2>&1 || { cat $(VENV)/install.log; exit 1; }
	@grep '^ *xlnet_kernels: ' $(VENV)/install.log
	@touch $@ $(COVERED)

# `make` alone prints this text.
#
# `make test` and `make bench` do everything on a fresh machine: environment, dependencies, build, run.
# Both pick up what has changed since the last time and cost nothing when nothing has. Each installs its own tools alone.
#
#   make bench ARGS="--device cpu --plot"     arguments for benchmarks/attn.py, such as --budget: 240 seconds by default,
#                                             plus at most the one measurement that has begun
#   make test ARGS="-m 'not slow'"            arguments for pytest
#   make test TORCH="torch==2.8.0"            another torch
#   make test PYTHON=python3.12               another interpreter
#
# `make test-machine` runs the GPU kernels as their compilers left them, on the host (benchmarks/lib/machine). It takes
# hours; `make test` has a sample of it. Run again it goes on with what has not passed, or starts anew where a source has
# changed.
#
# `make gpu-counts` counts what the GPU kernels execute, beside plain flash attention, on the same machine.
#
# `make bench-suite` keeps the operator's time in multiples of plain SDPA's; with COMPARE=1 it compares with what was kept
# instead, and fails where something has become slower.
#
# `make docs` writes the docstrings into docs/api, makes a site of all pages, build/docs/index.html, and checks its links.
#
# `make gpu-check` tests and measures on this machine's GPU with the torch, Triton and pytest that PYTHON has, without
# network and without an environment of its own, in less than eight minutes. OUT=FOLDER: where its results go.

PYTHON ?= python3
TORCH ?= torch==2.13.0
ARGS ?=
OUT ?= benchmarks/results

VENV := .venv
RUN := $(VENV)/bin/python
# Folders as well as files, so that a removed file counts as a change. Python sources are used in place.
SOURCES := $(wildcard csrc csrc/* csrc/*/* build_backend/*.py) setup.py pyproject.toml xlnet_kernels/_version.py

.PHONY: help test test-machine gpu-counts bench bench-suite docs gpu-check clean FORCE

help:
	@sed '/^$$/,$$d; s/^# \{0,1\}//' Makefile

test: $(VENV)/installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	OMP_WAIT_POLICY=PASSIVE $(RUN) -u -m pytest -n auto --dist loadfile --no-loadscope-reorder \
	  --durations 30 --durations-min 20 $(ARGS)

# tests/machine chooses architectures itself; the operator's tests are run on either.
MACHINE = XLNET_KERNELS_MACHINE=$(1) XLNET_KERNELS_RESUME=build/machine-$(2).txt OMP_WAIT_POLICY=PASSIVE \
  $(RUN) -u -m pytest -p tests.machine.resume -n auto $(3) $(ARGS)
OPERATOR := tests/operator/test_operator.py tests/operator/test_dropout.py tests/triton/test_backend.py
test-machine: $(VENV)/installed
	$(call MACHINE,80,itself,tests/machine tests/docs/test_add_a_term.py)
	$(call MACHINE,80,80,$(OPERATOR))
	$(call MACHINE,90,90,$(OPERATOR))

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
	rm -rf $(SITE) && mkdir -p $(SITE)/benchmarks
	ln -s $(addprefix $(CURDIR)/,README.md CHANGELOG.md CONTRIBUTING.md CITATION.cff docs) $(SITE) && ln -s $(CURDIR)/benchmarks/results $(SITE)/benchmarks
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --quiet

gpu-check:
	@$(PYTHON) -u benchmarks/gpu_check.py '$(OUT)'

clean:
	rm -rf $(VENV) build dist *.egg-info xlnet_kernels/*.so xlnet_kernels/_build_info.json

# Each stamp holds the choice it was made for, and is written again only when that changes.
$(VENV)/interpreter: FORCE
	@echo '$(PYTHON)' | cmp -s - $@ || { \
	  $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo "$(PYTHON) is missing or older than Python 3.10: name another one with PYTHON=..."; exit 1; }; \
	  $(PYTHON) -c 'import venv, ensurepip' || \
	    { echo "$(PYTHON) has no venv module (Debian, Ubuntu: apt-get install python3-venv)"; exit 1; }; \
	  $(PYTHON) -m venv --clear $(VENV) && echo '$(PYTHON)' > $@; }

$(VENV)/torch: $(VENV)/interpreter FORCE
	@echo '$(TORCH)' | cmp -s - $@ || { $(RUN) -m pip install '$(TORCH)' && echo '$(TORCH)' > $@; }

# What `make test` runs needs the tools of all three; `make bench` and `make docs` install their own alone.
$(VENV)/installed: EXTRAS := bench,docs,test
$(VENV)/installed: COVERED := $(VENV)/bench $(VENV)/docs
$(VENV)/bench: EXTRAS := bench
$(VENV)/docs: EXTRAS := docs
$(VENV)/installed $(VENV)/bench $(VENV)/docs: $(VENV)/torch $(SOURCES)
	@echo "building and installing, 5 to 10 minutes on two cores the first time (log: $(VENV)/install.log) ..."
	@$(RUN) -m pip install -v -e '.[$(EXTRAS)]' > $(VENV)/install.log 2>&1 || { cat $(VENV)/install.log; exit 1; }
	@grep '^ *xlnet_kernels: ' $(VENV)/install.log
	@touch $@ $(COVERED)

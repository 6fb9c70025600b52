# `make test` makes the environment if there is none and passes the tests.
# What runs here runs on the CPU build of vLLM, also where there are GPUs: that is then in .venv_cpu, and no GPU is seen.
SHELL := bash
# The processes of the tests import the same modules, which each would compile again.
unexport PYTHONDONTWRITEBYTECODE
on_cpu := source scripts/cpu_environment.sh &&

.PHONY: env test lint proofs mutants docs site bench gpu-lock-check gpu-rehearsal gpu-environment plan-check

env:
	@bash scripts/environment.sh

lint:
	$(on_cpu) $$python -m ruff check .
	$(on_cpu) $$python -m ruff format --check .
	$(on_cpu) $$python -m mypy --num-workers 2

# Three processes for two cores, since many tests wait for processes to start. Each has whole files: a file's
# tests share what is slow to start.
test: lint
	$(on_cpu) OMP_NUM_THREADS=1 $$python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

# Needs the package index, but no GPU and no .venv: uv resolves, for each Python that the lock is for.
gpu-lock-check: build/uv/bin/uv
	@build/uv/bin/python scripts/gpu_lock.py

build/uv/bin/uv: requirements/uv.txt
	python3 -m venv --clear build/uv
	build/uv/bin/python -m pip --disable-pip-version-check --quiet install --no-deps -r $<
	touch $@

# The CUDA path without a GPU: whole runs on the null GPU, which the first time installs 9 GB in
# build/gpu_env. CHOSEN="sft ppo*" does some of the runs.
gpu-rehearsal:
	@python3 scripts/gpu_rehearsal.py $(CHOSEN)

# What `python -m verl_like.rehearse` needs where there is no GPU: the GPU environment, without a run.
gpu-environment:
	@python3 scripts/gpu_rehearsal.py --environment

# The sums of trainer/memory/sums.py beside what a 7B model reserves on the null GPU; writes
# docs/memory_plan.md. CHOSEN="sft lora*" does some of the cases and writes nothing.
plan-check:
	$(on_cpu) PYTHONPATH=$(CURDIR) OMP_NUM_THREADS=1 $$python scripts/plan_check.py $(CHOSEN)

# What proves and takes long; writes docs/proofs.md, and after it the pages of rehearsal and plan.
# CHOSEN="-k resume" runs a part, without these.
proofs:
	$(on_cpu) PYTHONPATH=$(CURDIR) OMP_NUM_THREADS=1 $$python scripts/proofs.py $(CHOSEN)
	$(if $(CHOSEN),,@python3 scripts/gpu_rehearsal.py)
	$(if $(CHOSEN),,$(MAKE) plan-check)

# Writes docs/mutants.md. AREAS="data export" tries these areas alone and does not write it. The tools are
# laid over the environment, which stays as it is.
mutants: build/mutation_tools
	$(on_cpu) PYTHONPATH=$(CURDIR)/build/mutation_tools OMP_NUM_THREADS=1 $$python scripts/mutants.py $(AREAS)

build/mutation_tools: requirements/mutants.txt
	rm -rf $@
	$(on_cpu) $$python -m pip --disable-pip-version-check --quiet install --no-deps --target $@ -r $<
	touch $@

docs:
	$(on_cpu) $$python scripts/generate_docs.py

# The documents and the API reference as a site in build/site. Needs no .venv; its tools have an environment of their own.
site: build/site_tools
	NO_MKDOCS_2_WARNING=1 build/site_tools/bin/mkdocs build

build/site_tools: requirements/docs.txt
	rm -rf $@
	python3 -m venv $@
	$@/bin/python -m pip --disable-pip-version-check --quiet install --no-deps -r $<
	touch $@

benchmarks := $(filter-out harness serve table toy_world gpu_check driver versions,$(basename $(notdir $(sort $(wildcard benchmarks/*.py)))))

# One after the other; one that fails does not stop the rest.
bench:
	@bash benchmarks/setup_peers.sh
	@$(on_cpu) failed=; for name in $(benchmarks); do $$python -m benchmarks.$$name || failed="$$failed $$name"; done; \
	$$python -m benchmarks.table; \
	if [ -n "$$failed" ]; then echo "These benchmarks failed:$$failed"; exit 1; fi

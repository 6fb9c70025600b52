# `make test` makes the environment if there is none and passes the tests.
.PHONY: env test lint docs

env:
	@bash scripts/environment.sh

lint: env
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

test: lint
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest

docs: env
	.venv/bin/python scripts/generate_docs.py

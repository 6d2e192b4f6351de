"""The benchmark on a GPU: ``python -m benchmarks.gpu --json FILE``."""

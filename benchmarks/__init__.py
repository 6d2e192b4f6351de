"""What is measured, side by side with plain PyTorch and its peers. See benchmarks/README.md."""

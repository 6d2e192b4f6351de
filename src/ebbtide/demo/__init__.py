"""The demo: three real models on real data, plain and within a memory budget."""

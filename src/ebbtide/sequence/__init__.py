"""Backpropagation through chains of steps far longer than memory."""

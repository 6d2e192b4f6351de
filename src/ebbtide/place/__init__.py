"""Offsets for blocks of memory whose lifetimes are known."""

from ebbtide.place.layout import Block, Layout, max_live_bytes, place

__all__ = ["Block", "Layout", "max_live_bytes", "place"]

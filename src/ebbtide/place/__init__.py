"""Offsets for blocks of memory whose lifetimes are known."""

from ebbtide.place.layout import Block, Layout, max_live_bytes, place
from ebbtide.place.local import keep_local

__all__ = ["Block", "Layout", "keep_local", "max_live_bytes", "place"]

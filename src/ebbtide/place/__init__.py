"""Offsets for blocks of memory whose lifetimes are known."""

from ebbtide.place.layout import Block as Block
from ebbtide.place.layout import Layout as Layout
from ebbtide.place.layout import max_live_bytes as max_live_bytes
from ebbtide.place.layout import place as place

"""Schedules for reversing chains of steps: plain records, made lazily. No torch.

All raise `ArgumentError` for numbers of steps and slots that are not whole, and for times that are negative or not
finite; it is a `ValueError`.
"""

from ebbtide.sequence.schedules.disk_revolve import DiskCosts, DiskRevolve, PeriodicDiskRevolve
from ebbtide.sequence.schedules.h_revolve import HRevolve, Level
from ebbtide.sequence.schedules.interpret import Costs, Count, interpret
from ebbtide.sequence.schedules.mixed import Mixed
from ebbtide.sequence.schedules.multistage import Multistage
from ebbtide.sequence.schedules.online import Online, OnlineInMemory
from ebbtide.sequence.schedules.records import (
    DISK,
    MEMORY,
    Advance,
    Drop,
    Load,
    Record,
    Reverse,
    Schedule,
    Store,
)
from ebbtide.sequence.schedules.revolve import Revolve
from ebbtide.sequence.schedules.store_all import StoreAll

__all__ = [
    "DISK",
    "MEMORY",
    "Advance",
    "Costs",
    "Count",
    "DiskCosts",
    "DiskRevolve",
    "Drop",
    "HRevolve",
    "Level",
    "Load",
    "Mixed",
    "Multistage",
    "Online",
    "OnlineInMemory",
    "PeriodicDiskRevolve",
    "Record",
    "Reverse",
    "Revolve",
    "Schedule",
    "Store",
    "StoreAll",
    "interpret",
]

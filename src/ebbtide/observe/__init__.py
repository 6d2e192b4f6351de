"""Turns a running training step into a `Step`."""

from ebbtide.observe.ledger import Ledger as Ledger
from ebbtide.observe.recorder import Recorder as Recorder

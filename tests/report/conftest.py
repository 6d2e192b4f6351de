"""A made-up step, machine and plan: what summaries and timelines are tried on."""

from __future__ import annotations

import pytest

from ebbtide.decisions import Plan
from ebbtide.machine import Machine
from ebbtide.step import Step
from tests.report.synthetic_step import machine, network, plan_for


@pytest.fixture(scope="session")
def step() -> Step:
    return network()


@pytest.fixture(scope="session")
def on() -> Machine:
    return machine()


@pytest.fixture(scope="session")
def plan(step: Step, on: Machine) -> Plan:
    return plan_for(step, on)

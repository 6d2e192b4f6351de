"""What one recipe needs and costs when it runs.

NOTE [Replay]
1. A leaf is an input that no earlier op of the recipe made. Leaves are made present first, in order of first use.
2. Every output of an op that is a new storage is allocated with the op, needed or not.
3. An in-place op writes a storage that the recipe made in place; of a leaf it first makes a copy.
4. After each op the storages that no later op of the recipe reads are freed, the target's excepted.
5. ``batch_norm`` replays without its running statistics: what it mutates is neither read nor copied.
6. A leaf is external, or a value that was saved before the target was and that autograd still holds then, so that the
   target's holding can refer to the leaf's; when the recipe runs the leaf's storage is alive and has not been written
   since.
7. Ops of the forward pass are replayed, and those of a backward pass that ops of the forward pass follow: their
   arguments are captured as they run. Nothing is captured in the last pass, as nothing later needs what it makes.
"""

from __future__ import annotations

from ebbtide.errors import PlanError
from ebbtide.plan.problem import CheckedRecipe, Facts
from ebbtide.step import Op


def is_replayable(facts: Facts, tick: int) -> bool:
    """Whether a recipe may run op ``tick`` again: rule 7 of NOTE [Replay]."""
    return facts.replayable_from[tick] <= facts.step.moments


def is_leaf(facts: Facts, value: int, target: int) -> bool:
    """Whether a recipe of ``target`` may read ``value`` without making it: rule 6 of NOTE [Replay]."""
    if facts.step.values[value].storage in facts.external:
        return True
    moment = facts.packed.get(target, -1)
    return any(begin < moment < end for begin, end in facts.held.get(value, ()))


def operands(op: Op) -> list[int]:
    """Values that a replay of ``op`` reads or writes, each once: see rules 3 and 5 of NOTE [Replay]."""
    mutated = dict.fromkeys(old for old, _ in op.mutated)
    if op.replay == "batch_norm":
        return [value for value in dict.fromkeys(op.inputs) if value not in mutated]
    return list(dict.fromkeys((*op.inputs, *mutated)))


def check_recipe(facts: Facts, target: int, ops: tuple[int, ...], more_seconds: float = 0.0) -> CheckedRecipe:
    """Check the recipe ``ops`` for value ``target`` and add up what it takes, with ``more_seconds`` for each op.

    Searches come back to the same recipes: what was found once is kept.

    Raises:
        PlanError: if it cannot make the value.
    """
    key = target, ops, more_seconds
    found = facts.checked.get(key)
    if found is None:
        found = facts.checked[key] = _check_recipe(facts, target, ops, more_seconds)
    return found


def _check_recipe(facts: Facts, target: int, ops: tuple[int, ...], more_seconds: float) -> CheckedRecipe:
    """`check_recipe`, anew."""
    # Ending with the value's maker, a recipe reads only values older than its own: no two recipes wait for each other.
    if not ops or list(ops) != sorted(set(ops)) or ops[0] < 0 or ops[-1] != facts.step.values[target].maker:
        raise PlanError(f"the recipe {ops} of value {target} must be ticks in order, the last one that of its maker")
    last_use = {value: tick for tick in ops for value in operands(facts.step.ops[tick])}
    made: dict[int, int] = {}
    leaves: dict[int, None] = {}
    valid_until = facts.step.moments + 1
    seconds, peak_bytes, physical_bytes = 0.0, 0, 0
    for tick in ops:
        op = facts.step.ops[tick]
        if not is_replayable(facts, tick):
            raise PlanError(
                f"the recipe of value {target} replays op {tick} ({op.name}), which is {op.replay}, {op.phase}"
            )
        for value in operands(op):
            if value not in made:
                valid_until = min(valid_until, _leaf_until(facts, value, target))
                leaves[value] = None
        _make(facts, op, made)
        live_bytes = sum(made.values())
        peak_bytes = max(peak_bytes, live_bytes)
        physical_bytes = max(physical_bytes, live_bytes + op.workspace_bytes)
        seconds += op.duration_seconds + more_seconds
        made = {value: size for value, size in made.items() if value == target or last_use.get(value, -1) > tick}
    if target not in made:
        raise PlanError(f"the recipe {ops} does not make value {target}")
    storages = dict.fromkeys(facts.step.values[leaf].storage for leaf in leaves)
    own = tuple(storage for storage in storages if storage not in facts.external)
    return CheckedRecipe(own, seconds, peak_bytes, physical_bytes, valid_until)


def _make(facts: Facts, op: Op, made: dict[int, int]) -> None:
    """Add what ``op`` makes to ``made``, bytes by value: rules 2 and 3 of NOTE [Replay]."""
    values = facts.step.values
    for value in op.outputs:
        if facts.makes_storage[value]:
            made[value] = values[value].size_bytes
    if op.replay != "batch_norm":
        for old, new in op.mutated:
            made.pop(old, None)
            made[new] = values[old].size_bytes


def _leaf_until(facts: Facts, leaf: int, target: int) -> int:
    """The first moment at which ``leaf`` cannot be read any more."""
    if not is_leaf(facts, leaf, target):
        raise PlanError(f"the recipe of value {target} reads value {leaf}, neither external nor saved before it")
    return min(facts.superseded[leaf], facts.dies[leaf])

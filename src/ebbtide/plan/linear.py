"""Linear programs in boxes, solved by HiGHS, with values that hold whatever the solver's tolerances were.

`highspy` is used as it is: it is HiGHS alone (4 MB to fetch), takes a matrix as three arrays, and lets us choose the
method. `scipy.optimize.linprog` runs the same solver behind checks of its own and would bring all of scipy along.

NOTE [Certified value]
Multipliers ``p`` of the rows ``lower <= A x <= upper``, with ``p = p+ - p-``, prove

    min c'x  >=  p+' lower - p-' upper + sum over columns of min((c - A'p) x, over the column's box)

for every ``p``, since all boxes are finite; for the optimal ones it is an equality. `solve_program` returns this sum,
not the solver's objective. So the value is a bound also where the solver stopped early or was only nearly exact.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np

from ebbtide.arrays import Floats, Ints

Scalars = float | Floats

SMALL = 5000
"""Columns up to which the dual simplex method is the quicker one."""


class Program:
    """``minimise cost'x`` over rows ``lower <= A x <= upper`` and finite column boxes, put together from arrays."""

    def __init__(self) -> None:
        self.columns_count = self.rows_count = 0
        self._columns: list[tuple[Floats, Floats]] = []
        self._rows: list[tuple[Floats, Floats]] = []
        self._entries: list[tuple[Ints, Ints, Floats]] = []

    def columns(self, count: int, upper: Scalars, cost: float = 0.0) -> Ints:
        """Add ``count`` columns between 0 and ``upper``; returns their numbers."""
        first, self.columns_count = self.columns_count, self.columns_count + count
        self._columns.append((_filled(count, cost), _filled(count, upper)))
        return np.arange(first, self.columns_count)

    def rows(self, lower: Scalars, upper: Scalars, count: int) -> Ints:
        """Add ``count`` rows; returns their numbers."""
        first, self.rows_count = self.rows_count, self.rows_count + count
        self._rows.append((_filled(count, lower), _filled(count, upper)))
        return np.arange(first, self.rows_count)

    def put(self, rows: Ints, columns: Ints, values: Scalars) -> None:
        """Add ``values`` to the matrix; what stands at the same place is added up."""
        self._entries.append((rows, columns, _filled(len(rows), values)))

    def assemble(self) -> Assembled:
        """The whole program, its matrix row by row."""
        rows, columns, values = (np.concatenate(parts) for parts in zip(*self._entries, strict=True))
        place, where = np.unique(rows * self.columns_count + columns, return_inverse=True)
        rows, columns = np.divmod(place, self.columns_count)
        cost, upper = (np.concatenate(parts) for parts in zip(*self._columns, strict=True))
        row_lower, row_upper = (np.concatenate(parts) for parts in zip(*self._rows, strict=True))
        summed = np.bincount(where, values, len(place)).astype(np.float64)
        return Assembled(cost, upper, row_lower, row_upper, rows, columns, summed)


@dataclasses.dataclass(frozen=True, slots=True)
class Assembled:
    """A whole program, as arrays.

    Attributes:
        cost, upper: per column what one of it costs, and the most that it may be; the least is 0.
        row_lower, row_upper: per row what it must be at least and at most.
        rows, columns, values: entries of the matrix that are not 0, ordered by row, then column.
    """

    cost: Floats
    upper: Floats
    row_lower: Floats
    row_upper: Floats
    rows: Ints
    columns: Ints
    values: Floats

    def certify(self, multipliers: Floats) -> float:
        """What ``multipliers`` prove: see NOTE [Certified value]."""
        below, above = np.isfinite(self.row_lower), np.isfinite(self.row_upper)
        rising = np.where(below, np.maximum(multipliers, 0.0), 0.0)
        falling = np.where(above, np.maximum(-multipliers, 0.0), 0.0)
        entries = (rising - falling)[self.rows] * self.values
        reduced = self.cost - np.bincount(self.columns, entries, len(self.cost))
        sides = rising * np.where(below, self.row_lower, 0.0) - falling * np.where(above, self.row_upper, 0.0)
        return math.fsum(sides) + math.fsum(np.minimum(reduced, 0.0) * self.upper)


@dataclasses.dataclass(frozen=True, slots=True)
class Solution:
    """What was found out about a program.

    Attributes:
        value: a certified lower bound of its minimum; infinite if it has no solution.
        multipliers: of its rows; they prove that bound.
        columns: the best solution found, which nothing vouches for.
    """

    value: float
    multipliers: Floats
    columns: Floats


@functools.cache
def _highspy() -> Any:
    """HiGHS, imported here and not sooner, since only those who plan should wait for that."""
    import highspy

    return highspy


def solve_program(program: Assembled, seconds: float) -> Solution:
    """Minimise ``program`` for at most about ``seconds``; the answer is a bound even if the time was too short.

    Programs of `SMALL` columns and less are solved by the dual simplex method, in a third to two thirds of the time
    that the interior point method takes for them, which is used for larger ones, with a crossover to a vertex: on lower
    bounds with 500 blocks it took a third of the dual simplex's time. Without the crossover it saved a tenth, but where
    presolve had solved most of a program, the multipliers that came back proved half of its value. Of HiGHS's two such
    methods it is the older one: where the newer is installed (`highspy-extras`), "ipm" takes that, which took twice as
    long for these programs, in places three times.
    """
    highspy = _highspy()
    count, height = len(program.cost), len(program.row_lower)
    solver = _silent_solver()()
    if count <= SMALL:
        solver.setOptionValue("solver", "simplex")
    elif solver.setOptionValue("solver", "ipx") != highspy.HighsStatus.kOk:
        solver.setOptionValue("solver", "ipm")  # older ones know no other, and not its name
    solver.setOptionValue("time_limit", seconds)
    solver.passModel(_model(program))
    _run(solver)
    if solver.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
        return Solution(math.inf, np.zeros(height), np.zeros(count))
    solution = solver.getSolution()
    multipliers, columns = np.array(solution.row_dual, dtype=np.float64), np.array(solution.col_value, dtype=np.float64)
    if len(multipliers) != height:
        multipliers = np.zeros(height)
    if len(columns) != count:
        columns = np.zeros(count)
    return Solution(program.certify(multipliers), multipliers, columns)


def solve_whole(program: Assembled, whole: Ints, seconds: float) -> float:
    """What HiGHS proves, by branch and bound for at most about ``seconds``, where the columns ``whole`` are 0 or 1.

    A lower bound of the minimum but for HiGHS's tolerances, which nothing here makes up for; infinite if there is no
    solution, and minus infinity if the time was too short for any.
    """
    highspy = _highspy()
    model = _model(program)
    kinds = np.full(len(program.cost), highspy.HighsVarType.kContinuous)
    kinds[whole] = highspy.HighsVarType.kInteger
    model.integrality_ = kinds.tolist()
    solver = _silent_solver()()
    solver.setOptionValue("time_limit", seconds)
    solver.passModel(model)
    _run(solver)
    if solver.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
        return math.inf
    return float(solver.getInfo().mip_dual_bound)


def _run(solver: Any) -> None:
    """Let ``solver`` run in this thread alone.

    HiGHS keeps a pool of threads for later solves. A forked process does not have them, and a solve there would wait
    for them for ever. Where somebody else's solve has left such a pool, HiGHS refuses another number of threads until
    the pool is given up; not waiting for its threads to end, as those of a parent process never do.
    """
    solver.setOptionValue("threads", 1)
    if solver.run() == _highspy().HighsStatus.kError:
        solver.resetGlobalScheduler(False)
        solver.run()


def _model(program: Assembled) -> Any:
    """``program`` as HiGHS takes it."""
    highspy = _highspy()
    model = highspy.HighsLp()
    count, height = len(program.cost), len(program.row_lower)
    model.num_col_, model.num_row_ = count, height
    model.col_cost_, model.col_lower_, model.col_upper_ = program.cost, np.zeros(count), program.upper
    model.row_lower_, model.row_upper_ = program.row_lower, program.row_upper
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_ = np.searchsorted(program.rows, np.arange(height + 1)).astype(np.int32)
    model.a_matrix_.index_ = program.columns.astype(np.int32)
    model.a_matrix_.value_ = program.values
    return model


@functools.cache
def _silent_solver() -> Any:
    """A class of solvers that print nothing. Some versions print who they are as soon as they take callbacks."""

    class Silent(_highspy().Highs):  # type: ignore[misc]
        def enableCallbacks(self) -> None:  # noqa: N802 - the name is highspy's
            self.silent()
            super().enableCallbacks()

    return Silent


def _filled(count: int, values: Scalars) -> Floats:
    return np.broadcast_to(np.asarray(values, dtype=np.float64), count)

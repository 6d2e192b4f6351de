"""Worker threads behind a queue, made so that a fork can neither hang on them nor catch a transfer halfway.

NOTE [Fork]
1. Threads do not survive a fork: a child has the queue and the locks, but nobody who works on them. So in a child every
   lane is closed, and the tiers refuse to be used (`queued.py`).
2. A direct read that is under way while the process forks may arrive in the child's copy of a page instead of the
   parent's: open(2) forbids it. So a fork waits for the parts under way, and the workers stand still until it is over.
   They are told by `_no_fork` besides their locks: who gives a lock back and takes it at once overtakes who waits.
"""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Callable

from ebbtide.errors import SpillError
from ebbtide.run.tiers.gate import Gate

Job = Callable[[bool], None]
"""Work for a lane. It is told whether the lane is closing, and then must only report that it was not done."""

_lanes: weakref.WeakSet[Lane] = weakref.WeakSet()
_fork_lock = threading.Lock()
_no_fork = threading.Event()
_no_fork.set()
_held_gates: list[threading.Lock] = []


class Lane:
    """A queue that is worked off in order by daemon threads, which start with the first job.

    Args:
        name: name of the threads.
        workers: how many; with one, jobs run strictly one after another.
    """

    def __init__(self, name: str, workers: int) -> None:
        self._name = name
        self._workers = workers
        self._reset()
        _lanes.add(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads: dict[threading.Thread, Gate] = {}  # opened as each of them ends
        self._gates: list[threading.Lock] = []
        self._closing = False

    def submit(self, job: Job) -> None:
        """Queue a job. Raises `SpillError` if the lane is closed, or no thread can be started."""
        with self._lock:
            if self._closing:
                raise SpillError("a transfer was asked for after the spill was closed")
            if not self._threads:
                self._start()
            self._jobs.put(job)

    def close(self) -> None:
        """Tell the jobs that still wait that they will not be done, and join the threads.

        After Ctrl-C, closing again waits for those that have not ended.
        """
        with self._lock:
            self._closing = True
            for _ in self._threads:
                self._jobs.put(None)
        for thread, ended in self._others:
            ended.wait()  # a thread counts as joined when Ctrl-C strikes in its `join`
            thread.join()

    @property
    def has_ended(self) -> bool:
        """Whether none of the threads does anything more, if it is closed."""
        return all(ended.is_open for _, ended in self._others)

    @property
    def is_here(self) -> bool:
        """Whether this is one of its threads."""
        return threading.current_thread() in self._threads

    @property
    def _others(self) -> list[tuple[threading.Thread, Gate]]:
        """The threads but this one: the last reference to a tier may die in one of its own workers."""
        return [(thread, ended) for thread, ended in self._threads.items() if thread is not threading.current_thread()]

    def _start(self) -> None:
        """Start the threads, or as many of them as the system allows."""
        for _ in range(self._workers):
            gate, ended = threading.Lock(), Gate()
            thread = threading.Thread(target=self._work, args=(gate, ended), name=self._name, daemon=True)
            try:
                self._gates.append(gate)
                self._threads[thread] = ended
                thread.start()
            except BaseException as fault:  # one that was never started would be counted on, and waited for
                self._threads.pop(thread, None)
                self._gates = [other for other in self._gates if other is not gate]
                if not isinstance(fault, RuntimeError):
                    raise
                if not self._threads:
                    raise SpillError(f"no thread can be started to move tensors ({fault}); allow more") from fault

    def _work(self, gate: threading.Lock, ended: Gate) -> None:
        with self._lock:
            is_known = gate in self._gates
        if not is_known:
            return  # Ctrl-C struck as it was started: no fork would wait for it
        try:
            while (job := self._jobs.get()) is not None:
                _no_fork.wait()
                with gate:
                    job(self._closing)
                # Otherwise the job, and with it the tier, would live until the next one comes.
                del job
        finally:
            ended.open()

    @property
    def gates(self) -> tuple[threading.Lock, ...]:
        """One lock for each thread, held while a job runs."""
        return tuple(self._gates)

    def abandon(self) -> None:
        """Forget the threads of another process, and never start new ones."""
        self._reset()
        self._closing = True


def _before_fork() -> None:
    _fork_lock.acquire()
    _no_fork.clear()
    for lane in list(_lanes):
        for gate in lane.gates:
            gate.acquire()
            _held_gates.append(gate)


def _after_fork_in_parent() -> None:
    while _held_gates:
        _held_gates.pop().release()
    _no_fork.set()
    _fork_lock.release()


def _after_fork_in_child() -> None:
    global _no_fork
    _held_gates.clear()
    _no_fork = threading.Event()  # a thread of the parent may have held the old one's lock
    _no_fork.set()
    _fork_lock.release()
    for lane in list(_lanes):
        lane.abandon()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)

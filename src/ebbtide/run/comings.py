"""When steps of one kind come, and what comes after them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ebbtide.run.recurrence import Recurrence

if TYPE_CHECKING:
    from ebbtide.run.kinds import Kind


class Comings(Recurrence):
    """When the steps of one kind came.

    Attributes:
        count: how many there were.
        follower: the kind that steps are likely to be of that come after one of this kind; None for the same.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.follower: Kind | None = None
        self._was_followed_by_another = False

    def came_at(self, number: int) -> bool:
        """Note that step ``number`` was of this kind. Returns whether it was due then, and others came in between: the
        next one is likely when it is due."""
        is_regular = self.count > 1 and number == self.due and number - self.latest > 1
        self.note(number)
        self.count += 1
        return is_regular

    def followed_by(self, kind: Kind | None) -> None:
        """A step of this kind was followed by one of ``kind``, None for the same: twice in a row, and it is what is
        expected."""
        if kind is self.follower:
            self._was_followed_by_another = False
        elif self._was_followed_by_another:
            self.follower, self._was_followed_by_another = kind, False
        else:
            self._was_followed_by_another = True

    def no_longer_followed_by(self, kind: Kind) -> None:
        """Nobody knows ``kind`` any more."""
        if self.follower is kind:
            self.follower = None

"""When steps of one kind come, and what comes after them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ebbtide.run.kinds import Kind


class Comings:
    """When the steps of one kind came.

    Attributes:
        count: how many there were.
        latest: number of the last one; -1 before the first.
        follower: the kind that steps are likely to be of that come after one of this kind; None for the same.
    """

    def __init__(self) -> None:
        self.count, self.latest = 0, -1
        self.follower: Kind | None = None
        self._gap = 0
        self._was_followed_by_another = False

    @property
    def next_at(self) -> int:
        """Number of the next one, if that comes as long after the last one as that came after the one before."""
        return self.latest + self._gap

    def came_at(self, number: int) -> int | None:
        """Step ``number`` was of this kind. Returns the steps from the last one of it to this, if those from the one
        before to the last were as many, and more than one; otherwise None."""
        gap = number - self.latest
        again = self.count > 1 and gap == self._gap and gap > 1
        self.latest, self._gap = number, gap
        self.count += 1
        return gap if again else None

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

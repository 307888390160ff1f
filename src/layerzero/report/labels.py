"""Places for the labels of a chart: none lies on another, on a point or outside the picture."""

from __future__ import annotations

import math
from typing import NamedTuple

LETTER, LINE = 7.2, 14.0                       # width of a letter and height of a line, at most
DISTANCES = (12, 17, 24, 32, 42, 54)
ANGLES = (-45, -135, 45, 135, 0, 180, -90, 90)


class Box(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: Box) -> bool:
        return (self.left < other.right and other.left < self.right
                and self.top < other.bottom and other.top < self.bottom)


class Labels:
    """The parts of a picture that are taken."""

    def __init__(self, left: float, top: float, right: float, bottom: float) -> None:
        self.frame = Box(left, top, right, bottom)
        self.taken: list[Box] = []

    @staticmethod
    def width(text: str) -> float:
        return LETTER * len(text)

    def block(self, cx: float, cy: float, half_width: float, half_height: float) -> None:
        self.taken.append(Box(cx - half_width, cy - half_height, cx + half_width, cy + half_height))

    def take_along(self, x: float, y: float, angle: float, text: str) -> bool:
        """Take the place of a rotated text that begins at (x, y), if all of it is free."""
        lift, boxes = LINE / 3, []             # the baseline is below the middle of the letters
        for i in range(len(text)):
            step = (i + 0.5) * LETTER
            cx = x + step * math.cos(angle) + lift * math.sin(angle)
            cy = y + step * math.sin(angle) - lift * math.cos(angle)
            boxes.append(Box(cx - LETTER, cy - LINE / 2, cx + LETTER, cy + LINE / 2))
        if not all(self._free(box) for box in boxes):
            return False
        self.taken += boxes
        return True

    def _free(self, box: Box) -> bool:
        inside = (box.left >= self.frame.left and box.right <= self.frame.right
                  and box.top >= self.frame.top and box.bottom <= self.frame.bottom)
        return inside and not any(box.meets(other) for other in self.taken)

    def beside_line(self, right: float, y: float, text: str) -> tuple[float, float]:
        """Return the end of a text above a level line, or below where points are above it."""
        for baseline in (y - 6, y + LINE + 2):
            box = Box(right - self.width(text), baseline - LINE + 3, right, baseline + 3)
            if not any(box.meets(other) for other in self.taken):
                break
        else:
            baseline = y - 6
        self.taken.append(Box(right - self.width(text), baseline - LINE + 3, right, baseline + 3))
        return right, baseline

    def near(self, cx: float, cy: float, text: str) -> tuple[float, float, float] | None:
        """Return the middle of a free place near a point, and its distance; None without one."""
        half_width, half_height = self.width(text) / 2 + 3, LINE / 2 + 1
        for distance in DISTANCES:
            for angle in ANGLES:
                x = cx + distance * math.cos(math.radians(angle))
                y = cy + distance * math.sin(math.radians(angle))
                box = Box(x - half_width, y - half_height, x + half_width, y + half_height)
                if self._free(box):
                    self.taken.append(box)
                    return x, y, distance
        return None

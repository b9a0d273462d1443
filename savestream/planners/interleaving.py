"""Telling interleaved arrays apart: columns of one matrix reach over each other and yet share nothing.

Every address is looked at modulo a period, which is a stride that the arrays have in common. Axes that go on by whole
periods vanish there, and what is left of an array is an interval on a circle. Arrays whose intervals do not touch share
no memory, and a sort tells which these are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from savestream.arrays import ArrayInfo

__all__ = ["Candidates", "Placed", "candidates"]

_MAXIMUM_PERIODS = 8
_MAXIMUM_WIDE = 8  # arrays that fill the whole circle, each of which is compared with all others

_Interval = tuple[int, int, int]  # where it begins and ends, and what is there


class Placed(msgspec.Struct, frozen=True, gc=False):
    """Where an array is: its description, and the address of its first element."""

    info: ArrayInfo
    address: int

    def interval(self, period: int = 0) -> tuple[int, int]:
        """Where the elements begin and end; with a period, but for steps of whole periods."""
        start, length = self.address, self.info.itemsize
        for stride, size in zip(self.info.strides, self.info.shape, strict=True):
            if size > 1 and (not period or stride % period):
                reach = stride * (size - 1)
                start += min(reach, 0)
                length += abs(reach)
        return start, start + length


class Candidates(msgspec.Struct):
    """Which arrays may share memory: any two of a group, and the pairs. All others share none."""

    groups: list[list[int]] = []
    pairs: list[tuple[int, int]] = []


def candidates(arrays: Sequence[Placed], positions: Sequence[int]) -> Candidates:
    """Find what may share memory among the arrays at some positions, none of which is empty."""
    found = Candidates()
    for cluster in _clusters([(*arrays[position].interval(), position) for position in positions]):
        _split(arrays, cluster, _periods(arrays, cluster), found)
    return found


def _periods(arrays: Sequence[Placed], cluster: Sequence[int]) -> list[int]:
    """The most frequent strides, the largest first."""
    counts: Counter[int] = Counter()
    for position in cluster:
        info = arrays[position].info
        steps = zip(info.strides, info.shape, strict=True)
        counts.update({abs(stride) for stride, size in steps if size > 1 and abs(stride) > info.itemsize})
    return sorted([stride for stride, _ in counts.most_common(_MAXIMUM_PERIODS)], reverse=True)


def _split(arrays: Sequence[Placed], cluster: list[int], periods: Sequence[int], found: Candidates) -> None:
    if len(cluster) < 2:
        return
    if not periods:
        found.groups.append(cluster)
        return
    period, *others = periods
    intervals: list[_Interval] = []
    wide: list[int] = []
    for position in cluster:
        start, stop = arrays[position].interval(period)
        if stop - start >= period:
            wide.append(position)
        else:
            intervals.append((start % period, start % period + stop - start, position))
    if len(wide) > _MAXIMUM_WIDE or not intervals:
        _split(arrays, cluster, others, found)
        return
    found.pairs += [(first, second) for number, first in enumerate(wide) for second in wide[number + 1 :]]
    found.pairs += [(first, second) for first in wide for _, _, second in intervals]
    for part in _clusters(intervals, period):
        _split(arrays, part, others, found)


def _clusters(intervals: list[_Interval], period: int = 0) -> list[list[int]]:
    """What lies in intervals that overlap each other, directly or through others; with a period, on a circle."""
    clusters: list[list[int]] = []
    starts: list[int] = []
    reached = 0
    for start, stop, position in sorted(intervals):
        if clusters and start < reached:
            clusters[-1].append(position)
        else:
            clusters.append([position])
            starts.append(start)
        reached = max(reached, stop)
    if period and reached > period:  # the last ones reach over the circle's beginning
        around = sum(start < reached - period for start in starts[:-1])
        joined = [position for cluster in clusters[:around] for position in cluster]
        clusters = [*clusters[around:-1], clusters[-1] + joined]
    return clusters

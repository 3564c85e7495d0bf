"""Depth-first search for a packing under a capacity: loops over integers, compiled if numba is installed.

Buffers are placed from the bottom up, each as low as those under it allow, so a packing is found in one
order only: by offset, then by index (canonical solutions, as in MiniMalloc by Moffitt, ASPLOS 2023). A
branch ends where
  * a section of time has no room: buffers that cannot start before r, and those that must be placed with
  them, end after the capacity (the bound of one machine with release dates, Horn 1974), * some buffer would
  fit below everything still to be placed, so the packing could be pushed down. Where no unplaced buffer
  crosses a moment, the two sides are searched separately. Arrays are lists or numpy's; every loop here is
  over one of them. Their size grows with the number of buffers, not of pairs.
"""

from __future__ import annotations

from typing import Any

FOUND, EXHAUSTED, GAVE_UP = 1, 0, -1
LOW, HIGH, PARENT, AT, LAST, REST, BUFFER, NEXT, END, POOL, TRAIL = range(11)
FIELDS = 11  # Number of names above.
SPLIT_FIELDS = 6  # A split has the first six.
FREE, SPENT, NODES, TRAILED, SPLITS, TRUNCATED, LISTED = range(7)
COUNTERS = 7  # Number of names above.
MANY = 1 << 60


def search(rows: Any, sections: int, capacity: int, limits: Any, work: Any) -> int:
    """Search for offsets that stay within the capacity.

    rows: (lower, upper, size, align, twin), each with one integer per buffer: first section, end section,
    bytes, alignment of the offset, and the index of an equal buffer that must lie below, or -1.
    sections: number of sections of time.
    limits: limits on visited nodes and on units of effort.
    work: arrays from `LoopEngine.room`. The first one holds the offsets afterwards.
    Returns FOUND, GAVE_UP, or EXHAUSTED if no such packing exists.
    """
    _start(rows, sections, work)
    counters, frames = work[8], work[6]
    depth, head = 0, 0
    while head >= 0:
        _enter(frames, work[7], depth, head, counters)
        counters[NODES] += 1
        _gather(rows, work, depth)
        most = _remaining(rows, work, depth, capacity)
        if most >= 0:
            _branch(rows, work, depth, capacity - most)
        while frames[depth * FIELDS + NEXT] >= frames[depth * FIELDS + END]:
            parent = frames[depth * FIELDS + PARENT]
            if parent < 0:
                return GAVE_UP if counters[TRUNCATED] else EXHAUSTED
            _undo(work, depth, parent)
            depth = parent
        if counters[NODES] >= limits[0] or counters[SPENT] >= limits[1]:
            return GAVE_UP
        if not _place(rows, work, depth):
            return GAVE_UP
        head = _split(rows, work, depth)
        depth += 1
    return FOUND


def _start(rows: Any, sections: int, work: Any) -> None:
    offsets, placed, free, splits, counters = work[0], work[1], work[2], work[7], work[8]
    for counter in range(COUNTERS):
        counters[counter] = 0
    count = len(offsets)
    for j in range(count):
        offsets[j] = 0
        placed[j] = 0
        free[j] = j
    counters[FREE] = count
    splits[LOW], splits[HIGH] = 0, sections
    splits[PARENT] = splits[LAST] = splits[REST] = -1
    splits[AT] = 0
    counters[SPLITS] = 1


def _enter(frames: Any, splits: Any, depth: int, head: int, counters: Any) -> None:
    frame, split = depth * FIELDS, head * SPLIT_FIELDS
    for field in range(SPLIT_FIELDS):
        frames[frame + field] = splits[split + field]
    frames[frame + POOL] = counters[SPLITS]
    frames[frame + TRAIL] = counters[TRAILED]
    start = frames[frame - FIELDS + END] if depth > 0 else 0
    frames[frame + NEXT] = start
    frames[frame + END] = start


def _gather(rows: Any, work: Any, depth: int) -> None:
    lower, upper = rows[0], rows[1]
    free, listed, spots, frames, counters = work[2], work[3], work[11], work[6], work[8]
    low, high = frames[depth * FIELDS + LOW], frames[depth * FIELDS + HIGH]
    count = 0
    for i in range(counters[FREE]):
        j = free[i]
        if lower[j] >= low and upper[j] <= high:
            listed[count] = j
            spots[count] = i
            count += 1
    counters[LISTED] = count
    counters[SPENT] += 4 * counters[FREE]
    _raise(rows, work, depth)
    for i in range(count):
        free[spots[i]] = listed[i]


def _raise(rows: Any, work: Any, depth: int) -> None:
    """Raise the lowest offset of each buffer that was passed over, then sort the list by offset."""
    lower, upper, size = rows[0], rows[1], rows[2]
    offsets, listed, keys, tops = work[0], work[3], work[4], work[12]
    frames, counters = work[6], work[8]
    frame, count = depth * FIELDS, counters[LISTED]
    at, last = frames[frame + AT], frames[frame + LAST]
    for section in range(frames[frame + LOW], frames[frame + HIGH]):
        tops[section] = MANY
    for i in range(count):
        j = listed[i]
        if offsets[j] > at or (offsets[j] == at and j > last):
            top = offsets[j] + size[j]
            for section in range(lower[j], upper[j]):
                if top < tops[section]:
                    tops[section] = top
    for i in range(count):
        j = listed[i]
        value = offsets[j]
        if value < at or (value == at and j < last):
            value = MANY
            for section in range(lower[j], upper[j]):
                if tops[section] < value:
                    value = tops[section]
        k = i - 1
        while k >= 0 and keys[k] < value:
            keys[k + 1] = keys[k]
            listed[k + 1] = listed[k]
            k -= 1
        keys[k + 1] = value
        listed[k + 1] = j


def _remaining(rows: Any, work: Any, depth: int, capacity: int) -> int:
    """Return the most unplaced bytes in one section, or -1 if a section has too little room."""
    lower, upper, size = rows[0], rows[1], rows[2]
    listed, keys, load, frames, counters = work[3], work[4], work[5], work[6], work[8]
    for section in range(frames[depth * FIELDS + LOW], frames[depth * FIELDS + HIGH]):
        load[section] = 0
    most = 0
    for i in range(counters[LISTED]):
        j = listed[i]
        room = capacity - keys[i]
        counters[SPENT] += upper[j] - lower[j]
        for section in range(lower[j], upper[j]):
            total = load[section] + size[j]
            load[section] = total
            if total > room:
                return -1
            most = max(most, total)
    return most


def _branch(rows: Any, work: Any, depth: int, highest: int) -> None:
    """Push the candidates for placement, lowest offset and then lowest index first."""
    size, twin = rows[2], rows[4]
    offsets, placed, listed = work[0], work[1], work[3]
    frames, counters, choices = work[6], work[8], work[9]
    frame = depth * FIELDS
    at, last, start = frames[frame + AT], frames[frame + LAST], frames[frame + NEXT]
    for i in range(counters[LISTED]):
        highest = min(highest, offsets[listed[i]] + size[listed[i]] - 1)
    end = start
    for i in range(counters[LISTED] - 1, -1, -1):
        j = listed[i]
        value = offsets[j]
        if value < at or (value == at and j < last) or value > highest:
            continue
        if twin[j] >= 0 and not placed[twin[j]]:  # equal buffers are placed in one order only
            continue
        if end >= len(choices):
            counters[TRUNCATED] = 1
            break
        k = end - 1
        while k >= start and (
            offsets[choices[k]] > value or (offsets[choices[k]] == value and choices[k] > j)
        ):
            choices[k + 1] = choices[k]
            k -= 1
        choices[k + 1] = j
        end += 1
    frames[frame + END] = end


def _place(rows: Any, work: Any, depth: int) -> bool:
    """Place the next candidate and raise the buffers that overlap it. Return False if the trail is full."""
    lower, upper, size, align = rows[0], rows[1], rows[2], rows[3]
    offsets, placed, free, frames = work[0], work[1], work[2], work[6]
    counters, choices, trail = work[8], work[9], work[10]
    frame = depth * FIELDS
    b = choices[frames[frame + NEXT]]
    frames[frame + NEXT] += 1
    frames[frame + BUFFER] = b
    placed[b] = 1
    top, trailed = offsets[b] + size[b], counters[TRAILED]
    left = counters[FREE] - 1
    if trailed + 2 * left > len(trail):
        return False
    for i in range(left, -1, -1):
        k = free[i]
        if k == b:
            free[i] = free[left]
            free[left] = b
        elif lower[k] < upper[b] and upper[k] > lower[b] and offsets[k] < top:
            trail[trailed] = k
            trail[trailed + 1] = offsets[k]
            trailed += 2
            offsets[k] = top if align[k] == 1 else -(-top // align[k]) * align[k]
    counters[FREE] = left
    counters[TRAILED] = trailed
    return True


def _undo(work: Any, depth: int, parent: int) -> None:
    offsets, placed, frames, counters, trail = work[0], work[1], work[6], work[8], work[10]
    for level in range(parent, depth):
        placed[frames[level * FIELDS + BUFFER]] = 0
    counters[FREE] += depth - parent
    back = frames[parent * FIELDS + TRAIL]
    for t in range(counters[TRAILED] - 2, back - 1, -2):
        offsets[trail[t]] = trail[t + 1]
    counters[TRAILED] = back
    counters[SPLITS] = frames[parent * FIELDS + POOL]


def _split(rows: Any, work: Any, depth: int) -> int:
    """Split this level where no unplaced buffer crosses. Return the first remaining part, or -1."""
    lower, upper = rows[0], rows[1]
    free, crossing, frames, splits = work[2], work[5], work[6], work[7]
    counters, filled = work[8], work[12]
    frame = depth * FIELDS
    low, high, b = frames[frame + LOW], frames[frame + HIGH], frames[frame + BUFFER]
    for section in range(low, high):
        crossing[section] = 0
        filled[section] = 0
    for i in range(counters[FREE]):
        j = free[i]
        if lower[j] >= low and upper[j] <= high:
            crossing[lower[j]] += 1
            crossing[upper[j] - 1] -= 1
            filled[lower[j]] = 1
    head: int = frames[frame + REST]
    start, alive, some = low, 0, 0
    for section in range(low, high):
        alive += crossing[section]
        some += filled[section]
        if alive == 0:
            if some:
                split = counters[SPLITS] * SPLIT_FIELDS
                splits[split + LOW], splits[split + HIGH] = start, section + 1
                splits[split + PARENT], splits[split + REST] = depth, head
                splits[split + AT], splits[split + LAST] = work[0][b], b
                head = counters[SPLITS]
                counters[SPLITS] += 1
            start, some = section + 1, 0
    return head

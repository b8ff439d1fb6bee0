"""The least that a simulator has to do: ends of ops on in-order lanes, from lanes, groups and dependencies alone.

No labels, no starts, no pairs, no memory, no checks. `simulate.py` holds Treadle's simulator against it.
"""

import numba
import numpy as np


@numba.njit(cache=True, nogil=True)
def bare_sweep(lane_ptr, lane_group, group_ptr, group_lane, dep_ptr, dep, dur):
    """The end of each op."""
    num_lanes = len(lane_group)
    end = np.full(len(dur), -1, np.int64)
    head = lane_ptr[:-1].copy()
    free = np.zeros(num_lanes, np.int64)
    ready = np.zeros(num_lanes, np.int64)
    arrived = np.zeros(len(group_ptr), np.int32)
    first_waiter = np.full(len(dur), -1, np.int32)
    next_waiter = np.full(num_lanes, -1, np.int32)
    todo = np.arange(num_lanes - 1, -1, -1).astype(np.int32)
    count = num_lanes
    while count:
        count -= 1
        lane = todo[count]
        while head[lane] < lane_ptr[lane + 1]:
            op = head[lane]
            time = free[lane]
            blocker = -1
            for k in range(dep_ptr[op], dep_ptr[op + 1]):
                if end[dep[k]] < 0:
                    blocker = dep[k]
                    break
                time = max(time, end[dep[k]])
            if blocker >= 0:
                next_waiter[lane] = first_waiter[blocker]
                first_waiter[blocker] = lane
                break
            group = lane_group[lane]
            if group < 0:
                free[lane] = end[op] = time + dur[op]
                head[lane] = op + 1
                waiter = first_waiter[op]
                while waiter >= 0:
                    todo[count] = waiter
                    count += 1
                    waiter = next_waiter[waiter]
                continue
            ready[lane] = time
            arrived[group] += 1
            if arrived[group] == group_ptr[group + 1] - group_ptr[group]:
                arrived[group] = 0
                longest = 0
                for m in range(group_ptr[group], group_ptr[group + 1]):
                    time = max(time, ready[group_lane[m]])
                    longest = max(longest, dur[head[group_lane[m]]])
                for m in range(group_ptr[group], group_ptr[group + 1]):
                    member = group_lane[m]
                    op = head[member]
                    free[member] = end[op] = time + longest
                    head[member] = op + 1
                    waiter = first_waiter[op]
                    while waiter >= 0:
                        todo[count] = waiter
                        count += 1
                        waiter = next_waiter[waiter]
                    todo[count] = member
                    count += 1
            break
    return end

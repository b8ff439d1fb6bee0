"""Buffers between an update rank and its worker, and copies in and out of them.

Buffers on a host are memory without a name (memfd), handed over a Unix socket: nothing of them is left, whoever dies.
Those of a GPU go by CUDA IPC; torch counts their users in a named file in /dev/shm, which stays if its processes are
killed.
"""

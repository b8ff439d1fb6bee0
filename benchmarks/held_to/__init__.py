"""Measured step times and memory that `treadle.estimate` and the simulator are held to, one module a data set."""

"""Running a rank's ops: at cell granularity in one thread, at layer granularity on lanes."""

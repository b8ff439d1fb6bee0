"""The library as people call it: `files` reads and writes, `step` lowers, verifies and simulates with defaults."""

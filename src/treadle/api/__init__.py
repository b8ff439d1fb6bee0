"""The library as people call it: `files` reads and writes; `verbs` lowers, verifies, simulates and compares."""

"""Fields of files: what a value may be, checked with messages that name the place; and JSON schemas of what is printed.

nearest      the nearest known name to a wrong one
kinds        kinds of values: in words, as a check, as a JSON schema
typed        kinds made from dataclasses and TypedDicts
fields       an object of a file, read field by field
input_files  text, TOML and JSON read from files
"""

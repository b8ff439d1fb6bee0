"""Profiles of other trainers' runs: read, put on one clock, matched with a schedule, made into measured steps.

    files --reader--> Recording --assemble--> Imported: Schedule, Program, measured steps, remarks

A reader knows one form of file and nothing about pipelines; what comes behind it knows pipelines and no file.
"""

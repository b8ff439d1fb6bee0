"""Tests of the stream checker."""

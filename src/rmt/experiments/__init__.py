"""Experiments: declared in Python, made of ordinary runs, their results kept as data."""

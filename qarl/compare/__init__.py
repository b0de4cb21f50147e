"""Comparing ways to train: arms by seeds, run, measured, told as a table and a page."""

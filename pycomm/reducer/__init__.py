"""Gradients in buckets: which parameter lies where (layout), in what memory (bucket), when they travel (reducer), and
the one file that moves them (reduce).
"""

"""Wrappers: what stands around a codec and remembers. A file here is a member; ``make(inner, ...)`` wraps."""

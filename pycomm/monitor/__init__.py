"""Observers of a Group, attached by its hooks. The data path imports none of them."""

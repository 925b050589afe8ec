"""Attention of the new rows of a step over their sequence's paged prefix and their own block."""

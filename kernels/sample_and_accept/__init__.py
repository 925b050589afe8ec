"""The target's pick at every node, and the walk from the root along the picks."""

"""From a pool of draft candidates to a tree ordered by score."""

"""Penalties, biases, least lengths and token masks, on logits before they are filtered."""

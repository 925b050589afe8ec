"""Log-probabilities of picked tokens, and of the likeliest ones beside them."""

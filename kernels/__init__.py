"""Device operations: one folder per op, the Pallas form beside its plain-JAX reference. Imports
jax alone."""

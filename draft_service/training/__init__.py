"""Training of EAGLE-3 heads: on-policy data, cached target features, training-time test, export.

Read in this order: `recipe` (what to do), `dataset` (which tokens), `features` (the target's
states of them), `network` (the head as trained), `loss` (training-time test), `loop` (optimiser,
checkpoints), `export` (a published layout).
"""

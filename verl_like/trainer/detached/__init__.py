"""Detached training: makers and trainers that run apart, and the ledger, the buffers and the
weights between them."""

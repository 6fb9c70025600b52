"""Makers and trainers that run detached; between them are the ledger, the buffers and the
weights."""

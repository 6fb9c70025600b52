"""Advantage estimators, policy and value losses, KL: pure functions on tensors, to be imported from
their own files.

Importing this package, or that of the estimators or the losses, loads no torch; the file of an
algorithm does.
"""

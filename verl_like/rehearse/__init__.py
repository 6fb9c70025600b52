"""What a run needs of each GPU, measured on the null GPU by the run's own code: `python -m
verl_like.rehearse`."""

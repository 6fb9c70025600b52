"""Measures what a run needs of each GPU, on the null GPU and by the run's own code: `python -m
verl_like.rehearse`."""

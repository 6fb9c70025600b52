"""One page that shows runs over each other: `python -m verl_like.compare`."""

"""The training loop of every trainer and what it trains on."""

"""Training on examples: SFT, reward models, DPO and ILQL."""

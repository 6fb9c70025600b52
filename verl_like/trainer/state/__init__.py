"""The state from which a run can continue: checkpoints, their manifests, and how a run is found and
resumed."""

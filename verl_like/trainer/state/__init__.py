"""What a run leaves on disk to go on from: checkpoints, their manifests, and how a run is found and
resumed."""

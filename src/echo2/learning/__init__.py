"""The learning plane: from batches of trajectories to the weights of the next version (DESIGN §7)."""

"""What runs in a step: the parameter registry, the gradient store, the executor and the update."""

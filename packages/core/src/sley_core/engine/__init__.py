"""What runs in a step: the parameter book, the gradient store, the executor and the update."""

"""What autograd does with modules: their derivatives, and carrying quantities through its graph."""

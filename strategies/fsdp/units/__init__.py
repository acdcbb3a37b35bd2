"""How a model is cut into units that are gathered and freed, and what its tensors are called."""

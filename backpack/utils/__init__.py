"""Pure functions on tensors and modules; nothing here knows the engine."""

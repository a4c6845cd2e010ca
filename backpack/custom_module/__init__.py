"""Plain modules for operations that torch offers as functions only, and the conversion of models that use such functions."""

"""Kinds of layers: everything that is known about one, in one module each."""

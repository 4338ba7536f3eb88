"""Kinds of layers that tests add, one in a file."""

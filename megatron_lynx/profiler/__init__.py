"""Measures what a layer costs: time and bytes."""

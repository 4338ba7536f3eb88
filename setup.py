"""One call: all metadata is in pyproject.toml."""

from setuptools import setup

setup()

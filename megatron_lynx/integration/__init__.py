"""The only package that imports Megatron."""

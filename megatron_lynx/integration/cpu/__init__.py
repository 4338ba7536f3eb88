"""The CPU backend: real Megatron training over gloo on a machine without a GPU."""

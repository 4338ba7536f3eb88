"""The runtime: tapes that drop and rebuild activations as a plan says. Torch, no Megatron."""

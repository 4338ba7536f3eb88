"""How many layers each pipeline stage gets, and Megatron's way to write it down."""

"""The bench inside a training process: methods in turns on one model."""

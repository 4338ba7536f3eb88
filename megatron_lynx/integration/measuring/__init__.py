"""What a layer, the ends of a stage and the links cost, measured on the ranks that train."""

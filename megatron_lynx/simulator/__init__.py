"""What a plan does over time and in memory, computed apart from the planner, as its referee."""

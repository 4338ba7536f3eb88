"""The search of a job: plans and scores stages, splits them, compares methods. The public API of planning."""

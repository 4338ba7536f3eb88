"""Planners: from a StageProblem to a StagePlan."""

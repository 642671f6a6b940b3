"""The capacity planner: the smallest and cheapest fleet that meets the targets."""

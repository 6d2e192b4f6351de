"""Claims of published papers, their policies on our simulator, and our planner on the same instances."""

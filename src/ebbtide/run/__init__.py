"""Runs plans: `Budget`, the conductor, holdings, recipes, tiers."""

"""Published policies, one file per paper: each makes a plan of a step, a machine and a budget."""

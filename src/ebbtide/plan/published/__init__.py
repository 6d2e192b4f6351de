"""Published policies, one file per paper; the simulator judges them all."""

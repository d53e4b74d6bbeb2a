"""Elementary functions, log-sum-exp and random numbers on vectors."""

"""Tasks beside GSM8K: MATH, and the verification of solutions."""

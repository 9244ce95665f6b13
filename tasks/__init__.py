"""Tasks other than GSM8K: MATH, and the verification of solutions."""
